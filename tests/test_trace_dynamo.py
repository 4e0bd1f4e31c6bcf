"""Tracing by dynamo: the rows are those of every other tracer, and what dynamo cannot do is said with its line."""

import re
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import spangraph
from spangraph import DeclarationError, HostReadError, SpannedOutput, TraceError, from_lengths

from .toys import Spanned, Toy, backend, batch, compiled, cut, line_of, plain, spanned, tracer_of, values
from .traced_models import CASES, assert_delivers, inputs

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])


# ---- the same rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_eager_output(case: str) -> None:
    model = CASES[case].make().eval()
    with compiled(model, "simulated", "dynamo", depth=2) as run:
        first, second = inputs(), inputs()
        steps = run.launch(*first), run.launch(*second)
        for step, given in zip(steps, (first, second), strict=True):
            assert_delivers(step, CASES[case].expected(model, *given))
            step.release()
        assert tracer_of(run) == "dynamo"


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_an_export(case: str) -> None:
    """Its structure, and which outputs are cut; values, names and row values."""
    model, given = CASES[case].make().eval(), inputs()
    runs = [compiled(model, trace=trace) for trace in ("export", "dynamo")]
    steps = [run.launch(*given) for run in runs]
    assert_delivers(steps[1], CASES[case].expected(model, *given))
    results = [torch.utils._pytree.tree_flatten(step.result(), is_leaf=_is_rows) for step in steps]
    assert results[0][1] == results[1][1]
    assert [*map(_as_lists, results[0][0])] == [*map(_as_lists, results[1][0])]
    texts = [run.explain().replace("trace: export", "trace: dynamo") for run in runs]
    assert [line for line in texts[0].splitlines() if "nodes" not in line] == [
        line for line in texts[1].splitlines() if "nodes" not in line
    ]
    for name in re.findall(r"(\S+): row value", texts[0]):
        assert steps[0].row_values(name).equal(steps[1].row_values(name))


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, spangraph.Rows)


def _as_lists(leaf: Any) -> Any:
    if isinstance(leaf, spangraph.Rows):
        return {i: [t.tolist() for t in row] if isinstance(row, tuple) else row.tolist() for i, row in leaf.items()}
    return leaf.tolist() if isinstance(leaf, Tensor) else leaf


@BACKENDS
def test_rows_may_be_copied_to_the_host(on: str) -> None:
    model, (x, n) = CASES["conv"].make(), inputs()
    run = compiled(model, on, "dynamo", depth=2, copies={"audio": "host"})
    for _ in range(3):
        with run.launch(x, n) as step:
            assert_delivers(step, CASES["conv"].expected(model, x, n))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda out: out, "only"),
        (lambda out: (out, out + 1), "0"),
        (lambda out: {"wave": out}, "wave"),
        (lambda out: SpannedOutput({"wave": out}), "wave"),
    ],
    ids=["tensor", "tuple", "dict", "SpannedOutput"],
)
def test_adapters_pick_outputs_of_every_kind(make: Any, name: str) -> None:
    child = plain(lambda self, x, n: make(x * 2))
    spangraph.declare(child, {name: lambda out, x, n: from_lengths(n)})
    run = compiled(plain(lambda self, x, n: self.child(x, n=n), child=child), trace="dynamo")
    x, n = batch((3, 5))
    with run.launch(x, n) as step:
        assert values(step.rows(name)) == cut(x * 2, [3, 5])


def test_a_declared_root_and_a_submodule_without_spans_at_this_call() -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        self.quiet(x)
        return self.spanned(x + 1, n)

    root = spanned(forward)
    root.quiet = spanned(lambda self, x: SpannedOutput({"audio": x}))
    x, n = batch((3, 5))
    assert values(compiled(root, trace="dynamo")(x, n)["audio"]) == cut(x + 1, [3, 5])


def test_marks_in_a_checkpoint_and_under_autocast() -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = torch.utils.checkpoint.checkpoint(lambda x: self.toy(x, n)["audio"], x, use_reentrant=False)
        with torch.autocast("cpu"):
            return y, self.net(y, n)["audio"]

    class Net(Spanned):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor, n: Tensor) -> Any:
            return self.spanned(self.linear(x), n)

    model, (x, n) = plain(forward, toy=Toy(), net=Net()), batch((3, 5))
    first, second = compiled(model, trace="dynamo")(x, n)
    expected = model(x, n)
    assert values(first) == cut(expected[0], [3, 5])
    assert second[0].dtype is torch.bfloat16
    assert values(second) == cut(expected[1], [3, 5])


