"""Structures of inputs and outputs through both tracers: every kind of container, constants, and what is refused."""

import collections
import dataclasses
import enum
import logging
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

import spangraph
from spangraph import InputError, TraceError

from .toys import Toy, batch, compiled, cut, plain, spanned, tracer_of, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])


class Wave(NamedTuple):
    audio: Any
    rate: Any


@dataclasses.dataclass
class Frozen:
    audio: Any
    others: Any = None


def _fresh_dataclass(**fields: Any) -> Any:
    """Of a class that pytree has not seen."""
    return dataclasses.make_dataclass("Fresh", list(fields))(**fields)


# Each kind of container around the spanned tensor `y` and a whole one, `z`, with constants among them.
STRUCTURES = {
    "tensor": lambda y, z: y,
    "tuple": lambda y, z: (y, z),
    "list": lambda y, z: [y, [z, None]],
    "dict": lambda y, z: {"z": z, "y": y, "rate": 16000},
    "ordered": lambda y, z: collections.OrderedDict(y=y, z=z),
    "default": lambda y, z: collections.defaultdict(list, y=y, z=z),
    "deque": lambda y, z: collections.deque([y, z]),
    "named": lambda y, z: Wave(y, z),
    "dataclass": lambda y, z: Frozen(y, {"z": z, "flag": True}),
    "unregistered": lambda y, z: _fresh_dataclass(audio=y, inner=_fresh_dataclass(z=z, name="n")),
    "model_output": lambda y, z: BaseModelOutput(last_hidden_state=y, attentions=(z, z)),
    "model_output_one_field": lambda y, z: BaseModelOutput(last_hidden_state=y),
    "model_output_inside": lambda y, z: {"out": BaseModelOutput(last_hidden_state=y), "z": (z, 3)},
    "constants": lambda y, z: (None, 3, 2.5, "s", torch.float16, y, slice(1, 2), (), {}),
}


def _walk(found: Any, expected: Any, rows: Tensor, lengths: list[int]) -> None:
    """The same structure, with rows in place of the tensor `rows`."""
    if expected is rows:
        assert not isinstance(found, Tensor)
        assert values(found) == cut(rows, lengths)
    elif isinstance(expected, Tensor):
        assert found.equal(expected)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, dict):
        assert [f.name for f in dataclasses.fields(found)] == [f.name for f in dataclasses.fields(expected)]
        for field in dataclasses.fields(expected):
            _walk(getattr(found, field.name), getattr(expected, field.name), rows, lengths)
    elif isinstance(expected, dict):
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        for key in expected:
            _walk(found[key], expected[key], rows, lengths)
    elif isinstance(expected, list | tuple | collections.deque):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _walk(one, other, rows, lengths)
    else:
        assert type(found) is type(expected)
        assert found == expected


@TRACES
@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_result_has_the_models_own_structure(kind: str, trace: str) -> None:
    make = STRUCTURES[kind]
    model = plain(lambda self, x, n: make(self.toy(x, n)["audio"], x * 3), toy=Toy())
    run = compiled(model, trace=trace)
    for lengths in ([3, 0], [1, 5]):
        x, n = batch(lengths)
        y = x * 2 + 1
        _walk(run(x, n), make(y, x * 3), y, lengths)


@TRACES
def test_rows_with_tuple_ids_in_a_model_output_of_one_field(trace: str) -> None:
    """Such a ModelOutput iterates over its field when it is built, and takes pairs for its items: row ids that are
    pairs became its keys."""
    model = plain(lambda self, x, n: BaseModelOutput(last_hidden_state=self.toy(x, n)["audio"]), toy=Toy())
    x, n = batch((3, 5))
    out = compiled(model, trace=trace)(x, n, rows=[("req", 1), ("req", 2)])
    assert list(out) == ["last_hidden_state"]
    assert list(out.last_hidden_state) == [("req", 1), ("req", 2)]
    assert out["last_hidden_state"]["req", 2].tolist() == (x * 2 + 1)[1].tolist()


class _Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.parts = [{"deep": tensor}]


class _Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _cache(x: Tensor) -> DynamicCache:
    cache = DynamicCache()
    cache.update(x[None, None], x[None, None], 0)
    return cache


