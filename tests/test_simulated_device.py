"""The simulated device: as asynchronous and as hostile as CUDA, so that a program that is wrong there is wrong here."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import spangraph
from spangraph import CaptureError, InputError, SpannedOutput, StaleGraphError, from_lengths
from spangraph.testing import Pool, SimulatedDevice
from spangraph.weights import Weights

from .rig import KERNELS_PER_LAUNCH, Batch, Engine, assert_rows


def captured(device: SimulatedDevice, fn: Callable[[], Tensor], pool: Pool | None = None) -> tuple[Any, Tensor]:
    graph = device.new_graph()
    with device.graph(graph, pool=pool):
        y = fn()
    return graph, y


# ---- held, let, resumed --------------------------------------------------------------------------------------------


def test_kernels_run_only_while_they_may() -> None:
    device = SimulatedDevice()
    ran: list[int] = []
    events = []
    device.hold()
    for i in range(5):
        device.launch(lambda i=i: ran.append(i))
        events.append(device.record())
    assert ran == []
    assert not events[0].query()
    device.let(2)
    events[1].synchronize()
    assert ran == [0, 1]
    assert events[1].query()
    assert not events[2].query()
    device.let(1)
    events[2].synchronize()
    device.resume()
    device.synchronize()
    assert ran == [0, 1, 2, 3, 4]


def test_letting_kernels_run_that_are_not_held_gives_no_credit() -> None:
    device = SimulatedDevice()
    device.let(3)
    device.hold()
    ran: list[int] = []
    device.launch(lambda: ran.append(0))
    device.let(0)
    assert not device.record().query()
    assert ran == []
    device.resume()
    device.synchronize()


def test_events_waits_and_poison_need_no_leave() -> None:
    """They are no kernels: a test that lets two kernels run means its own."""
    engine = Engine(depth=2)
    device, other = engine.device, engine.device.new_stream()
    step = engine.launch(Batch.random()).wait()
    device.hold()
    view = step.rows().at(0)
    step.release()
    with device.use_stream(other):
        device.wait(device.record())
        batch = Batch.random()
        later = engine.launch(batch, lane=1)
    device.let(KERNELS_PER_LAUNCH)
    assert_rows(later.wait(timeout=60).rows(), batch.rows())
    assert view is None or bool(view.isnan().all())  # type: ignore[union-attr]
    device.resume()


def test_copies_to_the_host_land_when_told() -> None:
    """The stream waits where they land, and so do the events behind."""
    engine = Engine(depth=2)
    host = engine.stager._buffer.memory.host
    engine.device.hold_copies()
    batch = Batch.random()
    step = engine.launch(batch)
    behind: list[int] = []
    engine.device.launch(lambda: behind.append(1))
    assert not step.is_done
    assert not host.any()
    assert behind == []
    engine.device.land_copies()
    assert_rows(step.rows(), batch.rows())
    assert host.any()


# ---- faults --------------------------------------------------------------------------------------------------------


def test_each_fault_happens_once_and_as_given() -> None:
    device = SimulatedDevice()
    x = torch.ones(2)
    device.fail_next("capture", OSError("first"))
    device.fail_next("capture")
    with pytest.raises(OSError, match="first"):
        captured(device, lambda: x + 1)
    with pytest.raises(RuntimeError, match="simulated capture failure"):
        captured(device, lambda: x + 1)
    graph, y = captured(device, lambda: x + 1)

    device.fail_next("replay")
    with pytest.raises(RuntimeError, match="simulated replay failure"):
        graph.replay()
    device.synchronize()
    assert y.isnan().all()  # nothing was enqueued

    device.fail_next("kernel")
    graph.replay()
    event, later = device.record(), device.record()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="simulated kernel failure"):
            event.synchronize()
        with pytest.raises(RuntimeError, match="simulated kernel failure"):
            event.query()
    later.synchronize()

    device.fail_next("wait")
    event, later = device.record(), device.record()
    with pytest.raises(RuntimeError, match="simulated wait failure"):
        event.synchronize()
    later.synchronize()

    graph.replay()
    device.synchronize()
    assert y.tolist() == [2, 2]
    with pytest.raises(InputError, match=r"fail_next\('gpu'\): expected capture, replay, kernel"):
        device.fail_next("gpu")


def test_synchronize_raises_what_no_event_has_reported() -> None:
    """A kernel's error must not vanish because nobody recorded an event behind it."""
    device = SimulatedDevice()

    def kernel() -> None:
        raise ValueError("illegal address")

    device.launch(kernel)
    with pytest.raises(ValueError, match="illegal address"):
        device.synchronize()
    device.synchronize()
    device.launch(kernel)
    event = device.record()
    device.synchronize()
    with pytest.raises(ValueError, match="illegal address"):
        event.query()


