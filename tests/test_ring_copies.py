"""Races around copied rows, made to happen on the simulated device: each gives the right rows or the right error."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spangraph import (
    Copy,
    DeclarationError,
    RingFullError,
    Span,
    SpannedOutput,
    SpanStager,
    StagingError,
    StaleStepError,
    StepTimeoutError,
)
from spangraph.testing import Pool, SimulatedDevice

from .rig import Batch, Engine, assert_rows

COPIED = pytest.mark.parametrize("copies", ["device", "host"])


def launch_and_check(engine: Engine, count: int = 4) -> None:
    for _ in range(count):
        batch = Batch.random()
        with engine.launch(batch, wait=True) as step:
            assert_rows(step.rows(), batch.rows())


def assert_nothing_leaked(engine: Engine) -> None:
    gc.collect()
    engine.device.synchronize()
    launch_and_check(engine, engine.ring.num_slots + 1)
    ring = engine.ring
    ring._reap()
    assert sorted(ring._free) == list(range(ring.num_slots))
    assert sorted(ring._free_copies) == list(range(ring.depth))
    assert not ring._live
    assert not ring._quarantine


# ---- landing -----------------------------------------------------------------------------------------------------


def test_a_copy_that_lands_late() -> None:
    """K11: rows are there when their step is done, and not before."""
    engine = Engine(depth=2, lanes=1, copies="host")
    engine.device.hold_copies()
    batches = [Batch.random() for _ in range(2)]
    steps = [engine.launch(batch) for batch in batches]
    for step in steps:
        with pytest.raises(StepTimeoutError, match="was not done within"):
            step.wait(timeout=0.02)
    engine.device.land_copies()
    for step, batch in zip(steps, batches, strict=True):
        assert_rows(step.rows(), batch.rows())


@COPIED
@pytest.mark.parametrize("fault", ["copy", "late", "staging", "compaction"])
def test_an_event_that_completes_before_its_copy(copies: str, fault: str) -> None:
    """K22: nothing of that step is delivered; what lands afterwards hits no other step."""
    engine = Engine(depth=3, lanes=1, copies=copies)
    launch_and_check(engine, 2)
    before, after = Batch.random(), Batch.random()
    first = engine.launch(before)
    engine.device.synchronize()
    engine.device.fail_next(fault)
    lost, later = engine.launch(Batch.random()), engine.launch(after)
    if fault != "late":
        with pytest.raises(StagingError, match="instead of generation 4"):
            lost.rows()
    else:
        engine.device.synchronize()  # it landed with the step behind it
    assert_rows(first.rows(), before.rows())
    assert_rows(later.rows(), after.rows())
    first.release()
    later.release()
    del lost
    assert_nothing_leaked(engine)


def test_a_late_copy_of_a_step_that_was_given_up() -> None:
    """Its slots are not used before it is known to have landed."""
    engine = Engine(depth=2, lanes=1, copies="host")
    engine.device.fail_next("late")
    lost = engine.launch(Batch.random())
    with pytest.raises(StagingError, match="its slot holds generation 0 instead of generation 1"):
        lost.rows()
    slot = engine.ring._quarantine[1][1]
    for _ in range(3):
        batch = Batch.random()
        step = engine.launch(batch)
        assert step._launch.copy_slot != slot or engine.ring._done > 1
        assert_rows(step.rows(), batch.rows())
        step.release()
    assert_nothing_leaked(engine)


@COPIED
def test_steps_behind_a_lost_one_are_right(copies: str) -> None:
    """They are of one graph, so the cursor alone tells them apart."""
    engine = Engine(depth=4, lanes=1, copies=copies)
    engine.device.hold()
    engine.device.fail_next("staging")
    lost = engine.launch(Batch.random())
    batches = [Batch.random() for _ in range(3)]
    steps = [engine.launch(batch) for batch in batches]
    engine.device.resume()
    for step, batch in zip(steps, batches, strict=True):
        assert_rows(step.rows(), batch.rows())
        assert step.row_values("token").equal(batch.token)
    with pytest.raises(StagingError):
        lost.rows()


@COPIED
def test_a_forgotten_replay(copies: str) -> None:
    engine = Engine(depth=3, lanes=1, copies=copies)
    with engine.lanes[0].tail.step() as lost:
        pass
    batch = Batch.random()
    step = engine.launch(batch)
    assert_rows(step.rows(), batch.rows())
    with pytest.raises(StagingError, match="replay that graph inside its own"):
        lost.rows()
    step.release()
    assert_nothing_leaked(engine)


@COPIED
def test_the_slots_of_a_failed_wait(copies: str) -> None:
    """K15: the next steps use others, and they come back once a later step is done."""
    engine = Engine(depth=3, lanes=1, copies=copies)
    engine.device.hold()
    engine.device.fail_next("wait")
    lost = engine.launch(Batch.random())
    taken = lost._launch.slot, lost._launch.copy_slot
    with pytest.raises(RuntimeError, match="simulated wait failure"):
        lost.wait()
    batches = [Batch.random() for _ in range(2)]
    steps = [engine.launch(batch) for batch in batches]
    for step in steps:
        assert step._launch.slot != taken[0]
        assert step._launch.copy_slot != taken[1]
    engine.device.resume()
    for step, batch in zip(steps, batches, strict=True):
        assert_rows(step.rows(), batch.rows())
        step.release()
    assert_nothing_leaked(engine)


# ---- giving up ---------------------------------------------------------------------------------------------------


@COPIED
def test_a_step_that_is_cancelled_in_flight(copies: str) -> None:
    """K18: cancelling waits for nothing, and gives its place back at once."""
    engine = Engine(depth=1, copies=copies)
    engine.device.hold()
    for _ in range(2):  # a third would find the two spare slots taken
        step = engine.launch(Batch.random())
        step.cancel()
        for read in (step.wait, step.rows, lambda step=step: step.row_values("token")):
            with pytest.raises(StaleStepError, match=r"step \d \(cancelled, .* was given up by cancel\(\)"):
                read()
    batch = Batch.random()
    last = engine.launch(batch)
    engine.device.resume()
    assert_rows(last.rows(), batch.rows())
    last.release()
    assert_nothing_leaked(engine)


def test_cancelling_waits_for_no_other_thread() -> None:
    """K18: somebody launches meanwhile, and holds the launch lock for as long as their `with` block lasts."""
    engine = Engine(depth=2, copies="host")
    step = engine.launch(Batch.random())
    inside, leave = threading.Event(), threading.Event()
    batch = Batch.random()

    def launch() -> None:
        lane = engine.lanes[1]
        with lane.tail.step() as other:
            inside.set()
            assert leave.wait(60)
            engine.device.launch(lambda: lane.feed(batch))
            lane.graph.replay()
        assert_rows(other.rows(), batch.rows())
        other.release()

    with ThreadPoolExecutor() as threads:
        launching = threads.submit(launch)
        assert inside.wait(60)
        start = time.monotonic()
        step.cancel()
        assert time.monotonic() - start < 1
        with pytest.raises(StaleStepError):
            step.rows()
        leave.set()
        launching.result()
    assert_nothing_leaked(engine)


@pytest.mark.parametrize("wait", ["block", "spin", "header"])
def test_cancelling_wakes_who_waits(wait: str) -> None:
    engine = Engine(depth=1, copies="host", wait=wait)
    engine.device.hold()
    step = engine.launch(Batch.random())
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(step.wait, 60)
        time.sleep(0.02)
        step.cancel()
        with pytest.raises(StaleStepError):
            waiting.result(timeout=10)
    engine.device.resume()
    assert_nothing_leaked(engine)


@COPIED
def test_one_row_dropped_before_the_result(copies: str) -> None:
    """K30: launch [A, B, C], abort B in flight."""
    engine = Engine(bs=3, copies=copies)
    engine.device.hold()
    batch = Batch.of([(1, 4), (0, 6), (2, 5)])
    step = engine.launch(batch, ["A", "B", "C"])
    step.withhold("B")
    engine.device.resume()
    expected = batch.rows(["A", "B", "C"])
    del expected["B"]
    assert_rows(step.rows(), expected)
    assert_rows(step.rows().own(), expected)


@COPIED
def test_closing_with_steps_in_flight(copies: str) -> None:
    engine = Engine(depth=2, lanes=1, copies=copies)
    engine.device.hold()
    batches = [Batch.random() for _ in range(2)]
    steps = [engine.launch(batch) for batch in batches]
    closing = threading.Thread(target=engine.stager.close)
    closing.start()
    engine.device.resume()
    closing.join(60)
    for step, batch in zip(steps, batches, strict=True):
        assert_rows(step.rows(), batch.rows())
        owned = step.rows().own()
        step.release()
        assert_rows(owned, batch.rows())


# ---- threads -----------------------------------------------------------------------------------------------------


@COPIED
def test_threads_that_launch_and_read_at_once(copies: str) -> None:
    engine = Engine(depth=3, lanes=1, copies=copies)

    def work(seed: int) -> None:
        for _ in range(25):
            batch = Batch.random()
            with engine.device.use_stream(engine.device.new_stream()):
                step = engine.launch(batch, wait=True, timeout=60)
            assert_rows(step.rows(), batch.rows())
            owned = step.rows().own()
            step.release()
            assert_rows(owned, batch.rows())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert_nothing_leaked(engine)


@COPIED
def test_a_step_released_in_flight_by_a_thread_with_another_stream(copies: str) -> None:
    """K14: the poison comes behind the copy, and before the next one."""
    engine = Engine(depth=1, copies=copies)
    engine.device.hold()
    step = engine.launch(Batch.random())
    with engine.device.use_stream(engine.device.new_stream()):
        step.release()
    batch = Batch.of([(0, 6)] * 4)
    later = engine.launch(batch)
    engine.device.resume()
    assert_rows(later.rows(), batch.rows())


# ---- rings that are too small ------------------------------------------------------------------------------------


@COPIED
@pytest.mark.parametrize("fault", ["wait", "staging", "compaction", "kernel"])
def test_a_step_that_failed_holds_nothing_back(copies: str, fault: str) -> None:
    """Nobody will ever know whether it fitted, and nobody reads it."""
    engine = Engine(depth=3, lanes=1, copies=Copy(copies, capacity=32))
    launch_and_check(engine, 2)
    engine.device.fail_next(fault)
    lost = engine.launch(Batch.of([(0, 6)] * 4))
    batch = Batch.of([(0, 4), (0, 0), (1, 5), (0, 0)])
    step = engine.launch(batch)
    assert_rows(step.rows(), batch.rows())
    with pytest.raises((RuntimeError, StagingError)):
        lost.rows()
    step.release()
    assert_nothing_leaked(engine)


def test_graphs_of_one_pool_wait_for_each_other_s_rows() -> None:
    """K38: a replay of one overwrites the outputs of all. Rows that did not fit lie there, as views do."""
    for copy in ("view", Copy("host", capacity=16)):
        device, pool = SimulatedDevice(), Pool()
        stager = SpanStager(["audio"], max_rows=2, depth=2, copies={"audio": copy}, device=device)
        x, spans, tails = torch.randn(2, 6), torch.tensor([[0, 6], [1, 4]]), []
        for bs in (2, 1):
            graph = device.new_graph()
            with device.graph(graph, pool=pool):
                out = SpannedOutput({"audio": x[:bs] + 1}, {"audio": spans[:bs]})
                tails.append((graph, stager.stage(out)))
        with tails[0][1].step() as first:
            tails[0][0].replay()
        refused = "did not fit" if isinstance(copy, Copy) else "in the same memory pool are still leased by step 1"
        with pytest.raises(RingFullError, match=refused), tails[1][1].step():
            pass
        assert_rows(first.rows(), {0: x[0] + 1, 1: x[1, 1:4] + 1})
        first.release()
        with tails[1][1].step() as second:
            tails[1][0].replay()
        assert_rows(second.rows(), {0: x[0] + 1})


def test_a_graph_by_hand_that_overflows() -> None:
    engine = Engine(depth=2, lanes=1, copies=Copy("host", capacity=16))
    full, fits = Batch.of([(0, 6)] * 4), Batch.of([(0, 3), (2, 2), (0, 0), (4, 4)])
    step = engine.launch(full)
    with pytest.raises(RingFullError, match="did not fit"):
        engine.launch(fits)
    assert_rows(step.rows(), full.rows())
    waiter = ThreadPoolExecutor(1)
    later = waiter.submit(engine.launch, fits, wait=True, timeout=60)
    time.sleep(0.02)
    assert not later.done()
    step.release()
    assert_rows(later.result().rows(), fits.rows())
    waiter.shutdown()
    assert engine.stager.counts.overflows == 1
    assert engine.stager.counts.host_bytes == 16


# ---- stagers -----------------------------------------------------------------------------------------------------


def test_a_stager_needs_a_capacity_and_known_names() -> None:
    with pytest.raises(DeclarationError, match=r"copies\['audio'\] has no capacity.*Copy\('host', capacity=1 << 20\)"):
        SpanStager(["audio"], max_rows=2, copies={"audio": "host"}, device=SimulatedDevice())
    with pytest.raises(DeclarationError, match=r"copies of \['sound'\] are not declared; the stager declares"):
        SpanStager(["audio"], max_rows=2, copies={"sound": "view"}, device=SimulatedDevice())


def test_graphs_of_one_stager_that_copy_different_outputs() -> None:
    device = SimulatedDevice()
    stager = SpanStager(
        {"a": Span(), "b": Span(), "c": Span(dims=(-2, -1))},
        max_rows=4,
        copies={"a": Copy("host", capacity=4096), "c": Copy("device", capacity=4096)},
        depth=3,
        device=device,
    )
    x, spans = torch.randn(3, 2, 5), torch.tensor([[0, 2], [1, 5], [3, 3]])
    boxes = torch.tensor([[[0, 1], [0, 2]], [[0, 2], [1, 5]], [[1, 1], [0, 5]]])
    columns = {"a": spans, "b": spans, "c": boxes}
    graphs = {}
    for names in (("a",), ("b",), ("c",), ("b", "c"), ("a", "b", "c")):
        graph = device.new_graph()
        with device.graph(graph):
            outputs = {name: x + i for i, name in enumerate(names)}
            tail = stager.stage(SpannedOutput(outputs, {n: columns[n] for n in names}), names=names)
        assert len(tail.outputs) == (len(names) if "b" in names else 0)
        graphs[names] = graph, tail
    for names, (graph, tail) in graphs.items():
        with tail.step(rows=["p", "q", "r"]) as step:
            graph.replay()
        with step:
            for i, name in enumerate(names):
                expected = {"p": (x + i)[0, :, :2], "q": (x + i)[1, :, 1:5]}
                if name == "c":
                    expected = {"p": (x + i)[0, :1, :2], "q": (x + i)[1, :2, 1:5]}
                assert_rows(step.rows(name), expected)


def test_capacity_is_of_the_largest_batch_of_all_graphs() -> None:
    """A small bucket's graph cannot overflow where a large one can: it holds nothing back."""
    device = SimulatedDevice()
    stager = SpanStager(["audio"], max_rows=8, copies={"audio": Copy("host", capacity=64)}, depth=2, device=device)
    tails = {}
    for bs in (2, 8):
        x, spans = torch.randn(bs, 6), torch.tensor([[0, 6]] * bs)
        graph = device.new_graph()
        with device.graph(graph):
            tails[bs] = graph, stager.stage(SpannedOutput({"audio": x + 1}, {"audio": spans})), x
    assert (tails[2][1].may_overflow, tails[8][1].may_overflow) == (False, True)
    for bs, (graph, tail, x) in tails.items():
        with tail.step() as step:
            graph.replay()
        with step:
            assert_rows(step.rows(), {i: x[i] + 1 for i in range(bs)})
    assert stager.counts.overflows == 1
