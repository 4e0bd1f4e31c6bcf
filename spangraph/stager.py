"""The primitive for people who capture their own graphs: one staging node per graph, one ring for all of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from spangraph.backends import Backend, InlineBackend, resolve_backend
from spangraph.declare import Declaration
from spangraph.errors import DeclarationError, InputError, RowLookupError
from spangraph.kernels.stage import check_stage_args
from spangraph.passes.span_maps import SpanMap
from spangraph.ring import Launch, Layout, Ring, SlotBuffer
from spangraph.spans import Span, SpannedOutput
from spangraph.step import Cut, Step


class Tail:
    """One graph's staging node, and the outputs that its steps cut.

    Attributes:
        graph: the id that control records name this graph by.
        columns: what a slot holds for this graph: column -> words per row.
        buffer: the slots it writes to; None where it stages nothing.
        slot: for the plain async copy, the one slot that the captured copy writes to.
        keeps_outputs: whether steps are leased: rows are views of `outputs`, so a replay overwrites them.
        occupant: the step that leases the outputs.
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
        slot: int | None = None,
        keeps_outputs: bool = True,
    ) -> None:
        self._ring = ring
        self.graph = graph
        self.columns = columns
        self.buffer = buffer
        self.num_rows = num_rows
        self._cuts = cuts
        self._values = values
        self.slot = slot
        self.keeps_outputs = keeps_outputs
        self.occupant: Launch | None = None
        self.outputs: Sequence[Tensor] = ()
        self.mirror: Tensor | None = None
        if slot is not None and buffer is not None:
            with torch.inference_mode(False):
                self.mirror = torch.zeros(buffer.layout.num_words, dtype=torch.int64, device=ring.backend.device)

    def stage_args(self, columns: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments of `torch.ops.spangraph.stage` for these columns (tensors, or graph nodes in a pass)."""
        assert self.buffer is not None, "a tail without columns has no staging node"
        offsets = [self.buffer.layout.columns[name][0] for name in self.columns]
        memory, control = self.buffer.memory.device, self._ring.control.device
        return self._ring.cursor, memory, control, list(columns), offsets, self.graph, self.mirror, self.slot or 0

    def cut(self, name: str | None) -> Cut:
        """The cut called `name`; the only one if None.

        Raises:
            RowLookupError: if there is no such cut, or None is not clear.
        """
        if name is None and len(self._cuts) == 1:
            return next(iter(self._cuts.values()))
        if name is None or name not in self._cuts:
            asked = "one name" if name is None else repr(name)
            raise RowLookupError(
                f"no spanned output for {asked}; this step has {sorted(self._cuts)}. A module that returns no spans"
                " has its outputs delivered whole: see result()."
            )
        return self._cuts[name]

    def value(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Column and per-row shape of the row value called `name`.

        Raises:
            RowLookupError: if there is none.
        """
        if name not in self._values:
            raise RowLookupError(f"no row value {name!r}; this step has {sorted(self._values)}.")
        return self._values[name]

    def check_rows(
        self, rows: Sequence[Hashable] | None, num_rows: int | None
    ) -> tuple[Sequence[Hashable] | None, int]:
        """Row ids and their number for a launch; a batch row without an id must be said to be padding.

        Raises:
            InputError: for duplicate, too few or too many row ids.
        """
        real = self.num_rows if num_rows is None else num_rows
        if not 0 <= real <= self.num_rows:
            raise InputError(f"num_rows={num_rows} of a batch of {self.num_rows} rows: expected 0 to {self.num_rows}.")
        if rows is None:
            return None, real
        if isinstance(rows, str):
            raise InputError(f"rows={rows!r} is one string: expected a sequence of row ids.")
        ids = tuple(rows)
        if len(ids) != real:
            raise InputError(
                f"{len(ids)} row ids for {real} real rows: give one id per real row. num_rows= says how many of the"
                f" batch's {self.num_rows} rows are real; the others are padding."
            )
        try:
            distinct = len(set(ids))
        except TypeError as error:
            raise InputError(f"row ids {list(ids)} cannot be keys ({error}): use strings, numbers or tuples.") from None
        if distinct != len(ids):
            raise InputError(f"row ids {list(ids)} hold one id twice: every row needs its own.")
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
        """
        ids, real = self.check_rows(rows, num_rows)
        ring = self._ring
        with ring.lock, ring.backend.guard():
            launch = ring.reserve((self,), ids, real, wait=wait, timeout=timeout)
            try:
                yield Step(ring, launch)
                ring.commit(launch, self.outputs)
            except BaseException:
                ring.abort(launch)
                raise


class SpanStager:
    """Stages spans and row values at the tail of graphs that you capture yourself.

    All graphs of a stager (buckets, walks) share one ring and one launch order. Build it before any capture: pinned
    memory cannot be allocated inside one. Outputs are leased to their step, so a graph is not replayed again before
    its last step is released; capture one graph per step in flight, each with memory of its own.

    Args:
        spans: names, or name -> `Span`, of every spanned output of any of its graphs.
        max_rows: rows of the largest batch.
        row_values: names of row values `[bs]`, or name -> number of int64 words per row (k for `[bs, k]`).
        depth: steps that may be open or leased at once.
        device: `"cuda"`, a device, or a backend such as `spangraph.testing.SimulatedDevice()`.
        staging: `"kernel"`, or `"copy"` for the plain async copy, whose destination is baked in: depth 1, or one
            graph per slot (`stage(slot=...)`).
        wait: how waits wait: `"block"`, `"spin"`, or `"header"` (poll the header; where its order is proven).
    """

    def __init__(
        self,
        spans: Mapping[str, Span] | Sequence[str],
        *,
        max_rows: int,
        row_values: Mapping[str, int] | Sequence[str] = (),
        depth: int = 1,
        device: Backend | torch.device | str | None = None,
        staging: str = "kernel",
        wait: str = "block",
    ) -> None:
        spans = dict(spans) if isinstance(spans, Mapping) else {name: Span() for name in spans}
        for name, span in spans.items():
            if not isinstance(span, Span):
                raise DeclarationError(f"spans[{name!r}] is {span!r}: expected a Span, e.g. Span(dims=(-1,)).")
        if not isinstance(max_rows, int) or max_rows < 1:
            raise InputError(f"max_rows={max_rows!r}: expected the rows of the largest batch, at least 1.")
        self._declared = dict(spans)
        self._values = dict(row_values) if isinstance(row_values, Mapping) else dict.fromkeys(row_values, 1)
        for name, width in self._values.items():
            if not isinstance(width, int) or width < 1:
                raise DeclarationError(
                    f"row_values[{name!r}]={width!r}: expected the int64 words of a row, at least 1."
                )
        if clash := sorted(set(self._declared) & set(self._values)):
            raise DeclarationError(f"{clash} name both spanned outputs and row values: use different names.")
        self.backend = resolve_backend(device)
        self._core = StagerCore(self.backend, depth=depth, staging=staging, wait=wait)
        widths = {name: span.words_per_row for name, span in self._declared.items()} | self._values
        self._buffer = self._core.new_buffer(widths, max_rows)
        self._inline_tails: dict[int, tuple[object, Tail]] = {}

    def stage(self, out: SpannedOutput, *, names: Sequence[str] | None = None, slot: int | None = None) -> Tail:
        """Put the staging node behind what is being captured on the current stream.

        Args:
            out: outputs, their spans and row values, as the captured forward returned them. Outputs under other names
                than the declared ones are not touched.
            names: the spanned outputs of this graph, default all declared ones.
            slot: for `staging="copy"`: the slot this graph's copy writes to.

        Returns:
            The graph's tail: `with tail.step(rows=...) as step: graph.replay()`.

        Raises:
            DeclarationError: if names, shapes, dtypes or devices do not fit (SG101-SG106).
        """
        expected = (
            dict(self._declared) if names is None else {n: self._declared[n] for n in names if n in self._declared}
        )
        if names is not None and (unknown := sorted(set(names) - set(self._declared))):
            raise DeclarationError(f"names={unknown} are not declared; the stager declares {sorted(self._declared)}.")
        if not isinstance(out, SpannedOutput):
            raise DeclarationError(
                f"stage() got {type(out).__name__}: expected a SpannedOutput with outputs and spans."
            )
        declaration = Declaration(_NO_MODULE, "the staged output", "stage", expected, "")
        declaration.read(out, (), {})
        if unknown := sorted(set(out.row_values) - set(self._values)):
            raise DeclarationError(
                f"row values {unknown} are not declared: declared are {sorted(self._values)}; pass"
                f" SpanStager(row_values={unknown}), or name -> words per row."
            )
        columns = {**out.output_spans, **out.row_values}
        if not columns:
            raise DeclarationError("stage() got neither spans nor row values: there is nothing to stage in this graph.")
        num_rows = next(iter(columns.values())).shape[0]
        if num_rows > self._buffer.layout.num_rows:
            raise DeclarationError(
                f"a batch of {num_rows} rows, but the stager has room for {self._buffer.layout.num_rows}: raise"
                " max_rows."
            )
        for name, column in columns.items():
            width = self._buffer.layout.columns[name][1]
            if column.shape[1:].numel() != width:
                raise DeclarationError(f"row value {name!r} has shape {list(column.shape)}: declared {width} per row.")
        outputs = [out.outputs[name] for name in out.output_spans]
        tail = self._inline_tail()
        if tail is None or list(tail.columns) != list(columns) or tail.num_rows != num_rows:
            cuts = {
                name: make_cut(name, name, i, expected[name], outputs[i]) for i, name in enumerate(out.output_spans)
            }
            values = {name: (name, tuple(value.shape[1:])) for name, value in out.row_values.items()}
            tail = self._core.new_tail(
                {name: self._buffer.layout.columns[name][1] for name in columns},
                self._buffer,
                num_rows=num_rows,
                cuts=cuts,
                values=values,
                slot=slot,
                keeps_outputs=bool(outputs),
            )
            self._keep_inline_tail(tail)
        tail.outputs = outputs
        args = tail.stage_args(list(columns.values()))
        cursor, slots, control, staged, offsets, _, mirror, baked = args
        check_stage_args(cursor, slots, control, staged, offsets, mirror, baked)
        torch.ops.spangraph.stage.default(*args)
        return tail

    # On the inline backend a replay calls the captured function, and with it stage(), again: it must find its tail.
    def _inline_tail(self) -> Tail | None:
        graph = self.backend.current_graph() if isinstance(self.backend, InlineBackend) else None
        return self._inline_tails[id(graph)][1] if id(graph) in self._inline_tails and graph is not None else None

    def _keep_inline_tail(self, tail: Tail) -> None:
        graph = self.backend.current_graph() if isinstance(self.backend, InlineBackend) else None
        if graph is not None:
            self._inline_tails[id(graph)] = (graph, tail)

    def close(self) -> None:
        """Wait for all work, then refuse launches. Steps that were launched can still be read."""
        self._core.ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SpanStager {sorted(self._declared)} on {self.backend.name}; {self._core.ring.describe()}>"


_NO_MODULE = nn.Module()


class StagerCore:
    """Ring, buffers and tails: what `SpanStager` and `compile` share."""

    def __init__(self, backend: Backend, *, depth: int, staging: str = "kernel", wait: str = "block") -> None:
        if staging not in ("kernel", "copy"):
            raise InputError(f"staging={staging!r}: expected 'kernel' or 'copy'.")
        if staging == "copy" and wait == "header":
            raise InputError("wait='header' needs staging='kernel': a copy lands in no order.")
        self.staging = staging
        num_slots = depth if staging == "copy" else None
        with backend.guard():
            self.ring = Ring(backend, depth=depth, num_slots=num_slots, wait=wait)
        self._graph_ids = itertools.count(1)

    def new_buffer(self, widths: Mapping[str, int], num_rows: int) -> SlotBuffer:
        """Pinned slots; never inside a capture."""
        with self.ring.backend.guard():
            return SlotBuffer(self.ring.backend, Layout.of(widths, num_rows), self.ring.num_slots)

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


def make_cut(
    name: str, column: str, output: int, span: Span, value: Tensor, span_map: SpanMap | None = None, label: str = ""
) -> Cut:
    """A cut of the declared value itself, or of what `span_map` says derives from it."""
    widths = tuple(value.shape[dim] for dim in span.dims)
    return Cut(name, column, output, span, widths, span_map or SpanMap.identity(value.ndim, span.dims), label or name)