@TRACES
@pytest.mark.parametrize("hide", [_Holder, _Slots, _cache, lambda x: BaseModelOutputWithPast(x, _cache(x))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensors_in_a_class_that_pytree_does_not_know_are_refused(hide: Any, trace: str) -> None:
    """They were baked in: every launch returned the tensors of the trace, fake ones at that."""
    with pytest.raises(TraceError, match=r"returned a (_Holder|_Slots|DynamicCache), whose tensors cannot be reached"):
        compiled(plain(lambda self, x: (x + 1, hide(x))), trace=trace).launch(torch.ones(2, 3))


@TRACES
def test_an_object_without_tensors_is_passed_on(trace: str) -> None:
    """The mirrored case."""
    config = _Holder(3)  # type: ignore[arg-type]
    out = compiled(plain(lambda self, x: (x + 1, config)), trace=trace)(torch.ones(2))
    assert out[0].tolist() == [2, 2]
    assert out[1] is config


def test_an_opaque_model_that_changes_its_structure_is_refused() -> None:
    """The graph's outputs are those of the first run; the message says what is different."""
    outs: list[Any] = [lambda x: (x, 1), lambda x: (x, 1), lambda x: (x, 2), lambda x: [x, 1], lambda x: (x, 1)]
    calls = iter(outs)
    run = compiled(plain(lambda self, x: next(calls)(x + 1)), trace="opaque")
    x = torch.ones(2)
    assert run(x)[1] == 1
    with pytest.raises(TraceError, match=r"output has other constants than at its first run.*value=2.*value=1"):
        run(x)
    with pytest.raises(TraceError, match="output has other structure than at its first run"):
        run(x)
    assert run(x)[0].tolist() == [2, 2]


def test_an_opaque_model_that_changes_its_spans_is_refused() -> None:
    shapes = iter([5, 5, 4, 5])

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        return self.toy(x[:, : next(shapes)], n)["audio"]

    run = compiled(plain(forward, toy=Toy()), trace="opaque")
    x, n = batch((2, 3))
    assert values(run(x, n)) == cut(x * 2 + 1, [2, 3])
    with pytest.raises(TraceError, match="other spanned shapes than at its first run"):  # else checked by an old width
        run(x, n)
    assert values(run(x, n)) == cut(x * 2 + 1, [2, 3])


# ---- which outputs are the spanned value -----------------------------------------------------------------------------

# Where the model runs itself at every step.
RUNS_ITSELF = pytest.mark.parametrize(
    ("on", "options"),
    [
        ("inline", {"trace": "opaque"}),
        ("inline", {"buckets": {"batch": (1,)}}),
        ("simulated", {"buckets": {"batch": (1,)}}),
    ],
    ids=["opaque", "miss", "captured miss"],
)
# An output that is the spanned value, and one of its shape that is not: other values, also in the same memory.
TIES: dict[str, Any] = {
    "itself": (lambda y: y, lambda y: y * 2),
    "a view": (lambda y: y[:, None], lambda y: (y * 2)[:, None]),
    "negated": (lambda y: y, torch.ops.aten._neg_view.default),
}


@RUNS_ITSELF
@pytest.mark.parametrize("kind", TIES)
def test_an_output_that_is_the_spanned_value_must_remain_it(kind: str, on: str, options: Any) -> None:
    """It was delivered with the value of the other."""
    same, other = TIES[kind]
    model = plain(lambda self, x, n: (y := self.toy(x, n)["audio"], self.tied(y)), toy=Toy())
    model.tied = same
    run = compiled(model, on, **options)
    for _ in range(2):
        x, n = batch((3, 5))
        model.tied = same
        found = {i: row.flatten().tolist() for i, row in run(x, n)[1].items()}
        assert found == cut(x * 2 + 1, [3, 5])
        model.tied = other
        with pytest.raises(TraceError, match=r"output\[1\] was the spanned 'audio' of toy itself at the first run"):
            run(x, n)


@RUNS_ITSELF
@pytest.mark.parametrize("kind", TIES)
def test_an_output_may_become_the_spanned_value(kind: str, on: str, options: Any) -> None:
    """The mirrored case: it is delivered as at the first run."""
    same, other = TIES[kind]
    model = plain(lambda self, x, n: (y := self.toy(x, n)["audio"], self.tied(y)), toy=Toy())
    run = compiled(model, on, **{**options, "trace": "opaque"})
    for tied in (lambda y: same(y) * 3, same, other):
        model.tied = tied
        x, n = batch((3, 5))
        assert run(x, n)[1].equal(tied(x * 2 + 1))


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"trace": "opaque"}, {"buckets": {"batch": (1,)}}], ids=str)
def test_inputs_that_were_one_tensor_at_the_trace_may_be_two(on: str, options: Any) -> None:
    """An output that is the one was delivered with the values of the other."""
    model = spanned(lambda self, x, other, n: self.spanned(x, n, other=other, more=other[:, None]))
    model.register_buffer("held", torch.randn(2, 5))
    for first in (torch.randn(2, 5), model.held):
        run = compiled(model, on, **options)
        run(first, first, torch.tensor([3, 5]))
        x, other = torch.randn(2, 2, 5)
        for inputs in ((x, other), (other, x), (x, x)):
            outputs = run(*inputs, torch.tensor([3, 5])).outputs
            assert values(outputs["audio"]) == cut(inputs[0], [3, 5])
            assert outputs["other"].equal(inputs[1])
            assert outputs["more"].equal(inputs[1][:, None])


