"""The ring: pinned slots, control records, generations, and the order of launches.

Protocol, per launch n: the host reserves a free slot, writes the control record (n, slot, number of real rows, graph)
to `control[(n - 1) % K]`, and replays. The staging node finds the record by a device cursor, writes spans and row
values into the slot, then n into its header, and advances the cursor. The slot is free again as soon as the host has
copied it out; the control record is rewritten only after launch n is done, which K = number of slots guarantees: every
launch that is not known to be done holds a slot.

Where a graph copies rows, the record names a copy slot, too: one of `depth`, held until the step's lease ends. It may
be taken again while a step that nobody reads is still in flight, as the device writes in launch order.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spangraph.backends import Backend, Event, debug_enabled, storage_bytes
from spangraph.counts import WAIT_BOUNDS
from spangraph.errors import (
    ClosedError,
    InputError,
    RingFullError,
    StagingError,
    StepStateError,
    StepTimeoutError,
)
from spangraph.kernels.stage import CONTROL_WORDS, words_of
from spangraph.launch import Launch, not_staged_error, report_taken

if TYPE_CHECKING:
    from spangraph.stops import StopChecks
    from spangraph.tail import Tail

_logger = logging.getLogger("spangraph")

# Slots beyond the depth: a slot whose wait failed, or whose step was dropped in flight, is not free yet.
_SPARE_SLOTS = 2
# Back-off of polled waits, in seconds: the first is below a replay's length, the last costs no CPU worth speaking of.
_FIRST_SLEEP, _LAST_SLEEP = 20e-6, 1e-3
# A launch that waits so long (seconds) for room says so, once: nobody else may be there to release a step.
_WARN_AFTER = 10.0


class Ring:
    """One launch order over a few slots; shared by all graphs of a compiled object or stager.

    The lock is the launch order: it is held from a launch's reservation to its event. Waits do not hold it, and take
    it only once their event is done.
    """

    def __init__(self, backend: Backend, *, depth: int, num_slots: int | None = None, wait: str = "block") -> None:
        self.backend = backend
        self.debug = debug_enabled()
        if not isinstance(depth, int) or depth < 1:
            raise InputError(f"depth={depth!r}: expected an int of at least 1.")
        if wait not in ("block", "spin", "header"):
            raise InputError(f"wait={wait!r}: expected 'block', 'spin' or 'header'.")
        if wait == "header" and not backend.ordered_header:
            raise InputError(f"wait='header' needs an ordered header, which {backend.name} does not prove; spin.")
        self.depth = depth
        self.wait_kind = wait
        self.num_slots = num_slots or depth + _SPARE_SLOTS
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.control = backend.pinned(self.num_slots, CONTROL_WORDS, writer="host")
        self._control = words_of(self.control.host)
        with torch.inference_mode(False):
            self.cursor = torch.zeros(1, dtype=torch.int64, device=backend.device)
        self._next = 1
        self._done = 0  # newest generation known to be done; all before it are, as one order runs them
        self._free = deque(range(self.num_slots))
        self._free_copies = deque(range(depth))
        self._quarantine: list[tuple[deque[int], int, int]] = []  # (free list, slot, generation whose end is not known)
        self._live: dict[Launch, None] = {}  # open or leased, in launch order
        self._dying: list[Launch] = []  # dropped before they were done
        self._dropped: deque[Launch] = deque()  # by finalisers, which do nothing else
        self._consumers: list[tuple[Any, Event]] = []  # streams that may still read released memory
        self._last: tuple[Any, Event] | None = None
        self._cursor_in_doubt = False  # a wait failed, so a staging node may not have run
        self._reserved: Launch | None = None
        self._waiters = 0
        self.stop_checks: StopChecks | None = None
        self.is_closed = False

    # ---- reserve, commit, abort: the three ends of a launch, all under the lock ---------------------------------

    def reserve(
        self,
        tails: Sequence[Tail],
        row_ids: Sequence[Hashable] | None,
        num_rows: int,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Launch:
        """Take a slot and the first free one of `tails`, and write the control record.

        Never waits for the device, unless the only slots left are those of failed waits, or it is not known yet whether
        the copies of the graph's last step have fitted.

        Raises:
            ClosedError: after `close`.
            StepStateError: inside another launch of this ring.
            RingFullError: if `depth` steps are open or leased, or the graph's outputs are (and `wait` is false).
            StepTimeoutError: if waiting for room took longer than `timeout` seconds.
        """
        if self._reserved is not None:
            raise StepStateError(f"a launch inside the launch of {self._reserved}: end that one first.")
        if self.is_closed:
            raise ClosedError("launch on a closed object: compile the model (or build the stager) again.")
        if self._dropped or self._dying or self._quarantine:
            self._reap()
        tail: Tail | None = None
        if len(self._live) < self.depth:
            tail = tails[0]
            if tail.occupant is not None or not self._free or not tail.is_plain or tail.neighbours:
                tail = self._free_tail(tails)
        if tail is None or timeout is not None:
            tail = self._wait_for_room(tails, tail, wait=wait, timeout=timeout)
        is_static = self.backend.static
        if is_static:
            self.backend.begin_launch()
            try:
                self._order()
                self._settle_cursor(tail)
            except BaseException:
                self.backend.end_launch()
                raise
        elif self._cursor_in_doubt:
            self._settle_cursor(tail)
        generation = self._next
        if not tail.columns:
            launch = Launch(tail, generation, None, None, row_ids, num_rows)
        else:
            slot = self._free.popleft() if tail.slot is None else self._take(tail.slot)
            copy_slot = None if tail.copies is None else self._free_copies.popleft()
            launch = Launch(tail, generation, slot, copy_slot, row_ids, num_rows)
            base = (generation - 1) % self.num_slots * CONTROL_WORDS
            control = self._control
            control[base + 1] = slot
            control[base + 2] = num_rows
            control[base + 3] = tail.graph
            control[base + 4] = -1 if copy_slot is None else copy_slot
            control[base] = generation  # last: a record is never half of one and half of another
            self._next = generation + 1
        self._live[launch] = None
        if is_static:
            launch.grids = tail.grids
            if tail.holds_outputs or tail.may_overflow:
                tail.occupant = launch
        self._reserved = launch
        return launch

    def _wait_for_room(self, tails: Sequence[Tail], tail: Tail | None, *, wait: bool, timeout: float | None) -> Tail:
        """The first tail that can be launched, as soon as there is one.

        Raises:
            see `reserve`.
        """
        deadline = _deadline(timeout)
        sleep, warn_at = _FIRST_SLEEP, 0.0
        if tail is None and len(self._live) < self.depth:
            tail = self._find_tail(tails)
        while tail is None:
            problem = self._why_full(tails[0])
            if not wait and not self._is_settling(tails):
                raise RingFullError(problem)
            if deadline is not None and time.monotonic() > deadline:
                raise StepTimeoutError(
                    f"no room for a launch within {timeout} s, which another thread must make: {problem}\n"
                    f"{self.describe()}"
                )
            warn_at = warn_at or time.monotonic() + _WARN_AFTER
            if time.monotonic() > warn_at:
                _logger.warning(
                    "a launch has waited %g s for room, which another thread must make: %s\n%s",
                    _WARN_AFTER,
                    problem,
                    self.describe(),
                )
                warn_at = inf
            self._waiters += 1
            try:
                self._changed.wait(sleep)
            finally:
                self._waiters -= 1
            sleep = min(sleep * 2, _LAST_SLEEP)
            if self.is_closed:
                raise ClosedError("launch on a closed object: compile the model (or build the stager) again.")
            self._reap()
            tail = self._find_tail(tails) if len(self._live) < self.depth else None
        return tail

    def commit(self, launch: Launch, outputs: Sequence[Tensor]) -> Event:
        """The launch was enqueued: record its event on the stream that replayed it."""
        backend, tail, num_rows = self.backend, launch.tail, launch.num_rows
        launch.outputs = () if launch.is_released else outputs
        launch.event = event = backend.record()
        self._reserved = None
        if backend.static:
            self._last = (backend.stream(), event)
            backend.end_launch()
        counts = tail.counts
        counts.launches += 1
        counts.rows += num_rows
        counts.padding_rows += tail.num_rows - num_rows
        if not backend.synchronous or launch.is_released:
            return event
        if tail.buffer is None and tail.is_leased:  # nothing to read
            launch.is_read = True
        else:
            try:
                self._read(launch)
            except StagingError as error:
                # Whoever waits gets it. Its traceback leads to the frames of this launch's caller.
                error.__traceback__ = None
                return event
        if tail.cuts and not self.debug:  # then it is asked who takes which row
            tail.prepare(launch, launch.grids, outputs)
        counts.waits += 1
        counts.wait_times[0] += 1
        return event

    def abort(self, launch: Launch) -> None:
        """The launch raised half-way: drain, read the cursor, re-base, so that the next launch is in step."""
        self._reserved = None
        if self.backend.static:
            self.backend.end_launch()
        self._fail(launch, StepStateError(f"{launch}: its launch raised, so it holds no values."))
        self._rebase()

    def _rebase(self) -> None:
        """Drain, and count on from what the device says it staged."""
        self.backend.synchronize()
        staged = self.backend.read(self.cursor)
        for launch in [*self._live, *self._dying]:
            if launch.slot is not None and launch.generation > staged:
                self._fail(launch, not_staged_error(launch))
        self._next, self._done = staged + 1, staged
        self._leave_quarantine(inf)  # drained: nothing writes to them any more
        for base in range(0, len(self._control), CONTROL_WORDS):
            if self._control[base] > staged:  # its launch is gone: no other replay may take it for its own
                self._control[base] = 0
        self._cursor_in_doubt = False

    def _settle_cursor(self, tail: Tail) -> None:
        """Let the next launch find its record where one before it may not have been staged: after a failed wait; and
        where a step of the same graph is in flight, whose record it would take for its own."""
        is_shared = self.backend.static and not (tail.holds_outputs or tail.may_overflow)
        if self._cursor_in_doubt or (is_shared and tail.columns and self._done < self._next - 1):
            self.backend.fill(self.cursor, self._next - 1)
            self._cursor_in_doubt = False

    def _order(self) -> None:
        """Let this launch follow the last one, and every consumer of memory that it may overwrite, on the device."""
        if self._last is None and not self._consumers:
            return
        stream = self.backend.stream()
        if self._last is not None and self._last[0] != stream:
            self.backend.wait(self._last[1])
        for consumer, event in self._consumers:
            if consumer != stream:
                self.backend.wait(event)
        self._consumers.clear()

    # ---- room --------------------------------------------------------------------------------------------------

    def _find_tail(self, tails: Sequence[Tail]) -> Tail | None:
        """The first tail that can be launched. Drains where nothing else would bring a quarantined slot back."""
        tail = self._free_tail(tails)
        if tail is None and self._quarantine and any(_occupant(tail) is None for tail in tails):
            self._rebase()
            tail = self._free_tail(tails)
        return tail

    def _free_tail(self, tails: Sequence[Tail]) -> Tail | None:
        for tail in tails:
            if tail.may_overflow or tail.neighbours:
                for other in (tail, *tail.neighbours):
                    self._settle(other)
                if _occupant(tail) is not None:
                    continue
            elif tail.occupant is not None:
                continue
            if not tail.columns:
                return tail
            is_free = self._free if tail.slot is None else tail.slot in self._free
            if is_free and (tail.copies is None or self._free_copies):
                return tail
        return None

    def _settle(self, tail: Tail) -> None:
        """Find out, once its last step is done, whether the copies of a graph have fitted: then it may run again."""
        last = tail.occupant
        if last is None or not tail.may_overflow or last.is_read or last.event is None:
            return
        try:
            if last.event.query():
                self._read(last)
        except Exception as error:  # noqa: BLE001 - the step's own wait raises it
            # The step keeps it, and its traceback leads to the frames of this launch's caller, and to a step in them.
            error.__traceback__ = None
            if not last.is_dropped:
                self._fail(last, error)

    def _is_settling(self, tails: Sequence[Tail]) -> bool:
        occupants = [launch for tail in tails if (launch := _occupant(tail)) is not None]
        unread = [launch.tail for launch in occupants if not launch.is_read]
        return len(self._live) < self.depth and any(tail.may_overflow and not tail.holds_outputs for tail in unread)

    def _why_full(self, tail: Tail) -> str:
        if len(self._live) >= self.depth:
            names = ", ".join(str(launch) for launch in self._live)
            return (
                f"depth={self.depth} and {len(self._live)} steps are open or leased: {names}. Release one"
                " (with step: ..., or step.release(); rows.own() keeps its rows), raise depth, or launch with"
                " wait=True."
            )
        last = _occupant(tail)
        if last is not None and last.has_overflowed:
            return (
                f"the copies of {last} did not fit, so its rows are cut from the graph's outputs, which a"
                " replay would overwrite. Release it (rows.own() keeps its rows), or give its Copy more capacity."
            )
        if last is not None and last.tail.may_overflow and not last.is_read:
            return (
                f"{last} is not done, so it is not known whether its copies fit; until then its rows may have"
                " to be cut from the graph's outputs. Give its Copy the capacity of the worst case not to wait."
            )
        if last is not None:
            whose = "this graph" if last.tail is tail else "a graph in the same memory pool"
            return (
                f"the outputs of {whose} are still leased by {last}: a replay would overwrite its rows. Release it"
                " (rows.own() keeps its rows), or capture one graph per step in flight, with a pool of its own."
            )
        return f"no slot is free: dropped steps are still in flight or their waits failed.\n{self.describe()}"

    def _take(self, slot: int) -> int:
        """This slot, which is free: `_free_tail` has looked."""
        self._free.remove(slot)
        return slot

    def _reap(self) -> None:
        """Take back what finalisers and dropped steps left. Queries events, never waits."""
        while self._dropped:
            self._drop(self._dropped.popleft())
        for launch in list(self._dying):
            if self._is_done(launch):
                self._dying.remove(launch)
                slot, buffer = launch.slot, launch.tail.buffer
                if slot is not None and buffer is not None and buffer.header(slot) != launch.generation:
                    self._cursor_in_doubt = True  # reserved, but not replayed
                self._free_slot(launch)
        if self._quarantine:
            self._leave_quarantine(self._done)

    def _leave_quarantine(self, done: float) -> None:
        """Free the slots of failed waits up to generation `done`."""
        for free, slot, generation in self._quarantine:
            if generation <= done:
                free.append(slot)
        self._quarantine = [entry for entry in self._quarantine if entry[2] > done]

    def _is_done(self, launch: Launch) -> bool:
        try:
            return launch.event is not None and launch.event.query()
        except Exception:  # noqa: BLE001 - the failure belongs to the step, which nobody reads any more
            self._fail(launch, None)
            return False

    def _free_slot(self, launch: Launch) -> None:
        if launch.slot is not None:
            self._done = max(self._done, launch.generation)
            self._free.append(launch.slot)
            launch.slot = None

    def _fail(self, launch: Launch, error: BaseException | None) -> None:
        """The wait failed: nobody knows when the device is done with the slot, so it is not used again until a later
        step is known to be done. The step ends here: there is nothing to read, and the error's traceback would keep a
        step alive that nobody else holds."""
        launch.error = launch.error or error
        if launch in self._dying:
            self._dying.remove(launch)
        if launch.slot is not None:
            self._quarantine.append((self._free, launch.slot, launch.generation))
            launch.slot = None
        if launch.copy_slot is not None:
            self._quarantine.append((self._free_copies, launch.copy_slot, launch.generation))
            launch.copy_slot = None
        self._cursor_in_doubt = True
        launch.is_released = launch.is_dropped = True
        self._end(launch)

    def _end(self, launch: Launch) -> None:
        """The step takes no room any more."""
        if launch in self._live:
            del self._live[launch]
        self._leave_outputs(launch)
        if self._waiters:
            self._changed.notify_all()

    def _leave_outputs(self, launch: Launch) -> None:
        """Let the graph's next replay overwrite its outputs."""
        if launch.tail.occupant is launch:
            launch.tail.occupant = None
        launch.outputs, launch.grids = (), {}

    # ---- a step's end --------------------------------------------------------------------------------------------

    def wait_and_check(self, launch: Launch, timeout: float | None = None) -> None:
        """`wait`, then the stop check, if there is one."""
        if self.stop_checks is None:
            self.wait(launch, timeout)
        else:
            self.stop_checks.wait(self, launch, timeout)

    def wait(self, launch: Launch, timeout: float | None = None) -> memoryview | None:
        """Wait for the launch and copy its slot out, once; returns the words, or None if it was released meanwhile.

        Raises:
            StepStateError: if the launch was never enqueued.
            StepTimeoutError: after `timeout` seconds; the step stays open.
            StagingError: if the header does not hold this generation.
        """
        if launch.error is not None:
            raise launch.error
        if launch.is_read:
            return launch.words
        if launch.event is None:
            raise StepStateError(
                f"{launch} is not launched yet: replay its graph inside `with tail.step():`, and leave the block"
                " before reading."
            )
        deadline = None if timeout is None else _deadline(timeout)
        began = time.perf_counter()
        try:
            if self.wait_kind == "block" and deadline is None:
                launch.event.synchronize()
            else:
                self._poll(launch, launch.event, deadline, timeout)
        except StepTimeoutError:
            raise
        except Exception as error:
            with self.lock:
                if not launch.is_read:
                    self._fail(launch, error)
            raise
        if launch.is_released and launch.error is None:
            return None
        # No lock of the launch's own: whoever launches may read an earlier step inside its `with tail.step():`.
        if deadline is None:
            self.lock.acquire()
        elif not self.lock.acquire(timeout=_remaining(deadline)):
            raise self._timed_out(launch, timeout)
        try:
            if launch.error is not None:
                raise launch.error
            if not launch.is_read and not launch.is_released:
                self._read(launch)
                counts = launch.tail.counts
                counts.waits += 1
                counts.wait_times[bisect_left(WAIT_BOUNDS, time.perf_counter() - began)] += 1
            return launch.words
        finally:
            self.lock.release()

    def _read(self, launch: Launch) -> None:
        tail, slot = launch.tail, launch.slot
        buffer = tail.buffer
        if slot is not None and buffer is not None:
            words = buffer.copy_out(slot)
            if words[0] != launch.generation:
                error = not_staged_error(launch, words[0])
                self._fail(launch, error)
                raise error
            launch.words = words
            tail.counts.staged_bytes += buffer.slot_bytes
            if tail.copies is not None and (stale := tail.read_copies(launch)) is not None:
                error = not_staged_error(launch, stale, "record of copies")
                self._fail(launch, error)
                raise error
            self._free_slot(launch)
        launch.is_read = True
        if tail.may_overflow and not launch.has_overflowed and not tail.holds_outputs:
            self._leave_outputs(launch)
        if not tail.is_leased:
            self._live.pop(launch, None)
        if self._waiters:
            self._changed.notify_all()

    def _poll(self, launch: Launch, event: Event, deadline: float | None, timeout: float | None) -> None:
        slot, buffer = launch.slot, launch.tail.buffer
        header = self.wait_kind == "header" and slot is not None and buffer is not None
        sleep = _FIRST_SLEEP
        while not ((header and buffer.header(slot) == launch.generation) or event.query()):  # type: ignore[union-attr, arg-type]
            if launch.is_released:
                return
            if deadline is not None and time.monotonic() > deadline:
                raise self._timed_out(launch, timeout)
            if self.wait_kind == "block":
                time.sleep(sleep)
                sleep = min(sleep * 2, _LAST_SLEEP)

    def _timed_out(self, launch: Launch, timeout: float | None) -> StepTimeoutError:
        return StepTimeoutError(
            f"{launch} was not done within {timeout} s; it stays open and can be waited for again.\n{self.describe()}"
        )

    def note_reader(self, launch: Launch) -> None:
        """The current stream may read the launch's outputs until its release, whichever stream or thread that is on."""
        launch.note_reader(self.backend.stream())

    def release(self, launch: Launch) -> None:
        """End the lease: the next launch into this memory waits, on the device, for whatever may still read it."""
        with self.lock:
            if not launch.is_dropped:
                self._drop(launch)

    def cancel(self, launch: Launch) -> None:
        """Give a step up, in flight or not. Waits for nothing: if another thread is launching, the ring takes back what
        the step held at the end of that launch or the next."""
        launch.is_cancelled = launch.is_released = True
        self._dropped.append(launch)
        if self.lock.acquire(blocking=False):
            try:
                if self._reserved is None:
                    self._reap()
            finally:
                self.lock.release()

    def _drop(self, launch: Launch) -> None:
        """Take back what a step holds, once. Runs for every step."""
        if launch.is_dropped:
            return
        launch.is_released = launch.is_dropped = True
        tail, backend = launch.tail, self.backend
        if self.debug:
            report_taken(launch)
        if tail.is_leased and (backend.static or backend.debug):
            self._retire(launch)
        if launch.slot is not None:
            self._dying.append(launch)
        if launch.copy_slot is not None:
            self._free_copies.append(launch.copy_slot)
            launch.copy_slot = None
        self._end(launch)

    def _retire(self, launch: Launch) -> None:
        """Poison outputs and copies once their readers are done, and let the next launch wait for all of them."""
        outputs: Sequence[Tensor] = ()
        memory: Sequence[Tensor] = ()
        if self.backend.debug:
            outputs, copies, slot = launch.tail.dying(launch.outputs), launch.tail.copies, launch.copy_slot
            memory = copies.memory_of(slot) if copies is not None and slot is not None else ()
        if not self.backend.static:
            self.backend.poison(outputs, memory)
            return
        current = self.backend.stream()
        others = [(stream, self.backend.record(stream)) for stream in launch.readers if stream != current]
        after = [event for _, event in others]
        if launch.event is not None and self._last is not None and self._last[0] != current:
            after.append(launch.event)  # dropped in flight, by a thread with another stream
        self.backend.poison(outputs, memory, after=after)
        self._consumers += [*others, (current, self.backend.record())]

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
        self.backend.before_free((vars(self).get("control"), vars(self).get("cursor")))

    def leased_bytes(self) -> int:
        """Bytes that open and leased steps keep from being used again: their graphs' outputs, and their copy slots."""
        live = list(self._live)
        outputs = storage_bytes(output for launch in live for output in launch.outputs)
        return outputs + sum(launch.tail.copies.slot_bytes for launch in live if launch.tail.copies is not None)

    def describe(self) -> str:
        """The ring's state, for messages. Takes no lock: it may be asked for because somebody does not let go of it."""
        live = ", ".join(map(str, list(self._live))) or "none"
        quarantined = [(slot, generation) for _, slot, generation in list(self._quarantine)]
        return (
            f"ring: depth {self.depth}, next step {self._next}, done up to {self._done}, free slots {list(self._free)},"
            f" free copy slots {list(self._free_copies)}, quarantined (slot, step) {quarantined}, dropped in flight"
            f" {len(self._dying)}, {self.leased_bytes()} bytes leased, live: {live}"
        )


def _occupant(tail: Tail) -> Launch | None:
    """A step whose outputs a replay of this graph would overwrite."""
    if tail.occupant is not None or not tail.neighbours:
        return tail.occupant
    return next((other.occupant for other in tail.neighbours if other.occupant is not None), None)


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not timeout >= 0:
        raise InputError(f"timeout={timeout!r}: expected seconds, at least 0, or None to wait for ever.")
    return time.monotonic() + timeout


def _remaining(deadline: float) -> float:
    """Seconds left for a lock that is held for the length of a launch: a done step is not late for the lack of it."""
    return min(max(deadline - time.monotonic(), _LAST_SLEEP), threading.TIMEOUT_MAX)
