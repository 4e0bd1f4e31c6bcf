"""One graph's tail: its staging node, its compaction node, and the rows that its steps cut."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spangraph.backends import Backend
from spangraph.counts import Counts
from spangraph.cuts import Cut, Grid
from spangraph.errors import InputError, RowLookupError, SpanError, StaleGraphError, StepStateError
from spangraph.kernels.compact import COPY_WORDS
from spangraph.launch import Launch, checked_ids
from spangraph.ring import Ring
from spangraph.slots import ALIGNMENT, COPIES, Copy, CopySlots, Layout, SlotBuffer
from spangraph.step import Step
from spangraph.stops import RowValues, StopCheck, StopChecks


class Tail:
    """One graph's staging node, and the outputs that its steps cut.

    Attributes:
        graph: the id that control records name this graph by.
        columns: what a slot holds for this graph: column -> words per row.
        buffer: the slots it writes to; None where it stages nothing.
        slot: for the plain async copy, the one slot that the captured copy writes to.
        copies: the slots that it copies rows to; None where it copies nothing.
        counts: what its steps count in.
        is_plain: whether its steps take any slot and no other memory of the ring's.
        holds_outputs: whether its steps lease `outputs`, as rows are views of them: a replay overwrites them.
        may_overflow: whether a step's copies may not fit, so that its rows may have to be cut from `outputs`.
        occupant: the step that leases the outputs.
        neighbours: tails of graphs in the same memory pool: a replay of one overwrites the outputs of all.
    """

    def __init__(
        self,
        ring: Ring,
        graph: int,
        columns: Mapping[str, int],
        buffer: SlotBuffer | None,
        *,
        num_rows: int,
        cuts: Mapping[str, Cut],
        values: Mapping[str, tuple[str, tuple[int, ...]]],
        counts: Counts | None = None,
        slot: int | None = None,
        copies: CopySlots | None = None,
        copied: Sequence[Cut] = (),
        holds_outputs: bool = True,
        may_overflow: bool = False,
    ) -> None:
        self._ring = ring
        self.graph = graph
        self.buffer = buffer
        self.num_rows = num_rows
        self.cuts: Mapping[Any, Cut] = cuts  # by names; asked for None, too
        self._views = [cut for cut in cuts.values() if cut.single_dim >= 0]
        self._values = values
        self.counts = counts or Counts()
        self.slot = slot
        self.copies = copies if copied else None
        self.copied = copied
        self.holds_outputs = holds_outputs
        self.may_overflow = may_overflow
        self.staged_names = list(columns)
        if self.copies is not None and buffer is not None:
            columns = dict(columns, **{COPIES: len(copied) * COPY_WORDS})
        self.columns = columns
        places = {} if buffer is None else buffer.layout.columns
        self._places = {name: (places[name][0], width) for name, width in columns.items()}
        self.is_plain = slot is None and self.copies is None and not may_overflow
        self.is_leased = holds_outputs or bool(copied)
        self.occupant: Launch | None = None
        self.neighbours: Collection[Tail] = ()
        self.outputs: Sequence[Tensor] = ()
        self.grids: dict[Cut, Grid] = {}  # of these
        self._inputs: list[tuple[weakref.ref[Tensor], weakref.ref[torch.UntypedStorage], int]] = []
        self.mirror: Tensor | None = None
        self.status: Tensor | None = None  # what the copies of a replay tell its staging node
        with torch.inference_mode(False):
            if slot is not None and buffer is not None:
                self.mirror = torch.zeros(buffer.layout.num_words, dtype=torch.int64, device=ring.backend.device)
            if self.copies is not None:
                shape = num_rows, len(copied), COPY_WORDS
                self.status = torch.zeros(shape, dtype=torch.int64, device=ring.backend.device)

    def stage_args(self, columns: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments of `torch.ops.spangraph.stage` for these columns (tensors, or graph nodes in a pass)."""
        assert self.buffer is not None, "a tail without columns has no staging node"
        offsets = [self.buffer.layout.columns[name][0] for name in self.columns]
        memory, control = self.buffer.memory.device, self._ring.control.device
        staged = [*columns, *([] if self.status is None else [self.status])]
        return self._ring.cursor, memory, control, staged, offsets, self.graph, self.mirror, self.slot or 0

    def compact_args(self, sources: Sequence[Any], spans: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments of `torch.ops.spangraph.compact` for the outputs that are copied, rows along dim 0, and their
        spans (tensors, or graph nodes in a pass)."""
        assert self.copies is not None, "a tail without copies has no compaction node"
        regions = [cut.region for cut in self.copied if cut.region is not None]
        return (
            self._ring.cursor,
            self._ring.control.device,
            list(sources),
            list(spans),
            self.copies.rings,
            self.status,
            self.graph,
            [region.ring for region in regions],
            [region.first for region in regions],
            [region.capacity for region in regions],
            [dim for cut in self.copied for dim in cut.source_dims],
            [cut.span.max_spans for cut in self.copied],
            [int(cut.casts) for cut in self.copied],
        )

    def column(self, launch: Launch, name: str) -> memoryview:
        """The words of a column that a step staged for its real rows.

        Raises:
            StepStateError: if it staged nothing.
        """
        if (column := launch.columns.get(name)) is None:
            if (words := launch.words) is None:
                raise StepStateError(f"{launch} staged no spans.")
            first, width = self._places[name]
            column = launch.columns[name] = words[first : first + width * launch.num_rows]
        return column

    def prepare(
        self, launch: Launch, grids: dict[Cut, Grid], outputs: Sequence[Tensor], cuts: Sequence[Cut] | None = None
    ) -> None:
        """Look up what all rows of cuts need that are made by one operator each; of all that have a name, right behind
        an inline launch, where it takes half the time."""
        words, columns = launch.words, launch.columns
        assert words is not None, "it was read"
        for cut in self._views if cuts is None else cuts:
            first, width = self._places[cut.column]
            columns[cut.column] = words[first : first + width * launch.num_rows]
            padded, dim = outputs[cut.output], cut.single_dim
            strides = padded.stride()
            place = cut.single_width, strides[dim + 1], padded.storage_offset(), strides[0]
            grids[cut] = padded.as_strided, cut.row_shape, strides[1:], dim, *place

    def read_copies(self, launch: Launch) -> int | None:
        """Learn what became of a step's copies. Returns another step's generation if one of them is that step's."""
        if launch.num_rows == 0:
            return None
        records = self.column(launch, COPIES).tolist()
        width, last = len(records) // launch.num_rows, launch.num_rows - 1
        for cut in self.copied:
            assert cut.region is not None, "it is copied"
            first = cut.region.index * COPY_WORDS
            if other := set(records[first::width]) - {launch.generation}:
                return other.pop()
            offset = records[last * width + first + 1]
            if offset < 0:
                launch.has_overflowed = True
                self.counts.overflows += 1
                continue
            num_bytes = offset * ALIGNMENT
            with contextlib.suppress(SpanError):  # of the last row, which then takes none
                num_bytes += sum(map(cut.crop_bytes, cut.windows(self.column(launch, cut.column), last)))
            self.counts.nans += sum(records[first + 2 :: width])
            self.counts.host_bytes += num_bytes if cut.region.on_host else 0
            self.counts.device_bytes += 0 if cut.region.on_host else num_bytes
        return None

    def note_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Remember where the graph's inputs are."""
        self._inputs = [(weakref.ref(x), weakref.ref(x.untyped_storage()), x.data_ptr()) for x in inputs]

    def check_inputs(self) -> None:
        """While debugging: a graph reads its inputs where they were at the capture.

        Raises:
            StaleGraphError: if one of them is gone or has other memory now.
        """
        for i, (ref, storage, address) in enumerate(self._inputs):
            tensor = ref()  # gone, if it was a slice of a larger buffer; then that must be alive
            if storage() is None or (tensor is not None and tensor.data_ptr() != address):
                what = "is gone" if tensor is None else f"is at {tensor.data_ptr():#x}"
                raise StaleGraphError(
                    f"input {i} of graph {self.graph} was at {address:#x} at the capture, and {what} now: a replay"
                    " reads the old memory. Keep static inputs alive, and update them in place (copy_)."
                )

    def dying(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of a step's outputs that are nobody's after it: not in memory of an input."""
        inputs = {storage.data_ptr() for _, ref, _ in self._inputs if (storage := ref()) is not None}
        return [output for output in outputs if output.untyped_storage().data_ptr() not in inputs]

    def cut(self, name: str | None) -> Cut:
        """The cut called `name`; the only one if None.

        Raises:
            RowLookupError: if there is no such cut, or None is not clear.
        """
        if name is None and len(self.cuts) == 1:
            return next(iter(self.cuts.values()))
        if name is None or name not in self.cuts:
            if name is None and self.cuts:
                raise RowLookupError(f"this step has several spanned outputs: name one of {sorted(self.cuts)}.")
            asked = "" if name is None else f" for {name!r}"
            raise RowLookupError(
                f"no spanned output{asked}; this step has {sorted(self.cuts)}. A module that returns no spans has its"
                " outputs delivered whole: see result()."
            )
        return self.cuts[name]

    @property
    def cut_names(self) -> tuple[str, ...]:
        """Names of the spanned outputs."""
        return tuple(self.cuts)

    def value(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Column and per-row shape of the row value called `name`.

        Raises:
            RowLookupError: if there is none.
        """
        if name not in self._values:
            raise RowLookupError(f"no row value {name!r}; this step has {sorted(self._values)}.")
        return self._values[name]

    def all_values(self, launch: Launch) -> dict[str, list[Any]]:
        """Name -> row value per real row: an int, or a tuple of ints where a row has several."""
        found: dict[str, list[Any]] = {}
        for name, (column, shape) in self._values.items():
            words = self.column(launch, column).tolist()
            width = self.columns[column]
            found[name] = [tuple(words[i : i + width]) for i in range(0, len(words), width)] if shape else words
        return found

    def check_rows(
        self, rows: Sequence[Hashable] | None, num_rows: int | None, batch: int | None = None
    ) -> tuple[Sequence[Hashable] | None, int]:
        """Row ids and their number for a launch; a batch row without an id must be said to be padding.

        Args:
            batch: rows of the caller's batch, default the graph's.

        Raises:
            InputError: for duplicate, too few or too many row ids, or another `num_rows` than the batch can have.
        """
        size = self.num_rows if batch is None else batch
        real = size if num_rows is None else num_rows
        if not isinstance(real, int) or isinstance(real, bool) or not 0 <= real <= size:
            raise InputError(f"num_rows={num_rows} of a batch of {size} rows: expected an int from 0 to {size}.")
        if rows is None:
            return None, real
        ids = checked_ids(rows)
        if len(ids) != real:
            raise InputError(
                f"{len(ids)} row ids for {real} real rows: give one id per real row. num_rows= says how many of the"
                f" batch's {size} rows are real; the others are padding."
            )
        return ids, real

    @contextlib.contextmanager
    def step(
        self,
        rows: Sequence[Hashable] | None = None,
        *,
        num_rows: int | None = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Step]:
        """Reserve a slot for one replay of this graph, which must happen inside the block, once.

        The ring's launch lock is held meanwhile. If the block raises, the ring drains and re-bases, and later steps
        are right. A replay that nobody reserved is a dry run, if it ran before this reservation: synchronise after
        warm-up replays.

        Args:
            rows: ids of the real rows, default their positions.
            num_rows: number of real rows, default all; the rest are padding and never surface.
            wait: wait for room instead of raising `RingFullError`.
            timeout: seconds to wait for room.

        Raises:
            InputError: for bad row ids.
            RingFullError, StepTimeoutError, ClosedError: see `Ring.reserve`.
            StaleGraphError: while debugging, if an input of the graph has moved.
        """
        ids, real = self.check_rows(rows, num_rows)
        ring = self._ring
        if ring.debug:
            self.check_inputs()
        with ring.lock, ring.backend.guard():
            launch = ring.reserve((self,), ids, real, wait=wait, timeout=timeout)
            try:
                yield Step(ring, launch)
                ring.commit(launch, self.outputs)
            except BaseException:
                ring.abort(launch)
                raise


class StagerCore:
    """Ring, buffers and tails: what `SpanStager` and `compile` share."""

    def __init__(
        self,
        backend: Backend,
        *,
        depth: int,
        staging: str = "kernel",
        wait: str = "block",
        stop_check: Callable[[RowValues], StopCheck] | None = None,
    ) -> None:
        if staging not in ("kernel", "copy"):
            raise InputError(f"staging={staging!r}: expected 'kernel' or 'copy'.")
        if staging == "copy" and wait == "header":
            raise InputError("wait='header' needs staging='kernel': a copy lands in no order.")
        self.backend = backend
        self.staging = staging
        num_slots = depth if staging == "copy" else None
        with backend.guard():
            self.ring = Ring(backend, depth=depth, num_slots=num_slots, wait=wait)
        self.ring.stop_checks = None if stop_check is None else StopChecks(stop_check)
        self._graph_ids = itertools.count(1)
        self._pool: Any = None

    def shared_pool(self) -> Any:
        """Memory for all graphs whose outputs nobody keeps."""
        if self._pool is None:
            self._pool = self.backend.new_pool()
        return self._pool

    def new_buffer(
        self, widths: Mapping[str, int], num_rows: int, copies: Sequence[tuple[Copy, int]] = ()
    ) -> tuple[SlotBuffer, CopySlots | None]:
        """Slots for spans and row values, and for `copies`: `(copy, bytes)` each. Never inside a capture."""
        widths = dict(widths, **{COPIES: COPY_WORDS * len(copies)}) if copies else widths
        with self.backend.guard():
            buffer = SlotBuffer(self.backend, Layout.of(widths, num_rows), self.ring.num_slots)
            return buffer, CopySlots(self.backend, copies, self.ring.depth) if copies else None

    def new_tail(
        self, columns: Mapping[str, int], buffer: SlotBuffer | None, *, slot: int | None = None, **options: Any
    ) -> Tail:
        """A tail with a graph id of its own.

        Raises:
            InputError: if a slot is given to the kernel, or is missing or unknown for the plain copy.
        """
        if self.staging == "kernel" and slot is not None:
            raise InputError("slot= is for staging='copy': the kernel's slot is chosen at each launch.")
        if self.staging == "copy" and buffer is not None:
            slot = 0 if slot is None and self.ring.num_slots == 1 else slot
            if slot is None or not 0 <= slot < self.ring.num_slots:
                raise InputError(
                    f"staging='copy' at depth {self.ring.num_slots} bakes the slot into the graph: capture one graph"
                    f" per slot and pass stage(slot=0..{self.ring.num_slots - 1}), got {slot}."
                )
        return Tail(self.ring, next(self._graph_ids), columns, buffer, slot=slot, **options)


def refuse_copies(copies: Mapping[str, Copy], staging: str) -> None:
    """Copies need the staging kernel.

    Raises:
        InputError: for copies beside a plain copy of the spans.
    """
    if staging != "kernel" and any(copy.to != "view" for copy in copies.values()):
        raise InputError(
            "copies= needs staging='kernel': the copies' slot is chosen at each launch. Leave rows as views, or stage"
            " with the kernel."
        )
