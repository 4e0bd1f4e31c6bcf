"""Which marks a trace finds, what their outputs are called, and which of several marks cuts an output."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spangraph import DeclarationError, SpannedOutput, declare, from_lengths

from .toys import Spanned, Toy, batch, compiled, cut, line_of, plain, spanned, values

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])


@TRACES
def test_a_declaring_root(trace: str) -> None:
    x, lengths = batch((3, 0))
    with compiled(Toy(), trace=trace).launch(x, lengths) as step:
        assert values(step.rows("audio")) == cut(x * 2 + 1, [3, 0])
        assert values(step.result()["audio"]) == cut(x * 2 + 1, [3, 0])


@TRACES
def test_a_deeply_nested_submodule_and_an_output_that_nobody_returns(trace: str) -> None:
    inner = plain(lambda self, x, n: self.c(x, n)["audio"].sum(), c=Toy())
    model = plain(lambda self, x, n: self.b(x, n), b=nn.ModuleList([inner])[0])
    x, lengths = batch((3, 5))
    with compiled(model, trace=trace).launch(x, lengths) as step:
        assert values(step.rows("audio")) == cut(x * 2 + 1, [3, 5])
        assert step.result().item() == pytest.approx((x * 2 + 1).sum().item(), rel=1e-5)


@pytest.mark.parametrize("trace", ["export", "dynamo", "opaque"])
@pytest.mark.parametrize(
    "name", ["class", "None", 'quo"te', "back\\slash", "new\nline", "0", "a b", "é", "self", "torch"]
)
def test_submodules_and_parameters_of_any_name(trace: str, name: str) -> None:
    """torch.fx writes some of them as they are, and then cannot read its own code."""
    held = nn.ModuleDict({name: nn.Linear(5, 5)})
    held[name].register_parameter(name, nn.Parameter(torch.ones(5)))
    held[name].register_buffer(f"{name}_", torch.ones(5))
    model = plain(
        lambda self, x, n: self.toy(
            self.held[name](x) * getattr(self.held[name], name) + self.held[name]._buffers[f"{name}_"], n
        ),
        held=held,
        toy=Toy(),
    )
    x, lengths = batch((3, 5))
    run = compiled(model, trace=trace)
    with torch.no_grad():
        assert values(run(x, lengths)["audio"]) == cut(model(x, lengths)["audio"], [3, 5])
        held[name].weight.add_(1)
        assert values(run(x, lengths)["audio"]) == cut(model(x, lengths)["audio"], [3, 5])


@TRACES
def test_several_submodules_with_one_name(trace: str) -> None:
    """Unique names go alone, others with their submodule."""
    b = declare(nn.Linear(5, 5), image=lambda out, x: from_lengths(x[:, 0].long() * 0 + 2))
    model = plain(
        lambda self, x, n: (self.a(x, n)["audio"], self.c(x + 1, n - 1)["audio"], self.b(x)), a=Toy(), b=b, c=Toy()
    )
    x, lengths = batch((3, 5))
    with compiled(model, trace=trace).launch(x, lengths) as step:
        assert values(step.rows("a.audio")) == cut(x * 2 + 1, [3, 5])
        assert values(step.rows("c.audio")) == cut((x + 1) * 2 + 1, [2, 4])
        assert values(step.rows("image")) == cut(b(x).detach(), [2, 2])
        with pytest.raises(KeyError, match=r"no spanned output for 'audio'; this step has \['a.audio', 'c.audio'"):
            step.rows("audio")
        with pytest.raises(KeyError, match="several spanned outputs: name one of"):
            step.rows()


@TRACES
def test_one_submodule_called_three_times(trace: str) -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        return [self.net.toy(x * k, n - k)["audio"] for k in range(3)]

    model = plain(forward, net=plain(lambda self: None, toy=Toy()))
    x, lengths = batch((3, 5))
    with compiled(model, trace=trace).launch(x, lengths) as step:
        for k, name in enumerate(["net.toy.audio", "net.toy[1].audio", "net.toy[2].audio"]):
            expected = cut(x * k * 2 + 1, [3 - k, 5 - k])
            assert values(step.rows(name)) == expected
            assert values(step.result()[k]) == expected


@TRACES
def test_two_declarations_of_one_module_count_their_calls_apart(trace: str) -> None:
    """Both counted into one: the first call's second declaration was called `net[1]`, as a further call would be."""
    net = plain(lambda self, x, n: {"a": x * 2, "b": x * 3})
    declare(net, a=lambda out, x, n: from_lengths(n))
    declare(net, b=lambda out, x, n: from_lengths(n - 1))
    model = plain(lambda self, x, n: (self.net(x, n), self.net(x + 1, n)), net=net)
    x, lengths = batch((3, 5))
    with compiled(model, trace=trace).launch(x, lengths) as step:
        assert values(step.rows("net.a")) == cut(x * 2, [3, 5])
        assert values(step.rows("net.b")) == cut(x * 3, [2, 4])
        assert values(step.rows("net[1].a")) == cut((x + 1) * 2, [3, 5])
        assert values(step.rows("net[1].b")) == cut((x + 1) * 3, [2, 4])


