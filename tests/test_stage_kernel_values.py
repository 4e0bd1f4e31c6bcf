"""The implementations of staging against what the contract says, word by word over the whole ring.

`stage_ref`, `HostStage` and `stage_copy` run in the test's process. The Triton kernel runs under Triton's interpreter,
which has to be switched on before Triton is imported, so this file is also the script that runs the kernel over all
scenarios in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from spangraph.kernels.stage import CONTROL_WORDS, HEADER_WORDS, HostStage, stage, stage_copy, stage_ref

GRAPH = 7
NUM_SLOTS = 4
INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True)
class Launch:
    """One launch: what the host reserves for it, if anything, and who runs.

    Attributes:
        slot, num_rows: go into the record.
        record: whether the host writes a record at all.
        generation_error: added to the generation in the record.
        graph: the graph that runs; the record names `GRAPH`.
        is_dry: what the contract says about it.
    """

    slot: int = 0
    num_rows: int = 1
    record: bool = True
    generation_error: int = 0
    graph: int = GRAPH
    is_dry: bool = False


@dataclass(frozen=True)
class Scenario:
    """Launches in a row over one ring.

    Attributes:
        rows: the bucket.
        shapes: one trailing shape for each column.
        cursor: where the ring starts.
        reverse: the columns lie in the slot in reverse order.
        layout: how the columns lie in their own memory: "packed", "strided", or "shifted" off a 16-byte boundary.
    """

    rows: int
    shapes: tuple[tuple[int, ...], ...]
    launches: tuple[Launch, ...]
    cursor: int = 0
    num_records: int = 4
    reverse: bool = False
    layout: str = "packed"


SPANS, SPANS_2D, MANY_SPANS, TOKEN, TOKENS = COLUMN_KINDS = ((2,), (2, 2), (3, 2), (), (5,))

# Buckets: one row, odd ones, a power of two, and up to 1024, where a column is one whole tile of 2048 words, several,
# or ends within one (1024 x 5). Outputs: each count from 1 to 8. Real rows: all, none, one, all but one. Columns: spans
# on one dim and on several, several spans a row, one and several row values. All buckets by all counts; the rest goes
# round, so that any two values meet (pairwise).
BUCKETS = (1, 3, 7, 64, 257, 1024)
COUNTS = range(1, 9)


def _grid() -> Iterator[tuple[str, Scenario]]:
    for i, rows in enumerate(BUCKETS):
        for count in COUNTS:
            num_rows = (rows, 0, 1, rows - 1)[(i + count) % 4]
            shapes = tuple(COLUMN_KINDS[(i + 2 * count + j) % len(COLUMN_KINDS)] for j in range(count))
            yield f"{rows}x{count}-{num_rows}", Scenario(rows, shapes, (Launch(2, num_rows),))


ONE = (SPANS, TOKEN)
DRY = Launch(record=False, is_dry=True)

SCENARIOS = (
    dict(_grid())
    | {
        # More real rows than the bucket has, and fewer than none: the bucket is the limit.
        "more-rows-than-the-bucket": Scenario(3, ONE, (Launch(1, 5),)),
        "huge-number-of-rows": Scenario(3, ONE, (Launch(1, INT64.max),)),
        "negative-number-of-rows": Scenario(3, ONE, (Launch(1, -2),)),
        "empty-bucket": Scenario(0, ONE, (Launch(1, 0), Launch(2, 3))),
        "reverse": Scenario(5, (SPANS, TOKEN, TOKENS), (Launch(3, 4),), reverse=True),
        "strided": Scenario(5, (SPANS, TOKENS, MANY_SPANS), (Launch(3, 4),), layout="strided"),
        "shifted": Scenario(5, (TOKEN, TOKENS), (Launch(3, 4),), layout="shifted"),
        # Dry runs: no record, or one for an earlier or a later launch, another graph, or no slot of the ring.
        "dry-no-record": Scenario(3, ONE, (DRY,)),
        "dry-old-generation": Scenario(3, ONE, (Launch(1, 3, generation_error=-1, is_dry=True),)),
        "dry-old-record-of-this-place": Scenario(3, ONE, (Launch(1, 3, generation_error=-4, is_dry=True),), cursor=9),
        "dry-future-generation": Scenario(3, ONE, (Launch(1, 3, generation_error=1, is_dry=True),)),
        "dry-other-graph": Scenario(3, ONE, (Launch(1, 3, graph=GRAPH + 1, is_dry=True),)),
        "dry-graph-of-the-same-low-half": Scenario(3, ONE, (Launch(1, 3, graph=GRAPH + 2**32, is_dry=True),)),
        "dry-slot-below": Scenario(3, ONE, (Launch(-1, 3, is_dry=True),)),
        "dry-slot-above": Scenario(3, ONE, (Launch(NUM_SLOTS, 3, is_dry=True),)),
        # Warm-up, capture, an unreserved replay, then a reserved one, and again.
        "dry-then-real": Scenario(3, ONE, (DRY, DRY, Launch(1, 3), DRY, Launch(0, 2), Launch(1, 1), DRY)),
        # A batch of 4 fills the bucket, then one of 1 uses the same slot.
        "stale-rows": Scenario(4, ONE, (Launch(1, 4), Launch(1, 1))),
        # The ring of records wraps twice, with any number of records, and slots come in the host's order.
        "wrap-3": Scenario(3, ONE, tuple(Launch(slot, 2) for slot in (2, 0, 0, 3, 1, 2, 3)), num_records=3),
        "wrap-1": Scenario(3, ONE, tuple(Launch(slot, 2) for slot in (2, 0, 3)), num_records=1),
    }
    | {
        # Where 32 bits, and the whole numbers of a double, end; three launches step over the edge.
        f"generation-{exponent}": Scenario(3, ONE, (Launch(1, 2), Launch(3, 3), Launch(1, 1)), cursor=2**exponent - 2)
        for exponent in (31, 32, 53, 62)
    }
)


@dataclass
class Ring:
    """A ring with random content in every word that no launch should touch, inside a larger allocation."""

    scenario: Scenario
    rng: random.Random
    cursor: Tensor = field(init=False)
    slots: Tensor = field(init=False)
    control: Tensor = field(init=False)
    offsets: list[int] = field(init=False)

    def __post_init__(self) -> None:
        scenario = self.scenario
        sizes = [scenario.rows * math.prod(shape) for shape in scenario.shapes]
        self.offsets = [0] * len(sizes)
        word = HEADER_WORDS
        for i in reversed(range(len(sizes))) if scenario.reverse else range(len(sizes)):
            self.offsets[i] = word
            word += sizes[i] + self.rng.randrange(4)
        self.cursor = torch.tensor([scenario.cursor])
        self.slots = self.random_ints(1 + NUM_SLOTS, word + 3)[1:]
        self.control = torch.zeros(scenario.num_records, CONTROL_WORDS, dtype=torch.int64)

    def random_ints(self, *shape: int) -> Tensor:
        """Any int64: the kernel must not look at what it copies, nor at what a padding row holds."""
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        return torch.randint(INT64.min, INT64.max, shape, generator=generator)

    def columns(self) -> list[Tensor]:
        rows = self.scenario.rows
        num_rows, cut = {
            "packed": (rows, slice(None)),
            "strided": (rows * 2, slice(None, None, 2)),
            "shifted": (rows + 1, slice(1, None)),
        }[self.scenario.layout]
        return [self.random_ints(num_rows, *shape)[cut] for shape in self.scenario.shapes]

    def reserve(self, launch: Launch) -> None:
        count = int(self.cursor)
        record = [count + 1 + launch.generation_error, launch.slot, launch.num_rows, GRAPH]
        self.control[count % len(self.control)] = torch.tensor([*record, 0] if launch.record else [0] * CONTROL_WORDS)

    def expect(self, launch: Launch, columns: list[Tensor]) -> tuple[list[int], list[list[int]]]:
        """The cursor and the slots after `launch`, from the contract alone and in plain Python."""
        slots = self.slots.tolist()
        count = int(self.cursor)
        if launch.is_dry:
            return [count], slots
        slot = slots[launch.slot]
        slot[0] = count + 1
        for column, offset in zip(columns, self.offsets, strict=True):
            word = offset
            for row, values in enumerate(column.reshape(len(column), -1).tolist() if len(column) else []):
                for value in values:
                    slot[word] = value if row < launch.num_rows else 0
                    word += 1
        return [count + 1], slots


Stage = Callable[[Ring, Launch, list[Tensor]], None]


def _stage_ref(ring: Ring, launch: Launch, columns: list[Tensor]) -> None:
    stage_ref(ring.cursor, ring.slots, ring.control, columns, ring.offsets, launch.graph)


def _stage_host(ring: Ring, launch: Launch, columns: list[Tensor]) -> None:
    """One for all launches of a graph, as its memory is."""
    stages: dict[int, HostStage] = vars(ring).setdefault("host_stages", {})
    if launch.graph not in stages:
        stages[launch.graph] = HostStage(ring.cursor, ring.slots, ring.control, ring.offsets, launch.graph)
    stages[launch.graph](columns)


def _stage_copy(ring: Ring, launch: Launch, columns: list[Tensor]) -> None:
    """Runs the instance of the graph that belongs to the slot, as its host does."""
    slot = launch.slot if 0 <= launch.slot < NUM_SLOTS else 0
    mirror = ring.slots[slot].clone()
    stage_copy(ring.cursor, ring.slots, ring.control, columns, ring.offsets, launch.graph, mirror, slot)
    assert torch.equal(mirror, ring.slots[slot])


def _stage_kernel(ring: Ring, launch: Launch, columns: list[Tensor]) -> None:
    stage(ring.cursor, ring.slots, ring.control, columns, ring.offsets, launch.graph)


def _check_scenario(name: str, run: Stage) -> None:
    ring = Ring(SCENARIOS[name], random.Random(name))
    whole = ring.slots._base
    assert whole is not None
    for number, launch in enumerate(ring.scenario.launches):
        ring.reserve(launch)
        columns = ring.columns()
        before_ring, control = whole[0].clone(), ring.control.clone()
        inputs = [column.clone() for column in columns]
        cursor, slots = ring.expect(launch, columns)
        run(ring, launch, columns)
        assert ring.cursor.tolist() == cursor, f"launch {number}: the cursor"
        wrong = (ring.slots != torch.tensor(slots)).nonzero().tolist()
        assert not wrong, f"launch {number}: (slot, word) {wrong[:8]}, {len(wrong)} in all"
        assert torch.equal(whole[0], before_ring), f"launch {number}: wrote before the ring"
        assert torch.equal(ring.control, control), f"launch {number}: wrote the records"
        assert all(map(torch.equal, inputs, columns)), f"launch {number}: wrote the columns"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """Each scenario's failure under the interpreter, or an empty text."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout)
    return failures


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_kernel_follows_the_contract(name: str, interpreted: dict[str, str]) -> None:
    """K7, K8, K12: padding rows become empty spans whatever they hold, and dry runs write nothing."""
    assert interpreted[name] == ""


