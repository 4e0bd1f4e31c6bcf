"""Recording fakes of the few `torch.cuda` calls that `CudaBackend` makes, on a simulated device.

They refuse what CUDA refuses: pinning memory, querying an event or synchronising while a stream captures. An event that
was never recorded answers "complete", as CUDA's does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spangraph.backends import storage_bytes
from spangraph.testing import Pool, SimulatedDevice, SimulatedEvent, SimulatedStream

REFUSED = "operation not permitted when stream is capturing"


class FakeStream:
    """`torch.cuda.Stream`: streams are equal if they are the same queue."""

    def __init__(self, cuda: FakeCuda, queue: SimulatedStream, name: str) -> None:
        self.cuda, self.queue, self.name = cuda, queue, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.queue is other.queue

    def __hash__(self) -> int:
        return id(self.queue)

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.note("wait_stream", self.name, other.name)
        event = self.cuda.simulated.record(other.queue)
        with self.cuda.simulated.use_stream(self.queue):
            self.cuda.simulated.wait(event)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.note("wait_event", self.name, event.name)
        assert event.point is not None, "recorded"
        with self.cuda.simulated.use_stream(self.queue):
            self.cuda.simulated.wait(event.point)

    def synchronize(self) -> None:
        self.cuda.note("synchronize_stream", self.name)
        self.cuda.simulated.record(self.queue).synchronize()


class FakeEvent:
    """`torch.cuda.Event`."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.point: SimulatedEvent | None = None

    def record(self, stream: FakeStream) -> None:
        self.cuda.note("record", self.name, stream.name)
        point = self.cuda.simulated.record(stream.queue)
        assert isinstance(point, SimulatedEvent)
        self.point = point

    def query(self) -> bool:
        self.cuda.refuse_while_capturing()
        return self.point is None or self.point.query()

    def synchronize(self) -> None:
        if self.point is not None:
            self.point.synchronize()


class FakeGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.captured = cuda.simulated.new_graph()

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.cuda.note("register_generator", str(generator.initial_seed()))

    def replay(self) -> None:
        self.cuda.note("replay", self.cuda.current_stream().name)
        self.captured.replay()

    def reset(self) -> None:
        self.cuda.note("reset")

    def pool(self) -> tuple[int, int]:
        return self.cuda.handle_of(self.captured.pool)


