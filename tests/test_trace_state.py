"""Models with state: buffers, counters, rebinding, attributes, inputs that are written; and a trace leaves no trace."""

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spangraph
from spangraph import TraceError

from .toys import Spanned, batch, compiled, cut, plain, spanned, values

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])
BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
aten = torch.ops.aten


def _steps(model: nn.Module, on: str, trace: str, num_steps: int = 3, **options: Any) -> list[float]:
    """What each of some steps makes of ones."""
    run = compiled(model, on, trace, **options)
    x, n = torch.ones(1, 2), torch.tensor([2])
    return [run(x, n)["audio"][0].tolist()[0] for _ in range(num_steps)]


# ---- buffers ---------------------------------------------------------------------------------------------------------


def _add(self: Any, x: Tensor, n: Tensor) -> Any:
    self.n.add_(1)
    return self.spanned(x * self.n, n)


def _augmented(self: Any, x: Tensor, n: Tensor) -> Any:
    self.n += 1
    return self.spanned(x * self.n, n)


def _copied(self: Any, x: Tensor, n: Tensor) -> Any:
    self.n.copy_(self.n + 1)
    return self.spanned(x * self.n, n)


# A 0-d int counter is one of the buffers that a trace gives literal values.
@TRACES
@BACKENDS
@pytest.mark.parametrize("forward", [_add, _augmented, _copied])
@pytest.mark.parametrize("start", [torch.tensor(0), torch.tensor([0]), torch.tensor(0.0)], ids=["int", "ints", "float"])
def test_counters_count_once_per_step(forward: Callable[..., Any], start: Tensor, trace: str, on: str) -> None:
    """K42: as if neither trace nor warm-up had been. A 0-d int counter was a literal for ever: 1, 1, 1."""
    model = spanned(forward, n=start.clone())
    buffer = model.n
    assert _steps(model, on, trace) == [1, 2, 3]
    assert model.n is buffer
    assert buffer.item() == 3


def _rebind(self: Any, x: Tensor, n: Tensor) -> Any:
    self.n = self.n + 1
    return self.spanned(x * self.n, n)


@BACKENDS
@pytest.mark.parametrize("start", [torch.tensor(0), torch.tensor([0.0])], ids=["int", "float"])
def test_a_rebound_buffer_is_written_by_an_exported_graph(start: Tensor, on: str) -> None:
    """torch.export drops what a submodule binds to a buffer: each step began with the first value."""
    model = spanned(_rebind, n=start.clone())
    buffer = model.n
    assert _steps(model, on, "export") == [1, 2, 3]
    assert model.n is buffer
    assert buffer.item() == 3


def test_a_rebound_buffer_is_rebound_by_an_opaque_forward() -> None:
    model = spanned(_rebind, n=torch.tensor([0.0]))
    assert _steps(model, "inline", "opaque") == [1, 2, 3]
    assert model.n.item() == 3


def test_a_replay_cannot_rebind() -> None:
    """It would compute with the tensor of its capture."""
    model = spanned(_rebind, n=torch.tensor([0.0]))
    with pytest.raises(TraceError, match=r"the forward changes n at every call, which a replay cannot repeat"):
        _steps(model, "simulated", "opaque")
    assert model.n.item() == 0


@TRACES
def test_a_rebound_buffer_that_is_returned_keeps_its_value(trace: str) -> None:
    """The write at the end came before the clone that delivers the old value."""

    def forward(self: Any, x: Tensor) -> Any:
        old = self.n
        self.n = self.n + x
        return old, self.n * 1

    model = plain(forward)
    model.register_buffer("n", torch.zeros(2))
    run = compiled(model, trace="auto" if trace == "export" else trace)
    for step in range(3):
        old, new = run(torch.ones(2))
        assert old.tolist() == [step, step]
        assert new.tolist() == [step + 1, step + 1]


