"""What a forward returns against what it declares: each misfit is refused by rule, on both tracers."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spangraph import DeclarationError, Span, SpannedOutput, declare, from_lengths

from .toys import Spanned, Toy, batch, compiled, cut, line_of, plain, values

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])


class Declares(nn.Module):
    """Declares what it is told, and returns what `make` makes of `x` and its lengths."""

    def __init__(self, declared: Any, make: Any) -> None:
        super().__init__()
        self.declared = declared
        self.make = make

    def spanned_outputs(self, walk: str) -> Any:
        return (
            self.declared.get(walk) if isinstance(self.declared, dict) and "forward" in self.declared else self.declared
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.make(x * 2, from_lengths(lengths))


def _both(y: Tensor, spans: Any) -> SpannedOutput:
    return SpannedOutput({"a": y, "b": y + 1}, {"a": spans, "b": spans})


def _one(y: Tensor, spans: Any) -> SpannedOutput:
    return SpannedOutput({"a": y}, {"a": spans})


# Rule by rule: what is returned, against what is declared. The message names both sides, and how to mend it.
MISFITS = [
    (
        ("a", "b"),
        _one,
        r"SG101 the root module \(Declares.forward\) returned spans for \['a'\] but declares \['a', 'b'\]",
    ),
    (
        ("a",),
        _both,
        r"SG102 .* returned spans for \['b'\], which it does not declare .*declared: \['a'\], given: \['a', 'b'\]",
    ),
    ((), _one, r"SG102 .*\['a'\].*declared: \[\], given: \['a'\]"),
    (("a",), lambda y, s: _one(y, s.float()), r"SG104 .*output 'a'.*torch.float32.*from_lengths\(lengths\)"),
    (
        ("a",),
        lambda y, s: _one(y, s.to(torch.int32)),
        r"SG104 .*torch.int32, expected torch.int64.*\.to\(torch.int64\)",
    ),
    (("a",), lambda y, s: _one(y, s > 0), "SG104 .*torch.bool"),
    (("a",), lambda y, s: _one(y, s[:, 1]), r"SG103 .*spans have shape \[2\], expected \[2, 2\]"),
    (("a",), lambda y, s: _one(y, s[:1]), r"SG103 .*spans have shape \[1, 2\], expected \[2, 2\]"),
    (("a",), lambda y, s: _one(y, torch.cat([s, s], 1)), r"SG103 .*shape \[2, 4\], expected \[2, 2\]"),
    ({"a": Span(dims=(1, 2))}, _one, r"SG103 .*spanned dims \[1, 2\] do not fit a tensor of shape \[2, 5\]"),
    ({"a": Span(dims=(-2,))}, _one, r"SG103 .*spanned dims \[-2\] do not fit .*dim 0 holds the rows"),
    ({"a": Span(max_spans=3)}, _one, r"SG103 .*shape \[2, 2\], expected \[2, 3, 2\]"),
    (("a",), lambda y, s: _one(y[:, 0], s), r"SG103 .*spanned dims \[-1\] do not fit a tensor of shape \[2\]"),
    (("a",), lambda y, s: _one(y, [[0, 1], [0, 2]]), "SG105 .*spans are a host list; expected an int64 tensor on cpu"),
    (("a",), lambda y, s: _one(y, s.to("meta")), "SG105 .*spans are on meta, the output is on cpu; build them on cpu"),
    (("a",), lambda y, s: _one([1], s), "SG101 .*outputs holds list under that name"),
    (
        ("a",),
        lambda y, s: SpannedOutput({"b": y}, {"a": s}),
        r"SG101 .*holds NoneType .*outputs: \['b'\], spans: \['a'\]",
    ),
    (
        ("a", "b"),
        lambda y, s: SpannedOutput({"a": y, "b": y[:1]}, {"a": s, "b": s[:1]}),
        r"SG103 the root module .*: outputs and row values have different numbers of rows",
    ),
    (("a",), lambda y, s: SpannedOutput({"a": y}, {"a": s}, {"t": [1, 2]}), "SG106 .*row value 't': a host list"),
    (
        ("a",),
        lambda y, s: SpannedOutput({"a": y}, {"a": s}, {"t": y}),
        "SG104 .*row value 't': row values are torch.float32",
    ),
    (
        ("a",),
        lambda y, s: SpannedOutput({"a": y}, {"a": s}, {"t": s.sum()}),
        r"SG106 .*shape \[\]; expected \[bs\] or \[bs, k\]",
    ),
    (("a",), lambda y, s: SpannedOutput({"a": y}, {"a": s}, {"t": s[None]}), r"SG106 .*shape \[1, 2, 2\]"),
    (
        ("a",),
        lambda y, s: SpannedOutput({"a": y}, {"a": s}, {"t": s[:1, 0]}),
        r"SG103 the root module .*: outputs and row values have different numbers of rows",
    ),
    (("a",), lambda y, s: SpannedOutput({"a": y}, {"a": s}, {"a": s[:, 0]}), "SG108 .*'a' is declared twice"),
    (
        ("a",),
        lambda y, s: (_one(y, s), 1),
        r"SG101 .*returned a tuple that holds a SpannedOutput with spans for \['a'\]",
    ),
]


@TRACES
@pytest.mark.parametrize(("declared", "make", "message"), MISFITS, ids=lambda v: v[:5] if isinstance(v, str) else "")
def test_a_misfit_is_refused(declared: Any, make: Any, message: str, trace: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        compiled(Declares(declared, make), trace=trace).launch(*batch())


# The mirrored cases: all, or none, or none on this walk.
@TRACES
@pytest.mark.parametrize(
    ("declared", "make", "is_cut"),
    [
        (("a", "b"), _both, True),
        (("a", "b"), lambda y, s: SpannedOutput({"a": y, "b": y + 1}), False),
        (None, lambda y, s: SpannedOutput({"a": y, "b": y + 1}), False),
        (("a", "b"), lambda y, s: {"a": y, "b": y + 1}, False),
        ({"forward": ("a", "b"), "other": ("a",)}, _both, True),
        (["a", "b"], _both, True),
        ({"a", "b"}, _both, True),
    ],
)
def test_spans_for_all_or_for_none(declared: Any, make: Any, is_cut: bool, trace: str) -> None:
    x, lengths = batch((2, 4))
    out = compiled(Declares(declared, make), trace=trace)(x, lengths)
    if is_cut:
        assert values(out["a"]) == cut(x * 2, [2, 4])
        assert values(out["b"]) == cut(x * 2 + 1, [2, 4])
    else:
        assert out["a"].equal(x * 2)
        assert out["b"].equal(x * 2 + 1)


def test_a_refusal_says_where() -> None:
    with pytest.raises(DeclarationError, match="SG107") as caught:
        compiled(plain(lambda self, x, n: self.toy.forward(x, n)["audio"], toy=Toy())).launch(*batch())
    assert line_of(Toy, "def forward") in str(caught.value)


# Every way to run a module without running its hooks.
@TRACES
@pytest.mark.parametrize(
    "run",
    [
        lambda self, x, n: self.toy.forward(x, n)["audio"] * 1,
        lambda self, x, n: x * 2,
        lambda self, x, n: self.toy.gain * x,
    ],
)
def test_a_declaring_module_that_is_not_called_is_refused(run: Any, trace: str) -> None:
    """Hooks fire through `__call__` alone: its outputs would be delivered padded, without a word."""
    with pytest.raises(DeclarationError, match=r"SG107 toy \(Toy.forward\) declares \['audio'\] but was not called"):
        compiled(plain(run, toy=Toy()), trace=trace).launch(*batch())


@TRACES
def test_a_row_value_alone_must_fire_too(trace: str) -> None:
    """A declaration of nothing but row values was not counted: the values were missing, without a word."""
    net = declare(nn.Linear(5, 5), row_values={"top": lambda out, x: out.argmax(1)})
    with pytest.raises(DeclarationError, match=r"SG107 net \(Linear.forward\) declares \['top'\] but was not called"):
        compiled(plain(lambda self, x: self.net.forward(x), net=net), trace=trace).launch(batch()[0])
    called = compiled(plain(lambda self, x: self.net(x) * 1, net=net), trace=trace)
    x = torch.randn(2, 5)
    assert called.launch(x).row_values("top").tolist() == net(x).argmax(1).tolist()


@TRACES
def test_a_module_that_declares_nothing_on_the_walk_need_not_run(trace: str) -> None:
    net = declare(nn.Linear(5, 5), walks=["codec"], audio=lambda out, x: from_lengths(x.sum(1).long()))
    x = torch.randn(2, 5)
    assert compiled(plain(lambda self, x: x + 1, net=net), trace=trace, walk="prefill")(x).equal(x + 1)


class _Loose(nn.Module):
    """Declares nothing and returns spans all the same."""

    def forward(self, x: Tensor, lengths: Tensor) -> SpannedOutput:
        return SpannedOutput({"audio": x * 2}, {"audio": from_lengths(lengths)})


def _boxed(out: Any) -> Any:
    """In a dataclass that was never seen before."""
    return dataclasses.make_dataclass("Box", ["out"])(out)


@TRACES
@pytest.mark.parametrize("wrap", [lambda out: out, lambda out: {"k": (1, out)}, _boxed])
def test_spans_that_nobody_declared_are_refused(wrap: Any, trace: str) -> None:
    """A SpannedOutput in a dataclass that nobody registered was looked over at the first trace."""
    model = plain(lambda self, x, n: wrap(self.net(x, n)), net=_Loose())
    with pytest.raises(DeclarationError, match=r"SG102 .*SpannedOutput with spans for \['audio'\], but no submodule"):
        compiled(model, trace=trace).launch(*batch())


@TRACES
def test_spans_passed_on_by_a_parent_are_declared(trace: str) -> None:
    x, lengths = batch((1, 5))
    model = plain(lambda self, x, n: {"k": (1, self.toy(x, n))}, toy=Toy())
    out = compiled(model, trace=trace)(x, lengths)
    assert out["k"][0] == 1
    assert values(out["k"][1]["audio"]) == cut(x * 2 + 1, [1, 5])


@TRACES
def test_a_declaring_parent_may_return_its_childs_output_in_a_tuple(trace: str) -> None:
    """The mirrored case of a hidden SpannedOutput: these spans are declared, by the child."""

    class Parent(Spanned):
        def __init__(self) -> None:
            super().__init__()
            self.toy = Toy()

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            return self.toy(x, lengths), 1

    x, lengths = batch((1, 5))
    out, one = compiled(Parent(), trace=trace)(x, lengths)
    assert one == 1
    assert values(out["audio"]) == cut(x * 2 + 1, [1, 5])


@TRACES
def test_different_numbers_of_rows_in_one_step_are_refused(trace: str) -> None:
    model = plain(lambda self, x, n: (self.a(x, n)["audio"], self.b(x[:1], n[:1])["audio"]), a=Toy(), b=Toy())
    with pytest.raises(DeclarationError, match="SG103 spanned outputs of one step have different numbers of rows"):
        compiled(model, trace=trace).launch(*batch())
