"""After something went wrong: only that step is lost, and the next ones are right."""

import gc
import random

import pytest
import torch

from spangraph import RingFullError, Span, SpannedOutput, SpanStager, StagingError, StaleStepError, Step, StepStateError
from spangraph.testing import SimulatedDevice

from .rig import KERNELS_PER_LAUNCH, Batch, Engine, assert_rows


def launch_and_check(engine: Engine, count: int = 5) -> None:
    """Launch more steps than there are slots; all must be right."""
    for _ in range(count):
        batch = Batch.random()
        with engine.launch(batch, wait=True) as step:
            assert_rows(step.rows(), batch.rows())
            assert torch.equal(step.row_values("token"), batch.token)


# ---- failed waits --------------------------------------------------------------------------------------------------


def test_the_slot_of_a_failed_wait_is_not_used_until_a_later_step_is_done() -> None:
    """K15: a failed wait put its slot back on the free list, while the device may still write to it."""
    engine = Engine(depth=2)
    ring = engine.ring
    engine.device.hold()
    engine.device.fail_next("wait")
    lost = engine.launch(Batch.random())
    slot = lost._launch.slot
    for _ in range(2):
        with pytest.raises(RuntimeError, match="simulated wait failure"):
            lost.wait()
    assert [place for _, place, _ in ring._quarantine] == [slot]
    assert slot not in ring._free

    batch = Batch.random()
    step = engine.launch(batch)  # does not wait for the device either
    assert step._launch.slot != slot
    assert [place for _, place, _ in ring._quarantine] == [slot]
    engine.device.resume()
    assert_rows(step.rows(), batch.rows())
    step.release()
    launch_and_check(engine, 1)
    assert ring._quarantine == []
    engine.device.synchronize()
    ring._reap()
    assert sorted(ring._free) == list(range(ring.num_slots))
    launch_and_check(engine)


def test_steps_in_flight_behind_a_failed_wait_are_right() -> None:
    engine = Engine(depth=3)
    batches = [Batch.random() for _ in range(3)]
    engine.device.hold()
    steps = []
    for n, batch in enumerate(batches):
        if n == 1:
            engine.device.fail_next("wait")
        steps.append(engine.launch(batch))
    with pytest.raises(RuntimeError, match="simulated wait failure"):
        steps[1].wait()
    fourth = Batch.random()
    late = engine.launch(fourth, lane=1)
    engine.device.resume()
    for step, batch in ((steps[0], batches[0]), (steps[2], batches[2]), (late, fourth)):
        assert_rows(step.rows(), batch.rows())


def test_a_failed_wait_of_a_dropped_step_is_nobody_s_error() -> None:
    engine = Engine()
    engine.device.fail_next("wait")
    engine.launch(Batch.random()).release()
    launch_and_check(engine)


def test_the_only_slot_of_a_plain_copy_comes_back_after_a_failed_wait() -> None:
    """The slot is baked into the graph, so no later step could free it: every further launch found the ring full."""
    engine = Engine(depth=1, staging="copy")
    engine.device.fail_next("wait")
    lost = engine.launch(Batch.random())
    with pytest.raises(RuntimeError, match="simulated wait failure"):
        lost.wait()
    launch_and_check(engine)


def test_a_failed_step_that_was_dropped_gives_its_place_back() -> None:
    """The error's traceback held the step, and the ring held the error: depth shrank by one with every failure."""
    engine = Engine(depth=1)
    for fault, error in (("wait", RuntimeError), ("kernel", RuntimeError), ("staging", StagingError)):
        engine.device.fail_next(fault)
        lost = engine.launch(Batch.random())
        with pytest.raises(error):
            lost.rows()
        assert lost.is_released
        del lost
        launch_and_check(engine, 2)
    # The mirrored case: a step that did not fail keeps its place until it is dropped.
    step = engine.launch(Batch.random())
    with pytest.raises(RingFullError, match="depth=1"):
        engine.launch(Batch.random())
    step.wait()


