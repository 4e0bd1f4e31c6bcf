"""Builds a signature: traces the model, plans what is cut, copied and kept, captures, and says how a result is made."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from spangraph.backends import debug_enabled, preserve_generators
from spangraph.compiler import compile_graph
from spangraph.counts import Counts
from spangraph.diagnostics import Diagnostic
from spangraph.errors import DeclarationError, HostReadError, InputError, TraceError
from spangraph.host_state import storage_key
from spangraph.launch import Launch
from spangraph.passes.insert_staging import Copied, insert_staging_node
from spangraph.passes.marks import Mark, public_names
from spangraph.passes.nodes import is_part_of, result_nodes, storage_roots, val, written
from spangraph.passes.prepare import Prepared, prepare_graph
from spangraph.passes.run_on_host import graph_method, host_method
from spangraph.rows import Cut, Rows
from spangraph.signature import Instance, Runner, Signature, Uncaptured, restrided
from spangraph.slots import Copy, Region
from spangraph.step import Step
from spangraph.structure import CallSpec, Constant, Leaf
from spangraph.tail import StagerCore, make_cut
from spangraph.trace import Trace
from spangraph.tracer import TRACE_LOCK, locate_reads, retrace_uncaptured, trace_model
from spangraph.watch import Watch
from spangraph.weights import Weights

_logger = logging.getLogger("spangraph")


@dataclass(frozen=True)
class _Outputs:
    """What becomes of a graph's outputs.

    Attributes:
        names: public name -> cut.
        cuts: output -> cut, of all that are cut.
        copied: the cuts whose rows are copied, each part of a copy slot once, and where they come from.
        keep: outputs that the graph returns.
        holds: whether steps lease some of them.
        may_overflow: whether some copies may not fit.
    """

    names: Mapping[str, Cut]
    cuts: dict[int, Cut]
    copied: Sequence[tuple[Cut, Copied]]
    keep: Sequence[int]
    holds: bool
    may_overflow: bool


class SignatureBuilder:
    """Traces a model for an input signature, and captures it.

    Attributes:
        core: the ring that all signatures share.
    """

    def __init__(
        self,
        model: nn.Module,
        walk: str,
        core: StagerCore,
        *,
        trace: str,
        verify: str,
        copies: Mapping[str, Copy],
        generators: Sequence[torch.Generator],
        pads: bool,
    ) -> None:
        self._model = model
        self._walk = walk
        self.core = core
        self._backend = core.backend
        if trace == "opaque" and self._backend.compiler is not None:
            raise InputError(
                f"trace='opaque' and backend {self._backend.compiler!r}: an opaque trace is the model itself, which no"
                " compiler sees. Use trace='export' or 'dynamo', or a device as the backend."
            )
        self._tracer = trace
        self._verify = verify
        self._copies = copies
        self._generators = generators
        self._pads = pads
        self._debug = debug_enabled()

    def build(
        self,
        call: CallSpec,
        tensors: Sequence[Tensor],
        *,
        counts: Counts,
        make_room: Callable[[int], None],
        batch: int | None = None,
    ) -> Signature:
        """Trace, plan and capture.

        Args:
            counts: what launches count in.
            make_room: called with the number of graphs before they are captured.
            batch: rows of the bucket.

        Raises:
            TraceError, HostReadError, DeclarationError, CaptureError: as `Compiled.launch` says.
        """
        backend, walk, model = self._backend, self._walk, self._model
        inputs = self._as_inputs(tensors)
        # What a trace changes for a while, such as torch's settings, is no business of steps that run on host threads.
        backend.synchronize()
        try:
            trace = trace_model(
                model,
                walk,
                call,
                inputs,
                tracer=self._tracer,
                verify=self._verify,
                generators=self._generators,
            )
            prepared = prepare_graph(trace.gm, trace.infos, trace.leaf_names, reads=not trace.captures)
        except HostReadError as error:
            if self._verify == "error":
                raise locate_reads(model, walk, call, inputs, error) from None
            trace = retrace_uncaptured(model, walk, call, inputs, error, warn=self._verify == "warn")
            prepared = prepare_graph(trace.gm, trace.infos, trace.leaf_names, reads=True)
        if backend.compiler is not None:
            prepared = self._compile(prepared, trace, inputs)
        if trace.reason:
            _logger.info("traced opaquely: %s", trace.reason)
        if trace.tracer == "opaque" and prepared.marks:
            _say_what_is_whole(trace, prepared)
        return self._signature(trace, prepared, inputs, counts, make_room, batch)

    def build_eager(
        self,
        call: CallSpec,
        tensors: Sequence[Tensor],
        *,
        counts: Counts,
        make_room: Callable[[int], None],
        batch: int | None,
    ) -> Signature:
        """The model as it is, run at every launch, with the same outputs cut as in a graph.

        An opaque trace, which is one run, tells which outputs are the declared ones. Where there are others, which may
        derive from those in a way that depends on the shapes, the model is traced for these shapes as for a graph.

        Args and raises as for `build`; `batch` are the caller's rows.
        """
        inputs = self._as_inputs(tensors)
        self._backend.synchronize()

        def traced(tracer: str) -> tuple[Trace, Prepared]:
            trace = trace_model(
                self._model, self._walk, call, inputs, tracer=tracer, verify="off", generators=self._generators
            )
            return trace, prepare_graph(trace.gm, trace.infos, trace.leaf_names, reads=True)

        trace, prepared = traced("dynamo" if self._tracer == "dynamo" else "opaque")
        if self._tracer in ("auto", "export") and _undeclared(trace, prepared):
            trace, prepared = traced(self._tracer)
        trace.captures = False
        return self._signature(trace, prepared, inputs, counts, make_room, batch)

    def _signature(
        self,
        trace: Trace,
        prepared: Prepared,
        inputs: Sequence[Tensor],
        counts: Counts,
        make_room: Callable[[int], None],
        batch: int | None,
    ) -> Signature:
        self._refuse_writes(trace)
        label = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs) or "no tensors"
        signature = Signature(label, trace, prepared, counts, batch)
        signature.num_elements = sum(tensor.numel() for tensor in inputs)
        is_captured = self._backend.static and trace.captures
        if trace.tracer != "opaque":
            signature.strides = [tensor.stride() for tensor in inputs]
        if trace.tracer == "opaque" and not is_captured:  # the model runs itself, with whatever weights it has
            signature.weights = trace.gm.get_submodule("root")  # type: ignore[assignment]
        else:
            signature.weights = Weights(
                self._model,
                addresses=is_captured,
                constants=_constants(trace.gm),
                literals=trace.literals,
                probe_all=self._debug,
            )
        self._add_instances(signature, inputs, make_room)
        return signature

    def _as_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """On the device, and dense, as a graph's own inputs are: an expanded tensor becomes one with elements of its
        own."""
        moved = [tensor.to(self._backend.device) for tensor in tensors]
        return [restrided(tensor, _dense_stride(tensor)) for tensor in moved]

    def _refuse_writes(self, trace: Trace) -> None:
        backend = self._backend
        if trace.rebinds and backend.static and trace.captures:
            raise TraceError(
                f"the forward changes {', '.join(trace.rebinds)} at every call, which a replay cannot repeat: keep such"
                " state in registered buffers, and update them in place (copy_, add_)."
            )
        if trace.writes_inputs and (backend.static or trace.compiler or self._pads):
            what = "a replay" if backend.static else "compiled code" if trace.compiler else "a padded launch"
            raise TraceError(
                f"the forward writes its tensor inputs {list(trace.writes_inputs)} in place, but {what} has copies of"
                " its own: clone() them first, or keep what must change in registered buffers."
            )

    def _compile(self, prepared: Prepared, trace: Trace, inputs: Sequence[Tensor]) -> Prepared:
        backend = self._backend
        assert backend.compiler is not None, "the caller checked"
        if trace.tracer == "opaque":
            warnings.warn(
                f"backend {backend.compiler!r} cannot compile an opaque trace, so the model runs uncompiled. It is"
                f" opaque because: {trace.reason}",
                stacklevel=2,
            )
            return prepared
        with TRACE_LOCK, backend.guard():
            prepared = compile_graph(prepared, trace, inputs, backend.compiler)
        trace.captures &= backend.captures_compiled
        return prepared

    def _add_instances(self, signature: Signature, inputs: Sequence[Tensor], make_room: Callable[[int], None]) -> None:
        """Plan the slots and capture: all instances or none."""
        trace, prepared, backend = signature.trace, signature.prepared, self._backend
        results, marks = prepared.results, prepared.marks
        names = public_names(marks)
        column_of: dict[fx.Node, str] = {}  # spans that several outputs share are staged once
        widths: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for name, mark in zip(names, marks, strict=True):
            if mark.staged not in column_of:
                column_of[mark.staged] = name
                shape = val(mark.staged).shape
                sizes[name], widths[name] = shape[0], shape[1:].numel()
        if len(set(sizes.values())) > 1:
            raise DeclarationError(f"SG103 spanned outputs of one step have different numbers of rows: {sizes}.")
        first = val(results[0]).shape if results else ()
        num_rows = next(iter(sizes.values())) if sizes else (first[0] if first else 0)
        if signature.batch is not None and not sizes:
            num_rows = signature.batch
        elif signature.batch not in (None, num_rows):
            raise DeclarationError(
                f"SG103 a batch of {signature.batch} rows, but spans and row values of {num_rows}: where the batch is"
                " bucketed each of its rows needs one row of them."
            )

        outputs, wanted = self._plan(trace, prepared, names, column_of, num_rows)
        buffer, copies = self.core.new_buffer(widths, num_rows, wanted) if widths else (None, None)
        regions = copies.regions if copies is not None else []
        outputs = _place(outputs, regions)
        values = {
            name: (column_of[mark.staged], tuple(val(mark.value).shape[1:]))
            for name, mark in zip(names, marks, strict=True)
            if mark.info.span is None
        }
        staged = list(column_of)
        # A plain copy's slot is baked in, so it takes a graph per step in flight on every backend.
        per_step = (backend.static and outputs.holds) or self.core.staging == "copy"
        num_instances = self.core.ring.depth if per_step else 1
        make_room(num_instances)
        instances = []
        for i in range(num_instances):
            tail = self.core.new_tail(
                widths,
                buffer,
                counts=signature.counts,
                num_rows=num_rows,
                cuts=outputs.names,
                values=values,
                slot=i if self.core.staging == "copy" and buffer is not None else None,
                copies=copies,
                copied=[cut for cut, _ in outputs.copied],
                holds_outputs=outputs.holds,
                may_overflow=outputs.may_overflow,
            )
            gm = insert_staging_node(
                prepared.gm,
                staged,
                tail.stage_args,
                copied=[source for _, source in outputs.copied],
                compact_args=tail.compact_args,
                keep=outputs.keep,
            )
            instances.append(Instance(gm, tail, graph_method(gm) if backend.static else host_method(gm)))
        if backend.static:
            self._capture(trace, instances, inputs, share=not outputs.holds and not outputs.may_overflow)
        signature.cuts = outputs.cuts
        signature.results = self._results(signature, outputs, column_of, num_rows)
        signature.instances, signature.tails = instances, [instance.tail for instance in instances]

    def _plan(
        self,
        trace: Trace,
        prepared: Prepared,
        names: Sequence[str],
        column_of: Mapping[fx.Node, str],
        num_rows: int,
    ) -> tuple[_Outputs, list[tuple[Copy, int]]]:
        """Decide what is cut, copied and kept; the regions of a copy slot have no place yet."""
        marks, results = prepared.marks, prepared.results
        by_name: dict[str, Cut] = {}
        mark_of: dict[str, Mark] = {}
        for name, mark, output in zip(names, marks, prepared.value_outputs, strict=True):
            if mark.info.span is not None:
                by_name[name] = make_cut(name, column_of[mark.staged], output, mark.info.span, val(mark.value))
                mark_of[name] = mark
        cuts: dict[int, Cut] = {}
        for plan in prepared.cuts:
            cut = by_name[names[plan.mark]]
            if plan.output == cut.output and plan.span_map == cut.span_map:
                cuts[plan.output] = cut
                continue
            own = trace.leaf_names[plan.output] if plan.output < len(trace.leaf_names) else ""
            label = cut.name if plan.output == cut.output or not own else f"{cut.name} (output {own})"
            shape = list(val(results[plan.output]).shape)
            del shape[plan.span_map.row_dim]
            cuts[plan.output] = replace(
                cut,
                output=plan.output,
                span_map=plan.span_map,
                label=label,
                row_shape=tuple(shape),
                dtype=val(results[plan.output]).dtype,
            )
        wanted: list[tuple[Copy, int]] = []
        copied: dict[Any, tuple[Cut, Copied]] = {}
        may_overflow = False

        def copy(cut: Cut) -> Cut:
            """The cut as it is copied, if it is."""
            nonlocal may_overflow
            option = self._copy_of(cut.name, mark_of[cut.name])
            if option.dtype is not None and not is_part_of(results[cut.output], mark_of[cut.name].value):
                option = replace(option, dtype=None)  # what is computed from the audio, levels or a mask, is no audio
            if option.to == "view":
                return cut
            key = cut.output, cut.column, cut.span_map, option
            if key not in copied:
                mark = mark_of[cut.name]
                assert mark.spans is not None, "it is no row value"
                placed = cut.copied_to(Region(len(wanted), 0, option.to == "host", 0, 0), option)
                worst = placed.padded_bytes(num_rows)
                wanted.append((option, worst if option.capacity is None else min(option.capacity, worst)))
                may_overflow |= option.capacity is not None and option.capacity < worst
                copied[key] = placed, Copied(cut.output, mark.spans, cut.widths, cut.span_map)
            region = copied[key][0].region
            assert region is not None, "it is copied"
            return cut.copied_to(region, option)

        by_name = {name: copy(cut) for name, cut in by_name.items()}
        cuts = {output: copy(cut) for output, cut in cuts.items()}
        views = {cut.output for cut in (*by_name.values(), *cuts.values()) if cut.region is None}
        whole = {i for i in range(len(trace.leaf_names)) if i not in cuts}
        # Where all else is copied, spans and row values are delivered from the slot, so that nothing is leased.
        holds = not copied or bool(views) or not whole <= set(prepared.staged_outputs)
        keep = views | (whole if holds else set())
        keep |= {cut.output for cut, _ in copied.values()} if may_overflow else set()
        if not copied:
            keep = set(range(len(results)))
        return _Outputs(by_name, cuts, list(copied.values()), sorted(keep), holds, may_overflow), wanted

    def _copy_of(self, name: str, mark: Mark) -> Copy:
        for asked in (name, mark.full_name, mark.info.name):
            if asked in self._copies:
                return self._copies[asked]
        return Copy("view")

    def _capture(self, trace: Trace, instances: Sequence[Instance], inputs: Sequence[Tensor], *, share: bool) -> None:
        backend = self._backend
        with backend.guard(), contextlib.ExitStack() as stack:
            backend.synchronize()
            stack.enter_context(preserve_generators(backend.device, self._generators))
            stack.enter_context(_preserve(trace.written))  # outside the watch, which would undo it
            stack.enter_context(Watch(self._model))
            pool = self.core.shared_pool() if share else None
            for instance in instances:
                with torch.inference_mode(False):
                    instance.inputs = [torch.empty_like(t, requires_grad=False).copy_(t.detach()) for t in inputs]
                instance.tail.note_inputs(instance.inputs)
                if trace.captures:
                    instance.graph, instance.tail.outputs = backend.capture(
                        Runner(trace, instance), generators=self._generators, pool=pool
                    )
                else:
                    outputs = [self._static(val(node)) for node in result_nodes(instance.gm.graph)]
                    instance.tail.outputs = outputs
                    instance.graph = Uncaptured(backend, Runner(trace, instance), outputs)

    def _static(self, like: Tensor) -> Tensor:
        """Memory for an output, of which an example without memory is known; an expanded one gets all its elements."""
        with torch.inference_mode(False):
            return torch.empty_strided(like.shape, _dense_stride(like), dtype=like.dtype, device=self._backend.device)

    def _results(
        self, signature: Signature, outputs: _Outputs, column_of: Mapping[fx.Node, str], num_rows: int
    ) -> tuple[Callable[[Step, Launch], Any], Callable[[Step, Launch], Any]]:
        """Functions that build a step's result in the model's own output structure: with rows, and with owned rows."""
        trace, prepared, backend = signature.trace, signature.prepared, self._backend
        of_inputs = _of_inputs(prepared.gm.graph)

        def constant(step: Step, launch: Launch, value: Any) -> Any:
            return value

        def noted(step: Step, launch: Launch, cut: Cut) -> Rows:
            return step.cut_rows(cut)

        def owned(step: Step, launch: Launch, cut: Cut) -> Rows:
            return step.cut_rows(cut).own()

        def real(value: Tensor, launch: Launch) -> Tensor:
            """Without padding rows, where it has a row per row of the batch."""
            real = launch.num_rows
            return value[:real] if real < num_rows and value.shape[:1] == (num_rows,) else value

        def whole(step: Step, launch: Launch, kept: tuple[int, bool]) -> Tensor:
            index, is_table = kept
            value = step.output(index)
            return value if is_table or launch.num_rows == num_rows else real(value, launch)

        def cloned(step: Step, launch: Launch, kept: tuple[int, bool]) -> Tensor:
            return whole(step, launch, kept).clone()

        def staged(step: Step, launch: Launch, column: tuple[str, Sequence[int]]) -> Tensor:
            return real(step.staged(*column).to(backend.device), launch)

        rows = noted if backend.static else Rows
        own_whole = cloned if backend.static or self._debug else whole
        views: list[Leaf] = []
        owns: list[Leaf] = []
        for leaf in trace.out_leaves:
            made: Leaf
            own: Leaf
            if isinstance(leaf, Constant):
                made = own = (constant, leaf.value)
            elif (cut := outputs.cuts.get(leaf)) is not None:
                made, own = (rows, cut), (owned, cut)
            elif leaf in outputs.keep:
                kept = outputs.keep.index(leaf), prepared.results[leaf] not in of_inputs
                made, own = (whole, kept), (own_whole, kept)
            else:
                mark = prepared.marks[prepared.staged_outputs[leaf]]
                made = own = (staged, (column_of[mark.staged], val(mark.staged).shape))
            views.append(made)
            owns.append(own)
        return trace.result_maker(views), trace.result_maker(owns)


def _of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values depend on the inputs."""
    found: set[fx.Node] = set()
    roots = storage_roots(graph)
    for node in graph.nodes:
        if node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes) or roots[node] in found:
            found.add(node)
            found.update(roots[target] for target in written(node))
    return found


