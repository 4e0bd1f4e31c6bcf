"""Where steps run: inline on the caller's thread, or captured and replayed on CUDA/ROCm.

A backend hands out host-visible memory, captures and replays, and orders work by streams and events. The simulated
device, for machines without a GPU, is `spangraph.testing.SimulatedDevice`; all three pass one contract suite.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from spangraph.errors import CaptureError, InputError, SpangraphError

T = TypeVar("T")


def debug_enabled() -> bool:
    """Whether `SPANGRAPH_DEBUG` is on.

    Raises:
        ValueError: if the variable is neither "0", "1" nor empty.
    """
    value = os.environ.get("SPANGRAPH_DEBUG", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"SPANGRAPH_DEBUG={value!r}: expected 0 or 1.")
    return value == "1"


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before it is done; raises what that work raised."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until it is."""
        ...


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Enqueue the captured work on the current stream."""
        ...


@dataclass(frozen=True)
class Pinned:
    """Host-visible memory: what the host reads and writes, and what a kernel is given. One tensor on CUDA."""

    host: Tensor
    device: Tensor


class Backend(ABC):
    """What the runtime needs of a device.

    Attributes:
        device: where model tensors live.
        static: whether a replay writes its outputs to the same memory as the last one. Where it does not, outputs are
            fresh tensors at every launch.
        ordered_header: whether a header seen by a polling host proves that the spans before it have landed.
        debug: whether what the contract lets die is poisoned.
    """

    name: str
    device: torch.device
    static: bool
    ordered_header: bool = False
    debug: bool = False

    @abstractmethod
    def pinned(self, *shape: int, writer: str) -> Pinned:
        """Zeroed int64 memory that host and device both reach; `writer` is `"host"` or `"device"`."""

    @abstractmethod
    def host_buffer(self, like: Tensor) -> Tensor:
        """Memory shaped like `like` from which a copy to the device is asynchronous."""

    @abstractmethod
    def is_host(self, value: Tensor) -> bool:
        """Whether the caller may overwrite `value` before work that was enqueued earlier has read it."""

    @abstractmethod
    def capture(
        self, fn: Callable[[], T], *, generators: Sequence[torch.Generator] = (), pool: Any = None
    ) -> tuple[Graph, T]:
        """Warm `fn` up and capture it, with memory of its own or in a pool; returns the graph and what `fn` returned.

        Raises:
            CaptureError: if the device refuses; what `fn` itself raises is passed on. Either way the backend is usable.
        """

    @abstractmethod
    def stream(self) -> Any:
        """The current stream of this thread; compared by equality."""

    @abstractmethod
    def record(self, stream: Any = None) -> Event:
        """A new event, recorded on `stream`, by default the current one."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let the current stream wait for `event`, on the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all work is done."""

    @abstractmethod
    def copy_in(self, static: Tensor, value: Tensor) -> None:
        """Enqueue `static.copy_(value)` on the current stream."""

    def fill(self, static: Tensor, value: int) -> None:
        """Enqueue `static.fill_(value)` on the current stream."""
        static.fill_(value)

    def enqueue(self, fn: Callable[[], object]) -> None:
        """Run what cannot be captured on the current stream."""
        fn()

    def before_free(self, memory: object) -> None:  # noqa: B027 - nothing to do is the default
        """Called by finalisers, on any thread, when `memory` of a ring is collected: nothing on the device may use it
        any more."""

    def begin_launch(self) -> None:  # noqa: B027
        """Called on the launching thread before a launch, where captures and launches must not meet."""

    def end_launch(self) -> None:  # noqa: B027
        """Called on the same thread once the launch was enqueued or given up."""

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Make the backend's device the current one."""
        return contextlib.nullcontext()

    def read(self, cursor: Tensor) -> int:
        """The value of a device word; only after `synchronize`."""
        return int(cursor.item())

    def poison(  # noqa: B027
        self, outputs: Sequence[Tensor], memory: Sequence[Tensor] = (), *, after: Sequence[Event] = ()
    ) -> None:
        """Overwrite what the contract lets die, in stream order, and after the events of streams that still read it.
        Does nothing where debugging is off.

        Args:
            outputs: of a graph, or of a function that ran inline.
            memory: bytes of a ring, on the device or on the host.
        """

    def new_pool(self) -> Any:
        """Memory for graphs whose outputs nobody keeps, to be shared by their captures."""
        return None

    def pool_bytes(self, graph: Graph | None) -> tuple[Any, int]:
        """Which memory pool a graph has, and the pool's bytes; 0 where graphs have none."""
        return None, 0


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_DONE = _Done()


