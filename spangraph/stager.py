"""The primitive for people who capture their own graphs: one staging node per graph, one ring for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from spangraph.backends import Backend, InlineBackend, resolve_backend
from spangraph.counts import Counts
from spangraph.cuts import Cut, make_cut
from spangraph.declare import Declaration
from spangraph.errors import DeclarationError, InputError
from spangraph.kernels.stage import check_stage_args
from spangraph.memory import Memory, measure_stager
from spangraph.slots import Copy, copies_of
from spangraph.spans import Span, SpannedOutput
from spangraph.stops import RowValues, StopCheck
from spangraph.tail import StagerCore, Tail, refuse_copies


class SpanStager:
    """Stages spans and row values at the tail of graphs that you capture yourself.

    All graphs of a stager (buckets, walks) share one ring and one launch order. Build it before any capture: pinned
    memory cannot be allocated inside one. Outputs are leased to their step, so a graph is not replayed again before
    its last step is released; capture one graph per step in flight, each with memory of its own. A graph whose spanned
    outputs are all copied (`copies=`) leases none of them: any number of its steps may be in flight, up to the depth,
    and it may share a memory pool with other such graphs, unless a step may take more than the copies' capacity. While
    a step leases outputs of one graph, no graph of the same pool is launched: give graphs pools of their own to have
    their steps in flight at once.

    Args:
        spans: names, or name -> `Span`, of every spanned output of any of its graphs.
        max_rows: rows of the largest batch.
        row_values: names of row values `[bs]`, or name -> number of int64 words per row (k for `[bs, k]`).
        copies: name -> `Copy`, for spanned outputs whose valid bytes are copied at the tail. Its capacity must be given
            (bytes of a step's rows), as the outputs are not known yet.
        depth: steps that may be open or leased at once.
        device: `"cuda"`, a device, or a backend such as `spangraph.testing.SimulatedDevice()`.
        staging: `"kernel"`, or `"copy"` for the plain async copy, whose destination is baked in: depth 1, or one
            graph per slot (`stage(slot=...)`).
        wait: how waits wait: `"block"`, `"spin"`, or `"header"` (poll the header; where its order is proven).
        stop_check: see `spangraph.compile`.
    """

    def __init__(
        self,
        spans: Mapping[str, Span] | Sequence[str],
        *,
        max_rows: int,
        row_values: Mapping[str, int] | Sequence[str] = (),
        copies: Mapping[str, Copy | str] | None = None,
        depth: int = 1,
        device: Backend | torch.device | str | None = None,
        staging: str = "kernel",
        wait: str = "block",
        stop_check: Callable[[RowValues], StopCheck] | None = None,
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
        self._core = StagerCore(self.backend, depth=depth, staging=staging, wait=wait, stop_check=stop_check)
        widths = {name: span.words_per_row for name, span in self._declared.items()} | self._values
        asked = copies_of(copies)
        refuse_copies(asked, staging)
        self._copied = {name: copy for name, copy in asked.items() if copy.to != "view"}
        if unknown := sorted(set(asked) - set(self._declared)):
            raise DeclarationError(
                f"copies of {unknown} are not declared; the stager declares {sorted(self._declared)}."
            )
        sizes = [(copy, _known(name, copy)) for name, copy in self._copied.items()]
        self._buffer, self._copies = self._core.new_buffer(widths, max_rows, sizes)
        self._counts = Counts()
        self._by_pool: dict[Hashable, weakref.WeakSet[Tail]] = {}
        self._inline_tails: dict[int, tuple[object, Tail]] = {}

    def stage(
        self,
        out: SpannedOutput,
        *,
        names: Sequence[str] | None = None,
        inputs: Sequence[Tensor] = (),
        slot: int | None = None,
    ) -> Tail:
        """Put the staging node behind what is being captured on the current stream.

        Args:
            out: outputs, their spans and row values, as the captured forward returned them. Outputs under other names
                than the declared ones are not touched.
            names: the spanned outputs of this graph, default all declared ones.
            inputs: the graph's static inputs. Under `SPANGRAPH_DEBUG=1` each step checks that they are alive and where
                they were, and outputs in their memory are not poisoned.
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
        if tail is None or tail.staged_names != list(columns) or tail.num_rows != num_rows:
            cuts = {
                name: self._place(make_cut(name, name, i, expected[name], outputs[i]))
                for i, name in enumerate(out.output_spans)
            }
            values = {name: (name, tuple(value.shape[1:])) for name, value in out.row_values.items()}
            copied = [cut for cut in cuts.values() if cut.region is not None]
            for index, cut in enumerate(copied):
                assert cut.region is not None, "it is copied"
                copied[index] = cuts[cut.name] = replace(cut, region=replace(cut.region, index=index))
            tail = self._core.new_tail(
                {name: self._buffer.layout.columns[name][1] for name in columns},
                self._buffer,
                num_rows=num_rows,
                cuts=cuts,
                values=values,
                counts=self._counts,
                slot=slot,
                copies=self._copies,
                copied=copied,
                holds_outputs=len(copied) < len(cuts),
                may_overflow=any(cut.region.capacity < cut.padded_bytes(num_rows) for cut in copied if cut.region),
            )
            self._keep_inline_tail(tail)
        pools = (self.backend.pool_of(tensor) for tensor in (*outputs, *columns.values()))
        if (pool := next((pool for pool in pools if pool is not None), None)) is not None:
            tails = tail.neighbours = self._by_pool.setdefault(pool, weakref.WeakSet())
            tails.add(tail)
        tail.note_inputs(inputs)
        tail.outputs = outputs if tail.holds_outputs or tail.may_overflow else ()
        if tail.copied:
            sources = [out.outputs[cut.name] for cut in tail.copied]
            copy_args = tail.compact_args(sources, [out.output_spans[cut.name] for cut in tail.copied])
            torch.ops.spangraph.compact.default(*copy_args)
        args = tail.stage_args(list(columns.values()))
        cursor, slots, control, staged, offsets, _, mirror, baked = args
        check_stage_args(cursor, slots, control, staged, offsets, mirror, baked)
        torch.ops.spangraph.stage.default(*args)
        return tail

    def _place(self, cut: Cut) -> Cut:
        """The cut, with its place in a copy slot."""
        copy = self._copied.get(cut.name)
        if copy is None or self._copies is None:
            return cut
        return cut.copied_to(self._copies.regions[list(self._copied).index(cut.name)], copy)

    # On the inline backend a replay calls the captured function, and with it stage(), again: it must find its tail.
    def _inline_tail(self) -> Tail | None:
        graph = self.backend.current_graph() if isinstance(self.backend, InlineBackend) else None
        return self._inline_tails[id(graph)][1] if id(graph) in self._inline_tails and graph is not None else None

    def _keep_inline_tail(self, tail: Tail) -> None:
        graph = self.backend.current_graph() if isinstance(self.backend, InlineBackend) else None
        if graph is not None:
            self._inline_tails[id(graph)] = (graph, tail)

    @property
    def counts(self) -> Counts:
        """What its steps have done."""
        return self._counts

    def memory(self) -> Memory:
        """Pinned and device bytes per output, and what open leases retain."""
        return measure_stager(self._core, self._buffer, self._copies, list(self._copied))

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


def _known(name: str, copy: Copy) -> int:
    if copy.capacity is None:
        raise DeclarationError(
            f"copies[{name!r}] has no capacity: a stager is built before its graphs, so say how many bytes a step's"
            f" rows may take, e.g. Copy({copy.to!r}, capacity=1 << 20)."
        )
    return copy.capacity
