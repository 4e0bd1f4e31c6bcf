"""When a model that was traced by dynamo is traced again, and which trace a launch finds."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import Compiled, TraceError, from_lengths
from spangraph.weights import StaleGraphError

from .toys import Spanned, Toy, batch, compiled, cut, plain, spanned, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
FACTOR = 2.0


class Modes(Spanned):
    """What a forward reads on the host: an attribute, one in a container, one of the class, a global."""

    bias = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.mode = "double"
        self.options = {"steps": [1, 2]}

    def forward(self, x: Tensor, n: Tensor) -> Any:
        x = x * 2 if self.mode == "double" else x * 3
        for step in self.options["steps"]:
            x = x + step
        return self.spanned(x * FACTOR + self.bias, n)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one at each trace by dynamo."""
    from spangraph import dynamo

    made: list[str] = []
    trace = dynamo.trace_by_dynamo

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append("trace")
        return trace(*args, **kwargs)

    monkeypatch.setattr(dynamo, "trace_by_dynamo", counted)
    return made


def check(run: Compiled, model: Modes) -> None:
    x, n = batch((3, 5))
    assert values(run(x, n)["audio"]) == cut(model(x, n)["audio"], [3, 5])


@BACKENDS
def test_an_attribute_that_flips_finds_its_trace_again(on: str, traces: list[str]) -> None:
    model = Modes()
    run = compiled(model, on, "dynamo", depth=2)
    for mode, count in [("double", 1), ("triple", 2), ("double", 2), ("triple", 2), ("double", 2)]:
        model.mode = mode
        check(run, model)
        check(run, model)
        assert len(traces) == count
    assert run.explain().count("trace: dynamo") == 2


def test_what_a_forward_reads_on_the_host_is_guarded(traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Modes()
    run = compiled(model, trace="dynamo")
    changes = [
        lambda: None,
        lambda: model.options["steps"].append(3),
        lambda: model.options["steps"].__setitem__(0, 5),
        lambda: monkeypatch.setattr(Modes, "bias", 4.0),
        lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0),
    ]
    for count, change in enumerate(changes, 1):
        change()
        check(run, model)
        check(run, model)
        assert len(traces) == count
    monkeypatch.undo()
    model.options["steps"][:] = [1, 2]
    check(run, model)
    assert len(traces) <= len(changes)


def twice(x: Tensor) -> Tensor:
    return x * 2


def thrice(x: Tensor) -> Tensor:
    return x * 3


FUNCTION = twice


class Config:
    mode = 1.0


class Calls(Spanned):
    """What a forward calls, and attributes that the class has and an instance may shadow."""

    mode = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.relu
        self.function = twice
        self.functions = {"a": twice}
        self.config = Config()

    @property
    def scale(self) -> float:
        return self.mode

    def forward(self, x: Tensor, n: Tensor) -> Any:
        x = FUNCTION(self.functions["a"](self.function(self.act(x))))
        return self.spanned(x * self.scale + self.config.mode, n)