# ---- capture -------------------------------------------------------------------------------------------------------


def test_a_capture_executes_nothing() -> None:
    """Not in what it makes, not in memory from outside, be it through a view, and not in the generator."""
    device = SimulatedDevice()
    x, state, cache = torch.ones(3), torch.zeros(3), torch.zeros(2, 3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    graph = device.new_graph()
    with device.graph(graph):
        y = x * 2
        state.add_(1).mul_(2)
        cache[1].copy_(y)
        noise = torch.rand(3)
    assert y.isnan().all()
    assert noise.isnan().all()
    assert state.tolist() == [0, 0, 0]
    assert not cache.any()
    assert torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [2, 2, 2]
    assert state.tolist() == [2, 2, 2]
    assert cache.tolist() == [[0, 0, 0], [2, 2, 2]]
    assert torch.equal(noise, expected)


def test_a_capture_undoes_no_staging_of_other_graphs() -> None:
    """What a capture touches is put back; the cursor of a ring that other threads launch on must not be."""
    engine = Engine(depth=2)
    device, batch = engine.device, Batch.random()
    graph = device.new_graph()
    with device.graph(graph):
        engine.stager.stage(SpannedOutput(row_values={"token": batch.token * 1}))
        step = []
        launcher = threading.Thread(target=lambda: step.append(engine.launch(batch).wait()))
        launcher.start()
        launcher.join()
    assert engine.ring.cursor.item() == 1
    assert_rows(step[0].rows(), batch.rows())
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


# Every way to read a tensor's values on the host. The first group are operators; the second read CPU memory directly,
# as no CUDA tensor can be read.
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y[0].item(),
    "float": lambda y: float(y[0]),
    "if": lambda y: 1 if y.sum() > 0 else 2,
    "iteration": lambda y: [int(v) for v in y],
    "mask": lambda y: y[y > 0],
    "nonzero": lambda y: y.nonzero(),
    "equal": lambda y: torch.equal(y, y + 1),
    "masked_select": lambda y: torch.masked_select(y, y > 0),
    "tolist": lambda y: y.tolist(),
    "numpy": lambda y: y.numpy(),
    "asarray": lambda y: np.asarray(y),
    "cpu": lambda y: y.cpu(),
    "print": lambda y: f"{y}",
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_host_read_cannot_be_captured(read: Callable[[Tensor], Any]) -> None:
    device, x = SimulatedDevice(), torch.ones(3)

    def forward() -> Tensor:
        y = x * 2
        read(y)
        return y

    with pytest.raises(CaptureError, match=r"when stream is capturing: .*test_simulated_device\.py.*: SG401"):
        captured(device, forward)
    read(x)  # elsewhere it is nobody's business
    graph, y = captured(device, lambda: x * 3)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [3, 3, 3]


def test_work_that_reads_nothing_on_the_host_can_be_captured() -> None:
    """The mirrored cases: masks that fill, reads of shapes, scalars that are Python's own."""
    device, x = SimulatedDevice(), torch.tensor([1.0, -2.0, 3.0])

    def forward() -> Tensor:
        y = x * len(x) + x.shape[0]
        y[y < 0] = 0.0
        return torch.where(y > 5, y, -y)

    graph, y = captured(device, forward)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [6, -0.0, 12]


def test_an_empty_graph_cannot_be_replayed() -> None:
    device = SimulatedDevice()
    with pytest.raises(CaptureError, match="replay of a graph that was never captured"):
        device.new_graph().replay()


def test_a_graph_holds_the_memory_of_its_capture() -> None:
    """K28: as on CUDA, `parameter.data = ...` leads elsewhere; updates in place are followed."""
    device, weight = SimulatedDevice(), nn.Parameter(torch.ones(2))
    graph, y = captured(device, lambda: weight * 2)
    with torch.no_grad():
        weight.add_(1)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [4, 4]
    weight.data = torch.zeros(2)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [4, 4]


class Linear(nn.Module):
    """With more tensors than a launch checks in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)])

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("y",)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        return SpannedOutput({"y": self.layers(x)}, {"y": from_lengths(n)})


def test_a_swapped_storage_is_noticed_within_a_few_launches() -> None:
    """K28: weights replaced after capture: old addresses replayed. The simulated graph keeps the old memory, so that
    only the launches' checks in turn can notice."""
    model, inputs = Linear(), (torch.randn(2, 4), torch.tensor([3, 4]))
    compiled = spangraph.compile(model, backend=SimulatedDevice())
    for _ in range(4):  # and nothing is noticed where nothing happened
        assert torch.equal(compiled(*inputs).outputs["y"][1], model(*inputs).outputs["y"][1])
    with torch.no_grad():
        model.layers[8].bias.add_(1)
    assert torch.equal(compiled(*inputs).outputs["y"][1], model(*inputs).outputs["y"][1])
    model.layers[8].bias.data = torch.zeros(4)

    def launch_a_few() -> None:
        for _ in range(4):
            compiled(*inputs)

    with pytest.raises(StaleGraphError, match=r"layers\.8\.bias was replaced after the trace"):
        launch_a_few()


@pytest.mark.parametrize("addresses", [True, False], ids=["captured", "inline"])
def test_freed_memory_is_noticed_at_once(addresses: bool) -> None:
    """K28 where nobody keeps the old memory, as a CUDA graph does not: it is what the next replay would read."""
    model = Linear()
    weights = Weights(model, addresses=addresses)
    for _ in range(9):
        weights.check()
    model.layers[8].bias.data = torch.zeros(4)
    if addresses:
        for _ in range(2):
            with pytest.raises(StaleGraphError, match=r"layers\.8\.bias was replaced"):
                weights.check()
    else:  # an inline graph computes with the parameter, wherever its memory is
        for _ in range(9):
            weights.check()


# ---- memory --------------------------------------------------------------------------------------------------------


def test_outputs_are_static_and_die_at_the_next_replay() -> None:
    device, x = SimulatedDevice(), torch.ones(2)
    graph, y = captured(device, lambda: x * 2)
    address = y.data_ptr()
    assert y.isnan().all()
    for value in (3, 4):
        device.launch(lambda value=value: x.fill_(value))
        graph.replay()
        device.synchronize()
        assert y.tolist() == [2 * value] * 2
        assert y.data_ptr() == address
    device.hold()
    graph.replay()
    assert y.tolist() == [8, 8]
    device.resume()
    device.synchronize()


def test_integers_and_bools_are_poisoned_too() -> None:
    device, x = SimulatedDevice(), torch.ones(2)
    graph = device.new_graph()
    with device.graph(graph):
        i, b, c = (x * 3).to(torch.int32), x < 0, torch.complex(x, x)
    assert i.tolist() == [-(2**31)] * 2
    assert b.tolist() == [True, True]
    assert c.isnan().all()


def test_graphs_of_one_pool_overwrite_each_other() -> None:
    device, x, pool = SimulatedDevice(), torch.ones(2), Pool()
    first, y = captured(device, lambda: x * 2, pool)
    second, z = captured(device, lambda: x * 3, pool)
    alone, w = captured(device, lambda: x * 5)
    for graph in (first, alone, second):
        graph.replay()
    device.synchronize()
    assert y.isnan().all()
    assert z.tolist() == [3, 3]
    assert w.tolist() == [5, 5]


def test_memory_from_outside_is_not_poisoned() -> None:
    """An output that is an input belongs to the caller."""
    engine = Engine()
    lane = engine.lanes[0]
    graph = engine.device.new_graph()
    with engine.device.graph(graph):
        tail = engine.stager.stage(SpannedOutput({"audio": lane.x}, {"audio": lane.spans}))
    lane.x.fill_(7)
    with tail.step() as step:
        graph.replay()
    step.wait().release()
    engine.device.synchronize()
    assert (lane.x == 7).all()


# ---- streams -------------------------------------------------------------------------------------------------------


def test_streams_are_asynchronous_to_each_other_and_ordered_by_events() -> None:
    device = SimulatedDevice()
    first, second = device.new_stream(), device.new_stream()
    gate, order = threading.Event(), []
    with device.use_stream(first):
        device.launch(lambda: gate.wait(60))
        device.launch(lambda: order.append("first"))
        event = device.record()
    with device.use_stream(second):
        device.launch(lambda: order.append("second"))
        device.record().synchronize()
        device.wait(event)
        device.launch(lambda: order.append("third"))
        last = device.record()
    assert order == ["second"]
    assert not last.query()
    gate.set()
    last.synchronize()
    assert order == ["second", "first", "third"]


def test_the_current_stream_is_a_thread_s_own() -> None:
    device = SimulatedDevice()
    stream, seen = device.new_stream(), []
    with device.use_stream(stream):
        thread = threading.Thread(target=lambda: seen.append(device.stream()))
        thread.start()
        thread.join()
        assert device.stream() is stream
    assert seen == [device.stream()]
    assert device.stream() is not stream


def test_two_streams_land_their_copies_at_once() -> None:
    """One stream's landing must not show another's header before its spans, nor trip over memory that is gone."""
    device = SimulatedDevice()
    engines = [Engine(device, wait="header", bs=64) for _ in range(2)]
    for _ in range(3):
        Engine(device)  # leaves freed memory in the list of landings
    streams = [device.new_stream() for _ in engines]
    for _ in range(60):
        launched = []
        for engine, stream in zip(engines, streams, strict=True):
            with device.use_stream(stream):
                batch = Batch.random(64)
                launched.append((engine.launch(batch), batch))
        for step, batch in launched:
            with step:
                assert_rows(step.rows(), batch.rows())
    device.synchronize()


# ---- what must not wait --------------------------------------------------------------------------------------------


def test_profiling_does_not_drain_the_device() -> None:
    """K36: profiling ranges synchronise: ranges on, device held, launch still returns, and the ranges are there."""
    model, inputs = Linear(), (torch.randn(2, 4), torch.tensor([3, 4]))
    device = SimulatedDevice()
    compiled = spangraph.compile(model, backend=device)
    expected = compiled(*inputs).outputs["y"][0]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        device.hold()
        step = compiled.launch(*inputs)
        assert not step.is_done
        device.resume()
        assert torch.equal(step.rows("y")[0], expected)
        step.result()
    names = {event.name for event in profiler.events()}
    assert {"spangraph.launch", "spangraph.wait", "spangraph.cut"} <= names


def test_nothing_but_a_wait_waits() -> None:
    """K18 and its kind: with the device held, every other call returns."""
    engine = Engine(depth=3)
    engine.device.hold()
    steps = [engine.launch(Batch.random()) for _ in range(3)]
    steps[0].withhold(0)
    steps[1].release()
    assert not steps[2].is_done
    assert "next step 4" in repr(engine.stager)
    assert repr(steps[2]).startswith("<step 3 (open")
    del steps
    engine.launch(Batch.random(), lane=1).release()
    engine.device.resume()
    engine.stager.close()
