"""Rows cut from the outputs of one step."""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Hashable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any

from torch import Tensor

from spangraph.cuts import Cut, Grid, Window
from spangraph.errors import RowLookupError, SpanError
from spangraph.kernels.compact import COPY_WORDS, pcm16
from spangraph.kernels.gather import clone_each, gather
from spangraph.launch import Launch, stale_error
from spangraph.slots import ALIGNMENT, COPIES

if TYPE_CHECKING:
    from spangraph.step import Step

# Without an `__init__`: that of views is Python's, and a frame is 1 % to 3 % of a cut of one row.
_new = object.__new__

# A tensor, or a tuple of them where a row has several spans; typed so that the usual case needs no cast.
Entry = Any


class Rows(Mapping[Hashable, Entry]):
    """Rows of one spanned output: row id -> tensor, of the delivered rows only, in launch order.

    A row's tensor equals `padded[row, ..., start:end]` bit for bit, or `pcm16` of it where that was asked for. It lies
    in the graph's output or in a ring (see `Copy`), is made when asked for, and is valid until the step is released;
    `own()` gives copies. With several spans per row an entry is a tuple of tensors. Withheld rows (empty spans) are
    absent. `rows[row_id]` raises `SpanError` for a row whose span is bad, and iteration yields all good rows before it
    raises once, naming every bad one.
    """

    # Of the class until they are needed, as some are made at every step.
    _spans: Sequence[int] | None = None  # as they were staged
    _owned: Mapping[int, Entry] | None = None
    _nans: Mapping[int, int] | None = None
    _index: dict[Hashable, int] | None = None
    _windows_of: dict[int, list[Window]] | None = None
    _records: memoryview | None = None  # what became of the copies

    def __init__(
        self,
        step: Step | None,
        launch: Launch,
        cut: Cut,
        spans: Sequence[int] | None = None,
        owned: Mapping[int, Entry] | None = None,
        nans: Mapping[int, int] | None = None,
    ) -> None:
        self._step = step  # keeps the lease while the rows are in use
        self._launch = launch
        self._cut = cut
        if owned is not None:
            self._spans = spans
            self._owned = owned
            self._nans = nans

    @property
    def row_ids(self) -> Sequence[Hashable]:
        """Ids of all real rows at launch, delivered or not."""
        ids = self._launch.row_ids
        return range(self._launch.num_rows) if ids is None else ids

    def at(self, position: int) -> Entry | None:
        """The row at a launch position, or None if it is withheld.

        Raises:
            RowLookupError: if there is no such position.
            SpanError: if the row's span is bad.
            StaleStepError: after the step's release (unless the rows are owned).
        """
        if not 0 <= position < self._launch.num_rows:
            raise RowLookupError(f"no row at position {position}: the step has {self._launch.num_rows} real rows.")
        return self._entry(position)

    def __getitem__(self, row_id: Hashable) -> Entry:
        entry = self._entry(self._position(row_id))
        if entry is None:
            raise RowLookupError(f"row {row_id!r} of {self._cut.label!r} is withheld: it has no entry.")
        return entry

    def __iter__(self) -> Iterator[Hashable]:
        bad: list[SpanError] = []
        for position, row_id in enumerate(self.row_ids):
            try:
                if self._windows(position):
                    yield row_id
            except SpanError as error:
                bad.append(_alone(error))
        if bad:
            raise _joined(bad)

    def items(self) -> ItemsView[Hashable, Entry]:
        """Row ids and rows."""
        items = _new(_Items)
        items._mapping = self
        return items

    def values(self) -> ValuesView[Entry]:
        """The rows."""
        values = _new(_Values)
        values._mapping = self
        return values

    def __len__(self) -> int:
        """Number of rows that iteration yields."""
        width = self._cut.single_width
        if width >= 0 and self._owned is None and not self._launch.withheld:
            words = self._words()
            starts, ends = words[::2], words[1::2]
            if min(starts, default=0) >= 0 and max(ends, default=0) <= width and all(map(operator.lt, starts, ends)):
                return self._launch.num_rows
        count = 0
        for position in range(self._launch.num_rows):
            with contextlib.suppress(SpanError):
                count += bool(self._windows(position))
        return count

    def __repr__(self) -> str:
        kind = "owned" if self._owned is not None else "view" if self._cut.region is None else "copied"
        return f"Rows({self._cut.label!r}, {self._launch.num_rows} rows at launch, {kind})"

    def spans(self, row_id: Hashable) -> tuple[Window, ...]:
        """The row's spans in this output: one per span, each with one `(start, end)` per spanned dim; none if withheld.

        Raises:
            RowLookupError, SpanError: as for `rows[row_id]`.
        """
        launch, width = self._launch, self._cut.single_width
        if launch.row_ids is None and type(row_id) is int and 0 <= row_id < launch.num_rows:
            position = row_id  # as `_position` says, without the call
        else:
            position = self._position(row_id)
        if width >= 0 and not launch.withheld:
            words = self._spans or self._words()
            start, end = words[2 * position], words[2 * position + 1]
            if 0 <= start < end <= width:
                return (((start, end),),)
        return tuple(self._windows(position))

    def nans(self, row_id: Hashable) -> int:
        """How many NaNs of the row became 0 in a cast to PCM.

        Raises:
            RowLookupError, SpanError, StaleStepError: as for `rows[row_id]`.
        """
        return self._count_nans(self._position(row_id))

    def own(self) -> Rows:
        """Copies of the delivered rows that are the caller's for ever: one gather, each row into memory of its own, so
        that a kept row keeps nothing else alive. That memory may be of a size that `resize_` cannot change.

        Bad rows stay bad: reading one raises `SpanError`, as before.

        Raises:
            StaleStepError: after the step's release.
        """
        if self._owned is not None:
            return self
        owned = self._copies()
        nans = {position: self._count_nans(position) for position in owned} if self._cut.casts else None
        self._check_lease()  # still: a release meanwhile may have let a later step write what was copied
        return Rows(None, self._launch.owned(), self._cut, self._words(), owned, nans)

    # ---- positions -----------------------------------------------------------------------------------------------

    def _words(self) -> Sequence[int]:
        if (words := self._spans) is None:
            words = self._spans = self._launch.tail.column(self._launch, self._cut.column).tolist()
        return words

    def _position(self, row_id: Hashable) -> int:
        ids = self._launch.row_ids
        if ids is None:
            position = row_id if isinstance(row_id, int) and 0 <= row_id < self._launch.num_rows else None
        else:
            if self._index is None:
                self._index = {row: i for i, row in enumerate(ids)}
            position = self._index.get(row_id)
        if position is None:
            raise RowLookupError(f"no row {row_id!r} in this step; its rows are {list(self.row_ids)}.")
        return position

    def _windows(self, position: int) -> list[Window]:
        """A row's parts; none if it is withheld. Raises for a bad one."""
        withheld = self._launch.withheld
        if withheld and ((position, None) in withheld or (position, self._cut.name) in withheld):
            return []
        if self._windows_of is None:
            self._windows_of = {}
        elif (known := self._windows_of.get(position)) is not None:
            return known
        try:
            found = self._windows_of[position] = self._cut.windows(self._words(), position)
        except SpanError as error:
            self._launch.note(position, self._cut.name, is_bad=True)
            row_id = self.row_ids[position]
            raise SpanError(f"row {row_id!r} {error}", [row_id]) from None
        if not found:
            self._launch.note(position, self._cut.name)
        return found

    # ---- tensors -------------------------------------------------------------------------------------------------

    def _entry(self, position: int) -> Entry | None:
        launch = self._launch
        if (grid := self._grid()) is not None and not launch.withheld:
            as_strided, row_shape, strides, dim, width, stride, first, row_stride = grid
            words = self._words()
            start, end = words[2 * position], words[2 * position + 1]
            if 0 <= start < end <= width:
                shape = list(row_shape)
                shape[dim] = end - start
                return as_strided(shape, strides, first + position * row_stride + start * stride)
        windows = self._windows(position)
        if not windows:
            return None
        if self._owned is not None:
            return self._owned[position]
        return self._as_entry(self._crops(position, windows))

    def _grid(self) -> Grid | None:
        """How rows are made; None if there is more to do than one operator each.

        Raises:
            StaleStepError: after the step's release (unless the rows are owned).
        """
        launch, cut = self._launch, self._cut
        grids, outputs = launch.grids, launch.outputs  # before the check: another thread may release meanwhile
        if launch.is_released:
            raise stale_error(launch)
        if cut.single_dim < 0 or self._step is None or self._step._ring.debug:
            return None
        if cut not in grids:
            launch.tail.prepare(launch, grids, outputs, (cut,))
        return grids[cut]

    def _entry_or_none(self, position: int, bad: list[SpanError]) -> Entry | None:
        try:
            return self._entry(position)
        except SpanError as error:
            bad.append(_alone(error))
            return None

    def _as_entry(self, crops: Sequence[Tensor]) -> Entry:
        return tuple(crops) if self._cut.span.max_spans > 1 else crops[0]

    def _check_lease(self) -> None:
        if self._launch.is_released:
            raise stale_error(self._launch)

    def _copies(self) -> dict[int, Entry]:
        """Copies of all delivered rows, by position."""
        launch, cut = self._launch, self._cut
        outputs = launch.outputs  # before the check: another thread may release meanwhile
        self._check_lease()
        windows: list[tuple[int, Window]] = []
        words, width = self._words(), -1 if launch.withheld else cut.single_width
        for position in range(launch.num_rows):
            if width >= 0 and 0 <= (start := words[2 * position]) < (end := words[2 * position + 1]) <= width:
                windows += ((position, ((start, end),)),)
            else:
                with contextlib.suppress(SpanError):
                    windows += [(position, window) for window in self._windows(position)]
        positions = [position for position, _ in windows]
        if cut.region is None:
            copies = gather(outputs[cut.output].movedim(cut.span_map.row_dim, 0), cut.source_dims, windows)
        else:
            rows_windows = itertools.groupby(windows, operator.itemgetter(0))
            copies = clone_each([crop for p, row in rows_windows for crop in self._crops(p, [w for _, w in row])])
        copied = zip(positions, copies, strict=True)
        if cut.span.max_spans == 1:
            return dict(copied)
        rows: dict[int, Entry] = {}
        for position, copy in copied:
            rows[position] = (*rows.get(position, ()), copy)
        return rows

    def _crops(self, position: int, windows: Sequence[Window]) -> list[Tensor]:
        """A row's parts, in the ring or in the graph's output."""
        cut = self._cut
        if cut.region is None:
            return self._padded(position, windows)
        offset, _ = self._record(position)
        if offset < 0:  # the step did not fit
            crops = self._padded(position, windows)
            crops = [pcm16(crop) for crop in crops] if cut.casts else crops
            crops = [crop.cpu() for crop in crops] if cut.region.on_host else crops
            self._check_lease()  # what was copied here was still the step's
            return crops
        at = offset * ALIGNMENT
        crops = []
        for window in windows:
            crops.append(self._launch.crop(cut.region, at, cut.dtype, cut.crop_shape(window)))
            at += cut.crop_bytes(window)
        self._track(crops)
        return crops

    def _padded(self, position: int, windows: Sequence[Window]) -> list[Tensor]:
        """A row's parts in the graph's output."""
        outputs = self._launch.outputs  # before the check: another thread may release meanwhile
        self._check_lease()
        crops = [self._cut.view(outputs[self._cut.output], position, window) for window in windows]
        self._track(crops)
        return crops

    def _track(self, crops: Sequence[Tensor]) -> None:
        """While debugging: remember who took memory that dies with the lease."""
        if self._step is not None and self._step._ring.debug:
            from spangraph.watch import user_line  # what traces, which importing spangraph does without

            where = user_line()
            self._launch.taken += tuple((weakref.ref(crop), where) for crop in crops)

    def _record(self, position: int) -> tuple[int, int]:
        """Where the row's copy begins, in units of 16 bytes (below 0: the step did not fit), and its NaNs."""
        region = self._cut.region
        assert region is not None, "the output is copied"
        if self._records is None:
            self._records = self._launch.tail.column(self._launch, COPIES)
        at = len(self._records) // self._launch.num_rows * position + region.index * COPY_WORDS
        return self._records[at + 1], self._records[at + 2]

    def _count_nans(self, position: int) -> int:
        windows = self._windows(position)
        if not self._cut.casts or not windows:
            return 0
        if self._nans is not None:
            return self._nans[position]
        self._check_lease()
        offset, nans = self._record(position)
        return nans if offset >= 0 else sum(int(crop.isnan().sum()) for crop in self._padded(position, windows))


