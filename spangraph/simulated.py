"""A simulated device for machines without a GPU: an in-order asynchronous stream on a thread, as hostile as CUDA.

Use it wherever a device is asked for: `spangraph.compile(model, backend=SimulatedDevice())`,
`SpanStager(..., device=SimulatedDevice())`. Outputs are static and poisoned as soon as the contract lets them die;
kernels run only while the device is not held; what a kernel writes to the host lands only when it may; host reads
cannot be captured; a capture executes nothing; and each of its parts can be made to fail.

    device = SimulatedDevice()
    graph = device.new_graph()
    with device.graph(graph):                 # as torch.cuda.graph
        y = model(x)
    device.hold()                             # kernels wait
    graph.replay()                            # returns at once
    device.resume()
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spangraph.backends import (
    Backend,
    Event,
    Graph,
    Pinned,
    checked_compiler,
    poison_,
    preserve_generators,
    storage_bytes,
    writable,
)
from spangraph.errors import CaptureError, InputError
from spangraph.host_state import storage_key
from spangraph.tape import COMPACT, STAGE, HostReads, Op, Ref, Tape

T = TypeVar("T")


class _Gate:
    """Lets work through, or holds it until it may go on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits: int | None = None  # None: open

    def hold(self) -> None:
        with self._changed:
            self._permits = 0

    def open(self) -> None:
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def let(self, count: int) -> None:
        with self._changed:
            if self._permits is not None:
                self._permits += count
                self._changed.notify_all()

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._permits is None or self._permits > 0)
            if self._permits is not None:
                self._permits -= 1


class SimulatedEvent:
    """A point in a simulated stream."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: BaseException | None = None
        self.fail: BaseException | None = None

    def _reach(self, error: BaseException | None) -> None:
        self._error = error
        self._reached.set()

    def query(self) -> bool:
        """Whether the work before it is done; raises what that work raised."""
        if self.fail is not None:
            raise self.fail
        if not self._reached.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Block until it is."""
        if self.fail is None:
            self._reached.wait()
        self.query()


@dataclass
class _Ungated:
    """Work that is no kernel: it runs in stream order, but is neither held nor counted."""

    run: Callable[[], object]


# Running streams. A thread that is inside of torch when the interpreter ends would abort the process.
_workers: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_workers() -> None:
    for worker, items in list(_workers.items()):
        items.put(None)
        worker.join(timeout=1)  # for ever, if its device is held


class SimulatedStream:
    """An in-order queue of work with a thread of its own."""

    def __init__(self, kernels: _Gate) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | _Ungated | SimulatedEvent | None] = queue.SimpleQueue()
        worker = threading.Thread(target=_work, args=(self._queue, kernels), daemon=True, name="simulated-stream")
        worker.start()
        _workers[worker] = self._queue
        weakref.finalize(self, self._queue.put, None)

    def enqueue(self, item: Callable[[], object] | _Ungated | SimulatedEvent) -> None:
        """Append a kernel or an event."""
        self._queue.put(item)


def _work(items: queue.SimpleQueue[Callable[[], object] | _Ungated | SimulatedEvent | None], kernels: _Gate) -> None:
    error: BaseException | None = None
    while (item := items.get()) is not None:
        if isinstance(item, SimulatedEvent):
            item._reach(error)
            error = None
            continue
        if isinstance(item, _Ungated):
            kernel = item.run
        else:
            kernel = item
            kernels.enter()
        try:
            with torch.inference_mode():
                kernel()
        except BaseException as failure:  # noqa: BLE001 - surfaces at the next event, as on a device
            error = failure
        del item, kernel  # do not keep a graph alive while waiting for work


@dataclass(eq=False)  # weak references are equal where what they refer to is, and tensors compare element by element
class _Landing:
    """Memory that the host reads, and what kernels write to have it land there."""

    host: weakref.ref[Tensor]
    device: weakref.ref[Tensor]