def test_one_name_declared_twice_for_one_call_is_refused() -> None:
    net = declare(nn.Linear(5, 5), audio=lambda out, x: from_lengths(x[:, 0].long() * 0))
    declare(net, audio=lambda out, x: from_lengths(x[:, 0].long() * 0 + 1))
    with pytest.raises(DeclarationError, match=r"SG108 .*'audio' is declared twice for one call"):
        compiled(net).launch(torch.randn(2, 5))


@TRACES
def test_a_call_without_spans_has_no_mark(trace: str) -> None:
    class Sometimes(Spanned):
        def forward(self, x: Tensor, n: Tensor, is_last: bool) -> SpannedOutput:
            return self.spanned(x * 2, n) if is_last else SpannedOutput({"audio": x * 2})

    model = plain(lambda self, x, n: [self.net(x, n, k == 2)["audio"] for k in range(4)], net=Sometimes())
    x, lengths = batch((3, 5))
    with compiled(model, trace=trace).launch(x, lengths) as step:
        assert values(step.rows("audio")) == cut(x * 2, [3, 5])


# ---- several marks on one tensor -------------------------------------------------------------------------------------


@TRACES
def test_one_tensor_under_two_names_keeps_both_spans(trace: str) -> None:
    class Two(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("head", "tail")

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            y = x * 2
            spans = {"head": from_lengths(n), "tail": from_lengths(5 - n, start=n)}
            return SpannedOutput({"head": y, "tail": y}, spans)

    x, lengths = batch((3, 1))
    out = compiled(Two(), trace=trace)(x, lengths)
    assert values(out["head"]) == cut(x * 2, [3, 1])
    assert out["tail"][0].tolist() == (x * 2)[0, 3:].tolist()
    assert out["tail"][1].tolist() == (x * 2)[1, 1:].tolist()


def _two_names(rename: Any) -> nn.Module:
    class Two(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("head", "tail")

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            y = x * 2
            return SpannedOutput({"head": y, "tail": y}, {"head": from_lengths(n), "tail": from_lengths(n - 1)})

    return plain(lambda self, x, n: rename(self.two(x, n)), two=Two())


@TRACES
def test_an_unnamed_output_under_two_names_is_refused(trace: str) -> None:
    """Its spans would be a guess."""
    with pytest.raises(DeclarationError, match=r"SG109 output .*'two.head' and 'two.tail', with different spans"):
        compiled(_two_names(lambda out: {"y": out["head"]}), trace=trace).launch(*batch())


@TRACES
def test_an_output_that_bears_one_of_two_names_is_clear(trace: str) -> None:
    x, lengths = batch((3, 5))
    out = compiled(_two_names(lambda out: {"tail": out["head"]}), trace=trace)(x, lengths)
    assert values(out["tail"]) == cut(x * 2, [2, 4])


class Outer(Spanned):
    """Returns its child's tensor under spans of its own, one shorter."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        return self.spanned(self.child(x, n)["audio"], n - 1)


@TRACES
def test_of_an_inner_and_an_outer_mark_the_outer_wins(trace: str) -> None:
    x, lengths = batch((3, 5))
    model = plain(lambda self, x, n: self.outer(x, n)["audio"], outer=Outer(Toy()))
    with compiled(model, trace=trace).launch(x, lengths) as step:
        assert values(step.result()) == cut(x * 2 + 1, [2, 4])
        assert values(step.rows("outer.audio")) == cut(x * 2 + 1, [2, 4])
        assert values(step.rows("outer.child.audio")) == cut(x * 2 + 1, [3, 5])


@TRACES
def test_the_root_is_outside_of_all(trace: str) -> None:
    x, lengths = batch((3, 5))
    with compiled(Outer(Outer(Toy())), trace=trace).launch(x, lengths) as step:
        assert values(step.result()["audio"]) == cut(x * 2 + 1, [2, 4])
        assert values(step.rows("audio")) == cut(x * 2 + 1, [2, 4])  # a root's full name is its plain one


def test_the_nearest_mark_wins_over_a_farther_one() -> None:
    x, lengths = batch((3, 5))
    model = plain(lambda self, x, n: self.b(self.a(x, n)["audio"], n - 1)["audio"] + 1, a=Toy(), b=Toy())
    out = compiled(model)(x, lengths)
    assert values(out) == cut((x * 2 + 1) * 2 + 2, [2, 4])


def test_an_output_of_two_strangers_is_delivered_whole_with_a_diagnostic() -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Tensor:
        return self.a(x, n)["audio"] + self.b(x, n - 1)["audio"]  # mixed here

    model = compiled(plain(forward, a=Toy(), b=Toy()))
    x, lengths = batch((3, 5))
    assert model(x, lengths).equal((x * 2 + 1) * 2)
    (line,) = [line for line in model.explain().splitlines() if "SG203" in line]
    assert line.strip().startswith(line_of(forward, "mixed here"))
    assert "'b.audio' and 'a.audio'" in line or "'a.audio' and 'b.audio'" in line


def test_a_derived_output_is_cut_and_an_unknown_one_is_whole_with_its_line() -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = self.toy(x, n)["audio"]
        return y.abs(), y.sort(1).values  # of unknown effect

    model = compiled(plain(forward, toy=Toy()))
    x, lengths = batch((3, 5))
    known, unknown = model(x, lengths)
    assert values(known) == cut((x * 2 + 1).abs(), [3, 5])
    assert unknown.equal((x * 2 + 1).sort(1).values)
    (line,) = [line for line in model.explain().splitlines() if "SG203" in line]
    assert line_of(forward, "of unknown effect") in line


def test_an_opaque_trace_says_what_it_cannot_know() -> None:
    """It knows aliases, not derivations."""
    model = compiled(plain(lambda self, x, n: (self.toy(x, n)["audio"].mT, x + 1), toy=Toy()), trace="opaque")
    x, lengths = batch((3, 3))
    _, other = model(x, lengths)
    assert other.equal(x + 1)
    assert "SG203" in model.explain()
    assert "delivered whole" in model.explain()


@TRACES
def test_an_output_that_is_a_view_of_the_value_is_cut(trace: str) -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = self.toy(x, n)["audio"]
        return y[:, None], y.view(2, 5, 1), y[:, :, None].transpose(1, 2)

    x, lengths = batch((3, 5))
    a, b, c = compiled(plain(forward, toy=Toy()), trace=trace)(x, lengths)
    expected = cut(x * 2 + 1, [3, 5])
    assert values(a) == {i: [row] for i, row in expected.items()}
    assert values(b) == {i: [[v] for v in row] for i, row in expected.items()}
    assert values(c) == {i: [row] for i, row in expected.items()}


@TRACES
def test_a_spanned_output_that_is_an_input_does_not_flood_the_model(trace: str) -> None:
    """For inputs only the same value counts: `x + 1` derives from an input, not from the output."""
    x, lengths = batch((3, 5))
    model = spanned(lambda self, x, n: self.spanned(x, n, other=x + 1))
    out = compiled(model, trace=trace)(x, lengths)
    assert values(out["audio"]) == cut(x, [3, 5])
    assert out["other"].equal(x + 1)


def test_spans_that_two_outputs_share_are_staged_once() -> None:
    """The same tensor passed twice to an operator that writes is split in two."""

    class Both(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("a", "b")

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            spans = from_lengths(n)
            return SpannedOutput({"a": x * 2, "b": x * 3}, {"a": spans, "b": spans})

    x, lengths = batch((3, 5))
    model = compiled(Both())
    out = model(x, lengths)
    assert values(out["a"]) == cut(x * 2, [3, 5])
    assert values(out["b"]) == cut(x * 3, [3, 5])
    (signature,) = model._by_key.values()
    (stage,) = [n for n in signature.instances[0].gm.graph.nodes if n.target is torch.ops.spangraph.stage.default]
    assert len(stage.args[3]) == 1