def _place(outputs: _Outputs, regions: Sequence[Region]) -> _Outputs:
    """The same with regions where the copy slots have them, and outputs counted as the graph returns them."""

    @functools.cache
    def place(cut: Cut) -> Cut:
        output = outputs.keep.index(cut.output) if cut.output in outputs.keep else -1
        return replace(cut, output=output, region=None if cut.region is None else regions[cut.region.index])

    return replace(
        outputs,
        names={name: place(cut) for name, cut in outputs.names.items()},
        cuts={output: place(cut) for output, cut in outputs.cuts.items()},
        copied=[(place(cut), source) for cut, source in outputs.copied],
    )


@contextlib.contextmanager
def _preserve(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put tensors back to what they hold."""
    saved = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.inference_mode():  # some may have been made in it
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


def _constants(gm: fx.GraphModule) -> set[int]:
    """Memory of the tensors that a graph holds."""
    held = [attrgetter(str(node.target))(gm) for node in gm.graph.nodes if node.op == "get_attr"]
    return {storage_key(value) for value in held if isinstance(value, Tensor)}


def _undeclared(trace: Trace, prepared: Prepared) -> list[int]:
    """Outputs of the model that are neither cut nor what a `SpannedOutput` says of them: spans and row values."""
    paths = [path for path, leaf in zip(trace.paths, trace.out_leaves, strict=True) if not isinstance(leaf, Constant)]
    said = [any(getattr(key, "name", "") in ("output_spans", "row_values") for key in path) for path in paths]
    cut = {plan.output for plan in prepared.cuts}
    spans = {mark.spans for mark in prepared.marks}
    return [
        i
        for i, is_said in enumerate(said)
        if i not in cut and not is_said and prepared.results[i] not in spans and val(prepared.results[i]).ndim > 0
    ]


def _say_what_is_whole(trace: Trace, prepared: Prepared) -> None:
    """An opaque trace knows aliases, not derivations: name the outputs for which that leaves a question."""
    whole = [trace.leaf_names[i] or str(i) for i in _undeclared(trace, prepared)]
    if whole:
        trace.diagnostics.append(
            Diagnostic(
                "SG203",
                f"outputs {whole} are not all the elements of a spanned value; they are delivered whole, as an opaque"
                " trace cannot tell how they derive from one.",
                fix="declare them, with spans of their own.",
                severity="warning",
            )
        )