class Pool:
    """Memory that several graphs share: a replay of one overwrites the outputs of the others."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[SimulatedGraph] = weakref.WeakSet()


class SimulatedGraph:
    """A captured graph; `replay()` enqueues it on the current stream."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._ops: list[Op] | None = None
        self._static: dict[int, Tensor] = {}
        self.pool = Pool()

    def replay(self) -> None:
        """Enqueue the captured work.

        Raises:
            CaptureError: if nothing was captured.
        """
        if self._ops is None:
            raise CaptureError("replay of a graph that was never captured: capture it with device.graph(graph).")
        self._device._raise_fault("replay")
        lost = {op for op, kind in ((STAGE, "staging"), (COMPACT, "compaction")) if self._device._take_fault(kind)}
        self._device.launch(lambda: self._run(lost))

    def _run(self, lost: set[Any]) -> None:
        assert self._ops is not None, "replay() checked"
        self._device._raise_fault("kernel")
        for other in list(self.pool.graphs):
            poison_(other._static.values())
        values: dict[int, Tensor] = {}
        for op in self._ops:
            if op.func in lost:
                continue
            leaves = [values[leaf.index] if isinstance(leaf, Ref) else leaf for leaf in op.leaves]
            args, kwargs = pytree.tree_unflatten(leaves, op.spec)
            is_tail = op.func in (STAGE, COMPACT)
            if op.func is STAGE:  # who polls its header may read the outputs at once
                self._deliver(values)
            with self._device._pinned_lock if is_tail else contextlib.nullcontext():
                out = pytree.tree_leaves(op.func(*args, **kwargs))
            values.update((i, tensor) for i, tensor in zip(op.results, out, strict=True) if i is not None)
        self._deliver(values)
        self._device._land()

    def _deliver(self, values: dict[int, Tensor]) -> None:
        for index, tensor in self._static.items():
            if index in values:
                writable(tensor, tensor).copy_(writable(values[index], tensor))


