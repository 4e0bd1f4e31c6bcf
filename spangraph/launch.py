"""One launch, as the ring knows it, and the errors that its reader may get."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spangraph.backends import Event
from spangraph.errors import InputError, StagingError, StaleStepError
from spangraph.slots import Region

if TYPE_CHECKING:
    from spangraph.cuts import Cut, Grid
    from spangraph.tail import Tail

_logger = logging.getLogger("spangraph")
_counting = threading.Lock()  # of what readers count, on any thread


class Launch:
    """What the ring knows of one launch. `Step` is the caller's handle to it."""

    # Of the class until they change, as one is made at every step.
    outputs: Sequence[Tensor] = ()
    event: Event | None = None
    words: memoryview | None = None
    error: BaseException | None = None
    is_read: bool = False
    is_released: bool = False  # nobody may read it any more
    is_cancelled: bool = False
    is_dropped: bool = False  # and the ring has taken back what it held
    has_overflowed: bool = False  # some of its copies did not fit
    stops: frozenset[Hashable] | None = None  # row ids; None: its stop check, if there is one, has not run
    withheld: AbstractSet[tuple[int, str | None]] = frozenset()  # (position, output, or None for all)
    readers: Collection[Any] = ()  # streams that were current when its rows were asked for
    counted: set[tuple[int, str]] | None = None  # withheld and bad rows, each once per output
    taken: tuple[tuple[weakref.ref[Tensor], str], ...] = ()  # rows and where, while debugging

    def __init__(
        self,
        tail: Tail,
        generation: int,
        slot: int | None,
        copy_slot: int | None,
        row_ids: Sequence[Hashable] | None,
        num_rows: int,
    ) -> None:
        self.tail = tail
        self.generation = generation
        self.slot = slot  # None: nothing is staged, or the slot was freed
        self.copy_slot = copy_slot  # None: nothing is copied, or the lease has ended
        self.row_ids = row_ids
        self.num_rows = num_rows
        self.columns: dict[str, memoryview] = {}  # of `words`, those that somebody has asked for
        self.grids: dict[Cut, Grid] = {}  # how rows of its outputs are made, likewise

    def crop(self, region: Region, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """What lies in its copy slot from byte `offset` of a region on.

        Raises:
            StaleStepError: after the lease.
        """
        slot, copies = self.copy_slot, self.tail.copies  # before the check: another thread may release meanwhile
        if self.is_released or slot is None or copies is None:
            raise stale_error(self)
        return copies.crop(region, slot, offset, dtype, shape)

    def withhold(self, which: Iterable[tuple[int, str | None]]) -> None:
        """Withhold rows, in what `owned` has returned, too. Any thread may."""
        vars(self).setdefault("withheld", set()).update(which)

    def note_reader(self, stream: Any) -> None:
        """A stream may read its outputs until its release. Any thread may say so."""
        if stream not in self.readers:
            vars(self).setdefault("readers", []).append(stream)

    def note(self, position: int, name: str, *, is_bad: bool = False) -> None:
        """Count a row of an output that yields no tensor, once."""
        if self.tail is None:  # of owned rows, which were counted before
            return
        with _counting:
            self.counted = set() if self.counted is None else self.counted
            if (position, name) in self.counted:
                return
            self.counted.add((position, name))
            if is_bad:
                self.tail.counts.bad_spans += 1
            else:
                self.tail.counts.withheld += 1

    def owned(self) -> Launch:
        """What rows that are the caller's need of it, and nothing that is the ring's."""
        none: Any = None
        launch = Launch(none, self.generation, None, None, self.row_ids, self.num_rows)
        launch.withheld = vars(self).setdefault("withheld", set())
        return launch

    def __str__(self) -> str:
        if self.is_released:
            state = "failed" if self.error else "cancelled" if self.is_cancelled else "released"
        else:
            state = "leased" if self.is_read else "open"
        rows = "" if self.row_ids is None else f", rows {list(self.row_ids)[:4]}"
        return f"step {self.generation} ({state}, graph {self.tail.graph}{rows})"


def checked_ids(rows: Sequence[Hashable]) -> tuple[Hashable, ...]:
    """Row ids, each of which can be a key and is there once.

    Raises:
        InputError: if not.
    """
    if isinstance(rows, str):
        raise InputError(f"rows={rows!r} is one string: expected a sequence of row ids.")
    ids = tuple(rows)
    try:
        distinct = len(set(ids))
    except TypeError as error:
        raise InputError(f"row ids {list(ids)} cannot be keys ({error}): use strings, numbers or tuples.") from None
    if distinct != len(ids):
        raise InputError(f"row ids {list(ids)} hold one id twice: every row needs its own.")
    return ids


def stale_error(launch: Launch) -> StaleStepError:
    """The error for rows of a step whose lease has ended."""
    if launch.is_cancelled:
        return StaleStepError(f"{launch} was given up by cancel(): it delivers nothing.")
    return StaleStepError(
        f"{launch} was released, so its memory may belong to a later step. Read rows before release(), keep them with"
        " rows.own(), or raise depth to hold more steps at once."
    )


def report_taken(launch: Launch) -> None:
    """While debugging: name the rows that somebody still holds, though their memory is no longer theirs."""
    alive = [where for ref, where in launch.taken if ref() is not None]
    launch.taken = ()
    if alive:
        _logger.warning(
            "%s was released while %d of its rows are still held, taken at %s: they hold poison from now on. Drop them"
            " before the release, or keep rows.own().",
            launch,
            len(alive),
            ", ".join(dict.fromkeys(alive)),
        )


def not_staged_error(launch: Launch, header: int | None = None, what: str = "slot") -> StagingError:
    found = "nothing" if header is None else f"generation {header}"
    return StagingError(
        f"{launch}: its event completed, but its {what} holds {found} instead of generation {launch.generation}. The"
        " graph recorded no staging node, or another graph was replayed: stage() inside the capture, and replay that"
        " graph inside its own `with tail.step():`."
    )
