"""Waits: what may be read when, timeouts, kinds of wait, and waits by any thread."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spangraph import InputError, StepStateError, StepTimeoutError
from spangraph.testing import SimulatedDevice

from .rig import EACH_LIFETIME, KERNELS_PER_LAUNCH, Batch, Engine, assert_rows

KINDS = ["block", "spin", "header"]


class UnorderedDevice(SimulatedDevice):
    """A device whose header does not prove the spans before it, as a GPU with a weaker memory model."""

    name = "unordered"
    ordered_header = False


@EACH_LIFETIME
@pytest.mark.parametrize("wait", KINDS)
def test_nothing_can_be_read_before_it_landed(wait: str) -> None:
    """K11: pinned values read before the copy landed. There is no read without a wait."""
    engine = Engine(wait=wait)
    engine.device.hold_copies()
    batch = Batch.random()
    step = engine.launch(batch, list("abcd"))
    assert not step.is_done
    with pytest.raises(StepTimeoutError, match="was not done within"):
        step.wait(timeout=0.01)
    engine.device.land_copies()
    assert_rows(step.rows(), batch.rows("abcd"))


@EACH_LIFETIME
@pytest.mark.parametrize("wait", KINDS)
@pytest.mark.parametrize("timeout", [None, 60.0, float("inf")])
def test_kinds_of_wait_read_the_same(wait: str, timeout: float | None) -> None:
    engine = Engine(depth=2, wait=wait)
    for _ in range(5):
        batches = Batch.random(), Batch.random()
        steps = [engine.launch(batch) for batch in batches]
        for step, batch in zip(steps, batches, strict=True):
            with step:
                assert step.wait(timeout) is step
                assert step.is_done
                assert_rows(step.rows(), batch.rows())


def test_a_step_that_never_ends_is_reported_with_the_ring_state() -> None:
    """K33: an engine that hangs for ever in a wait. The step stays open and can be waited for again."""
    engine = Engine(depth=2, lanes=3)
    engine.device.hold()
    batch = Batch.random()
    step = engine.launch(batch, ["req-1", "b", "c", "d"])
    engine.launch(Batch.random()).release()
    with pytest.raises(StepTimeoutError, match=r"was not done within 0\.01 s; it stays open"):
        step.wait(timeout=0.01)
    with pytest.raises(StepTimeoutError, match=r"was not done within 0\.01 s; it stays open") as raised:
        step.wait(timeout=0.01)
    message = str(raised.value)
    for part in (
        "step 1 (open, graph 1, rows ['req-1'",
        "depth 2",
        "next step 3",
        "done up to 0",
        "free slots [2, 3]",
        "quarantined (slot, step) []",
        "dropped in flight 1",
        "96 bytes leased",
    ):
        assert part in message
    engine.device.resume()
    assert_rows(step.wait(timeout=60).rows(), batch.rows(["req-1", "b", "c", "d"]))


@EACH_LIFETIME
def test_a_zero_timeout_asks_once() -> None:
    engine = Engine()
    engine.device.hold()
    step = engine.launch(Batch.random())
    with pytest.raises(StepTimeoutError, match="within 0 s"):
        step.wait(timeout=0)
    engine.device.resume()
    engine.device.synchronize()
    assert step.wait(timeout=0) is step


@EACH_LIFETIME
def test_each_step_has_an_event_of_its_own() -> None:
    """K13: one event re-recorded for step n+1 before the waiter of n ran: n then waits for n+1 as well."""
    engine = Engine(depth=2)
    batches = Batch.random(), Batch.random()
    engine.device.hold()
    first, second = (engine.launch(batch) for batch in batches)
    engine.device.let(KERNELS_PER_LAUNCH)
    assert_rows(first.rows(), batches[0].rows())
    assert first.is_done
    assert not second.is_done
    with pytest.raises(StepTimeoutError, match="step 2"):
        second.wait(timeout=0.01)
    engine.device.resume()
    assert_rows(second.rows(), batches[1].rows())


@EACH_LIFETIME
def test_an_event_that_was_never_recorded_is_not_complete() -> None:
    """K16: an event that was never recorded answers "complete", and the slot's old content is taken for the step."""
    engine = Engine()
    lane = engine.lanes[0]
    with lane.tail.step() as step:
        assert not step.is_done
        for read in (step.wait, step.rows, lambda: step.row_values("token")):
            with pytest.raises(StepStateError, match=r"step 1 .*is not launched yet: replay its graph inside"):
                read()
        lane.graph.replay()
    step.wait()
    assert step.is_done


