"""The ring: pinned slots, control records, generations, and the order of launches.

Protocol, per launch n: the host reserves a free slot, writes the control record (n, slot, number of real rows, graph)
to `control[(n - 1) % K]`, and replays. The staging node finds the record by a device cursor, writes spans and row
values into the slot, then n into its header, and advances the cursor. The slot is free again as soon as the host has
copied it out; the control record is rewritten only after launch n is done, which K = number of slots guarantees: every
launch that is not known to be done holds a slot.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spangraph.backends import Backend, Event, Pinned
from spangraph.errors import ClosedError, RingFullError, StagingError, StepStateError, StepTimeoutError
from spangraph.kernels.stage import CONTROL_WORDS, HEADER_WORDS

if TYPE_CHECKING:
    from spangraph.stager import Tail

_WORD = 8
# Slots beyond the depth: a slot whose wait failed, or whose step was dropped in flight, is not free yet.
_SPARE_SLOTS = 2
# Back-off of polled waits, in seconds: the first is below a replay's length, the last costs no CPU worth speaking of.
_FIRST_SLEEP, _LAST_SLEEP = 20e-6, 1e-3


@dataclass(frozen=True)
class Layout:
    """Where each column lies in a slot: name -> (first word, words per row)."""

    columns: Mapping[str, tuple[int, int]]
    num_rows: int
    num_words: int

    @staticmethod
    def of(widths: Mapping[str, int], num_rows: int) -> Layout:
        """Columns one after the other behind the header, each with room for `num_rows` rows."""
        columns, word = {}, HEADER_WORDS
        for name, width in widths.items():
            columns[name] = (word, width)
            word += width * num_rows
        return Layout(columns, num_rows, word + word % 2)


class SlotBuffer:
    """Pinned memory of one layout, one row per slot of the ring."""

    def __init__(self, backend: Backend, layout: Layout, num_slots: int) -> None:
        self.layout = layout
        self.memory: Pinned = backend.pinned(num_slots, layout.num_words, writer="device")
        address = self.memory.host.data_ptr()
        self._words = (ctypes.c_int64 * (num_slots * layout.num_words)).from_address(address)
        self._bytes = memoryview(self._words).cast("B")

    def header(self, slot: int) -> int:
        """The generation that the slot holds."""
        return int(self._words[slot * self.layout.num_words])

    def copy_out(self, slot: int) -> memoryview:
        """A private copy of the slot's words."""
        size = self.layout.num_words * _WORD
        return memoryview(bytes(self._bytes[slot * size : (slot + 1) * size])).cast("q")


@dataclass(eq=False, slots=True)
class Launch:
    """What the ring knows of one launch. `Step` is the caller's handle to it."""

    tail: Tail
    generation: int
    slot: int | None  # None: nothing is staged, or the slot was freed
    row_ids: Sequence[Hashable] | None
    num_rows: int
    outputs: Sequence[Tensor] = ()
    event: Event | None = None
    words: memoryview | None = None
    error: BaseException | None = None
    is_read: bool = False
    is_released: bool = False
    withheld: set[tuple[int, str | None]] | None = None
    lock: Any = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        state = "released" if self.is_released else "leased" if self.is_read else "open"
        rows = "" if self.row_ids is None else f", rows {list(self.row_ids)[:4]}"
        return f"step {self.generation} ({state}, graph {self.tail.graph}{rows})"


