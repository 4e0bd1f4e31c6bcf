"""Where steps run: what the runtime needs of a device, and the backend that runs inline on the caller's thread.

A backend hands out host-visible memory, captures and replays, and orders work by streams and events. CUDA and ROCm are
in `cuda`; the simulated device, for machines without a GPU, is `spangraph.testing.SimulatedDevice`; all three pass one
contract suite.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from spangraph.errors import InputError

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
        synchronous: whether a launch is done when it returns.
        ordered_header: whether a header seen by a polling host proves that the spans before it have landed.
        debug: whether what the contract lets die is poisoned.
        compiler: the backend of `torch.compile` that compiles graphs up to their tail, by its name.
        always_ranges: whether host work is put in a `range` though no profiler of torch's runs.
        captures_compiled: whether a capture records what compiled code does.
    """

    name: str
    device: torch.device
    static: bool
    synchronous: bool = False
    ordered_header: bool = False
    debug: bool = False
    compiler: str | None = None
    captures_compiled: bool = True
    always_ranges: bool = False

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

    def fill(self, static: Tensor, value: float | bool) -> None:
        """Enqueue `static.fill_(value)` on the current stream."""
        static.fill_(value)

    def enqueue(self, fn: Callable[[], object]) -> None:
        """Run what cannot be captured on the current stream."""
        fn()

    def before_free(self, memory: object) -> None:  # noqa: B027 - nothing to do is the default
        """Called by finalisers, on any thread, when `memory` of a ring is collected: nothing on the device may use it
        any more."""

    def begin_launch(self) -> None:  # noqa: B027
        """Called on the launching thread before a launch of a static backend, whose captures it must not meet."""

    def end_launch(self) -> None:  # noqa: B027
        """Called on the same thread once the launch was enqueued or given up."""

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Make the backend's device the current one."""
        return contextlib.nullcontext()

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A range around host work, for profilers; never a synchronisation."""
        return torch.profiler.record_function(name)

    def read(self, cursor: Tensor) -> int:
        """The value of a device word; only after `synchronize`."""
        return int(cursor.item())

    def poison(  # noqa: B027 - nothing to do is the default
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

    def pool_of(self, tensor: Tensor) -> Hashable | None:
        """While a capture runs: the memory pool of a graph that the tensor lies in; None if it lies in none, or that is
        not known."""
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
    synchronous = True
    ordered_header = True

    def __init__(self, device: torch.device | str = "cpu", *, compiler: str | None = None) -> None:
        self.compiler = checked_compiler(compiler)
        self.device = torch.device(device)
        self.debug = debug_enabled()

    def pinned(self, *shape: int, writer: str) -> Pinned:
        with torch.inference_mode(False):
            memory = torch.zeros(shape, dtype=torch.int64, device="cpu")
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


def checked_compiler(name: str | None) -> str | None:
    """The name of a `torch.compile` backend, or None.

    Raises:
        InputError: for one that is not known, or captures CUDA graphs itself.
    """
    if name is not None:
        from spangraph.compiler import check_compiler  # imports torch._dynamo

        check_compiler(name)
    return name


def resolve_backend(device: Backend | torch.device | str | None, compiles_for: torch.device | None = None) -> Backend:
    """The backend for a device: itself, inline for CPU, CUDA graphs for CUDA and ROCm.

    Args:
        compiles_for: where a name of a `torch.compile` backend is taken, too: the device that it compiles for.

    Raises:
        InputError: for any other device or name.
    """
    if isinstance(device, Backend):
        return device
    compiler = None
    try:
        resolved = torch.device(device if device is not None else "cpu")
    except (RuntimeError, TypeError) as error:
        if compiles_for is None or not isinstance(device, str):
            raise InputError(
                f"backend or device {device!r} is none that torch knows: expected cpu, cuda or a Backend."
            ) from error
        resolved, compiler = compiles_for, checked_compiler(device)
    if resolved.type == "cpu":
        return InlineBackend(compiler=compiler)
    if resolved.type == "cuda":
        from spangraph.cuda import CudaBackend

        if not torch.cuda.is_available():
            raise InputError(
                f"device {resolved}: no GPU is available to torch; use spangraph.testing.SimulatedDevice()."
            )
        return CudaBackend(resolved, compiler=compiler)
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