@EACH_LIFETIME
def test_a_step_says_whether_a_wait_would_return_at_once() -> None:
    """Also where the wait would raise at once."""
    engine = Engine()
    engine.device.hold()
    step = engine.launch(Batch.random())
    assert not step.is_done
    engine.device.resume()
    engine.device.synchronize()
    assert step.is_done
    step.release()
    engine.device.fail_next("wait")
    step = engine.launch(Batch.random())
    assert step.is_done
    with pytest.raises(RuntimeError, match="simulated wait failure"):
        step.wait()
    assert step.is_done


def test_polling_the_header_needs_a_proven_order() -> None:
    with pytest.raises(InputError, match="wait='header' needs an ordered header, which unordered does not prove"):
        Engine(UnorderedDevice(), wait="header")
    with pytest.raises(InputError, match=r"needs staging='kernel': a copy lands in no order"):
        Engine(wait="header", staging="copy")
    with pytest.raises(InputError, match=r"wait='sleep': expected 'block', 'spin' or 'header'"):
        Engine(wait="sleep")
    batch = Batch.random()
    assert_rows(Engine(UnorderedDevice(), wait="spin").launch(batch).rows(), batch.rows())


@EACH_LIFETIME
def test_the_header_lands_before_the_event() -> None:
    """What polling the header is for: work behind the staging node does not delay the wait."""
    engine = Engine(wait="header")
    lane, batch = engine.lanes[0], Batch.random()
    engine.device.hold()
    with lane.tail.step() as step:
        engine.device.launch(lambda: lane.feed(batch))
        lane.graph.replay()
        engine.device.launch(lambda: None)  # held for ever, in front of the step's event
    engine.device.let(KERNELS_PER_LAUNCH)
    assert_rows(step.wait(timeout=60).rows(), batch.rows())
    engine.device.resume()


@EACH_LIFETIME
@pytest.mark.parametrize("wait", KINDS)
def test_any_thread_may_wait(wait: str) -> None:
    """Several threads on one step, and steps read by other threads than the launcher's, while launches go on."""
    engine = Engine(depth=4, wait=wait)
    with ThreadPoolExecutor(4) as readers:
        for _ in range(6):
            batches = [Batch.random() for _ in range(4)]
            engine.device.hold()
            steps = [engine.launch(batch) for batch in batches]
            reads = [
                (readers.submit(step.rows), batch) for step, batch in zip(steps, batches, strict=True) for _ in "ab"
            ]
            engine.device.resume()
            for read, batch in reads:
                assert_rows(read.result(), batch.rows())
            for step in steps:
                step.release()


@EACH_LIFETIME
def test_a_launcher_may_read_a_step_that_another_thread_is_reading() -> None:
    """A reader that held its step's lock while it waited for the launch lock hung with a launcher that, inside its
    block, read the same step."""
    engine = Engine(depth=2)
    batch, lane = Batch.random(), engine.lanes[1]
    engine.device.hold()
    step = engine.launch(batch)
    entered, reader_waits = threading.Event(), threading.Event()
    poll = engine.ring._poll

    def announced(*args: object) -> None:
        poll(*args)  # type: ignore[arg-type]
        reader_waits.set()  # its event is done: what it needs next is the launch lock
        assert entered.wait(60)

    engine.ring._poll = announced  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(lambda: step.wait(timeout=60).rows())
        with lane.tail.step() as other:
            engine.device.resume()
            assert reader_waits.wait(60)
            engine.ring._poll = poll  # type: ignore[method-assign]
            entered.set()
            assert_rows(step.wait(timeout=60).rows(), batch.rows())
            lane.graph.replay()
        assert_rows(read.result(), batch.rows())
    other.wait()