@BACKENDS
def test_buffers_and_parameters_are_those_of_the_model(on: str) -> None:
    """Updated by the forward, by rebinding too, and by the user."""

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        self.count += 1
        self.last = self.last + x.sum(1)
        return self.spanned(x * self.count + self.last[:, None], n)

    model = spanned(forward, count=torch.zeros(()), last=torch.zeros(2))
    run, last = compiled(model, on, "dynamo", depth=2), torch.zeros(2)
    x, n = batch((3, 5))
    for i in range(1, 5):
        x = x + 1
        last += x.sum(1)
        assert values(run(x, n)["audio"]) == cut(x * i + last[:, None], [3, 5])
    model.count.fill_(9)
    last += x.sum(1)
    assert values(run(x, n)["audio"]) == cut(x * 10 + last[:, None], [3, 5])
    assert (model.count.item(), model.last.tolist()) == (10, last.tolist())


def test_models_without_tensors_or_inputs() -> None:
    assert compiled(plain(lambda self, x: {"n": 3, "x": x}), trace="dynamo")(torch.ones(2))["x"].tolist() == [1, 1]
    assert compiled(plain(lambda self: 3), trace="dynamo")() == 3


def test_a_model_of_inference_tensors_runs() -> None:
    with torch.inference_mode():
        model = Toy()
    x, n = batch((3, 5))
    assert values(compiled(model, trace="dynamo")(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])


# ---- what is refused -------------------------------------------------------------------------------------------------


def _helper(y: Tensor) -> Tensor:
    print("in the helper")
    return y + 1


def test_every_graph_break_is_named_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = x + 1
        torch._dynamo.graph_break()  # first
        y = _helper(y * 2)
        torch._dynamo.graph_break()  # last
        return self.spanned(y * 2, n)

    model = spanned(forward, count=torch.zeros(1))
    with pytest.raises(TraceError, match="dynamo breaks the graph of the forward") as caught:
        compiled(model, trace="dynamo").launch(*batch())
    lines = str(caught.value).splitlines()[1:]
    places = [line_of(forward, "# first"), line_of(_helper, "print"), line_of(forward, "# last")]
    assert [line.split(": ")[0].strip() for line in lines] == places
    assert "graph_break()" in lines[0]
    assert "builtin operator `print`" in lines[1]
    assert "in the helper" in capsys.readouterr().out


def test_looking_for_breaks_changes_nothing() -> None:
    """Neither the model nor what the process has compiled."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        torch._dynamo.graph_break()
        return x + self.count

    compilations: list[str] = []

    def note(gm: Any, _: Any) -> Any:
        compilations.append("graph")
        return gm.forward

    mine = torch.compile(lambda x: x * 2 + 1, backend=note)
    mine(torch.ones(3))
    model = plain(forward)
    model.register_buffer("count", torch.zeros(1))
    with pytest.raises(TraceError, match="graph_break"):
        compiled(model, trace="dynamo").launch(torch.ones(3))
    assert model.count.item() == 0
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(forward.__code__)
    mine(torch.ones(3))
    assert compilations == ["graph"]


def test_host_reads_are_refused_with_their_lines() -> None:
    def scalar(self: Any, x: Tensor, n: Tensor) -> Any:
        return self.spanned(x * x.sum().item(), n)  # here

    def branch(self: Any, x: Tensor, n: Tensor) -> Any:
        if x.sum() > 0:  # here
            x = x + 1
        return self.spanned(x, n)

    for forward in (scalar, branch):
        with pytest.raises(HostReadError, match="SG401 host reads in the forward") as caught:
            compiled(spanned(forward), trace="dynamo").launch(*batch())
        assert [found.where for found in caught.value.diagnostics] == [line_of(forward, "# here")]


def test_a_forward_with_host_reads_runs_uncaptured_if_asked() -> None:
    run = compiled(spanned(lambda self, x, n: self.spanned(x * n.max().item(), n)), trace="dynamo", verify="off")
    x, n = batch((3, 5))
    assert values(run(x, n)["audio"]) == cut(x * 5, [3, 5])
    assert tracer_of(run) == "opaque"


def test_state_on_the_host_is_refused() -> None:
    def counts(self: Any, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls

    model = plain(counts)
    model.calls = 0
    with pytest.raises(TraceError, match="the forward changes calls at every call"):
        compiled(model, trace="dynamo").launch(torch.ones(2))
    assert model.calls == 0


def test_declarations_are_checked() -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        return SpannedOutput({"audio": x}, {"audio": from_lengths(n).int()})

    with pytest.raises(DeclarationError, match=r"SG104.*spans are torch\.int32"):
        compiled(spanned(forward), trace="dynamo").launch(*batch())
    unused = plain(lambda self, x: x + 1, toy=Toy())
    with pytest.raises(DeclarationError, match="SG107 toy"):
        compiled(unused, trace="dynamo").launch(torch.ones(2))


def test_hooks_are_gone_after_the_trace() -> None:
    model = CASES["adapted"].make()
    spangraph.compile(model, trace="dynamo", backend=backend("inline")).launch(*inputs()).release()
    assert not any(module._forward_hooks for module in model.modules())
    assert "decode" not in vars(model.decoder)