@pytest.mark.parametrize("run", [_stage_ref, _stage_host], ids=["ref", "host"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_references_follow_the_contract(name: str, run: Stage) -> None:
    """K7, K8, K12."""
    _check_scenario(name, run)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_plain_copy_follows_the_contract(name: str) -> None:
    """K7, K8, K12."""
    _check_scenario(name, _stage_copy)


def test_the_plain_copy_ignores_a_record_for_another_slot() -> None:
    """Its destination is baked in, so the wrong instance of a graph must not take the record, nor any slot."""
    ring = Ring(Scenario(3, ONE, ()), random.Random(0))
    ring.reserve(Launch(slot=1, num_rows=3))
    before = ring.slots.clone()
    mirror = ring.slots[2].clone()
    stage_copy(ring.cursor, ring.slots, ring.control, ring.columns(), ring.offsets, GRAPH, mirror, 2)
    assert ring.cursor.tolist() == [0]
    assert torch.equal(ring.slots, before)
    assert torch.equal(mirror, before[2])


@pytest.mark.parametrize("run", [_stage_ref, _stage_host, _stage_copy], ids=["ref", "host", "copy"])
def test_a_staging_that_records_nothing_leaves_the_old_header(run: Stage) -> None:
    """K22: the host tells a silently missing copy by the generation in the header."""
    ring = Ring(Scenario(3, ONE, ()), random.Random(0))
    for launch in (Launch(1, 3), Launch(1, 3, graph=GRAPH + 1)):
        ring.reserve(launch)
        run(ring, launch, ring.columns())
    reserved = 2
    assert ring.control[1, 0] == reserved
    assert ring.slots[1, 0] != reserved


@pytest.mark.parametrize("field_name", ["num_rows", "generation_error", "slot"])
def test_the_comparison_sees_a_wrong_word(field_name: str) -> None:
    """The mirrored case: an implementation that reads one field of the record wrongly does not pass."""

    def run(ring: Ring, launch: Launch, columns: list[Tensor]) -> None:
        ring.reserve(replace(launch, **{field_name: getattr(launch, field_name) + 1}))
        control = ring.control.clone()
        ring.reserve(launch)
        stage_ref(ring.cursor, ring.slots, control, columns, ring.offsets, launch.graph)

    with pytest.raises(AssertionError, match="launch 0"):
        _check_scenario("7x5-6", run)


def _run_kernel_scenarios() -> dict[str, str]:
    failures = {}
    for name in SCENARIOS:
        try:
            _check_scenario(name, _stage_kernel)
            failures[name] = ""
        except AssertionError as error:
            failures[name] = str(error)
    return failures


if __name__ == "__main__":
    json.dump(_run_kernel_scenarios(), sys.stdout)