class Cache(Spanned):
    """Writes its input into row `at` of a cache, and returns the sum over what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2, 3))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        self.cache.index_copy_(0, self.at, x[None])
        self.at.add_(1).remainder_(4)
        return self.spanned(self.cache.sum(0), n)


@TRACES
@BACKENDS
def test_a_cache_is_updated_in_place_and_never_copied(trace: str, on: str) -> None:
    model = Cache()
    cache, address = model.cache, model.cache.data_ptr()
    run = compiled(model, on, trace)
    total = torch.zeros(2, 3)
    for _ in range(3):
        x, n = torch.randn(2, 3), torch.tensor([3, 2])
        total = total + x
        rows = run(x, n)["audio"]
        torch.testing.assert_close(rows[0], total[0])
        torch.testing.assert_close(rows[1], total[1, :2])
    assert model.cache is cache
    assert cache.data_ptr() == address
    torch.testing.assert_close(cache.sum(0), total)
    (signature,) = run._by_key.values()
    targets = [node.target for node in signature.instances[0].gm.graph.nodes]
    assert aten.clone.default not in targets


@TRACES
@BACKENDS
def test_a_cache_that_is_returned_is_a_copy(trace: str, on: str) -> None:
    """A view would show, and be, the next step's cache."""
    net = Cache()
    model = plain(lambda self, x, n: (self.net(x, n), self.net.cache, self.net.cache[0]), net=net)
    run = compiled(model, on, trace, depth=2)
    n = torch.tensor([3, 2])
    first = run.launch(torch.ones(2, 3), n)
    second = run.launch(torch.ones(2, 3) * 2, n)
    _, cache, row = first.result()
    assert cache[0].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert cache[1].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert row.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert second.result()[1][1].tolist() == [[2, 2, 2], [2, 2, 2]]
    first.release()  # poisons what it returned, and not the model's cache
    assert net.cache[:2].sum().item() == 18


# Every operator through which an output may be an input, a parameter or a mutated buffer: by view, by identity, and
# without an alias annotation in its schema.
@TRACES
@BACKENDS
@pytest.mark.parametrize(
    "alias",
    [
        lambda t, like: t,
        lambda t, like: t[0],
        lambda t, like: t.view(-1),
        lambda t, like: t.reshape(3, 2),
        lambda t, like: t.to(torch.float32),
        lambda t, like: t.contiguous(),
        lambda t, like: t.detach(),
        lambda t, like: t.type_as(like),
        lambda t, like: torch.einsum("ij->ji", t),
        lambda t, like: torch.atleast_2d(t),
        lambda t, like: torch.broadcast_tensors(t, like)[0],
        lambda t, like: t.split(1)[1],
        lambda t, like: F.dropout(t, 0.5, training=False),
        lambda t, like: t.T.expand(2, 3, 2),
    ],
)
def test_outputs_in_memory_of_others_are_copies(alias: Callable[..., Tensor], trace: str, on: str) -> None:
    """A leased output is poisoned, and written by the next step: an input, a parameter or a buffer must not be one."""

    def forward(self: Any, x: Tensor) -> Any:
        self.state.add_(1)
        return alias(x, x), alias(self.weight, x), alias(self.state, x)

    model = plain(forward)
    model.weight = nn.Parameter(torch.randn(2, 3))
    model.register_buffer("state", torch.zeros(2, 3))
    weight = model.weight.detach().clone()
    x = torch.randn(2, 3)
    kept = x.clone()
    with compiled(model, on, trace).launch(x) as step:
        assert step.result()[0].equal(alias(kept, kept))
        assert step.result()[1].equal(alias(weight, kept))
        assert step.result()[2].equal(alias(torch.ones(2, 3), kept))
        for out in step.result():
            assert out.untyped_storage().data_ptr() not in (
                t.untyped_storage().data_ptr() for t in (x, model.weight, model.state)
            )
    assert x.equal(kept)
    assert model.weight.equal(weight)
    assert model.state.eq(1).all()


def test_a_cast_is_no_alias() -> None:
    """The mirrored case: `.to` that casts is a tensor of its own, and needs no copy."""
    run = compiled(plain(lambda self, x: x.to(torch.float64)))
    assert run(torch.ones(2)).dtype is torch.float64
    (signature,) = run._by_key.values()
    assert aten.clone.default not in [node.target for node in signature.prepared.gm.graph.nodes]


# ---- state outside of buffers ----------------------------------------------------------------------------------------


def _count(self: Any, x: Tensor, n: Tensor) -> Any:
    self.count += 1
    return self.spanned(x * self.count, n)


def _count_in_dict(self: Any, x: Tensor, n: Tensor) -> Any:
    self.config["inner"].count += 1
    return self.spanned(x * self.config["inner"].count, n)


def _append(self: Any, x: Tensor, n: Tensor) -> Any:
    self.log.append(x.sum())
    return self.spanned(x * len(self.log), n)


def _rebind_attribute(self: Any, x: Tensor, n: Tensor) -> Any:
    self.state = self.state + 1
    return self.spanned(x * self.state, n)


def _lazy_state(self: Any, x: Tensor, n: Tensor) -> Any:
    if self.lazy is None:
        self.lazy = torch.zeros(1)
    self.lazy.add_(1)
    return self.spanned(x * self.lazy, n)


