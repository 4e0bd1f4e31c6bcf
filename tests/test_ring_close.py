"""The end of a ring: closing drains, what was launched can still be read, and nothing leaks."""

import gc
import threading
import weakref

import pytest
import torch

from spangraph import ClosedError, SpanStager
from spangraph.testing import SimulatedDevice

from .rig import EACH_LIFETIME, Batch, Engine, Lane, assert_rows


@EACH_LIFETIME
def test_closing_drains() -> None:
    engine = Engine(depth=2)
    engine.device.hold()
    steps = [engine.launch(Batch.random()), engine.launch(Batch.random())]
    closer = threading.Thread(target=engine.stager.close)
    closer.start()
    closer.join(0.02)
    assert closer.is_alive()
    engine.device.resume()
    closer.join()
    assert all(step.is_done for step in steps)


@EACH_LIFETIME
def test_open_steps_can_be_read_after_the_close() -> None:
    engine = Engine(depth=2)
    batches = Batch.random(), Batch.random()
    steps = [engine.launch(batch) for batch in batches]
    steps[0].rows()
    engine.stager.close()
    engine.stager.close()
    for step, batch in zip(steps, batches, strict=True):
        with step:
            assert_rows(step.rows(), batch.rows())


@EACH_LIFETIME
@pytest.mark.parametrize("wait", [False, True])
def test_no_launch_after_the_close(wait: bool) -> None:
    with Engine().stager as stager:
        lane = Lane(stager.backend, stager, 2, 3, spanned=True, slot=None)  # type: ignore[arg-type]
    with (
        pytest.raises(ClosedError, match=r"launch on a closed object: compile the model \(or build the stager\) again"),
        lane.tail.step(wait=wait),
    ):
        pass


@EACH_LIFETIME
def test_a_launcher_that_waits_for_room_is_told_of_the_close() -> None:
    engine = Engine()
    step = engine.launch(Batch.random())
    errors: list[BaseException] = []

    def launch() -> None:
        try:
            engine.launch(Batch.random(), wait=True)
        except ClosedError as error:
            errors.append(error)

    launcher = threading.Thread(target=launch)
    launcher.start()
    engine.stager.close()
    launcher.join()
    assert len(errors) == 1
    step.wait()


@EACH_LIFETIME
def test_one_stager_s_end_is_not_the_other_s() -> None:
    device = SimulatedDevice()
    first, second = Engine(device), Engine(device)
    first.stager.close()
    batch = Batch.random()
    assert_rows(second.launch(batch).rows(), batch.rows())


@EACH_LIFETIME
def test_a_stager_that_nobody_holds_is_freed_with_its_memory() -> None:
    engine = Engine(depth=2)
    engine.launch(Batch.random()).rows()
    engine.launch(Batch.random())
    engine.device.synchronize()
    device = engine.device
    ring, memory = weakref.ref(engine.ring), weakref.ref(engine.stager._buffer.memory.host)
    del engine
    gc.collect()
    assert ring() is None
    assert memory() is None
    SpanStager({}, max_rows=1, row_values=["token"], device=device)


@EACH_LIFETIME
def test_a_step_keeps_what_it_needs() -> None:
    """Steps outlive the stager and the graph that they came from."""
    engine = Engine()
    batch = Batch.random()
    step = engine.launch(batch)
    del engine
    gc.collect()
    assert_rows(step.rows(), batch.rows())
    assert torch.equal(step.row_values("token"), batch.token)


class DrainCounter(SimulatedDevice):
    """Notes when a ring's memory is about to be freed, and whether work was done by then."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[bool] = []

    def before_free(self, memory: object) -> None:
        self.synchronize()
        self.freed.append(True)


def test_a_ring_is_freed_after_a_drain() -> None:
    """Its pinned memory is what kernels in flight write to."""
    device = DrainCounter()
    engine = Engine(device)
    engine.launch(Batch.random()).wait()
    del engine
    gc.collect()
    assert device.freed == [True, True]  # slots; control records and cursor