@EACH_LIFETIME
def test_a_timeout_holds_while_somebody_else_has_the_launch_lock() -> None:
    """A first launch may trace and capture for minutes under that lock. The message is built without it."""
    engine = Engine(depth=2)
    step = engine.launch(Batch.random())
    engine.device.synchronize()
    with engine.lanes[1].tail.step(), ThreadPoolExecutor(1) as pool:
        with pytest.raises(StepTimeoutError, match=r"step 1 .*not done within 0\.01 s"):
            pool.submit(step.wait, 0.01).result()
        engine.lanes[1].graph.replay()
    assert step.wait(timeout=60) is step


@EACH_LIFETIME
def test_an_interrupted_wait_leaves_the_step_open() -> None:
    """Ctrl-C in a wait used to become the step's error for ever: the next wait raised KeyboardInterrupt again."""
    engine = Engine()
    batch = Batch.random()
    engine.device.fail_next("wait", KeyboardInterrupt())
    step = engine.launch(batch)
    with pytest.raises(KeyboardInterrupt):
        step.wait()
    step._launch.event.fail = None  # type: ignore[union-attr]
    assert_rows(step.rows(), batch.rows())


@EACH_LIFETIME
def test_a_release_by_another_thread_ends_the_wait_as_stale() -> None:
    """The reader came back from its wait without words, and said that the step had staged nothing."""
    engine = Engine(depth=2)
    engine.device.hold()
    step = engine.launch(Batch.random())
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(step.rows)
        step.release()
        engine.device.resume()
        with pytest.raises(RuntimeError, match=re.escape("step 1 (released, graph 1) was released")):
            read.result()


@EACH_LIFETIME
def test_reading_twice_gives_the_same() -> None:
    engine = Engine()
    batch = Batch.random()
    step = engine.launch(batch)
    for _ in range(3):
        assert_rows(step.rows(), batch.rows())
        assert torch.equal(step.row_values("token"), batch.token)


@pytest.mark.parametrize(("wait", "timeout"), [("block", None), ("block", 60), ("spin", None), ("header", 60)])
def test_a_wait_that_blocks_leaves_the_processor_to_others(wait: str, timeout: float | None) -> None:
    """K34: spinning waits slow other threads. It is a choice, and blocking is the default."""
    assert Engine().ring.wait_kind == "block"
    engine = Engine(wait=wait)
    engine.device.hold()
    step = engine.launch(Batch.random())
    used: list[float] = []

    def work() -> None:
        begin = time.thread_time()
        step.wait(timeout)
        used.append(time.thread_time() - begin)

    waiting = threading.Thread(target=work)
    waiting.start()
    time.sleep(0.5)
    engine.device.resume()
    waiting.join(60)
    assert (used[0] < 0.05) == (wait == "block"), used


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    engine = Engine(depth=2)
    step = engine.launch(Batch.random())
    for wait in (step.wait, lambda timeout: engine.launch(Batch.random(), timeout=timeout)):
        with pytest.raises(InputError, match="expected seconds, at least 0, or None to wait for ever"):
            wait(timeout)
    step.wait(60)


def test_a_launch_that_waits_long_for_room_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else may be there to release a step."""
    monkeypatch.setattr("spangraph.ring._WARN_AFTER", 0.02)
    engine = Engine(depth=1)
    step = engine.launch(Batch.random())
    with pytest.raises(StepTimeoutError, match="no room for a launch within"):
        engine.launch(Batch.random(), wait=True, timeout=0.2)
    assert step.row_ids == (0, 1, 2, 3)
    (record,) = [record for record in caplog.records if "waited 0.02 s for room" in record.getMessage()]
    assert "depth=1 and 1 steps are open" in record.getMessage()