class Config:
    count = 0


def _stateful(forward: Callable[..., Any]) -> Any:
    model: Any = spanned(forward)
    model.count, model.log, model.state, model.lazy = 0, collections.deque(), torch.zeros(1), None
    model.config = {"inner": Config()}
    return model


STATEFUL = pytest.mark.parametrize(
    ("forward", "name"),
    [
        (_count, "count"),
        (_count_in_dict, "config.inner.count"),
        (_append, "log"),
        (_rebind_attribute, "state"),
        (_lazy_state, "lazy"),
    ],
)


@STATEFUL
@pytest.mark.parametrize("trace", ["auto", "opaque"])
def test_state_on_the_host_advances_inline(forward: Callable[..., Any], name: str, trace: str) -> None:
    """A graph would bake it in, and the trace itself advanced it: 1, 1, 1, or 2, 3, 4."""
    assert _steps(_stateful(forward), "inline", trace) == [1, 2, 3]


@STATEFUL
def test_state_on_the_host_does_not_export(forward: Callable[..., Any], name: str) -> None:
    model = _stateful(forward)
    with pytest.raises(TraceError, match=f"the forward (changes|writes) {name}.*"):
        _steps(model, "inline", "export")
    assert (model.count, len(model.log), model.state.item(), model.lazy) == (0, 0, 0, None)
    assert model.config["inner"].count == 0


@STATEFUL
@pytest.mark.parametrize("trace", ["auto", "opaque"])
def test_state_on_the_host_cannot_be_replayed(forward: Callable[..., Any], name: str, trace: str) -> None:
    model = _stateful(forward)
    with pytest.raises(TraceError, match=f"the forward changes {name} at every call, which a replay cannot repeat"):
        _steps(model, "simulated", trace)
    assert (model.count, len(model.log), model.state.item(), model.lazy) == (0, 0, 0, None)


@BACKENDS
@pytest.mark.parametrize("trace", ["auto", "opaque"])
def test_a_plain_tensor_attribute_that_is_written_stays_the_models(on: str, trace: str) -> None:
    """Export changes it once, for real, and gives the graph a copy of its own."""

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        self.plain.add_(1)
        return self.spanned(x * self.plain, n)

    model = spanned(forward)
    model.plain = torch.zeros(1)
    kept = model.plain
    assert _steps(model, on, trace) == [1, 2, 3]
    assert model.plain is kept
    assert kept.item() == 3
    with pytest.raises(TraceError, match="the forward writes plain otherwise than as a registered buffer"):
        _steps(model, on, "export")
    assert kept.item() == 3


@BACKENDS
@TRACES
def test_a_table_built_on_first_use_is_no_state(on: str, trace: str) -> None:
    """The mirrored case: what only the first call changes may be exported, and captured."""

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        if self.table is None:
            self.table = torch.full((2,), 4.0)
            self.widths[x.shape] = 1
        return self.spanned(x * self.table * self.widths[x.shape], n)

    model = spanned(forward)
    model.table, model.widths = None, {}
    assert _steps(model, on, trace) == [4, 4, 4]
    assert not type(model.table).__name__.startswith("Fake")


@BACKENDS
@TRACES
def test_an_attribute_that_is_bound_before_it_is_read_is_no_state(on: str, trace: str) -> None:
    """The mirrored case: a weight that a hook computes from others, a tensor kept for inspection."""
    linear = nn.Linear(2, 2)
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(linear)

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        self.last = self.net(x)
        return self.spanned(self.last, n)

    model = spanned(forward)
    model.net, model.last = linear, None
    expected = linear(torch.ones(1, 2))[0, 0].item()
    assert _steps(model, on, trace) == pytest.approx([expected] * 3)


# ---- inputs that are written -----------------------------------------------------------------------------------------


