"""Slots, control records and generations: what a step reads is what its own replay staged."""

import random
from collections import deque

import pytest
import torch

from spangraph import RingFullError, Span, SpannedOutput, SpanStager, StagingError, Step
from spangraph.kernels.stage import CONTROL_WORDS
from spangraph.testing import SimulatedDevice

from .rig import Batch, Engine, Lane, assert_rows

# Depths 1 to 4 have 3 to 6 slots with the kernel and 1 to 4 with the plain copy. 211 launches, a prime, come round many
# times and meet every slot at every position among the open steps.
DEPTHS = [1, 2, 3, 4]
NUM_LAUNCHES = 211


@pytest.mark.parametrize("staging", ["kernel", "copy"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_slots_and_records_wrap_around(depth: int, staging: str) -> None:
    """A slot or a control record that comes round too early shows another step's rows."""
    engine = Engine(depth=depth, staging=staging)
    in_flight: deque[tuple[Step, Batch, list[str]]] = deque()
    for n in range(NUM_LAUNCHES):
        batch, ids = Batch.random(), [f"req-{n}-{i}" for i in range(4)]
        in_flight.append((engine.launch(batch, ids), batch, ids))
        # Read some, in any order; the graph that is launched next needs the oldest step to be over.
        for step, expected, names in random.sample(list(in_flight), random.randint(0, len(in_flight))):
            assert_rows(step.rows("audio"), expected.rows(names))
        if len(in_flight) == depth:
            step, expected, names = in_flight.popleft()
            assert_rows(step.rows("audio"), expected.rows(names))
            assert torch.equal(step.row_values("token"), expected.token)
            step.release()
    for step, expected, names in in_flight:
        assert_rows(step.rows("audio"), expected.rows(names))
    assert engine.ring.cursor.item() == NUM_LAUNCHES


@pytest.mark.parametrize("depth", DEPTHS)
def test_steps_that_lease_nothing_wrap_around_on_one_graph(depth: int) -> None:
    """Row values alone: one graph serves all steps in flight, so only slot and record tell them apart."""
    engine = Engine(depth=depth, lanes=1, spanned=False)
    for _ in range(NUM_LAUNCHES // depth):
        batches = [Batch.random() for _ in range(depth)]
        engine.device.hold()
        steps = [engine.launch(batch) for batch in batches]
        engine.device.resume()
        for step, batch in reversed(list(zip(steps, batches, strict=True))):
            assert torch.equal(step.row_values("token"), batch.token)


# The edges of 32-bit and of exact float64 integers, and the largest generation that leaves room to count on.
@pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 3, 2**53 - 3, 2**62])
def test_generations_are_int64(first: int) -> None:
    engine = Engine(depth=2)
    engine.ring._next = first
    engine.ring.cursor.fill_(first - 1)
    for n in range(first, first + 9):
        batch = Batch.random()
        with engine.launch(batch) as step:
            assert step.generation == n
            assert_rows(step.rows(), batch.rows())
    assert engine.ring.cursor.item() == first + 8


def test_a_control_record_says_generation_slot_rows_and_graph() -> None:
    engine = Engine(depth=2, bs=4)
    engine.device.hold()
    step = engine.launch(Batch.random(), ["a", "b"], lane=1, num_rows=2)
    records = engine.ring.control.host.view(-1, CONTROL_WORDS)
    assert records[0].tolist() == [1, 0, 2, engine.lanes[1].tail.graph, -1]
    assert not records[1:].any()
    engine.device.resume()
    step.wait()


def test_warm_ups_and_replays_that_nobody_reserved_write_nothing() -> None:
    """K12: warm-up used the slot and recorded no event."""
    engine = Engine(depth=2)
    lane, buffer = engine.lanes[0], engine.stager._buffer.memory
    buffer.host.fill_(-7)
    buffer.device.fill_(-7)
    lane.graph.replay()  # warm-up
    lane.graph.replay()  # a replay that nobody reserved
    engine.device.synchronize()
    assert (buffer.device == -7).all()
    assert (buffer.host == -7).all()
    assert engine.ring.cursor.item() == 0

    batch = Batch.random()
    step = engine.launch(batch)
    assert_rows(step.rows(), batch.rows())
    before = buffer.device.clone()
    lane.graph.replay()  # nor does one between two steps
    engine.device.synchronize()
    assert torch.equal(buffer.device, before)
    step.release()
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


def test_a_forward_outside_a_capture_is_a_dry_run() -> None:
    """K12, eager: warming up by hand calls stage() too."""
    engine = Engine()
    out = SpannedOutput({"audio": torch.randn(4, 6)}, {"audio": torch.ones(4, 2, dtype=torch.int64)})
    engine.stager.stage(out)
    assert not engine.stager._buffer.memory.device.any()
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


def test_stale_padding_rows_never_surface() -> None:
    """K7, K8: one real row in a bucket of four, after a batch of four; the spans buffer still holds the old values."""
    engine = Engine()
    full = Batch.of([(0, 6), (1, 5), (2, 4), (0, 3)])
    with engine.launch(full, list("abcd")) as step:
        assert_rows(step.rows(), full.rows("abcd"))

    one = Batch(full.x + 1, full.spans, full.token)
    for _ in range(5):  # at every replay, whichever slot it gets
        with engine.launch(one, ["e"], num_rows=1) as step:
            assert_rows(step.rows(), one.rows("e"))
            assert step.row_ids == ("e",)
            assert step.row_values("token").tolist() == one.token[:1].tolist()
            words = step._launch.words
            assert words is not None
            first, _ = engine.stager._buffer.layout.columns["audio"]
            assert words[first : first + 8].tolist() == [0, 6, 0, 0, 0, 0, 0, 0]


def test_padding_rows_may_hold_anything() -> None:
    """Spans of a padding row are not checked: they are garbage by right. The same span in a real row is an error."""
    engine = Engine()
    batch = Batch.of([(0, 2), (5, 3), (-1, 99), (1, 4)])
    batch.x[1:3] = float("nan")
    with engine.launch(batch, ["a"], num_rows=1) as step:
        assert_rows(step.rows(), batch.rows("a"))
    with engine.launch(batch, list("abcd")) as step, pytest.raises(ValueError, match=r"span \[5, 3\)"):
        list(step.rows())


def test_no_real_rows() -> None:
    engine = Engine()
    with engine.launch(Batch.random(), [], num_rows=0) as step:
        assert dict(step.rows()) == {}
        assert step.row_values("token").tolist() == []


def test_what_was_staged_counts_not_what_the_span_tensor_holds_later() -> None:
    """K5: bound read from a reused buffer."""
    engine = Engine()
    batch = Batch.of([(1, 4), (0, 6), (2, 2), (3, 5)])
    step = engine.launch(batch)
    engine.device.synchronize()
    engine.lanes[0].spans.copy_(torch.tensor([0, 1]))
    assert_rows(step.rows(), batch.rows())
    engine.lanes[0].spans.fill_(99)
    assert_rows(step.rows(), batch.rows())


def test_a_step_that_was_read_does_not_need_its_slot() -> None:
    """A slot is busy only until its spans are copied out: it comes round while the step's rows are still in use."""
    engine = Engine(depth=2)
    batch = Batch.random()
    step = engine.launch(batch, lane=0)
    rows = step.rows()
    for _ in range(2 * engine.ring.num_slots):
        engine.launch(Batch.random(), lane=1).wait().release()
    assert_rows(rows, batch.rows())
    assert_rows(step.rows(), batch.rows())
    assert torch.equal(step.row_values("token"), batch.token)


def test_a_slot_stays_taken_while_its_dropped_step_is_in_flight() -> None:
    """K14: a slot that is handed out while the device still writes to it. The control records need the same."""
    engine = Engine(depth=2, lanes=1, spanned=False)
    batches = [Batch.random() for _ in range(5)]
    engine.device.hold()
    for batch in batches[:4]:
        engine.launch(batch).release()
    with pytest.raises(RingFullError, match="no slot is free: dropped steps are still in flight"):
        engine.launch(batches[4])
    engine.device.resume()
    engine.device.synchronize()
    assert engine.ring.cursor.item() == 4
    assert torch.equal(engine.launch(batches[4]).row_values("token"), batches[4].token)


def test_graphs_of_several_sizes_share_a_stager() -> None:
    device = SimulatedDevice()
    stager = SpanStager({"audio": Span()}, max_rows=8, row_values=["token"], depth=3, device=device)
    lanes = {bs: Lane(device, stager, bs, 5, spanned=True, slot=None) for bs in (8, 4, 1)}
    for _ in range(7):
        batches = {bs: Batch.random(bs, 5) for bs in random.sample(list(lanes), 3)}
        device.hold()
        steps = {}
        for bs, batch in batches.items():
            with lanes[bs].tail.step() as steps[bs]:
                device.launch(lambda lane=lanes[bs], batch=batch: lane.feed(batch))
                lanes[bs].graph.replay()
        device.resume()
        for bs, step in steps.items():
            with step:
                assert_rows(step.rows(), batches[bs].rows())
                assert torch.equal(step.row_values("token"), batches[bs].token)


def test_replaying_another_graph_inside_the_block_is_an_error_of_that_step() -> None:
    """A control record names its graph, so that another one cannot stage rows of the wrong shape under this step."""
    engine = Engine(depth=2)
    with engine.lanes[0].tail.step() as step:
        engine.lanes[1].graph.replay()
    with pytest.raises(StagingError, match="another graph was replayed"):
        step.rows()
    step.release()
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


def test_two_stagers_on_one_device_do_not_disturb_each_other() -> None:
    device = SimulatedDevice()
    engines = [Engine(device, depth=2), Engine(device, depth=3, bs=2)]
    for _ in range(11):
        device.hold()
        launched = []
        for engine, bs in zip(engines, (4, 2), strict=True):
            batch = Batch.random(bs)
            launched.append((engine.launch(batch), batch))
        device.resume()
        for step, batch in launched:
            with step:
                assert_rows(step.rows(), batch.rows())
    assert [engine.ring.cursor.item() for engine in engines] == [11, 11]
