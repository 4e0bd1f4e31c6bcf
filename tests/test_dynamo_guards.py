"""When a model that was traced by dynamo is traced again, and which trace a launch finds."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
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


class Looks(Spanned):
    """Attributes that look like torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.use_hooks = False
        self.use_flat_weights = False
        self.config = SimpleNamespace(my_hooks=1)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        x = x * 2 if self.use_hooks else x * 3
        x = x + 4 if self.use_flat_weights else x
        return self.spanned(x * self.config.my_hooks, n)


def test_attributes_that_look_like_torch_s_are_guarded(traces: list[str]) -> None:
    """Guards were dropped for a part of their name."""
    model: Any = Looks()
    run = compiled(model, trace="dynamo")
    changes = [
        lambda: None,
        lambda: setattr(model, "use_hooks", True),
        lambda: setattr(model, "use_flat_weights", True),
        lambda: setattr(model.config, "my_hooks", 5),
    ]
    for count, change in enumerate(changes, 1):
        change()
        check(run, model)
        assert len(traces) == count


TENSOR = torch.tensor(2.0)
ALIAS = TENSOR
TENSORS = {"a": [torch.tensor(3.0)]}
LINEAR = nn.Linear(3, 3)


def enclosed() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], None]]:
    cell = torch.tensor(2.0)

    def call(x: Tensor) -> Tensor:
        return x * cell

    def rebind(new: Tensor) -> None:
        nonlocal cell
        cell = new

    return call, rebind


CALL, REBIND = enclosed()


def defaulting(x: Tensor, k: float = 2.0) -> Tensor:
    return x + k


class Elsewhere(Spanned):
    """Tensors and modules that are no parameters or buffers of the model."""

    shared = torch.tensor(2.0)

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(tensor=torch.tensor(2.0))
        self.object = Config()
        self.object.linear = nn.Linear(3, 3)  # type: ignore[attr-defined]
        self.modules_ = [nn.Linear(3, 3)]
        self.scalar = np.float32(2)
        self.array = np.ones(3, dtype=np.float32)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        x = CALL(x * TENSOR + TENSORS["a"][0]) - self.shared
        x = self.modules_[0](self.object.linear(LINEAR(x))) * self.config.tensor  # type: ignore[attr-defined]
        return self.spanned(defaulting(x * float(self.scalar)) * torch.from_numpy(self.array) + ALIAS, n)


def check_close(run: Compiled, model: nn.Module) -> None:
    x, n = batch((3, 3), 3)
    out = run(x, n)["audio"]
    torch.testing.assert_close(torch.stack([out[0], out[1]]), model(x, n).outputs["audio"])


@BACKENDS
def test_a_tensor_that_is_rebound_outside_the_model_is_traced_again(
    on: str, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these replayed the graph of the old one. The mirrored case: one that is written in place."""
    model: Any = Elsewhere()
    run = compiled(model, on, "dynamo")
    new = torch.tensor(7.0)
    changes = [
        lambda: None,
        lambda: monkeypatch.setitem(globals(), "TENSOR", new),
        lambda: monkeypatch.setitem(globals(), "ALIAS", torch.tensor(9.0)),
        lambda: monkeypatch.setitem(TENSORS, "a", [new + 1]),
        lambda: TENSORS["a"].__setitem__(0, new.clone()),
        lambda: REBIND(new + 2),
        lambda: monkeypatch.setattr(Elsewhere, "shared", new + 3),
        lambda: setattr(model.config, "tensor", new + 4),
        # At most recompile_limit traces of one signature.
    ]
    more = [
        lambda: None,
        lambda: setattr(model.object, "linear", nn.Linear(3, 3)),
        lambda: model.modules_.__setitem__(0, nn.Linear(3, 3)),
        lambda: monkeypatch.setitem(globals(), "LINEAR", nn.Linear(3, 3)),
        lambda: setattr(LINEAR, "weight", nn.Parameter(torch.randn(3, 3))),
        lambda: setattr(model, "scalar", np.float32(7)),
        lambda: setattr(model, "array", np.full(3, 2, dtype=np.float32)),
        lambda: monkeypatch.setattr(defaulting, "__defaults__", (7.0,)),
    ]
    for steps in (changes, more):
        run, before = compiled(model, on, "dynamo"), len(traces)
        for count, change in enumerate(steps, 1):
            change()
            check_close(run, model)
            check_close(run, model)
            assert len(traces) == before + count
    before = len(traces)
    for tensor in (new, TENSORS["a"][0], Elsewhere.shared, model.config.tensor, model.object.linear.weight.data):
        tensor.mul_(2)
    model.array.fill(3)
    check_close(run, model)
    assert len(traces) == before


def test_a_forward_that_is_replaced_on_its_class_is_traced_again(
    traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Modes()
    run = compiled(model, trace="dynamo")
    check(run, model)
    monkeypatch.setattr(Modes, "forward", lambda self, x, n: self.spanned(x + 50, n))
    check(run, model)
    check(run, model)
    assert len(traces) == 2


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
    """What has its name is one."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"decode": 2}
            self.decode_gain = 1

        def decode(self, x: Tensor) -> Tensor:
            return x * self.config["decode"] * self.decode_gain

    decoder = spangraph.declare(Decoder(), wave=lambda out, x: from_lengths((x > -9).sum(-1) - 1), method="decode")
    run = compiled(plain(lambda self, x: self.decoder.decode(x), decoder=decoder), trace="dynamo")
    x, _ = batch((3, 5))
    for _ in range(3):
        assert values(run(x)) == cut(x * 2, [4, 4])
    assert len(traces) == 1
    decoder.config["decode"] = 3  # type: ignore[index]
    assert values(run(x)) == cut(x * 3, [4, 4])
    decoder.decode_gain = 2  # type: ignore[assignment]
    assert values(run(x)) == cut(x * 6, [4, 4])
    assert len(traces) == 3


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
