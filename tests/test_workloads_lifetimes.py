"""Real networks under each lifetime of their rows, on the simulated device: rows equal plain indexing, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import spangraph
from spangraph import Copy
from spangraph.kernels.compact import pcm16
from spangraph.testing import SimulatedDevice

from .test_workloads import SHIPPED, WORKLOADS, _assert_rows, _batches, _eager, _expected, _ids, _workload
from .workloads.common import Row

LIFETIMES = ("view", "device", "host", "pcm")
DEPTHS = (1, 2, 4)
TRACES = ("export", "opaque")

# Each pair of (workload, lifetime, depth) values occurs; the ways to trace go round them.
CASES = [
    (name, lifetime, DEPTHS[(i + j) % len(DEPTHS)], TRACES[(i + j // 2) % len(TRACES)])
    for i, name in enumerate(WORKLOADS)
    for j, lifetime in enumerate(LIFETIMES)
]

pytestmark = pytest.mark.usefixtures("one_thread")


def _cast(row: Row) -> Any:
    if isinstance(row, tuple):
        return tuple(_cast(part) for part in row)
    return pcm16(row) if isinstance(row, Tensor) and row.is_floating_point() else row


def _copy(lifetime: str, rows: list[Row]) -> Copy:
    """`"pcm"` is a cast in a ring on the device, for outputs that are floats."""
    floats = all(row is None or (row[0] if isinstance(row, tuple) else row).is_floating_point() for row in rows)
    if lifetime == "pcm":
        return Copy("device", dtype=torch.int16 if floats else None)
    return Copy(lifetime)


def test_cases_cover_each_pair() -> None:
    for first, second in itertools.combinations(range(3), 2):
        pairs = {(case[first], case[second]) for case in CASES}
        assert pairs == set(itertools.product({case[first] for case in CASES}, {case[second] for case in CASES}))


@pytest.mark.parametrize(
    ("name", "lifetime", "depth", "trace"),
    [pytest.param(*case, marks=() if case[0] in SHIPPED else (pytest.mark.slow,)) for case in CASES],
)
def test_rows_equal_plain_indexing(name: str, lifetime: str, depth: int, trace: str) -> None:
    """Of `depth` steps that are open at once, with different inputs; read last first, then owned."""
    workload = _workload(name)
    expected = [_expected(name, batch) for batch in range(2)]
    if lifetime == "pcm":
        expected = [{n: [_cast(row) for row in rows] for n, rows in each.items()} for each in expected]
    uncaptured = workload.reads and trace == "opaque"
    with spangraph.compile(
        workload.model,
        trace=trace,
        backend=SimulatedDevice(),
        depth=depth,
        copies={n: _copy(lifetime, rows) for n, rows in _expected(name, 0).items()},
        verify="off" if uncaptured else "error",
    ) as compiled:
        batches = _batches(name)
        ids = _ids(batches[0])
        for _ in range(2):
            open_steps = [(b % 2, compiled.launch(*batches[b % 2], rows=ids)) for b in range(depth)]
            for batch, step in reversed(open_steps):
                with step, contextlib.ExitStack() as later:
                    for output, rows in expected[batch].items():
                        _assert_rows(step.rows(output), ids, rows)
                        later.callback(_assert_rows, step.rows(output).own(), ids, rows)
                    for value, numbers in workload.row_values(_eager(name, batch)).items():
                        assert torch.equal(step.row_values(value), numbers)
                    step.release()
        assert compiled.counts.overflows == 0
        moved = compiled.counts.host_bytes + compiled.counts.device_bytes
        assert (moved > 0) == (lifetime != "view")
