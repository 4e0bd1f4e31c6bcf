"""The ticket for one launch, and the rows cut from its outputs."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from spangraph.errors import RowLookupError, SpanError, StaleStepError, StepStateError
from spangraph.kernels.compact import COPY_WORDS, pcm16
from spangraph.kernels.gather import clone_each, gather
from spangraph.passes.span_maps import SpanMap
from spangraph.ring import Launch, Ring
from spangraph.slots import ALIGNMENT, COPIES, Copy, Region, aligned
from spangraph.spans import Span, describe_bad_span
from spangraph.watch import user_line

# A tensor, or a tuple of them where a row has several spans; typed so that the usual case needs no cast.
Entry = Any

_WITHHOLDING = threading.Lock()


@dataclass(frozen=True)
class Cut:
    """How one output tensor of a graph is cut.

    Attributes:
        name: public name of the spanned output whose spans apply.
        column: its column in the slot.
        output: index of the tensor among the graph's outputs.
        span: the declaration.
        widths: size of each spanned dim of the declared value; spans are checked against these.
        span_map: where row and spans lie in this output.
        label: what messages call it.
        row_shape: shape of a padded row of this output.
        dtype: of the delivered rows.
        casts: whether they are int16 PCM made of floats.
        region: where a copy slot holds them; None if they are views.
    """

    name: str
    column: str
    output: int
    span: Span
    widths: tuple[int, ...]
    span_map: SpanMap
    label: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    casts: bool = False
    region: Region | None = None

    def extents(self, words: memoryview, position: int) -> list[tuple[tuple[int, int], ...]]:
        """A row's declared spans that are not empty in this output, each with one `(start, end)` per spanned dim.

        Args:
            words: the spans of the step's rows, as they were staged.

        Raises:
            SpanError: for a bad span, without the row's id.
        """
        num_dims, mapped = len(self.widths), self.span_map
        word = position * self.span.words_per_row
        extents: list[tuple[tuple[int, int], ...]] = []
        for _ in range(self.span.max_spans):
            extent: list[tuple[int, int]] = []
            empty = False
            for dim in range(num_dims):
                start, end = words[word], words[word + 1]
                word += 2
                if not 0 <= start <= end <= self.widths[dim]:
                    raise SpanError(
                        f"of {self.label!r} (dim {self.span.dims[dim]}): "
                        f"{describe_bad_span(start, end, self.widths[dim])}. Other rows of the step are not affected."
                    )
                extent.append((start, end))
                if not mapped.is_identity:
                    start, end = mapped.apply(dim, start, end)
                empty |= start == end
            if not empty:
                extents.append(tuple(extent))
        return extents

    @property
    def source_dims(self) -> tuple[int, ...]:
        """The spanned dims once the rows have been moved to dim 0."""
        return tuple(dim + 1 for dim in self.span_map.row_dims)

    def crop_shape(self, extent: Sequence[tuple[int, int]]) -> list[int]:
        """Shape of a row's part in a declared span."""
        shape = list(self.row_shape)
        for i, (dim, span) in enumerate(zip(self.span_map.row_dims, extent, strict=True)):
            start, end = self.span_map.apply(i, *span)
            shape[dim] = end - start
        return shape

    def crop_bytes(self, extent: Sequence[tuple[int, int]]) -> int:
        """Bytes of that part in a copy slot."""
        return aligned(math.prod(self.crop_shape(extent)) * self.dtype.itemsize)

    def padded_bytes(self, num_rows: int) -> int:
        """The most bytes that a step's rows can take there: each span may be as wide as the output."""
        return num_rows * self.span.max_spans * aligned(math.prod(self.row_shape) * self.dtype.itemsize)

    def copied_to(self, region: Region, copy: Copy) -> Cut:
        """The cut whose rows a copy slot holds, in `region`.

        Raises:
            DeclarationError: if `copy` casts what is no float.
        """
        dtype = copy.delivered(self.dtype, self.name)
        return replace(self, region=region, dtype=dtype, casts=dtype is not self.dtype)


