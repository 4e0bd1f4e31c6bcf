"""The simulated device: as asynchronous and as hostile as CUDA, so that a program that is wrong there is wrong here."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import spangraph
from spangraph import InputError, SpannedOutput, from_lengths
from spangraph.testing import Pool, SimulatedDevice

from .rig import KERNELS_PER_LAUNCH, Batch, Engine, assert_rows, captured

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


def test_letting_kernels_run_that_are_not_held_changes_nothing() -> None:
    device = SimulatedDevice()
    device.let(1)
    ran: list[int] = []
    for i in range(3):
        device.launch(lambda i=i: ran.append(i))
    device.synchronize()
    assert ran == [0, 1, 2]
    device.let(3)
    device.hold()
    device.launch(lambda: ran.append(3))
    assert not device.record().query()
    assert ran == [0, 1, 2]
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
    with pytest.raises(InputError, match=r"fail_next\('gpu'\): expected one of capture, replay, kernel"):
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


def test_a_landing_shows_nothing_that_is_half_written() -> None:
    """Each landing brings all memory that kernels write to the host, also what another stream is just writing."""
    device, x = SimulatedDevice(), torch.ones(2)
    memory = device.pinned(1, 4, writer="device")
    graph, _ = captured(device, lambda: x * 2)
    half, go_on = threading.Event(), threading.Event()

    def write() -> None:
        memory.device[0, 0] = 5
        half.set()
        assert go_on.wait(60)
        memory.device[0, 2] = 7

    with device.use_stream(device.new_stream()):
        device.enqueue(write)
        done = device.record()
    assert half.wait(60)
    with device.use_stream(device.new_stream()):
        graph.replay()
        landed = device.record()
    assert not landed._reached.wait(0.03)  # type: ignore[attr-defined]
    assert memory.host.tolist() == [[0, 0, 0, 0]]
    go_on.set()
    done.synchronize()
    assert memory.host.tolist() == [[5, 0, 7, 0]]
    landed.synchronize()


# ---- what must not wait --------------------------------------------------------------------------------------------


class Cut(nn.Module):
    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("y",)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        return SpannedOutput({"y": x * 2}, {"y": from_lengths(n)})


def test_profiling_does_not_drain_the_device() -> None:
    """K36: profiling ranges synchronise: ranges on, device held, launch still returns, and the ranges are there."""
    model, inputs = Cut(), (torch.randn(2, 4), torch.tensor([3, 4]))
    device = SimulatedDevice()
    compiled = spangraph.compile(model, backend=device)
    expected = compiled(*inputs).outputs["y"][0]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        device.hold()
        step = compiled.launch(*inputs)
        assert not step.is_done
        device.resume()
        assert torch.equal(step.rows("y")[0], expected)
        step.result()
    names = {event.name for event in profiler.events() or ()}
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


def test_memory_that_is_gone_does_not_stop_what_lands() -> None:
    """Half of it may go first, where a graph is dropped by another thread; memory was looked for by its elements."""
    device = SimulatedDevice()
    kept, gone = device.pinned(2, 34, writer="device"), device.pinned(2, 16, writer="device")
    host = gone.host
    del gone
    kept.device.fill_(7)
    device._land()
    assert kept.host.tolist() == [[7] * 34] * 2
    assert host.tolist() == [[0] * 16] * 2


@pytest.mark.parametrize("state", ["busy", "held"])
def test_the_interpreter_ends_whatever_the_device_does(state: str) -> None:
    """A thread inside of torch at that moment aborted the process."""
    script = f"""
import torch
from spangraph.testing import SimulatedDevice
device, a = SimulatedDevice(), torch.randn(300, 300)
if "{state}" == "held":
    device.hold()
device.launch(lambda: [torch.mm(a, a) for _ in range(300)])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
