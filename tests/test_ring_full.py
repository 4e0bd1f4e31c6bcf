"""Depth: how many steps may be open or leased, what happens to one more, and how room comes back."""

import gc
import threading

import pytest
import torch

from spangraph import InputError, RingFullError, StaleStepError, StepStateError, StepTimeoutError

from .rig import Batch, Engine, assert_rows


def test_one_step_more_than_depth_names_the_steps_in_the_way() -> None:
    """K17: a static output re-used by replay n+1 before n was read; here the second launch without a release."""
    engine = Engine(depth=2, lanes=3)
    first, second = engine.launch(Batch.random(), ["req-7", "x", "y", "z"]), engine.launch(Batch.random())
    first.rows()
    with pytest.raises(RingFullError, match=r"depth=2 and 2 steps are open or leased") as raised:
        engine.launch(Batch.random())
    message = str(raised.value)
    assert "step 1 (leased, graph 1, rows ['req-7', 'x', 'y', 'z'])" in message
    assert "step 2 (open, graph 2)" in message
    for way_out in ("Release one", "rows.own()", "raise depth", "wait=True"):
        assert way_out in message
    second.release()
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


def test_a_refused_launch_changes_nothing() -> None:
    """The mirrored case: whoever is refused must not have taken a slot, a generation or a record."""
    engine = Engine()
    batch = Batch.random()
    with engine.launch(batch) as step:
        for _ in range(9):
            with pytest.raises(RingFullError, match="depth=1"):
                engine.launch(Batch.random())
        assert_rows(step.rows(), batch.rows())
    with engine.launch(batch) as step:
        assert step.generation == 2
        assert_rows(step.rows(), batch.rows())


def test_reading_the_first_of_two_launches_after_its_release_is_stale() -> None:
    """K17, the other order: launch, read, release, launch, read the first again."""
    engine = Engine()
    batch = Batch.of([(0, 3), (1, 4), (0, 6), (2, 5)])
    step = engine.launch(batch)
    rows = step.rows()
    kept = rows.own()
    step.release()
    engine.launch(Batch.random()).wait()
    for read in (step.rows, lambda: rows[0], lambda: rows.at(0), rows.own, lambda: step.row_values("token")):
        with pytest.raises(StaleStepError, match=r"step 1 .*was released.*rows\.own\(\), or raise depth"):
            read()
    assert_rows(kept, batch.rows())


def test_a_graph_is_not_replayed_over_outputs_that_are_leased() -> None:
    """K17 with room in the ring: two steps of depth, one graph. The message says which graph and what to do."""
    engine = Engine(depth=2, lanes=1)
    batch = Batch.random()
    step = engine.launch(batch)
    with pytest.raises(RingFullError, match=r"still leased by step 1.*rows\.own\(\) keeps.*capture one graph per step"):
        engine.launch(Batch.random())
    assert_rows(step.rows(), batch.rows())


def test_steps_that_lease_nothing_are_over_once_they_are_read() -> None:
    engine = Engine(spanned=False)
    kept = []
    for _ in range(5):
        batch = Batch.random()
        kept.append(engine.launch(batch))
        assert torch.equal(kept[-1].row_values("token"), batch.token)
    assert [step.generation for step in kept] == [1, 2, 3, 4, 5]


def test_steps_that_lease_nothing_are_open_until_they_are_read() -> None:
    engine = Engine(spanned=False)
    step = engine.launch(Batch.random())
    with pytest.raises(RingFullError, match=r"step 1 \(open"):
        engine.launch(Batch.random())
    step.wait()
    engine.launch(Batch.random())


def test_a_launch_can_wait_for_room() -> None:
    """The reader must be able to read and release while the launcher waits, so the launch lock is let go meanwhile."""
    engine = Engine()
    step = engine.launch(first := Batch.random())
    batch = Batch.random()
    launched = []
    launcher = threading.Thread(target=lambda: launched.append(engine.launch(batch, wait=True)))
    launcher.start()
    assert_rows(step.rows(), first.rows())
    assert not launched
    step.release()
    launcher.join()
    assert_rows(launched[0].rows(), batch.rows())


def test_waiting_for_room_has_a_timeout() -> None:
    engine = Engine()
    step = engine.launch(Batch.random())
    with pytest.raises(
        StepTimeoutError, match=r"no room for a launch within 0\.01 s, which .*: depth=1.*\n.*ring: depth 1"
    ):
        engine.launch(Batch.random(), wait=True, timeout=0.01)
    step.release()
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