class Rows(Mapping[Hashable, Entry]):
    """Rows of one spanned output: row id -> tensor, of the delivered rows only, in launch order.

    A row's tensor equals `padded[row, ..., start:end]` bit for bit, or `pcm16` of it where it was asked for. It lies in
    the graph's output or in a ring (see `Copy`), is made when asked for, and is valid until the step is released;
    `own()` gives copies. With several spans per row an entry is a tuple of tensors. Withheld
    rows (empty spans) are absent. `rows[row_id]` raises `SpanError` for a row whose span is bad, and iteration yields
    all good rows before it raises once, naming every bad one.
    """

    __slots__ = ("_cut", "_index", "_launch", "_owned", "_spans", "_step")

    def __init__(
        self, step: Step | None, launch: Launch, cut: Cut, spans: memoryview, owned: dict[int, Entry] | None = None
    ) -> None:
        self._step = step  # keeps the lease while the rows are in use
        self._launch = launch
        self._cut = cut
        self._spans = spans
        self._owned = owned
        self._index: dict[Hashable, int] | None = None

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
            StaleStepError: after the step's release (views only).
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
            if self._is_withheld(position):
                continue
            try:
                extents = self._extents(position)
            except SpanError as error:
                bad.append(error)
                continue
            if extents:
                yield row_id
        if bad:
            raise SpanError("\n".join(map(str, bad)), [row for error in bad for row in error.rows])

    def __len__(self) -> int:
        """Number of rows that iteration yields."""
        count = 0
        for position in range(self._launch.num_rows):
            try:
                count += not self._is_withheld(position) and bool(self._extents(position))
            except SpanError:
                continue
        return count

    def __repr__(self) -> str:
        kind = "owned" if self._owned is not None else "view" if self._cut.region is None else "copied"
        return f"Rows({self._cut.label!r}, {self._launch.num_rows} rows at launch, {kind})"

    def spans(self, row_id: Hashable) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The row's spans in this output: one per span, each with one `(start, end)` per spanned dim; none if withheld.

        Raises:
            RowLookupError, SpanError: as for `rows[row_id]`.
        """
        position = self._position(row_id)
        if self._is_withheld(position):
            return ()
        mapped = self._cut.span_map
        return tuple(tuple(mapped.apply(dim, *pair) for dim, pair in enumerate(e)) for e in self._extents(position))

    def nans(self, row_id: Hashable) -> int:
        """How many NaNs of the row became 0 in a cast to PCM.

        Raises:
            RowLookupError, SpanError, StaleStepError: as for `rows[row_id]`.
        """
        position = self._position(row_id)
        if not self._cut.casts or self._is_withheld(position):
            return 0
        extents = self._extents(position)
        offset, nans = self._record(position)
        if offset >= 0:
            return nans
        return sum(int(padded.isnan().sum()) for padded in self._padded(position, extents))

    def own(self) -> Rows:
        """Copies of the delivered rows that are the caller's for ever: one gather, each row into memory of its own, so
        that a kept row keeps nothing else alive.

        Bad rows stay bad: reading one raises `SpanError`, as before.

        Raises:
            StaleStepError: after the step's release.
        """
        if self._owned is not None:
            return self
        extents: dict[int, list[tuple[tuple[int, int], ...]]] = {}
        for position in range(self._launch.num_rows):
            with contextlib.suppress(SpanError):
                if not self._is_withheld(position) and (found := self._extents(position)):
                    extents[position] = found
        copies = iter(self._gather(extents))
        owned = {position: self._as_entry([next(copies) for _ in row]) for position, row in extents.items()}
        return Rows(None, self._launch, self._cut, self._spans, owned)

    def _gather(self, extents: Mapping[int, Sequence[tuple[tuple[int, int], ...]]]) -> list[Tensor]:
        """Copies of these rows' parts, in order."""
        cut, outputs = self._cut, self._launch.outputs
        if self._launch.is_released:
            raise _stale(self._launch)
        if cut.region is not None:
            return clone_each([crop for position, row in extents.items() for crop in self._crops(position, row)])
        if not extents:
            return []
        mapped = cut.span_map
        crops = [
            (position, tuple(mapped.apply(dim, *pair) for dim, pair in enumerate(extent)))
            for position, row in extents.items()
            for extent in row
        ]
        return gather(outputs[cut.output].movedim(mapped.row_dim, 0), cut.source_dims, crops)

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

    def _is_withheld(self, position: int) -> bool:
        withheld = self._launch.withheld
        return withheld is not None and ((position, None) in withheld or (position, self._cut.name) in withheld)

    def _entry(self, position: int) -> Entry | None:
        if self._is_withheld(position):
            return None
        if self._owned is not None:
            owned = self._owned.get(position)
            if owned is None:
                self._extents(position)  # raises for a bad row
            return owned
        extents = self._extents(position)
        crops = self._crops(position, extents)
        if self._step is not None and self._step._ring.debug:
            where = user_line()
            self._launch.taken += [(weakref.ref(crop), where) for crop in crops]
        return self._as_entry(crops) if extents else None

    def _as_entry(self, crops: Sequence[Tensor]) -> Entry:
        return tuple(crops) if self._cut.span.max_spans > 1 else crops[0]

    def _crops(self, position: int, extents: Sequence[tuple[tuple[int, int], ...]]) -> list[Tensor]:
        """The row's parts, in the ring or in the graph's output."""
        launch, cut = self._launch, self._cut
        if cut.region is None:
            return self._padded(position, extents)
        offset, _ = self._record(position)
        if offset < 0:  # the step did not fit
            crops = self._padded(position, extents)
            crops = [pcm16(crop) for crop in crops] if cut.casts else crops
            return [crop.cpu() for crop in crops] if cut.region.on_host else crops
        slot = launch.copy_slot  # before the check: another thread may release meanwhile
        if launch.is_released or slot is None or launch.tail.copies is None:
            raise _stale(launch)
        memory, at, crops = launch.tail.copies.bytes_of(cut.region, slot), offset * ALIGNMENT, []
        for extent in extents:
            shape = cut.crop_shape(extent)
            num_bytes = math.prod(shape) * cut.dtype.itemsize
            crops.append(memory.narrow(0, at, num_bytes).view(cut.dtype).view(shape))
            at += aligned(num_bytes)
        return crops

    def _padded(self, position: int, extents: Sequence[tuple[tuple[int, int], ...]]) -> list[Tensor]:
        """Views of the row's parts in the graph's output."""
        outputs = self._launch.outputs  # before the check: another thread may release meanwhile
        if self._launch.is_released:
            raise _stale(self._launch)
        return [self._cut.span_map.cut(outputs[self._cut.output], position, extent) for extent in extents]

    def _record(self, position: int) -> tuple[int, int]:
        """Where the row's copy begins, in units of 16 bytes (below 0: the step did not fit), and its NaNs."""
        launch, region = self._launch, self._cut.region
        assert region is not None, "the output is copied"
        records = launch.tail.column(launch, COPIES)
        at = len(records) // launch.num_rows * position + region.index * COPY_WORDS
        return records[at + 1], records[at + 2]

    def _extents(self, position: int) -> list[tuple[tuple[int, int], ...]]:
        try:
            return self._cut.extents(self._spans, position)
        except SpanError as error:
            row_id = self.row_ids[position]
            raise SpanError(f"row {row_id!r} {error}", [row_id]) from None


