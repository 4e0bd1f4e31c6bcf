"""Streams and threads: nothing is overwritten while somebody may still read it, and all share one launch order."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from spangraph import RingFullError, Step, StepTimeoutError
from spangraph.testing import SimulatedDevice, SimulatedStream

from .rig import EACH_LIFETIME, Batch, Engine, assert_rows


class Consumer:
    """A kernel on a stream of its own that reads a row late: it waits until `finish()`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.stream: SimulatedStream = device.new_stream()
        self._may_read = threading.Event()
        self._copies: list[Tensor] = []

    def read(self, view: Tensor) -> None:
        """Enqueue the reading kernel."""

        def kernel() -> None:
            assert self._may_read.wait(60)
            self._copies.append(view.clone())

        with self.device.use_stream(self.stream):
            self.device.launch(kernel)

    def finish(self) -> list[Tensor]:
        """Let it read; returns what it saw."""
        self._may_read.set()
        self.device.synchronize()
        return self._copies


def assert_held(step: Step) -> None:
    """The device holds the step back; without the wait in front of it, it would be done within that time."""
    with pytest.raises(StepTimeoutError, match="was not done within"):
        step.wait(timeout=0.03)


@EACH_LIFETIME
def test_a_launch_waits_on_the_device_for_the_stream_that_released() -> None:
    """K40: output re-used while a consumer's kernel on another stream still reads it."""
    engine = Engine()
    consumer, batch, second = Consumer(engine.device), Batch.of([(1, 5)] * 4), Batch.of([(0, 6)] * 4)
    step = engine.launch(batch)
    with engine.device.use_stream(consumer.stream), step:
        consumer.read(step.rows()[2])
    later = engine.launch(second)  # at once: does not block
    assert_held(later)
    assert torch.equal(consumer.finish()[0], batch.rows()[2])
    assert_rows(later.rows(), second.rows())


@EACH_LIFETIME
def test_rows_read_on_one_stream_and_released_on_another() -> None:
    """K40 where `release()` is called by the launching thread: the stream that asked for the rows counts too."""
    engine = Engine()
    consumer, batch, second = Consumer(engine.device), Batch.of([(1, 5)] * 4), Batch.of([(0, 6)] * 4)
    step = engine.launch(batch)
    with engine.device.use_stream(consumer.stream):
        consumer.read(step.rows()[0])
    step.release()
    later = engine.launch(second)
    assert_held(later)
    assert torch.equal(consumer.finish()[0], batch.rows()[0])
    assert_rows(later.rows(), second.rows())


@EACH_LIFETIME
def test_a_step_that_is_dropped_after_its_rows_went_to_another_stream() -> None:
    """K40 without a release: the finaliser records nothing, but the next launch knows who asked for rows."""
    engine = Engine()
    consumer, batch, second = Consumer(engine.device), Batch.of([(1, 5)] * 4), Batch.of([(0, 6)] * 4)
    step = engine.launch(batch)
    with engine.device.use_stream(consumer.stream):
        consumer.read(step.rows()[3])
    del step
    later = engine.launch(second)
    assert_held(later)
    assert torch.equal(consumer.finish()[0], batch.rows()[3])
    assert_rows(later.rows(), second.rows())


@EACH_LIFETIME
def test_a_launch_does_not_wait_for_streams_that_read_nothing() -> None:
    """The mirrored case: other work on other streams is none of its business."""
    engine = Engine()
    consumer, batch, second = Consumer(engine.device), Batch.random(), Batch.random()
    consumer.read(torch.zeros(1))
    with engine.launch(batch) as step:
        assert_rows(step.rows(), batch.rows())
    assert_rows(engine.launch(second).wait(timeout=60).rows(), second.rows())
    consumer.finish()


@EACH_LIFETIME
def test_released_rows_are_poisoned_behind_their_readers() -> None:
    """A view that is kept past its release must not look right; nor may the poison reach what comes after."""
    engine = Engine()
    batch = Batch.of([(0, 6)] * 4)
    step = engine.launch(batch)
    view = step.rows()[0]
    step.release()
    engine.device.synchronize()
    assert view.isnan().all()
    for stream in (engine.device.stream(), engine.device.new_stream(), engine.device.new_stream()):
        with engine.device.use_stream(stream):
            batch = Batch.of([(0, 6)] * 4)
            with engine.launch(batch) as step:
                assert_rows(step.rows(), batch.rows())


@EACH_LIFETIME
def test_poison_from_another_stream_does_not_hit_the_next_launch() -> None:
    """The poison is enqueued where the step was released; a launch elsewhere must come after it."""
    engine = Engine()
    device, other = engine.device, engine.device.new_stream()
    gate = threading.Event()
    step = engine.launch(Batch.random()).wait()
    with device.use_stream(other):
        device.launch(lambda: gate.wait(60))  # what the poison is behind
        step.release()
    batch = Batch.of([(0, 6)] * 4)
    later = engine.launch(batch)
    assert_held(later)
    gate.set()
    assert_rows(later.rows(), batch.rows())
    device.synchronize()
    assert_rows(later.rows(), batch.rows())