def test_a_launch_inside_a_launch_is_refused_and_both_rings_go_on() -> None:
    engine = Engine(depth=2)
    batch = Batch.random()
    lane = engine.lanes[0]
    with lane.tail.step() as step:
        with pytest.raises(StepStateError, match=r"a launch inside the launch of step 1"):
            engine.launch(Batch.random(), lane=1)
        engine.device.launch(lambda: lane.feed(batch))
        lane.graph.replay()
    assert_rows(step.rows(), batch.rows())
    batch = Batch.random()
    assert_rows(engine.launch(batch, lane=1).rows(), batch.rows())


@pytest.mark.parametrize("is_read", [False, True])
def test_a_step_that_was_dropped_gives_its_place_to_the_next_launch(is_read: bool) -> None:
    """A step that nobody holds any more must not keep its slot or its graph for ever."""
    engine = Engine()
    for n in range(1, 9):
        batch = Batch.random()
        step = engine.launch(batch, wait=True)  # for a slot: steps may be dropped faster than the device runs
        assert step.generation == n
        if is_read:
            assert_rows(step.rows(), batch.rows())
        del step
    assert len(engine.ring._dropped) == 1  # the finaliser leaves all work to the next launch
    batch = Batch.random()
    assert_rows(engine.launch(batch, wait=True).rows(), batch.rows())
    engine.launch(Batch.random())
    assert len(engine.ring._free) == engine.ring.num_slots - 1


def test_rows_keep_their_step_leased() -> None:
    """The mirrored case of a dropped step: `compiled.launch(x).rows()` must not lose its lease at once."""
    engine = Engine()
    batch = Batch.random()
    rows = engine.launch(batch).rows()
    gc.collect()
    with pytest.raises(RingFullError, match="depth=1"):
        engine.launch(Batch.random())
    assert_rows(rows, batch.rows())
    del rows
    engine.launch(Batch.random())


def test_a_step_in_a_reference_cycle_is_reaped_after_its_collection() -> None:
    engine = Engine()
    holder: list[object] = [engine.launch(Batch.random())]
    holder.append(holder)
    del holder
    gc.collect()
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


def test_releasing_a_step_in_flight_does_not_wait_for_it() -> None:
    """K18: cancel during an in-flight copy. Neither the release nor the launches behind it wait for the device."""
    engine = Engine(depth=2)
    engine.device.hold()
    cancelled = engine.launch(Batch.random())
    cancelled.release()
    assert cancelled.is_released
    batch = Batch.random()
    step = engine.launch(batch, lane=0)  # the same graph: it follows in stream order
    assert not step.is_done
    with pytest.raises(StaleStepError, match="was released"):
        cancelled.rows()
    engine.device.resume()
    assert_rows(step.rows(), batch.rows())


def test_releasing_while_the_copy_has_not_landed_does_not_wait_either() -> None:
    engine = Engine(depth=1, lanes=2)
    engine.device.hold_copies()
    engine.launch(Batch.random()).release()
    batch = Batch.random()
    step = engine.launch(batch)
    engine.device.land_copies()
    assert_rows(step.rows(), batch.rows())


def test_release_twice_is_release_once() -> None:
    engine = Engine()
    step = engine.launch(Batch.random())
    step.release()
    batch = Batch.random()
    later = engine.launch(batch)
    step.release()
    with step:
        pass
    assert_rows(later.rows(), batch.rows())


def test_leased_bytes_are_reported() -> None:
    """K19: bytes retained by open leases."""
    engine = Engine(depth=3, bs=4, width=6)
    assert " 0 bytes leased" in repr(engine.stager)
    first, second = engine.launch(Batch.random()), engine.launch(Batch.random())
    assert f" {2 * 4 * 6 * 4} bytes leased" in repr(engine.stager)
    first.release()
    second.wait()
    assert f" {4 * 6 * 4} bytes leased" in repr(engine.stager)
    second.release()
    assert " 0 bytes leased" in repr(engine.stager)


# No step at all, less than none, half a step, and what a configuration that says nothing gives.
@pytest.mark.parametrize("depth", [0, -1, 1.5, None])
def test_a_bad_depth_is_refused_without_a_word_from_the_finaliser(depth: object) -> None:
    """The half-built ring's finaliser used to raise, which Python reports as an unraisable warning."""
    with pytest.raises(InputError, match=r"depth=.*expected an int of at least 1"):
        Engine(depth=depth, lanes=1)  # type: ignore[arg-type]
    gc.collect()