def writable(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` without the copies of elements that an expanded `like` has: torch refuses to write those."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory in which tensors lie, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def poison_of(dtype: torch.dtype) -> float | int | bool:
    """NaN; of ints the smallest, of bytes the largest, which makes NaN of any float that lies in them."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    info = torch.iinfo(dtype)
    return info.min or info.max


def poison_(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with what `poison_of` says."""
    with torch.inference_mode():
        for tensor in tensors:
            writable(tensor, tensor).fill_(poison_of(tensor.dtype))


@dataclass
class _Function:
    """The inline backend's graph: a function that is called again at each replay."""

    fn: Callable[[], Any]

    def replay(self) -> None:
        replaying = _replaying.stack
        replaying.append(self)
        try:
            self.fn()
        finally:
            replaying.pop()


class _Replaying(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Function] = []


_replaying = _Replaying()


class InlineBackend(Backend):
    """Runs on the calling thread, on CPU: a launch is done when it returns, and outputs are fresh tensors.

    Under `SPANGRAPH_DEBUG=1` outputs are overwritten as soon as the contract lets them die, as on CUDA.
    """

    name = "inline"
    static = False
    ordered_header = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.debug = debug_enabled()

    def pinned(self, *shape: int, writer: str) -> Pinned:
        with torch.inference_mode(False):
            memory = torch.zeros(shape, dtype=torch.int64)
        return Pinned(memory, memory)

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def capture(
        self, fn: Callable[[], T], *, generators: Sequence[torch.Generator] = (), pool: Any = None
    ) -> tuple[Graph, T]:
        graph = _Function(fn)
        _replaying.stack.append(graph)
        try:
            return graph, fn()
        finally:
            _replaying.stack.pop()

    def current_graph(self) -> object | None:
        """The graph whose function is running, so that a stager finds the tail it made for it."""
        return _replaying.stack[-1] if _replaying.stack else None

    def stream(self) -> Any:
        return None

    def record(self, stream: Any = None) -> Event:
        return _DONE

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def is_host(self, value: Tensor) -> bool:
        return False  # nothing is ever enqueued

    def copy_in(self, static: Tensor, value: Tensor) -> None:
        static.copy_(value)

    def poison(self, outputs: Sequence[Tensor], memory: Sequence[Tensor] = (), *, after: Sequence[Event] = ()) -> None:
        if self.debug:
            poison_([*outputs, *memory])


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

    def __init__(self, device: torch.device | str = "cuda", *, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
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
            memory = torch.zeros(shape, dtype=torch.int64).pin_memory()
        return Pinned(memory, memory)

    def host_buffer(self, like: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(like.shape, dtype=like.dtype).pin_memory()

    def new_pool(self) -> _Pool:
        return _Pool(self._cuda.graph_pool_handle(), self._cuda.Stream(self.device))

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


def resolve_backend(device: Backend | torch.device | str | None) -> Backend:
    """The backend for a device: itself, inline for CPU, CUDA graphs for CUDA and ROCm.

    Raises:
        InputError: for any other device.
    """
    if isinstance(device, Backend):
        return device
    try:
        resolved = torch.device(device if device is not None else "cpu")
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"backend or device {device!r} is none that torch knows: expected cpu, cuda or a Backend."
        ) from error
    if resolved.type == "cpu":
        return InlineBackend()
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                f"device {resolved}: no GPU is available to torch; use spangraph.testing.SimulatedDevice()."
            )
        return CudaBackend(resolved)
    raise InputError(f"no backend for device {resolved}: expected cpu, cuda or a spangraph Backend.")


@contextlib.contextmanager
def preserve_generators(device: torch.device, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put the default generators of CPU and `device`, and `generators`, back to where they were."""
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