class Ring:
    """One launch order over a few slots; shared by all graphs of a compiled object or stager.

    The lock is the launch order: it is held from a launch's reservation to its event. Waits do not hold it.
    """

    def __init__(self, backend: Backend, *, depth: int, num_slots: int | None = None, wait: str = "block") -> None:
        if not isinstance(depth, int) or depth < 1:
            raise StepStateError(f"depth={depth!r}: expected an int of at least 1.")
        if wait not in ("block", "spin", "header"):
            raise StepStateError(f"wait={wait!r}: expected 'block', 'spin' or 'header'.")
        if wait == "header" and not backend.ordered_header:
            raise StepStateError(f"wait='header' needs an ordered header, which {backend.name} does not prove; spin.")
        self.backend = backend
        self.depth = depth
        self.wait_kind = wait
        self.num_slots = num_slots or depth + _SPARE_SLOTS
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.control = backend.pinned(self.num_slots, CONTROL_WORDS, writer="host")
        self._control = (ctypes.c_int64 * (self.num_slots * CONTROL_WORDS)).from_address(self.control.host.data_ptr())
        with torch.inference_mode(False):
            self.cursor = torch.zeros(1, dtype=torch.int64, device=backend.device)
        self._next = 1
        self._done = 0  # newest generation known to be done; all before it are, as one order runs them
        self._free = deque(range(self.num_slots))
        self._quarantine: list[tuple[int, int]] = []  # (slot, generation whose end is not known)
        self._live: dict[int, Launch] = {}  # by ticket: open or leased
        self._dying: list[Launch] = []  # dropped before they were done
        self._dropped: deque[Launch] = deque()  # by finalisers, which do nothing else
        self._consumers: list[tuple[Any, Event]] = []  # streams that may still read released memory
        self._last: tuple[Any, Event] | None = None
        self._rebase_due = False
        self._reserved: Launch | None = None
        self._waiters = 0
        self.is_closed = False

    # ---- reserve, commit, abort: the three ends of a launch, all under the lock ---------------------------------

    def reserve(
        self, tails: Sequence[Tail], row_ids: Sequence[Hashable] | None, num_rows: int, *, wait: bool = False,
        timeout: float | None = None,
    ) -> Launch:
        """Take a slot and the first free one of `tails`, and write the control record.

        Never touches the device, except to re-base after an error.

        Raises:
            ClosedError: after `close`.
            StepStateError: inside another launch of this ring.
            RingFullError: if `depth` steps are open or leased, or the graph's outputs are (and `wait` is false).
            StepTimeoutError: if waiting for room took longer than `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        sleep = _FIRST_SLEEP
        if self._reserved is not None:
            raise StepStateError(f"a launch inside the launch of {self._reserved}: end that one first.")
        while True:
            if self.is_closed:
                raise ClosedError("launch on a closed object: compile the model (or build the stager) again.")
            self._reap()
            if len(self._live) < self.depth:
                tail = self._free_tail(tails)
                if tail is not None:
                    break
            problem = self._why_full(tails[0])
            if not wait:
                raise RingFullError(problem)
            if deadline is not None and time.monotonic() > deadline:
                raise StepTimeoutError(f"no room for a launch within {timeout} s: {problem}\n{self.describe()}")
            self._waiters += 1
            try:
                self._changed.wait(sleep)
            finally:
                self._waiters -= 1
            sleep = min(sleep * 2, _LAST_SLEEP)
        if self._rebase_due:
            self._rebase()
        if not tail.columns:
            launch = Launch(tail, self._next, None, row_ids, num_rows)
        else:
            slot = self._take_slot(tail)
            launch = Launch(tail, self._next, slot, row_ids, num_rows)
            base = (self._next - 1) % self.num_slots * CONTROL_WORDS
            self._control[base : base + CONTROL_WORDS] = (self._next, slot, num_rows, tail.graph)
            self._next += 1
        self._live[id(launch)] = launch
        if tail.keeps_outputs and self.backend.static:
            tail.occupant = launch
        self._reserved = launch
        self._order()
        return launch

    def commit(self, launch: Launch, outputs: Sequence[Tensor]) -> Event:
        """The launch was enqueued: record its event on the stream that replayed it."""
        launch.outputs = outputs
        launch.event = self.backend.record()
        self._reserved = None
        self._last = (self.backend.stream(), launch.event)
        return launch.event

    def abort(self, launch: Launch) -> None:
        """The launch raised half-way: drain, read the cursor, re-base, so that the next launch is in step."""
        self._reserved = None
        self._live.pop(id(launch), None)
        if launch.tail.occupant is launch:
            launch.tail.occupant = None
        self._fail(launch, StepStateError(f"{launch}: its launch raised, so it holds no values."))
        launch.is_released = True
        self._rebase()

    def _rebase(self) -> None:
        """After an error: drain, and count on from what the device says it staged."""
        self.backend.synchronize()
        staged = self.backend.read(self.cursor)
        for launch in [*self._live.values(), *self._dying]:
            if launch.slot is not None and launch.generation > staged:
                self._fail(launch, _not_staged(launch))
        self._next, self._done = staged + 1, staged
        self._free.extend(slot for slot, _ in self._quarantine)  # drained: nothing writes to them any more
        self._quarantine.clear()
        self._rebase_due = False

    def _order(self) -> None:
        """Let this launch follow the last one, and every consumer of memory that it may overwrite, on the device."""
        if not self.backend.static or (self._last is None and not self._consumers):
            return
        stream = self.backend.stream()
        if self._last is not None and self._last[0] != stream:
            self.backend.wait(self._last[1])
        for consumer, event in self._consumers:
            if consumer != stream:
                self.backend.wait(event)
        self._consumers.clear()

    # ---- room --------------------------------------------------------------------------------------------------

    def _free_tail(self, tails: Sequence[Tail]) -> Tail | None:
        for tail in tails:
            if tail.occupant is None and (not tail.columns or self._find_slot(tail) is not None):
                return tail
        return None

    def _why_full(self, tail: Tail) -> str:
        if len(self._live) >= self.depth:
            names = ", ".join(str(launch) for launch in self._live.values())
            return (
                f"depth={self.depth} and {len(self._live)} steps are open or leased: {names}. Release one (with step: ...,"
                " or step.release()), keep its rows with rows.own(), raise depth, or launch with wait=True."
            )
        if tail.occupant is not None:
            return (
                f"the outputs of this graph are still leased by {tail.occupant}: a replay would overwrite its rows."
                " Release it, keep its rows with rows.own(), or capture one graph per step in flight."
            )
        return f"no slot is free: dropped steps are still in flight or their waits failed.\n{self.describe()}"

    def _find_slot(self, tail: Tail) -> int | None:
        if tail.slot is not None:
            return tail.slot if tail.slot in self._free else None
        return self._free[0] if self._free else None

    def _take_slot(self, tail: Tail) -> int:
        slot = self._find_slot(tail)
        assert slot is not None, "reserve checked that a slot is free"
        self._free.remove(slot)
        return slot

    def _reap(self) -> None:
        """Take back what finalisers and dropped steps left. Queries events, never waits."""
        while self._dropped:
            self._drop(self._dropped.popleft())
        for launch in list(self._dying):
            if self._is_done(launch):
                self._dying.remove(launch)
                self._free_slot(launch)
        if self._quarantine:
            self._free.extend(slot for slot, generation in self._quarantine if generation <= self._done)
            self._quarantine = [(slot, gen) for slot, gen in self._quarantine if gen > self._done]

    def _notify(self) -> None:
        if self._waiters:
            self._changed.notify_all()

    def _is_done(self, launch: Launch) -> bool:
        try:
            return launch.event is not None and launch.event.query()
        except Exception:  # the failure belongs to the step, which nobody reads any more
            self._fail(launch, None)
            return False

    def _free_slot(self, launch: Launch) -> None:
        if launch.slot is not None:
            self._done = max(self._done, launch.generation)
            self._free.append(launch.slot)
            launch.slot = None

    def _fail(self, launch: Launch, error: BaseException | None) -> None:
        """The wait failed: nobody knows when the device is done with the slot, so it is not used again until a later
        step is known to be done."""
        launch.error = launch.error or error
        if launch in self._dying:
            self._dying.remove(launch)
        if launch.slot is not None:
            self._quarantine.append((launch.slot, launch.generation))
            launch.slot = None
        self._rebase_due = True

    # ---- a step's end --------------------------------------------------------------------------------------------

    def wait(self, launch: Launch, timeout: float | None = None) -> memoryview | None:
        """Wait for the launch and copy its slot out, once; returns the words.

        Raises:
            StepStateError: if the launch was never enqueued.
            StepTimeoutError: after `timeout` seconds; the step stays open.
            StagingError: if the header does not hold this generation.
        """
        with launch.lock:
            if launch.error is not None:
                raise launch.error
            if launch.is_read:
                return launch.words
            if launch.event is None:
                raise StepStateError(f"{launch} was never launched: replay its graph inside `with tail.step():` first.")
            try:
                self._wait_event(launch, launch.event, timeout)
            except StepTimeoutError:
                raise
            except BaseException as error:
                with self.lock:
                    self._fail(launch, error)
                raise
            with self.lock:
                if launch.error is not None:
                    raise launch.error
                slot, buffer = launch.slot, launch.tail.buffer
                if slot is not None and buffer is not None:
                    if buffer.header(slot) != launch.generation:
                        self._fail(launch, _not_staged(launch, buffer.header(slot)))
                        raise launch.error  # type: ignore[misc]  # _fail has set it
                    launch.words = buffer.copy_out(slot)
                    self._free_slot(launch)
                launch.is_read = True
                if not launch.tail.keeps_outputs:
                    self._live.pop(id(launch), None)
                self._notify()
            return launch.words

    def _wait_event(self, launch: Launch, event: Event, timeout: float | None) -> None:
        if self.wait_kind == "block" and timeout is None:
            event.synchronize()
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        slot, buffer = launch.slot, launch.tail.buffer
        header = self.wait_kind == "header" and slot is not None and buffer is not None
        sleep = _FIRST_SLEEP
        while not ((header and buffer.header(slot) == launch.generation) or event.query()):  # type: ignore[union-attr, arg-type]
            if deadline is not None and time.monotonic() > deadline:
                raise StepTimeoutError(
                    f"{launch} was not done within {timeout} s; it stays open and can be waited for again."
                    f"\n{self.describe()}"
                )
            if self.wait_kind == "block":
                time.sleep(sleep)
                sleep = min(sleep * 2, _LAST_SLEEP)

    def release(self, launch: Launch) -> None:
        """End the lease: the next launch into this memory waits, on the device, for the releasing stream."""
        with self.lock:
            if not launch.is_released:
                self._drop(launch)
                if self.backend.static:
                    self._consumers.append((self.backend.stream(), self.backend.record()))

    def _drop(self, launch: Launch) -> None:
        if launch.is_released:
            return
        launch.is_released = True
        self._live.pop(id(launch), None)
        if launch.tail.occupant is launch:
            launch.tail.occupant = None
        if launch.tail.keeps_outputs:
            self.backend.poison(launch.outputs)
        launch.outputs = ()
        if launch.slot is not None:
            self._dying.append(launch)
        self._notify()

    def discard(self, launch: Launch) -> None:
        """For finalisers: leave the launch to the next one. Takes no lock."""
        self._dropped.append(launch)

    def close(self) -> None:
        """Wait for all work, then refuse launches. Steps that were launched can still be read."""
        with self.lock:
            if not self.is_closed:
                self.is_closed = True
                self.backend.synchronize()
                self._reap()

    def __del__(self) -> None:
        self.backend.before_free()

    def describe(self) -> str:
        """The ring's state, for messages."""
        live = ", ".join(str(launch) for launch in self._live.values()) or "none"
        return (
            f"ring: depth {self.depth}, next step {self._next}, done up to {self._done}, free slots {list(self._free)},"
            f" quarantined {[slot for slot, _ in self._quarantine]}, dropped in flight {len(self._dying)}, live: {live}"
        )


def _not_staged(launch: Launch, header: int | None = None) -> StagingError:
    found = "nothing" if header is None else f"generation {header}"
    return StagingError(
        f"{launch}: its event completed, but its slot holds {found} instead of generation {launch.generation}. The graph"
        " recorded no staging node, or another graph was replayed: stage() inside the capture, and replay that graph"
        " inside its own `with tail.step():`."
    )
