"""Real networks through buckets: mixed row counts, shuffled, rows aborted in flight; each row reaches its own id."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

import spangraph
from spangraph import Step
from spangraph.testing import SimulatedDevice

from .test_workloads import SHIPPED, WORKLOADS, _assert_same, _workload
from .workloads.common import Row, cut_by_hand

BUCKETS = (3, 8)
# One row and all of a bucket, one more than a bucket, more than the largest (which runs eagerly), and back again.
NUM_ROWS = (1, 3, 4, 13, 8, 2, 9, 7, 5)
# Each workload is traced one way, and runs on one backend at one depth; each way to trace meets each backend.
HOW = (("export", "simulated", 2), ("opaque", "inline", 1), ("export", "inline", 2), ("opaque", "simulated", 1))
CASES = [(name, *HOW[i % len(HOW)]) for i, name in enumerate(WORKLOADS)]

pytestmark = pytest.mark.usefixtures("one_thread")


def _inputs(name: str) -> tuple[Tensor, ...]:
    inputs = _workload(name).inputs
    if name == "torchcrepe_voiced":  # its whole recordings, at 13 rows, take a minute
        audio, lengths = inputs
        return audio[:, :2400], lengths.clamp(max=2400)
    return inputs


class Request:
    """One launch: some rows of the workload, shuffled, under ids of their own."""

    def __init__(self, name: str, num_rows: int, number: int, chance: random.Random) -> None:
        inputs = _inputs(name)
        picked = [chance.randrange(len(inputs[0])) for _ in range(num_rows)]
        self.inputs = tuple(tensor[picked] for tensor in inputs)
        self.launched = tuple(tensor.clone() for tensor in self.inputs)
        self.ids: list[Hashable] = [f"{number}.{i}" for i in range(num_rows)]
        self.aborted = set(chance.sample(self.ids, num_rows // 3))
        self.is_cancelled = chance.random() < 0.2

    def expected(self, name: str) -> dict[str, list[Row]]:
        """Rows by plain indexing of what the model itself returns for the padded batch."""
        workload = _workload(name)
        size = next((size for size in BUCKETS if size >= len(self.ids)), len(self.ids))
        padded = tuple(torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])]) for x in self.inputs)
        with torch.inference_mode():
            outputs = workload.padded(workload.model(*padded), *padded)
            cut = {output: cut_by_hand(*outputs[output], span) for output, span in workload.spans.items()}
        return {output: rows[: len(self.ids)] for output, rows in cut.items()}

    def check(self, name: str, step: Step) -> int:
        """Compare, release, and return the number of rows compared."""
        compared = 0
        with step:
            for output, rows in self.expected(name).items():
                delivered = step.rows(output)
                wanted = {i: row for i, row in zip(self.ids, rows, strict=True) if row is not None}
                assert list(delivered) == [i for i in wanted if i not in self.aborted]
                for row_id, row in delivered.items():
                    _assert_same(row, wanted[row_id])
                    compared += 1
        return compared


def test_cases_cover_each_way() -> None:
    assert {how[0:2] for how in HOW} == set(itertools.product(("export", "opaque"), ("simulated", "inline")))
    assert [case[0] for case in CASES] == list(WORKLOADS)


@pytest.mark.parametrize(
    ("name", "trace", "on", "depth"),
    [pytest.param(*case, marks=() if case[0] in SHIPPED else (pytest.mark.slow,)) for case in CASES],
)
def test_each_row_reaches_its_own_id(name: str, trace: str, on: str, depth: int) -> None:
    workload, chance = _workload(name), random.Random(name)
    options: dict[str, Any] = {"verify": "off"} if workload.reads and trace == "opaque" else {}
    with spangraph.compile(
        workload.model,
        trace=trace,
        backend=SimulatedDevice() if on == "simulated" else "cpu",
        depth=depth,
        buckets={"batch": BUCKETS},
        **options,
    ) as run:
        run.warmup(tuple(tensor[:1] for tensor in _inputs(name)), progress=False)
        in_flight: list[tuple[Request, Step]] = []
        compared = 0
        for number, num_rows in enumerate(NUM_ROWS):
            if len(in_flight) == depth:
                request, step = in_flight.pop(0)
                compared += request.check(name, step)
            request = Request(name, num_rows, number, chance)
            step = run.launch(*request.launched, rows=request.ids)
            for tensor in request.launched:
                tensor.zero_()  # it is the caller's again, as soon as the launch has returned
            for row_id in request.aborted:
                step.withhold(row_id)
            if request.is_cancelled:
                step.cancel()
            else:
                in_flight.append((request, step))
        for request, step in in_flight:
            compared += request.check(name, step)
        assert compared >= 10
        assert (run.counts.captures, run.counts.hits) == (2, sum(n <= BUCKETS[-1] for n in NUM_ROWS))
        assert run.counts.reasons == {"batch above 8": sum(n > BUCKETS[-1] for n in NUM_ROWS)}
