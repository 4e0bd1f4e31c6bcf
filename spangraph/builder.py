"""Builds a signature: traces the model, plans its slots and outputs, and captures."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, fx, nn

from spangraph.backends import debug_enabled, preserve_generators
from spangraph.compiler import compile_graph
from spangraph.counts import Counts
from spangraph.diagnostics import Diagnostic
from spangraph.errors import DeclarationError, HostReadError, InputError, TraceError
from spangraph.host_state import storage_key
from spangraph.outputs import make_results, place_copies, plan_outputs
from spangraph.passes.insert_staging import insert_staging_node
from spangraph.passes.marks import public_names
from spangraph.passes.nodes import result_nodes, val
from spangraph.passes.prepare import Prepared, prepare_graph
from spangraph.passes.run_on_host import graph_method, host_method
from spangraph.signature import Instance, Runner, Signature, Uncaptured, restrided
from spangraph.slots import Copy
from spangraph.structure import CallSpec, Constant
from spangraph.tail import StagerCore
from spangraph.trace import Trace
from spangraph.tracer import TRACE_LOCK, locate_reads, retrace_uncaptured, trace_model
from spangraph.watch import Watch
from spangraph.weights import Weights

_logger = logging.getLogger("spangraph")


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

        outputs, wanted = plan_outputs(trace, prepared, self._copies, names, column_of, num_rows)
        buffer, copies = self.core.new_buffer(widths, num_rows, wanted) if widths else (None, None)
        regions = copies.regions if copies is not None else []
        outputs = place_copies(outputs, regions)
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
        signature.results = make_results(trace, prepared, outputs, column_of, num_rows, backend, debug=self._debug)
        signature.instances, signature.tails = instances, [instance.tail for instance in instances]

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
