"""A small engine for tests: graphs captured by hand on a simulated device, fed in stream order, one SpanStager."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from spangraph import Copy, Rows, Span, SpannedOutput, SpanStager, Step
from spangraph.ring import Ring
from spangraph.testing import Pool, SimulatedDevice, SimulatedGraph

# The test runs once with rows that are views, and once for each kind of copy.
EACH_LIFETIME = pytest.mark.usefixtures("each_lifetime")

# What one `Engine.launch` enqueues that `SimulatedDevice.let` counts: the input copy and the replay.
KERNELS_PER_LAUNCH = 2


@dataclass(frozen=True)
class Batch:
    """Inputs of one launch: `x` [bs, width], `spans` [bs, 2] and `token` [bs] int64."""

    x: Tensor
    spans: Tensor
    token: Tensor

    @staticmethod
    def random(bs: int = 4, width: int = 6) -> Batch:
        """Fresh values; starts and ends anywhere, some rows empty."""
        edges = torch.randint(0, width + 1, (bs, 2)).sort(1).values
        return Batch(torch.randn(bs, width), edges, torch.randint(-(2**62), 2**62, (bs,)))

    @staticmethod
    def of(spans: Sequence[Sequence[int]], width: int = 6) -> Batch:
        """Fresh values under these spans."""
        bs = len(spans)
        return Batch(torch.randn(bs, width), torch.tensor(spans), torch.randint(0, 2**62, (bs,)))

    @property
    def padded(self) -> Tensor:
        """What the engine's model makes of `x`."""
        return self.x * 2 + 1

    def rows(self, ids: Iterable[Hashable] | None = None) -> dict[Hashable, Tensor]:
        """The rows that must be delivered for these ids of the first rows; for all rows by position if None."""
        names = range(len(self.x)) if ids is None else ids
        cut = {
            name: padded[start:end]
            for name, padded, (start, end) in zip(names, self.padded, self.spans.tolist(), strict=False)
        }
        return {name: row for name, row in cut.items() if len(row)}


class Lane:
    """One captured graph of `x * 2 + 1`, with static inputs of its own."""

    def __init__(
        self, device: SimulatedDevice, stager: SpanStager, bs: int, width: int, *, spanned: bool, slot: int | None
    ) -> None:
        self.x = torch.zeros(bs, width)
        self.spans = torch.zeros(bs, 2, dtype=torch.int64)
        self.token = torch.zeros(bs, dtype=torch.int64)
        self.graph = device.new_graph()
        with device.graph(self.graph):
            audio = self.x * 2 + 1
            self.tail = stager.stage(
                SpannedOutput(
                    {"audio": audio}, {"audio": self.spans} if spanned else {}, {"token": self.token.clone()}
                ),
                slot=slot,
            )

    def feed(self, batch: Batch) -> None:
        """Write the static inputs; to be run on the device."""
        self.x.copy_(batch.x)
        self.spans.copy_(batch.spans)
        self.token.copy_(batch.token)


class Engine:
    """Graphs in turn, as many as steps may be in flight.

    Args:
        lanes: number of graphs; default one per step of depth, as their outputs are leased.
        spanned: whether the graphs stage spans, or the row value `token` alone, whose steps lease nothing.
        copies: the lifetime of the rows; default `Engine.lifetime`.
    """

    lifetime: ClassVar[str] = "view"

    def __init__(
        self,
        device: SimulatedDevice | None = None,
        *,
        depth: int = 1,
        lanes: int | None = None,
        bs: int = 4,
        width: int = 6,
        spanned: bool = True,
        staging: str = "kernel",
        wait: str = "block",
        copies: Copy | str | None = None,
    ) -> None:
        self.device = device or SimulatedDevice()
        copies = copies or (self.lifetime if staging == "kernel" else "view")
        if copies in ("device", "host"):
            copies = Copy(str(copies), capacity=bs * -(-4 * width // 16) * 16)
        self.stager = SpanStager(
            {"audio": Span()},
            max_rows=bs,
            row_values=["token"],
            copies={"audio": copies},
            depth=depth,
            device=self.device,
            staging=staging,
            wait=wait,
        )
        slots = range(depth) if staging == "copy" else [None] * (lanes or depth)
        self.lanes = [Lane(self.device, self.stager, bs, width, spanned=spanned, slot=slot) for slot in slots]
        self._turn = 0

    @property
    def ring(self) -> Ring:
        """The stager's ring, for what no caller can see."""
        return self.stager._core.ring

    def launch(
        self,
        batch: Batch,
        rows: Sequence[Hashable] | None = None,
        *,
        lane: int | None = None,
        num_rows: int | None = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Step:
        """Feed and replay the next graph, or the one asked for."""
        graph = self.lanes[self._turn % len(self.lanes) if lane is None else lane]
        with graph.tail.step(rows, num_rows=num_rows, wait=wait, timeout=timeout) as step:
            self.device.launch(lambda: graph.feed(batch))
            graph.graph.replay()
        self._turn += 1  # a refused launch does not take its turn
        return step


def captured(
    device: SimulatedDevice, fn: Callable[[], Tensor], pool: Pool | None = None
) -> tuple[SimulatedGraph, Tensor]:
    """A graph of `fn`, and its static output."""
    graph = device.new_graph()
    with device.graph(graph, pool=pool):
        y = fn()
    return graph, y


def assert_rows(rows: Rows, expected: Mapping[Any, Tensor]) -> None:
    """Same ids in the same order, same values."""
    assert list(rows) == list(expected)
    assert len(rows) == len(expected)
    for row_id, value in expected.items():
        delivered = rows[row_id]
        assert isinstance(delivered, Tensor)
        torch.testing.assert_close(delivered, value, rtol=0, atol=0)