@BACKENDS
def test_what_a_forward_calls_and_what_shadows_a_class_is_guarded(
    on: str, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these replayed the old graph. Back again, the first trace is found."""
    model: Any = Calls()
    run = compiled(model, on, "dynamo", buckets={"batch": (2,)})
    changes = [
        lambda: None,
        lambda: monkeypatch.setattr(model, "act", torch.tanh),
        lambda: monkeypatch.setattr(model, "function", thrice),
        lambda: monkeypatch.setitem(model.functions, "a", thrice),
        lambda: monkeypatch.setitem(globals(), "FUNCTION", thrice),
        lambda: monkeypatch.setattr(model, "mode", 5.0),
        lambda: monkeypatch.setattr(model.config, "mode", 7.0),
    ]
    for count, change in enumerate(changes, 1):
        change()
        check(run, model)
        check(run, model)
        assert len(traces) == count
    monkeypatch.undo()
    check(run, model)
    assert len(traces) == len(changes)


def test_eager_launches_follow_what_is_guarded() -> None:
    """They were served by the first trace of their shape for ever, or cut as the graph of another mode was."""

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = x * 2
        return self.spanned(y, n, other=y.flip(-1) if self.mode else y + 0)

    model: Any = spanned(forward)
    model.mode = False
    run = compiled(model, trace="dynamo", buckets={"batch": (2,)})
    for mode in (False, True, False):
        model.mode = mode
        for bs in (2, 3):
            x, n = batch((3, 5, 1)[:bs])
            rows = {i: x[i, :k] * 2 for i, k in enumerate(n.tolist())}
            expected = {i: row.flip(0) if mode else row for i, row in rows.items()}
            assert values(run(x, n)["other"]) == values(expected)


def test_another_submodule_or_mode_is_guarded(traces: list[str]) -> None:
    model = spanned(lambda self, x, n: self.spanned(self.net(x), n))
    model.net = nn.Sequential(nn.ReLU(), nn.Dropout(1.0))
    run = compiled(model.eval(), trace="dynamo")
    x, n = batch((3, 5))
    assert values(run(x, n)["audio"]) == cut(x.relu(), [3, 5])
    model.net[0] = nn.Tanh()
    assert values(run(x, n)["audio"]) == cut(x.tanh(), [3, 5])
    model.train()
    assert values(run(x, n)["audio"]) == cut(x * 0, [3, 5])
    model.eval()
    assert values(run(x, n)["audio"]) == cut(x.tanh(), [3, 5])
    assert len(traces) == 3


def test_what_the_forward_does_not_read_and_other_modes_trace_nothing_again(traces: list[str]) -> None:
    model = Modes()
    run = compiled(model, trace="dynamo")
    check(run, model)
    model.other = 3
    model.register_forward_pre_hook(lambda *_: None)  # hooks are read at the trace, and not watched
    check(run, model)
    with torch.no_grad():
        check(run, model)
    with torch.inference_mode():
        check(run, model)
    with torch.autocast("cpu"):
        check(run, model)
    assert len(traces) == 1


def test_signatures_have_versions_of_their_own(traces: list[str]) -> None:
    model = Modes()
    run = compiled(model, trace="dynamo")
    for mode in ("double", "triple", "double", "triple"):
        model.mode = mode
        for lengths in ((3, 5), (2,)):
            x, n = batch(lengths)
            assert values(run(x, n)["audio"]) == cut(model(x, n)["audio"], lengths)
    assert len(traces) == 4


def test_what_changes_all_the_time_is_refused(traces: list[str]) -> None:
    model = Modes()
    run = compiled(model, trace="dynamo")
    limit = torch._dynamo.config.recompile_limit
    for i in range(limit):
        model.options["steps"][0] = i
        check(run, model)
    model.options["steps"][0] = limit
    with pytest.raises(TraceError, match=rf"traced {limit} times .*recompile_limit.*changes all the time") as caught:
        run.launch(*batch((3, 5)))
    assert r"options['steps'][0] == 0" in str(caught.value)
    assert len(traces) == limit
    for i in (0, limit - 1):  # the versions that there are remain
        model.options["steps"][0] = i
        check(run, model)


def test_a_trace_that_fails_leaves_the_others(traces: list[str]) -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        if self.broken:
            torch._dynamo.graph_break()
        return self.spanned(x + 1, n)

    model = spanned(forward)
    model.broken = False
    run = compiled(model, trace="dynamo")
    x, n = batch((3, 5))
    run(x, n)
    model.broken = True
    with pytest.raises(TraceError, match="breaks the graph"):
        run.launch(x, n)
    model.broken = False
    assert values(run(x, n)["audio"]) == cut(x + 1, [3, 5])
    assert len(traces) == 2


def test_weights_are_no_guards(traces: list[str]) -> None:
    """In place they are followed; replaced, they are stale, as with every tracer."""
    model = Toy()
    run = compiled(model, trace="dynamo")
    x, n = batch((3, 5))
    run(x, n)
    guard = next(iter(run._by_key.values())).trace.guard
    assert guard is not None
    with torch.no_grad():
        model.gain.fill_(5)
    assert values(run(x, n)["audio"]) == cut(x * 5 + 1, [3, 5])
    model.gain = nn.Parameter(torch.tensor(3.0))
    assert guard.holds()
    with pytest.raises(StaleGraphError, match="gain"):
        run.launch(x, n)
    assert len(traces) == 1


def test_a_method_that_was_wrapped_for_the_trace_is_no_guard(traces: list[str]) -> None:
    class Decoder(nn.Module):
        def decode(self, x: Tensor) -> Tensor:
            return x * 2

    decoder = spangraph.declare(Decoder(), wave=lambda out, x: from_lengths((x > -9).sum(-1) - 1), method="decode")
    run = compiled(plain(lambda self, x: self.decoder.decode(x), decoder=decoder), trace="dynamo")
    for _ in range(3):
        x, _ = batch((3, 5))
        assert values(run(x)) == cut(x * 2, [4, 4])
    assert len(traces) == 1


def test_a_dropped_object_lets_go_of_its_model() -> None:
    model = Modes()
    gone = weakref.ref(model)
    run = compiled(model, trace="dynamo")
    check(run, model)
    del run, model
    gc.collect()
    assert gone() is None


def test_dynamo_leaves_nothing_in_the_globals_of_a_module() -> None:
    from spangraph import dynamo

    before = set(vars(dynamo)), set(globals())
    model = Modes()
    check(compiled(model, trace="dynamo"), model)
    assert (set(vars(dynamo)), set(globals())) == before