def test_a_refused_launch_does_not_lose_the_poison_of_a_dropped_step() -> None:
    """The refused launch reaped the step on its own stream, and the next launch came from another one."""
    engine = Engine(depth=2)
    device, other = engine.device, engine.device.new_stream()
    gate = threading.Event()
    dropped, leased = (engine.launch(Batch.random()).wait() for _ in range(2))
    with device.use_stream(other):
        device.launch(lambda: gate.wait(60))  # what the poison is behind
        del dropped
        with pytest.raises(RingFullError, match="still leased by step 2"):
            engine.launch(Batch.random(), lane=1)
    batch = Batch.of([(0, 6)] * 4)
    later = engine.launch(batch, lane=0)
    assert_held(later)
    gate.set()
    device.synchronize()
    assert_rows(later.rows(), batch.rows())
    leased.release()


@EACH_LIFETIME
def test_launches_on_different_streams_keep_their_order() -> None:
    """A launch on another stream than the last one first waits on the previous step's event: the cursor, the graphs'
    inputs and the model's state have one order."""
    engine = Engine(depth=3)
    streams = [engine.device.new_stream() for _ in range(3)]
    gate = threading.Event()
    with engine.device.use_stream(streams[0]):
        engine.device.launch(lambda: gate.wait(60))
    launched = []
    for stream in streams:
        with engine.device.use_stream(stream):
            batch = Batch.random()
            launched.append((engine.launch(batch), batch))
    for step, _ in launched:
        assert_held(step)
    gate.set()
    for step, batch in reversed(launched):
        with step:
            assert_rows(step.rows(), batch.rows())
    assert engine.ring.cursor.item() == 3


@EACH_LIFETIME
def test_an_abort_on_one_stream_and_a_launch_on_another() -> None:
    engine = Engine(depth=2)
    batch = Batch.random()
    step = engine.launch(batch)
    with engine.device.use_stream(engine.device.new_stream()):
        with pytest.raises(ZeroDivisionError), engine.lanes[1].tail.step():
            raise ZeroDivisionError
        second = Batch.random()
        assert_rows(engine.launch(second, lane=1).rows(), second.rows())
    assert_rows(step.rows(), batch.rows())


def test_a_failed_wait_is_settled_in_stream_order() -> None:
    """The cursor is put right in front of the next replay, behind those in flight, on whatever stream that is."""
    engine = Engine(depth=3)
    engine.device.hold()
    engine.device.fail_next("staging")
    lost, lost_too = engine.launch(Batch.random()), engine.launch(Batch.random())
    lost._launch.event.fail = RuntimeError("failed wait")  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="failed wait"):
        lost.wait()
    with engine.device.use_stream(engine.device.new_stream()):
        batch = Batch.random()
        step = engine.launch(batch)
    engine.device.resume()
    assert_rows(step.rows(), batch.rows())
    with pytest.raises(RuntimeError, match="its slot holds generation 0 instead of generation 2"):
        lost_too.rows()


@EACH_LIFETIME
def test_settling_the_cursor_does_not_overtake_steps_in_flight() -> None:
    """The mirrored case: the wait failed, but the step was staged; so is the next one, on the stream that is behind."""
    engine = Engine(depth=3)
    gate, batches = threading.Event(), [Batch.random() for _ in range(3)]
    engine.device.fail_next("wait")
    lost = engine.launch(batches[0])
    engine.device.launch(lambda: gate.wait(60))
    second = engine.launch(batches[1])
    with pytest.raises(RuntimeError, match="simulated wait failure"):
        lost.wait()
    with engine.device.use_stream(engine.device.new_stream()):
        third = engine.launch(batches[2])
    assert_held(third)
    gate.set()
    assert_rows(second.rows(), batches[1].rows())
    assert_rows(third.rows(), batches[2].rows())


@EACH_LIFETIME
@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_two_threads_launch_and_read(streams: str) -> None:
    """Several engine threads share a stager; each sees its own rows, whatever the interleaving."""
    engine = Engine(depth=4)
    ready = threading.Barrier(2)

    def serve(lanes: tuple[int, int], stream: SimulatedStream) -> int:
        num_right = 0
        with engine.device.use_stream(stream):
            ready.wait()
            for n in range(40):
                batch, ids = Batch.random(), [(lanes, n, i) for i in range(4)]
                with engine.launch(batch, ids, lane=lanes[n % 2], wait=True) as step:
                    assert_rows(step.rows(), batch.rows(ids))
                    assert torch.equal(step.row_values("token"), batch.token)
                    num_right += 1
        return num_right

    default = engine.device.stream()
    chosen = [default, default] if streams == "one stream" else [engine.device.new_stream() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        served = [pool.submit(serve, lanes, stream) for lanes, stream in zip([(0, 1), (2, 3)], chosen, strict=True)]
        assert [future.result() for future in served] == [40, 40]
    engine.device.synchronize()
    assert engine.ring.cursor.item() == 80


@EACH_LIFETIME
def test_one_thread_launches_and_another_reads_and_releases() -> None:
    engine = Engine(depth=3)
    with ThreadPoolExecutor(1) as reader:

        def consume(step: Step, batch: Batch) -> None:
            with step:
                assert_rows(step.rows(), batch.rows())

        reads = []
        for _ in range(60):
            batch = Batch.random()
            reads.append(reader.submit(consume, engine.launch(batch, wait=True), batch))
        for read in reads:
            read.result()