def _delivered(self: _Items | _Values) -> Iterator[Any]:
    """The delivered rows, or pairs of ids and rows; at the end raises one error for all bad ones."""
    rows = self._mapping
    launch, cut = rows._launch, rows._cut
    in_pairs, ids = self.in_pairs, launch.row_ids
    bad: list[SpanError] = []
    if (grid := launch.grids.get(cut) or rows._grid()) is None:
        for position in range(launch.num_rows):
            if (entry := rows._entry_or_none(position, bad)) is not None:
                yield (position if ids is None else ids[position], entry) if in_pairs else entry
    else:  # as `_entry`, with all that is the same for all rows outside of the loop
        as_strided, row_shape, strides, dim, width, stride, row, row_stride = grid
        shape = list(row_shape)
        words = launch.columns.get(cut.column) or launch.tail.column(launch, cut.column)
        for position in range(launch.num_rows):
            start, end = words[2 * position], words[2 * position + 1]
            if launch.is_released:
                raise stale_error(launch)
            if 0 <= start < end <= width and not launch.withheld:
                shape[dim] = end - start
                entry = as_strided(shape, strides, row + start * stride)
            else:
                entry = rows._entry_or_none(position, bad)
            if entry is not None:
                yield (position if ids is None else ids[position], entry) if in_pairs else entry
            row += row_stride
    if bad:
        raise _joined(bad)


class _Items(ItemsView[Hashable, Entry]):
    __slots__ = ()
    in_pairs = True
    _mapping: Rows
    __iter__ = _delivered


class _Values(ValuesView[Entry]):
    __slots__ = ()
    in_pairs = False
    _mapping: Rows
    __iter__ = _delivered


def _alone(error: SpanError) -> SpanError:
    """The error without its traceback, which leads to a step and to frames that hold the error."""
    return SpanError(str(error), error.rows)


def _joined(bad: Sequence[SpanError]) -> SpanError:
    """One error for all bad rows of an iteration."""
    return SpanError("\n".join(map(str, bad)), [row for error in bad for row in error.rows])