# ---- steps that were not staged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["kernel", "copy"])
@pytest.mark.parametrize("fault", ["staging", "copy"])
def test_a_step_whose_slot_holds_something_else_delivers_no_row(fault: str, staging: str) -> None:
    """K22: a copy silently missing from the captured graph; old spans would cut new outputs."""
    engine = Engine(staging=staging)
    launch_and_check(engine, 2)
    engine.device.fail_next(fault)
    step = engine.launch(Batch.random())
    for read in (step.wait, step.rows, lambda: step.row_values("token")):
        with pytest.raises(StagingError, match=r"step 3 .*its slot holds generation \d instead of generation 3"):
            read()
    launch_and_check(engine)


def test_what_was_lost_does_not_land_with_a_later_step() -> None:
    engine = Engine(depth=2)
    engine.device.fail_next("copy")
    lost, batch = engine.launch(Batch.random()), Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())
    with pytest.raises(StagingError, match="its slot holds generation 0 instead of generation 1"):
        lost.rows()


def test_a_graph_that_recorded_no_staging_node_fails_at_its_first_step() -> None:
    """K22: stage() was called, but not inside the capture that is replayed."""
    device = SimulatedDevice()
    stager = SpanStager({"audio": Span()}, max_rows=2, device=device)
    x, spans = torch.randn(2, 3), torch.tensor([[0, 1], [0, 3]])
    tail = stager.stage(SpannedOutput({"audio": x}, {"audio": spans}))
    graph = device.new_graph()
    with device.graph(graph):
        y = x * 2
    with tail.step() as step:
        graph.replay()
    with pytest.raises(StagingError, match=r"recorded no staging node.*stage\(\) inside the capture"):
        step.rows()
    del y


def test_a_kernel_failure_is_its_step_s_alone() -> None:
    engine = Engine(depth=2)
    launch_and_check(engine, 2)
    engine.device.fail_next("kernel", ValueError("illegal address"))
    step = engine.launch(Batch.random())
    for _ in range(2):
        with pytest.raises(ValueError, match="illegal address"):
            step.rows()
    launch_and_check(engine)


@pytest.mark.parametrize("spanned", [True, False])
@pytest.mark.parametrize("how", ["read", "released", "collected"])
def test_a_reservation_without_a_replay_is_an_error_of_that_step_alone(how: str, spanned: bool) -> None:
    """The device's cursor stays behind, so every later step found another step's record."""
    engine = Engine(depth=2, lanes=1, spanned=spanned)
    with engine.lanes[0].tail.step() as step:
        pass
    if how == "read":
        with pytest.raises(StagingError, match=r"step 1 .*its slot holds generation 0"):
            step.wait()
    elif how == "released":
        step.release()
    del step
    gc.collect()
    for _ in range(5):
        batch = Batch.random()
        with engine.launch(batch, wait=True) as step:
            assert torch.equal(step.row_values("token"), batch.token)


# ---- launches that raise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["nothing", "feed", "replay"])
def test_an_exception_inside_a_launch_loses_that_launch_alone(after: str) -> None:
    """K43: a launch raised half-way and all later steps are off by one."""
    engine = Engine(depth=3)
    lane, batches = engine.lanes[2], [Batch.random(), Batch.random()]
    steps = [engine.launch(batch) for batch in batches]
    lost: Step | None = None

    def launch() -> None:
        nonlocal lost
        with lane.tail.step() as lost:
            if after != "nothing":
                engine.device.launch(lambda: lane.feed(Batch.random()))
            if after == "replay":
                lane.graph.replay()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch()
    assert lost is not None
    with pytest.raises(StepStateError, match=r"step 3 .*its launch raised, so it holds no values"):
        lost.rows()
    for step, batch in zip(steps, batches, strict=True):
        with step:
            assert_rows(step.rows(), batch.rows())
    launch_and_check(engine)


def test_a_replay_that_raises_loses_that_launch_alone() -> None:
    engine = Engine()
    for _ in range(3):
        engine.device.fail_next("replay")
        with pytest.raises(RuntimeError, match="simulated replay failure"):
            engine.launch(Batch.random())
        launch_and_check(engine, 2)