def _write_input(self: Any, x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@TRACES
def test_an_input_is_written_once_per_step_inline(trace: str) -> None:
    """The trace of an opaque forward wrote it too."""
    x = torch.zeros(2)
    run = compiled(plain(_write_input), trace=trace)
    assert [run(x).tolist()[0] for _ in range(3)] == [2, 4, 6]
    assert x.tolist() == [3, 3]


@TRACES
def test_an_input_that_a_replay_would_write_is_refused(trace: str) -> None:
    """It would write the graph's own copy: a cache that is passed in would never change."""
    x = torch.zeros(2)
    with pytest.raises(TraceError, match=r"writes its tensor inputs \[0\] in place"):
        compiled(plain(_write_input), "simulated", trace).launch(x)
    assert x.tolist() == [0, 0]
    assert compiled(plain(lambda self, x: x.clone().add_(1) * 2), "simulated", trace)(x).tolist() == [2, 2]


# ---- a trace leaves no trace -----------------------------------------------------------------------------------------


class Noisy(Spanned):
    """Draws from every generator that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        drawn = torch.rand(x.shape, generator=self.own)
        return self.spanned(F.dropout(self.norm(x), 0.5) + torch.rand_like(x) + drawn, n)


@BACKENDS
@pytest.mark.parametrize("trace", ["auto", "opaque"])
def test_the_first_step_draws_what_eager_draws(on: str, trace: str) -> None:
    """K42: dropout, batch norm's statistics, and generators, the model's own among them."""
    x, n = torch.randn(4, 3), torch.tensor([3, 3, 3, 3])
    eager, model = Noisy(), Noisy()
    torch.manual_seed(7)
    expected = [eager(x, n)["audio"].detach() for _ in range(2)]
    torch.manual_seed(7)
    run = compiled(model, on, trace)
    for padded in expected:
        torch.testing.assert_close(torch.stack(list(run(x, n)["audio"].values())), padded)
    torch.testing.assert_close(model.norm.running_mean, eager.norm.running_mean)
    tracked = model.norm.num_batches_tracked
    assert tracked is not None
    assert tracked.item() == 2


def test_a_generator_that_is_passed_in_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    run = compiled(plain(lambda self, x: x + torch.rand(3, generator=generator)), generators=[generator])
    first = run(torch.zeros(3))
    assert first.equal(torch.rand(3, generator=torch.Generator().manual_seed(1)))


@TRACES
@BACKENDS
def test_dropout_and_buffers_through_both_tracers(trace: str, on: str) -> None:
    model, eager = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    x = torch.randn(5, 3)
    torch.manual_seed(2)
    expected = [eager(x).detach(), eager(x).detach()]
    torch.manual_seed(2)
    run = compiled(model, on, trace)
    torch.testing.assert_close(run(x), expected[0])
    torch.testing.assert_close(run(x), expected[1])
    torch.testing.assert_close(model[0].running_var, eager[0].running_var)
    assert model[0].num_batches_tracked.item() == 2


@TRACES
def test_random_numbers_of_python_and_numpy_are_left_alone(trace: str) -> None:
    """An encoder draws for layer drop, and does not use what it drew: that exports, and the states stay."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        drawn = random.random() + np.random.random()
        return x + 1 if not self.training or drawn < 3 else x

    random.seed(5)
    np.random.seed(5)
    run = compiled(plain(forward), trace=trace)
    run.launch(torch.ones(2)).release()
    if trace == "opaque":  # the step itself draws
        assert (random.random(), np.random.random()) != (random.Random(5).random(), np.random.RandomState(5).random())
    else:
        assert (random.random(), np.random.random()) == (random.Random(5).random(), np.random.RandomState(5).random())


def test_a_failed_trace_leaves_no_fake_tensors() -> None:
    """An export that failed half-way left its fake tensors in the module."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen.append(x * 2)
        self.last = x * 3
        return torch.from_numpy((x + self.last).numpy())

    model = plain(forward)
    model.seen, model.last = [], torch.zeros(2)
    assert compiled(model, verify="off")(torch.ones(2)).tolist() == [4, 4]
    assert [seen.tolist() for seen in model.seen] == [[2, 2]]
    assert model.last.tolist() == [3, 3]


def test_spangraph_is_a_guest() -> None:
    """Hooks and wrappers are gone after a trace: the module runs as before."""
    model = spanned(lambda self, x, n: self.spanned(x * 2, n))
    x, n = batch()
    before = {name: value for name, value in vars(model).items() if not name.startswith("_forward")}
    assert values(spangraph.compile(model)(x, n)["audio"]) == cut(x * 2, [3, 5])
    assert not model._forward_hooks
    assert {name: value for name, value in vars(model).items() if not name.startswith("_forward")} == before


def test_a_dict_may_be_written_while_a_trace_notes_it() -> None:
    """By another thread; here by a key that is asked for its name."""
    table: dict[Any, Any] = {}

    class Key:
        def __str__(self) -> str:
            table["late"] = torch.ones(1)
            return "key"

    table[Key()] = [torch.ones(1)]
    model = spanned(lambda self, x, n: self.spanned(x * 2, n))
    model.table = table
    assert _steps(model, "inline", "opaque") == [2, 2, 2]