def _stale(launch: Launch) -> StaleStepError:
    return StaleStepError(
        f"{launch} was released, so its memory may belong to a later step. Read rows before release(), keep them with"
        " rows.own(), or raise depth to hold more steps at once."
    )


class Step:
    """The ticket for one launch. Any thread may wait for it and read it; reading twice gives the same rows.

    A step is open until its spans are read, and leased until it is released: `with step:` releases at the end of the
    block, `release()` does it by hand, and so does the collection of the step and its rows.
    """

    __slots__ = ("__weakref__", "_launch", "_make_result", "_ring")

    def __init__(self, ring: Ring, launch: Launch, make_result: Callable[[Step, bool], Any] | None = None) -> None:
        self._ring = ring
        self._launch = launch
        self._make_result = make_result

    @property
    def generation(self) -> int:
        """The launch's number in the ring."""
        return self._launch.generation

    @property
    def row_ids(self) -> tuple[Hashable, ...]:
        """Ids of the real rows, frozen at launch."""
        ids = self._launch.row_ids
        return tuple(range(self._launch.num_rows) if ids is None else ids)

    @property
    def is_done(self) -> bool:
        """Whether a wait would return at once. Does not wait."""
        if self._launch.is_read or self._launch.error is not None:
            return True
        try:
            return self._launch.event is not None and self._launch.event.query()
        except Exception:  # noqa: BLE001 - the wait raises it
            return True

    @property
    def is_released(self) -> bool:
        """Whether the lease has ended."""
        return self._launch.is_released

    def wait(self, timeout: float | None = None) -> Step:
        """Wait until the step is done and its spans are on the host.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            StepTimeoutError: after `timeout`; the step stays open and can be waited for again.
            StagingError: if the step's slot does not hold this step.
            StaleStepError: after the step's release, also by another thread meanwhile.
        """
        if not self._launch.is_released:
            with profiled("spangraph.wait"):
                self._ring.wait(self._launch, timeout)
        if self._launch.is_released:
            raise self._launch.error or _stale(self._launch)
        return self

    def rows(self, name: str | None = None) -> Rows:
        """Wait, then cut one spanned output.

        Args:
            name: the declared name, or `"fqn.name"` where several submodules declare it; may be left out where the
                step has one spanned output.

        Raises:
            RowLookupError: if the step has no such spanned output.
            and what `wait` raises.
        """
        self.wait()
        return self.cut_rows(self._launch.tail.cut(name))

    def cut_rows(self, cut: Cut) -> Rows:
        """Rows of one planned cut; after a wait."""
        self._ring.note_reader(self._launch)
        return Rows(self, self._launch, cut, self._launch.tail.column(self._launch, cut.column))

    def output(self, index: int) -> Tensor:
        """One whole output of the graph; after a wait."""
        self._ring.note_reader(self._launch)
        outputs = self._launch.outputs
        if self._launch.is_released:
            raise _stale(self._launch)
        return outputs[index]

    def row_values(self, name: str) -> Tensor:
        """Wait, then the row values called `name`: a host tensor, int64 `[rows]` or `[rows, k]`, of the real rows.

        Raises:
            RowLookupError: if the step has no such row value.
            and what `wait` raises.
        """
        self.wait()
        column, shape = self._launch.tail.value(name)
        values = torch.tensor(self._launch.tail.column(self._launch, column).tolist(), dtype=torch.int64)
        return values.view(self._launch.num_rows, *shape)

    def staged(self, column: str, shape: Sequence[int]) -> Tensor:
        """A whole staged column, padding rows zeroed, as a host tensor; after a wait."""
        words, buffer = self._launch.words, self._launch.tail.buffer
        assert words is not None and buffer is not None, "read, so that it has words"
        first, width = buffer.layout.columns[column]
        return torch.tensor(words[first : first + width * shape[0]].tolist(), dtype=torch.int64).view(*shape)

    def result(self) -> Any:
        """Wait, then the model's own output structure with spanned tensors replaced by `Rows`.

        Outputs without spans are delivered whole and live as long as the rows. Only for compiled models.

        Raises:
            StepStateError: for a step of a `SpanStager`, which knows no output structure.
            and what `wait` raises.
        """
        return self._result(own=False)

    def _result(self, *, own: bool) -> Any:
        self.wait()
        if self._make_result is None:
            raise StepStateError("a step of a SpanStager has no result(): use rows(name) and the graph's own outputs.")
        with profiled("spangraph.cut"):
            return self._make_result(self, own)

    def withhold(self, row_id: Hashable, *names: str) -> None:
        """Withhold a row after the launch, for the named outputs or all of them: as if its spans were empty.

        For stop checks and aborted requests; never waits.

        Raises:
            RowLookupError: if the step has no such row or output.
        """
        if row_id not in self.row_ids:
            raise RowLookupError(f"no row {row_id!r} in this step; its rows are {list(self.row_ids)}.")
        position = self.row_ids.index(row_id)
        which: list[str | None] = [self._launch.tail.cut(name).name for name in names]
        with _WITHHOLDING:  # of all steps: held for a microsecond
            self._launch.withheld = (self._launch.withheld or frozenset()) | {
                (position, name) for name in which or [None]
            }

    def release(self) -> None:
        """End the lease. Rows that are not owned become invalid; a consumer's work on the current stream is waited for,
        on the device, by the next launch into this memory. Never waits for the device, but for a launch that another
        thread is making; does nothing the second time."""
        self._ring.release(self._launch)

    def cancel(self) -> None:
        """Give the step up, done or in flight, for requests that nobody waits for any more: who waits or reads gets
        `StaleStepError`. Waits for nothing, not even for another thread's launch. To give up one row, see `withhold`."""
        self._ring.cancel(self._launch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        if not self._launch.is_released:
            self._ring.discard(self._launch)

    def __repr__(self) -> str:
        return f"<{self._launch}>"


class _Unprofiled:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


_UNPROFILED = _Unprofiled()


def profiled(name: str) -> Any:
    """A profiler range around host work; free while no profiler runs, and never a synchronisation."""
    running = torch._C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]
    return torch.profiler.record_function(name) if running else _UNPROFILED