def test_an_interrupt_inside_a_launch_is_an_exception_like_any_other() -> None:
    engine = Engine()
    with pytest.raises(KeyboardInterrupt), engine.lanes[0].tail.step():
        raise KeyboardInterrupt
    launch_and_check(engine)


def test_the_record_of_a_launch_that_raised_is_not_used_by_a_replay_that_nobody_reserved() -> None:
    """K43 then K12: the aborted record still matched, so a warm-up replay staged under the next step's number."""
    engine = Engine()
    lane = engine.lanes[0]
    with pytest.raises(ZeroDivisionError), lane.tail.step():
        raise ZeroDivisionError
    lane.graph.replay()
    engine.device.synchronize()
    assert engine.ring.cursor.item() == 0
    launch_and_check(engine)


def test_an_event_that_cannot_be_recorded_is_a_launch_that_raised() -> None:
    engine = Engine()
    record = engine.device.record

    def fail(stream: object = None) -> None:
        raise RuntimeError("no event")

    engine.device.record = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="no event"):
        engine.launch(Batch.random())
    engine.device.record = record  # type: ignore[method-assign]
    launch_and_check(engine)


def test_a_stream_that_cannot_wait_does_not_block_the_ring() -> None:
    """A reservation that raised after it was noted left the ring "inside a launch" for ever."""
    engine = Engine()
    launch_and_check(engine, 1)

    def fail(event: object) -> None:
        raise RuntimeError("cannot wait")

    with engine.device.use_stream(engine.device.new_stream()):
        engine.device.wait = fail  # type: ignore[method-assign,assignment]
        with pytest.raises(RuntimeError, match="cannot wait"):
            engine.launch(Batch.random())
        del engine.device.wait
        launch_and_check(engine)


def test_a_drain_that_fails_is_made_up_for_by_the_next_launch() -> None:
    engine = Engine(depth=2)
    batch = Batch.random()
    step = engine.launch(batch)
    synchronize = engine.device.synchronize

    def fail() -> None:
        raise RuntimeError("cannot drain")

    engine.device.synchronize = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cannot drain"), engine.lanes[1].tail.step():
        raise ZeroDivisionError
    engine.device.synchronize = synchronize  # type: ignore[method-assign]
    assert_rows(step.rows(), batch.rows())
    step.release()
    launch_and_check(engine)


def test_faults_at_random_never_show_wrong_rows() -> None:
    """A step is right or raises, whatever happened to it or before it; and one without a fault is right."""
    engine = Engine(depth=2)
    num_right = 0
    for _ in range(150):
        kind = random.choice(["replay", "kernel", "staging", "copy", "wait", None, None, None])
        batch = Batch.random()
        if kind is not None:
            engine.device.fail_next(kind)
        try:
            with engine.launch(batch, wait=True) as step:
                assert_rows(step.rows(), batch.rows())
        except (RuntimeError, StagingError):
            if kind is None:
                raise
        else:
            num_right += 1
    assert num_right >= 20


def test_let_counts_what_a_launch_enqueues() -> None:
    """The number that these tests let through: the input copy and the replay, and no event or poison between them."""
    engine = Engine(lanes=2, depth=2)
    batch = Batch.random()
    engine.launch(Batch.random()).wait().release()
    engine.device.synchronize()
    engine.device.hold()
    step = engine.launch(batch)
    engine.device.let(KERNELS_PER_LAUNCH)
    assert_rows(step.wait(timeout=60).rows(), batch.rows())
    engine.device.resume()


def test_an_error_does_not_outlive_its_release_as_another() -> None:
    """After the release the first error is still what a read raises, not "stale"."""
    engine = Engine()
    engine.device.fail_next("staging")
    step = engine.launch(Batch.random())
    with pytest.raises(StagingError, match="instead of generation 1"):
        step.wait()
    step.release()
    with pytest.raises(StagingError, match="instead of generation 1"):
        step.rows()
    good = engine.launch(Batch.random())
    good.release()
    with pytest.raises(StaleStepError, match="was released"):
        good.rows()