def test_an_output_that_becomes_a_buffer_is_kept_from_the_next_step() -> None:
    """That it was none at the trace does not make it the forward's own."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.total += x
        return self.total if self.shows else x * 0

    model = spanned(forward, total=torch.zeros(2))
    model.shows = False
    run = compiled(model, trace="opaque", depth=2)
    assert run(torch.ones(2)).tolist() == [0, 0]
    model.shows = True
    first, second = run.launch(torch.ones(2)), run.launch(torch.ones(2))
    assert second.result().tolist() == [3, 3]
    assert first.result().tolist() == [2, 2]


# ---- inputs ----------------------------------------------------------------------------------------------------------


@TRACES
def test_keyword_default_and_nested_inputs(trace: str) -> None:
    def forward(self: Any, x: Tensor, *, parts: Any, scale: float = 3.0, **extra: Any) -> Any:
        return self.toy(x * scale + parts["a"][0] + extra["more"], parts["n"])["audio"], extra["flag"]

    run = compiled(plain(forward, toy=Toy()), trace=trace)
    x, n = batch((3, 5))
    parts = {"a": (torch.randn(2, 5), None), "n": n}
    out, flag = run(x, parts=parts, more=x * 2, flag="yes")
    assert flag == "yes"
    assert values(out) == cut((x * 3.0 + parts["a"][0] + x * 2) * 2 + 1, [3, 5])
    out, _ = run(x, parts=parts, more=x * 2, flag="yes", scale=0.5)
    assert values(out) == cut((x * 0.5 + parts["a"][0] + x * 2) * 2 + 1, [3, 5])


class Kind(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


@dataclasses.dataclass
class Params:
    scale: Tensor
    times: int


class Tag(str):
    """Looks like a str."""


# Pairs that a careless key would take for one: equal values of other types, equal hashes, equal text.
@TRACES
@pytest.mark.parametrize(
    "pair",
    [
        (1, 1.0),
        (1, True),
        (0, False),
        ("1", 1),
        (2, 3),
        (0.0, -0.0),
        (Kind.DOUBLE, Kind.TRIPLE),
        (None, 0),
        (1, 1 + 0j),
        ("a", Tag("a")),
    ],
    ids=str,
)
def test_constants_are_baked_in_by_type_and_value(pair: tuple[Any, Any], trace: str) -> None:
    def forward(self: Any, x: Tensor, k: Any) -> Any:
        return x + 1, k

    run = compiled(plain(forward), trace=trace)
    x = torch.randn(2)
    for k in (*pair, *pair):
        out, found = run(x, k)
        assert out.equal(x + 1)
        assert (type(found), repr(found)) == (type(k), repr(k))


class Mute(enum.Enum):
    A, B = 2, 3

    def __repr__(self) -> str:
        return "Mute"


class Count(int):
    def __repr__(self) -> str:
        return "Count"


@pytest.mark.parametrize(
    "pair",
    [(Mute.A, Mute.B), (Count(2), Count(3)), (slice(Count(2)), slice(Count(3))), (range(0, 3, 2), range(0, 4, 2))],
    ids=["enum", "int", "slice", "range"],
)
def test_constants_of_one_repr_are_told_apart(pair: tuple[Any, Any]) -> None:
    """And of those that compare equal: a range is its items, but has a stop."""
    run = compiled(plain(lambda self, x, k: (x + 1, k)))
    for k in (*pair, *pair):
        found = run(torch.ones(1), k)[1]
        assert found == k
        assert getattr(found, "stop", None) == getattr(k, "stop", None)
    assert run.counts.captures == 2


def test_nan_is_one_constant() -> None:
    """The mirrored case: it is not equal to itself."""
    run = compiled(plain(lambda self, x, k: x + k))
    for _ in range(3):
        assert run(torch.ones(1), float("nan")).isnan().all()
    assert run.counts.captures == 1


def test_slices_enums_and_dtypes_may_be_baked_in() -> None:
    def forward(self: Any, x: Tensor, part: slice, kind: Kind, dtype: torch.dtype) -> Tensor:
        return x[part].to(dtype) * kind.value

    run = compiled(plain(forward))
    x = torch.arange(6)
    assert run(x, slice(1, 3), Kind.DOUBLE, torch.float32).tolist() == [2.0, 4.0]
    assert run(x, slice(1, 3), Kind.TRIPLE, torch.float32).tolist() == [3.0, 6.0]
    assert run(x, slice(2, 4), Kind.TRIPLE, torch.int32).tolist() == [6, 9]


@pytest.mark.parametrize("bad", [object(), slice(torch.tensor(1), None), {1, 2}, nn.Linear(1, 1), len])
def test_inputs_that_can_be_neither_copied_nor_baked_are_refused(bad: Any) -> None:
    """A slice of tensors would be baked in by its text."""
    with pytest.raises(InputError, match="can be neither copied in nor baked into a graph"):
        compiled(plain(lambda self, x, k: x)).launch(torch.ones(2), bad)


def test_a_registered_dataclass_may_be_an_input() -> None:
    torch.export.register_dataclass(Params)
    run = compiled(plain(lambda self, x, p: x * p.scale * p.times))
    assert run(torch.ones(2), Params(torch.tensor(3.0), 2)).tolist() == [6, 6]
    assert run(torch.ones(2), Params(torch.tensor(4.0), 2)).tolist() == [8, 8]
    assert run(torch.ones(2), Params(torch.tensor(4.0), 3)).tolist() == [12, 12]


# ---- which tracer ----------------------------------------------------------------------------------------------------


def test_what_does_not_export_is_traced_opaquely_with_the_reason() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        script = torch.jit.script(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    run = compiled(script)
    assert run(x).equal(script(x))
    assert tracer_of(run) == "opaque"
    assert "opaque because: " in run.explain()
    exported = compiled(nn.Linear(3, 3))
    exported.launch(x)
    assert tracer_of(exported) == "export"
    assert "opaque because: " not in exported.explain()


def _unexportable(self: nn.Module, x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2) if x.ndim == 2 else x


def test_trace_export_refuses_what_does_not_export() -> None:
    with pytest.raises(TraceError, match=r"torch\.export failed"):
        compiled(plain(_unexportable), trace="export").launch(torch.ones(2, 3))


def test_a_failing_export_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """It printed its half-built graph, and logged."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x + 1 if x.max() > 0 else x

    assert compiled(plain(forward), verify="off")(torch.ones(2)).tolist() == [2, 2]
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_a_failing_export_does_not_log() -> None:
    """Its handlers hold the standard error of their own; other threads' records pass."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        logging.getLogger("torch.export").warning("of this thread")
        thread = threading.Thread(target=lambda: logging.getLogger("torch.export").warning("of another"))
        thread.start()
        thread.join()
        return x + 1 if x.max() > 0 else x

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental.symbolic_shapes")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with pytest.raises(TraceError):
            compiled(plain(forward), trace="export").launch(torch.ones(2))
        assert records == ["of another"]
        loggers[0].warning("afterwards")
        assert records == ["of another", "afterwards"]
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def test_what_the_forward_prints_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """The mirrored case."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        print("hello", file=sys.stderr)
        return x + 1

    compiled(plain(forward), trace="export").launch(torch.ones(2))
    assert "hello" in capfd.readouterr().err


def test_a_compiled_model_inside_another_is_refused() -> None:
    """The traces' lock was taken twice by one thread, which hung for ever; a captured step would hold the values of
    its capture."""
    inner = compiled(Toy())
    x, n = batch((3, 5))
    outer = compiled(plain(lambda self, x, n: inner(x, n)["audio"][0]))
    with pytest.raises(TraceError, match="launches another compiled model"):
        outer.launch(x, n)
    assert values(inner(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])
    with pytest.raises(TraceError, match="launches another compiled model"):  # also one that is traced already
        outer.launch(x, n)
    assert spangraph.compile(Toy())(x, n)["audio"][0].tolist() == (x * 2 + 1)[0, :3].tolist()


def test_an_output_may_be_nested_deeper_than_an_expression() -> None:
    def deep(audio: Tensor) -> object:
        value: object = audio
        for _ in range(105):
            value = [value]
        return value

    class Deep(nn.Module):
        def forward(self, audio: Tensor) -> object:
            return deep(audio * 2)

    found: Any = spangraph.compile(Deep(), trace="opaque")(torch.ones(2))
    while isinstance(found, list):
        [found] = found
    assert found.tolist() == [2.0, 2.0]