class FakeNvtx:
    """`torch.cuda.nvtx`: ranges are `(name, depth)` as they are opened."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int]] = []
        self.depth = 0

    def mark(self, name: str) -> None:
        pass

    def range_push(self, name: str) -> None:
        self.ranges.append((name, self.depth))
        self.depth += 1

    def range_pop(self) -> None:
        self.depth -= 1


class FakeCuda:
    """Stands in for the module `torch.cuda`.

    Attributes:
        nvtx: ranges of host work.
        log: the calls, in order, without the device argument.
        capturing: whether some thread captures.
    """

    def __init__(self) -> None:
        self.simulated = SimulatedDevice()
        self.nvtx = FakeNvtx()
        self.log: list[tuple[str, ...]] = []
        self.capturing = False
        self._capturer = 0
        self._is_broken = False
        self._names: dict[int, str] = {id(self.simulated.stream()): "default"}
        self._num_events = 0
        self._pools: dict[tuple[int, int], Pool] = {}
        self._current = threading.local()

    def note(self, *call: str) -> None:
        self.log.append(call)

    def calls(self, *names: str) -> list[tuple[str, ...]]:
        """The calls with these names, in order."""
        return [call for call in self.log if call[0] in names]

    def refuse_while_capturing(self) -> None:
        """Fail, and break the capture, as a call that CUDA does not permit does."""
        if self.capturing:
            self._is_broken = True
            raise RuntimeError(REFUSED)

    # ---- the module's functions ----------------------------------------------------------------------------------

    def current_device(self) -> int:
        index: int | None = self._device.index
        return index or 0

    @property
    def _device(self) -> torch.device:
        device: torch.device = getattr(self._current, "device", torch.device("cuda", 0))
        return device

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self._device
        self._current.device = device
        try:
            yield
        finally:
            self._current.device = before

    def is_current(self, device: torch.device) -> bool:
        """Whether `device` is the thread's current one."""
        return self._device == device

    def synchronize(self, device: torch.device) -> None:
        if threading.get_ident() == self._capturer:
            self.refuse_while_capturing()
        self.note("synchronize")
        if threading.current_thread().name != "simulated-stream":  # a finaliser may run anywhere, also on the device
            self.simulated.synchronize()

    def Stream(self, device: torch.device) -> FakeStream:
        queue = self.simulated.new_stream()
        name = self._names.setdefault(id(queue), f"stream {len(self._names)}")
        return FakeStream(self, queue, name)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        queue = self.simulated.stream()
        return FakeStream(self, queue, self._names.get(id(queue), "another"))

    def stream(self, stream: FakeStream) -> contextlib.AbstractContextManager[None]:
        return self.simulated.use_stream(stream.queue)

    def Event(self, *, blocking: bool) -> FakeEvent:
        assert blocking, "a waiting thread must not spin"
        self._num_events += 1
        return FakeEvent(self, f"event {self._num_events}")

    def graph_pool_handle(self) -> tuple[int, int]:
        return self.handle_of(Pool())

    def handle_of(self, pool: Pool) -> tuple[int, int]:
        """The handle that stands for a pool."""
        for handle, known in self._pools.items():
            if known is pool:
                return handle
        self._pools[0, len(self._pools) + 1] = pool
        return 0, len(self._pools)

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [
            {"segment_pool_id": handle, "total_size": storage_bytes(graph._static.values())}
            for handle, pool in self._pools.items()
            for graph in pool.graphs
        ]

    def CUDAGraph(self) -> FakeGraph:
        self.note("new_graph")
        return FakeGraph(self)

    @contextlib.contextmanager
    def graph(
        self, graph: FakeGraph, *, stream: FakeStream, pool: tuple[int, int] | None, capture_error_mode: str
    ) -> Iterator[None]:
        self.note("capture", stream.name, capture_error_mode)
        shared = None if pool is None else self._pools[pool]
        with self.simulated.use_stream(stream.queue), self.simulated.graph(graph.captured, shared):
            self.capturing, self._capturer, self._is_broken = True, threading.get_ident(), False
            try:
                yield
            finally:
                self.capturing, self._capturer = False, 0
                self.note("captured")
        if self._is_broken:
            raise RuntimeError("capture was broken by another call")

    # ---- what tensors do -----------------------------------------------------------------------------------------

    def patch_tensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let CPU tensors pin, note streams, and copy asynchronously where that is asked for."""
        copy, fill = Tensor.copy_, Tensor.fill_

        def pin_memory(tensor: Tensor) -> Tensor:
            self.refuse_while_capturing()
            self.note("pin_memory")
            return tensor

        def record_stream(tensor: Tensor, stream: FakeStream) -> None:
            self.note("record_stream", stream.name)

        def on_device() -> bool:
            return self.capturing or threading.current_thread().name == "simulated-stream"

        def copy_(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if on_device() or not non_blocking:
                return copy(tensor, source)
            self.note("copy", self.current_stream().name)
            self.simulated.launch(lambda: copy(tensor, source))
            return tensor

        def fill_(tensor: Tensor, value: int) -> Tensor:
            if on_device():
                return fill(tensor, value)
            self.note("fill", self.current_stream().name)
            self.simulated.launch(lambda: fill(tensor, value))
            return tensor

        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(Tensor, "record_stream", record_stream)
        monkeypatch.setattr(Tensor, "copy_", copy_)
        monkeypatch.setattr(Tensor, "fill_", fill_)


class Slow:
    """A function whose capture lasts until it is told to end."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.entered, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> Tensor:
        if self.cuda.capturing:
            self.entered.set()
            assert self.may_end.wait(60)
        return torch.ones(2) * 2