class SimulatedDevice(Backend):
    """An asynchronous device on threads of this process. Tensors are CPU tensors.

    Control: `hold`, `resume`, `let(n)` for kernels; `hold_copies`, `land_copies` for what kernels write to the host;
    `fail_next(kind)` for faults:

    | kind | what happens, once |
    | --- | --- |
    | `"capture"` | a capture raises |
    | `"replay"` | a replay raises on the launch thread; nothing is enqueued |
    | `"kernel"` | a replay raises on the device; the next event reports it |
    | `"staging"` | a replay runs without its staging node |
    | `"compaction"` | a replay runs without the node that copies rows |
    | `"copy"` | what a replay wrote to the host never lands |
    | `"late"` | what a replay wrote to the host lands after its event, with what a later one wrote |
    | `"wait"` | waiting for the next event that is recorded raises |

    `synchronize` raises what a kernel raised and no event has reported.
    """

    name = "simulated"
    static = True
    ordered_header = True
    debug = True
    captures_compiled = False  # operators are recorded, which compiled code does without

    def __init__(self, *, compiler: str | None = None) -> None:
        self.compiler = checked_compiler(compiler)
        self.device = torch.device("cpu")
        self._kernels = _Gate()
        self._copies = _Gate()
        self._faults: dict[str, list[BaseException]] = defaultdict(list)
        self._landings: list[_Landing] = []
        self._pinned_lock = threading.Lock()  # one stream lands only what another has wholly written
        self._owned: dict[int, int] = defaultdict(int)  # storages of static outputs
        self._capture = threading.RLock()
        self._capturing: tuple[Tape, Pool] | None = None
        self._streams: weakref.WeakSet[SimulatedStream] = weakref.WeakSet()
        self._default = self.new_stream()
        self._current = threading.local()

    # ---- control -------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Let no further kernel start."""
        self._kernels.hold()

    def resume(self) -> None:
        """Let kernels run."""
        self._kernels.open()

    def let(self, count: int) -> None:
        """While held: let `count` more kernels (input copies, replays, `launch`; no events, waits or poison) run."""
        self._kernels.let(count)

    def hold_copies(self) -> None:
        """Let nothing that kernels write to the host land; the stream waits there, and so do the events behind."""
        self._copies.hold()

    def land_copies(self) -> None:
        """Let it land."""
        self._copies.open()

    def fail_next(self, kind: str, error: BaseException | None = None) -> None:
        """Make one thing fail, once; see the class.

        Raises:
            InputError: for an unknown kind.
        """
        kinds = ("capture", "replay", "kernel", "staging", "compaction", "copy", "late", "wait")
        if kind not in kinds:
            raise InputError(f"fail_next({kind!r}): expected one of {', '.join(kinds)}.")
        self._faults[kind].append(error or RuntimeError(f"simulated {kind} failure"))

    def _take_fault(self, kind: str) -> BaseException | None:
        return self._faults[kind].pop(0) if self._faults[kind] else None

    def _raise_fault(self, kind: str) -> None:
        if (error := self._take_fault(kind)) is not None:
            raise error

    # ---- streams and graphs --------------------------------------------------------------------------------------

    def new_stream(self) -> SimulatedStream:
        """A further stream."""
        stream = SimulatedStream(self._kernels)
        self._streams.add(stream)
        return stream

    @contextlib.contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Make `stream` this thread's current one."""
        before = self.stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def launch(self, kernel: Callable[[], object]) -> None:
        """Enqueue any function as a kernel on the current stream."""
        self.stream().enqueue(kernel)

    def new_graph(self) -> SimulatedGraph:
        """An empty graph, to be captured with `graph()`."""
        return SimulatedGraph(self)

    @contextlib.contextmanager
    def graph(self, graph: SimulatedGraph, pool: Pool | None = None) -> Iterator[None]:
        """Capture the block into `graph`. Nothing in it is executed; what it makes is static memory of the graph.

        Memory from outside that the block updates must not be written by replays of other threads meanwhile.

        Raises:
            CaptureError: at a host read.
        """
        with self._capture:
            self.synchronize()
            tape = Tape()
            self._capturing = tape, pool or graph.pool
            try:
                with preserve_generators(self.device), HostReads(), tape:
                    self._raise_fault("capture")
                    yield
            finally:
                self._capturing = None
                static = tape.finish()
            with torch.inference_mode():
                poison_(static.values())
            graph._ops, graph._static = tape.ops, static
            graph.pool = pool or graph.pool
            graph.pool.graphs.add(graph)
            keys = {storage_key(tensor) for tensor in static.values()}
            for key in keys:
                self._owned[key] += 1
            weakref.finalize(graph, self._disown, keys)

    def _disown(self, keys: set[int]) -> None:
        for key in keys:
            self._owned[key] -= 1
            if not self._owned[key]:
                del self._owned[key]

    # ---- Backend -------------------------------------------------------------------------------------------------

    def pinned(self, *shape: int, writer: str) -> Pinned:
        with torch.inference_mode(False):
            host = torch.zeros(shape, dtype=torch.int64, device="cpu")
            if writer == "host":
                return Pinned(host, host)
            pinned = Pinned(host, torch.zeros(shape, dtype=torch.int64, device="cpu"))
        self._landings.append(_Landing(weakref.ref(pinned.host), weakref.ref(pinned.device)))
        return pinned

    def host_buffer(self, like: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty_like(like, memory_format=torch.contiguous_format)

    def is_host(self, value: Tensor) -> bool:
        return storage_key(value) not in self._owned

    def new_pool(self) -> Pool:
        return Pool()

    def pool_of(self, tensor: Tensor) -> Pool | None:
        tape, pool = self._capturing or (None, None)
        return pool if tape is not None and tape.makes(tensor) else None

    def pool_bytes(self, graph: Graph | None) -> tuple[Pool | None, int]:
        if not isinstance(graph, SimulatedGraph):
            return None, 0
        graphs = list(graph.pool.graphs)
        return graph.pool, max((storage_bytes(other._static.values()) for other in graphs), default=0)

    def capture(
        self, fn: Callable[[], T], *, generators: Sequence[torch.Generator] = (), pool: Pool | None = None
    ) -> tuple[Graph, T]:
        graph = self.new_graph()
        with self._capture:
            self.synchronize()
            fn()  # warm-up
            with self.graph(graph, pool):
                result = fn()
        return graph, result

    def stream(self) -> SimulatedStream:
        stream: SimulatedStream | None = getattr(self._current, "stream", None)
        return stream or self._default

    def record(self, stream: SimulatedStream | None = None) -> Event:
        event = SimulatedEvent()
        event.fail = self._take_fault("wait")
        (stream or self.stream()).enqueue(event)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent), "recorded by this device"
        self.stream().enqueue(_Ungated(event._reached.wait))  # its failure is the recording stream's

    def synchronize(self) -> None:
        events = []
        for stream in list(self._streams):
            events.append(SimulatedEvent())
            stream.enqueue(events[-1])
        for event in events:
            event._reached.wait()
        for event in events:
            event.query()

    def copy_in(self, static: Tensor, value: Tensor) -> None:
        def copy() -> None:
            static.copy_(value)

        self.launch(copy)

    def fill(self, static: Tensor, value: float | bool) -> None:
        self.launch(lambda: static.fill_(value))

    def enqueue(self, fn: Callable[[], object]) -> None:
        def run() -> None:
            with self._pinned_lock:
                fn()
            self._land()

        self.launch(run)

    def poison(self, outputs: Sequence[Tensor], memory: Sequence[Tensor] = (), *, after: Sequence[Event] = ()) -> None:
        mine = [tensor for tensor in outputs if storage_key(tensor) in self._owned]
        mine += memory
        if mine:
            for event in after:
                self.wait(event)
            self.stream().enqueue(_Ungated(lambda: poison_(mine)))

    def _land(self) -> None:
        self._copies.enter()
        with self._pinned_lock:
            lost, late = self._take_fault("copy") is not None, self._take_fault("late") is not None
            if late:
                return
            alive = []
            for landing in list(self._landings):
                host, device = landing.host(), landing.device()
                if host is None or device is None:
                    self._landings.remove(landing)
                else:
                    alive.append((host, device))
            if lost:
                for host, device in alive:
                    device.copy_(host)  # so that no later landing brings it
                return
            for host, device in alive:
                host[:, 2:].copy_(device[:, 2:])
            for host, device in reversed(alive):  # headers land last, and those of spans after all copies
                host[:, :2].copy_(device[:, :2])
