"""CUDA and ROCm, through `torch.cuda.CUDAGraph`."""

from __future__ import annotations

import contextlib
import gc
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from spangraph.backends import Backend, Event, Graph, Pinned, checked_compiler, debug_enabled, poison_of, writable
from spangraph.errors import CaptureError, InputError, SpangraphError

T = TypeVar("T")


class _CaptureGate:
    """Keeps captures alone: launches and event queries may overlap each other, but not a capture by another thread.

    Shared, not a mutex: a launch may last as long as the caller's `with` block, and may wait for a reader who must
    query events meanwhile.

    Attributes:
        postponed: what finalisers could not do during a capture.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}  # thread -> how many launches and queries it is in
        self._capturing: int | None = None
        self._depth = 0
        self.postponed: deque[Callable[[], None]] = deque()

    def enter(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if me not in self._inside:
                self._changed.wait_for(lambda: self._capturing in (None, me))
            self._inside[me] = self._inside.get(me, 0) + 1

    def try_enter(self) -> bool:
        """Enter, or say that a capture is going on, on this thread or another."""
        with self._changed:
            if self._capturing is not None:
                return False
            self.enter()
            return True

    def leave(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
                self._changed.notify_all()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._capturing in (None, me) and not set(self._inside) - {me})
            self._capturing = me
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._capturing = None
                    self._changed.notify_all()
            while self._capturing is None and self.postponed:
                self.postponed.popleft()()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Run no cyclic garbage collection: a finaliser that touches the device would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class _Pool:
    """A memory pool of captures, and their stream: the allocator gives memory again on the stream that freed it."""

    handle: Any
    stream: Any


class CudaBackend(Backend):
    """CUDA and ROCm, through `torch.cuda.CUDAGraph`.

    Thin on purpose: its control flow is tested against recording fakes of the few `torch.cuda` calls below, which is
    why they are reached through `cuda`.
    """

    name = "cuda"
    static = True
    # Of the process: a launch, or an event query even by another thread, breaks a capture.
    _gate = _CaptureGate()

    def __init__(
        self, device: torch.device | str = "cuda", *, cuda: Any = torch.cuda, compiler: str | None = None
    ) -> None:
        self._cuda = cuda
        self.compiler = checked_compiler(compiler)
        self._nvtx: Any = cuda.nvtx
        try:
            self._nvtx.mark("spangraph")
            self.always_ranges = True  # nobody tells whether a tool listens
        except RuntimeError:  # a torch that was built without NVTX
            self._nvtx = None
        self.debug = debug_enabled()
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", cuda.current_device())
        # The release of the header orders the spans before it on CUDA; not on HIP with more than one wave (KERNELS.md).
        self.ordered_header = torch.version.hip is None and platform.machine() in ("x86_64", "AMD64")

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        return self._cuda.device(self.device)  # type: ignore[no-any-return]

    def begin_launch(self) -> None:
        self._gate.enter()

    def end_launch(self) -> None:
        self._gate.leave()

    def pinned(self, *shape: int, writer: str) -> Pinned:
        with torch.inference_mode(False):
            memory = torch.zeros(shape, dtype=torch.int64, device="cpu").pin_memory()
        return Pinned(memory, memory)

    def host_buffer(self, like: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(like.shape, dtype=like.dtype, device="cpu").pin_memory()

    def new_pool(self) -> _Pool:
        return _Pool(self._cuda.graph_pool_handle(), self._cuda.Stream(self.device))

    def pool_of(self, tensor: Tensor) -> Hashable | None:
        address = tensor.data_ptr()
        for segment in self._cuda.memory_snapshot():
            if segment["address"] <= address < segment["address"] + segment["total_size"]:
                pool = tuple(segment["segment_pool_id"])
                return pool if any(pool) else None  # (0, 0): ordinary memory
        return None

    def pool_bytes(self, graph: Graph | None) -> tuple[Any, int]:
        if graph is None:
            return None, 0
        pool = tuple(graph.pool())  # type: ignore[attr-defined]
        segments = self._cuda.memory_snapshot()
        return pool, sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == pool)

    def capture(
        self, fn: Callable[[], T], *, generators: Sequence[torch.Generator] = (), pool: _Pool | None = None
    ) -> tuple[Graph, T]:
        for generator in generators:
            if generator.device.type != self.device.type:
                raise InputError(
                    f"generator on {generator.device}: a captured step cannot draw from it, its state lives on the"
                    f" host. Use torch.Generator({self.device.type!r})."
                )
        cuda = self._cuda
        with self._gate.alone(), self.guard():
            graph = cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            # A private pool (None) for outputs that must survive replays of every other graph, and a new stream.
            pool = pool or _Pool(None, cuda.Stream(self.device))
            stream, current = pool.stream, cuda.current_stream(self.device)
            stream.wait_stream(current)
            try:
                with cuda.stream(stream):
                    fn()
                stream.synchronize()
                options = {"stream": stream, "pool": pool.handle, "capture_error_mode": "thread_local"}
                with _no_collection(), cuda.graph(graph, **options):
                    result = fn()
            except BaseException as error:
                graph.reset()
                pool.stream = cuda.Stream(self.device)  # one whose capture failed stays invalid
                refused = isinstance(error, RuntimeError) and not isinstance(error, SpangraphError)
                if refused and "captur" in str(error).lower():
                    raise CaptureError(f"the step cannot be captured: {error}") from error
                raise
            finally:
                current.wait_stream(stream)
        return graph, result

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        profiled = super().range(name) if profiler._is_profiler_enabled else contextlib.nullcontext()
        return profiled if self._nvtx is None else _Range(self._nvtx, name, profiled)

    def stream(self) -> Any:
        return self._cuda.current_stream(self.device)

    def record(self, stream: Any = None) -> Event:
        event = self._cuda.Event(blocking=True)
        event.record(self.stream() if stream is None else stream)
        return _GatedEvent(event, self._gate)

    def wait(self, event: Event) -> None:
        if isinstance(event, _GatedEvent):
            self.stream().wait_event(event.event)

    def synchronize(self) -> None:
        with self._gate.open():
            self._cuda.synchronize(self.device)

    def before_free(self, memory: object) -> None:
        # A drain would break a capture by this thread, and wait for one by another, which may wait for this thread.
        if sys.is_finalizing():
            return
        if not self._gate.try_enter():
            self._gate.postponed.append(lambda: self.before_free(memory))
            return
        try:
            self._cuda.synchronize(self.device)
        finally:
            self._gate.leave()

    def is_host(self, value: Tensor) -> bool:
        return value.device != self.device

    def poison(self, outputs: Sequence[Tensor], memory: Sequence[Tensor] = (), *, after: Sequence[Event] = ()) -> None:
        if not self.debug:
            return
        for event in after:
            self.wait(event)
        with self._gate.open(), self.guard():
            for tensor in (writable(whole, whole) for whole in (*outputs, *memory)):
                # A copy, for a fill of pinned memory would not wait for the stream.
                tensor.copy_(torch.full_like(tensor, poison_of(tensor.dtype), device=self.device), non_blocking=True)

    def copy_in(self, static: Tensor, value: Tensor) -> None:
        if value.device == self.device:
            value.record_stream(self.stream())
        static.copy_(value, non_blocking=True)


@dataclass(frozen=True)
class _Range:
    """An NVTX range, which costs next to nothing while no tool listens, around one of the profiler."""

    nvtx: Any
    name: str
    profiled: contextlib.AbstractContextManager[Any]

    def __enter__(self) -> None:
        self.nvtx.range_push(self.name)
        self.profiled.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.profiled.__exit__(None, None, None)
        self.nvtx.range_pop()


@dataclass(frozen=True)
class _GatedEvent:
    event: Any
    gate: _CaptureGate

    def query(self) -> bool:
        with self.gate.open():
            return bool(self.event.query())

    def synchronize(self) -> None:
        with self.gate.open():
            pass
        self.event.synchronize()
