"""`spangraph.compile`: a model whose steps return at once and are cut after they are done."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from spangraph.backends import Backend, Event, Graph, debug_enabled, preserve_generators, resolve_backend
from spangraph.declare import find_declarations
from spangraph.diagnostics import Diagnostic
from spangraph.errors import ClosedError, DeclarationError, HostReadError, InputError, TraceError
from spangraph.passes import Prepared, insert_staging_node, prepare_graph
from spangraph.passes.marks import public_names
from spangraph.passes.nodes import val
from spangraph.pipeline import Pipeline
from spangraph.report import Report
from spangraph.stager import StagerCore, Tail, make_cut
from spangraph.step import Cut, Step, profiled
from spangraph.structure import CallSpec, Constant, normalise_call, split_call
from spangraph.trace import Trace
from spangraph.tracer import locate_reads, refuse_nested, retrace_uncaptured, trace_model
from spangraph.watch import Watch
from spangraph.weights import Weights

_logger = logging.getLogger("spangraph")
_OPTIONS = ("rows", "num_rows", "wait", "timeout")


def compile(
    model: nn.Module,
    *,
    walk: str = "forward",
    depth: int = 1,
    trace: str = "auto",
    backend: Backend | torch.device | str | None = None,
    verify: str = "error",
    staging: str = "kernel",
    wait: str = "block",
    generators: Sequence[torch.Generator] = (),
    pipeline: Pipeline | None = None,
) -> Compiled:
    """Wrap a model with spanned outputs so that its steps run without a host read and its rows are cut afterwards.

    Each input signature (shapes, dtypes, devices, non-tensor constants) is traced and captured at its first launch.
    The model must not run elsewhere meanwhile.

    Tensors change from step to step; what Python computes at the trace does not (`random`, clocks). State that the
    forward keeps on the host (a counter, a list, a tensor bound to an attribute) is noticed: inline such a model runs
    opaquely, and where steps are captured it is refused, as is one that writes its inputs in place.

    Args:
        model: declares its spanned outputs (`spanned_outputs`, or `spangraph.declare`). Switch to eval mode yourself.
        walk: the execution path, given to `spanned_outputs(walk)`.
        depth: steps that may be open or leased at once. On a captured backend a signature has one graph per step of
            depth, each with memory of its own.
        trace: `"export"`, `"opaque"` (the model is one leaf of the graph), or `"auto"`: export, else opaque, with the
            reason in `explain()`.
        backend: a device or a backend; default the device of the model's parameters. On CPU, steps run inline.
        verify: what to do about host reads that stay in the graph: `"error"` refuses them with file:line, `"warn"`
            runs the model uncaptured, `"off"` does so silently. The same for conflicts in `pipeline`. Warnings, as of
            padding that may leak, are in `explain()`; `spangraph.verify` checks more.
        staging: `"kernel"`, or `"copy"` for the plain async copy.
        wait: how waits wait: `"block"`, `"spin"`, or `"header"` (poll the slot's header).
        generators: device generators that the model draws from, to be registered with its graphs.
        pipeline: the pipeline that the model is a node of, to be checked on this walk.

    Raises:
        InputError: for an option out of range, a forward whose parameter is called like an option of `launch`, or a
            pipeline that the model is no node of.
        VerificationError: for speculation conflicts in the pipeline, all of them.
    """
    if pipeline is not None and verify != "off":
        report = _verified(pipeline, model, walk)
        if verify == "error":
            report.raise_for_errors()
        elif report.errors:
            warnings.warn(f"the pipeline has conflicts:\n{report}", stacklevel=2)
    return Compiled(model, walk, depth, trace, backend, verify, staging, wait, tuple(generators))


def _verified(pipeline: Pipeline, model: nn.Module, walk: str) -> Report:
    if not isinstance(pipeline, Pipeline):
        raise InputError(
            f"pipeline is a {type(pipeline).__name__}: expected a Pipeline (Pipeline.from_toml reads one)."
        )
    declared = {name for declaration in find_declarations(model, walk) for name in declaration.spans}
    if not any(node.module is model or set(node.spanned_outputs(walk)) == declared for node in pipeline.nodes):
        raise InputError(
            f"no node of the pipeline is this model: expected one with module=model, or one whose spanned outputs on"
            f" walk {walk!r} are {sorted(declared)}."
        )
    return pipeline.verify(walk)


@dataclass(eq=False)
class _Instance:
    """One graph of a signature, with memory of its own on a captured backend."""

    gm: fx.GraphModule
    tail: Tail
    inputs: list[Tensor] = field(default_factory=list)
    graph: Graph | None = None
    uploads: list[tuple[list[Tensor], Event]] = field(default_factory=list)


@dataclass(eq=False)
class _Signature:
    """Everything that one input signature needs."""

    label: str
    trace: Trace
    prepared: Prepared
    cuts: dict[int, Cut] = field(default_factory=dict)
    instances: list[_Instance] = field(default_factory=list)
    tails: list[Tail] = field(default_factory=list)
    weights: Weights | None = None
    make_result: Callable[[Step, bool], Any] | None = None


class Compiled:
    """A compiled model. Built by `spangraph.compile`; see there.

    `compiled(...)` launches, waits and returns owned rows. `compiled.launch(...)` returns a `Step` at once. Any thread
    may launch; launches have one order. The object is a context manager that closes itself.
    """

    def __init__(
        self,
        model: nn.Module,
        walk: str,
        depth: int,
        trace: str,
        backend: Backend | torch.device | str | None,
        verify: str,
        staging: str,
        wait: str,
        generators: tuple[torch.Generator, ...],
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"compile() got {type(model).__name__}: expected an nn.Module.")
        for name, value, options in (
            ("trace", trace, ("auto", "export", "opaque")),
            ("verify", verify, ("error", "warn", "off")),
        ):
            if value not in options:
                raise InputError(f"{name}={value!r}: expected one of {list(options)}.")
        self._signature_of = inspect.signature(model.forward)
        if clash := [name for name in _OPTIONS if name in self._signature_of.parameters]:
            raise InputError(
                f"the model's forward has parameters {clash}, which launch() takes itself: wrap the model in one whose"
                " forward names them otherwise."
            )
        if backend is None:
            backend = next((p.device for p in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
        self._model = model
        self._walk = walk
        self._trace = trace
        self._verify = verify
        self._generators = generators
        self._backend = resolve_backend(backend)
        self._debug = debug_enabled()
        self._core = StagerCore(self._backend, depth=depth, staging=staging, wait=wait)
        self._ring = self._core.ring
        self._by_key: dict[Any, _Signature] = {}
        self._by_tensors: dict[Any, _Signature] = {}

    # ---- launching -------------------------------------------------------------------------------------------------

    def launch(
        self,
        *args: Any,
        rows: Sequence[Hashable] | None = None,
        num_rows: int | None = None,
        wait: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Step:
        """Start a step and return its ticket. Never waits for the device, a signature's first launch aside.

        Args:
            *args, **kwargs: the model's inputs.
            rows: ids of the real rows, default their positions.
            num_rows: number of real rows, default the batch size; the rest are padding and never surface.
            wait: wait for room instead of raising `RingFullError`, for up to `timeout` seconds.

        Raises:
            InputError: for inputs or row ids that cannot be taken.
            RingFullError: if `depth` steps are open or leased.
            StaleGraphError: if a parameter or buffer was replaced since the trace.
            ClosedError: after `close`.
            TraceError, HostReadError, DeclarationError, CaptureError: at a signature's first launch.
            and whatever the model raises; later launches are not affected.
        """
        ring = self._ring
        refuse_nested()
        with profiled("spangraph.launch"), ring.lock:
            if ring.is_closed:
                raise ClosedError("launch on a closed object: compile the model again.")
            signature, leaves = self._resolve(args, kwargs)
            if signature.weights is not None:
                signature.weights.check()
            ids, real = signature.tails[0].check_rows(rows, num_rows)
            with self._backend.guard():
                launch = ring.reserve(signature.tails, ids, real, wait=wait, timeout=timeout)
                try:
                    instance = signature.instances[signature.tails.index(launch.tail)]
                    if instance.graph is None:
                        ring.commit(launch, _call(signature.trace, instance.gm, leaves))
                    else:
                        buffers = self._upload(instance, leaves)
                        instance.graph.replay()
                        event = ring.commit(launch, instance.tail.outputs)
                        if buffers is not None:
                            instance.uploads.append((buffers, event))
                except BaseException:
                    ring.abort(launch)
                    raise
        return Step(ring, launch, signature.make_result)

    def __call__(
        self, *args: Any, rows: Sequence[Hashable] | None = None, num_rows: int | None = None, **kwargs: Any
    ) -> Any:
        """Launch, wait, and return the model's output structure with owned rows in place of spanned tensors."""
        with self.launch(*args, rows=rows, num_rows=num_rows, **kwargs) as step:
            return step._result(own=True)

    def _upload(self, instance: _Instance, leaves: Sequence[Tensor]) -> list[Tensor] | None:
        """Copy inputs into the graph's own, in stream order.

        The caller may overwrite host tensors as soon as the launch returns, so they go through buffers of ours.
        Returns the buffers, which must not be written before this launch is done.
        """
        backend = self._backend
        on_host = [backend.is_host(leaf) for leaf in leaves]
        buffers = self._host_buffers(instance) if any(on_host) else None
        for i, (static, leaf) in enumerate(zip(instance.inputs, leaves, strict=True)):
            if buffers is not None and on_host[i]:
                leaf = buffers[i].copy_(leaf.detach())
            backend.copy_in(static, leaf)
        return buffers

    def _host_buffers(self, instance: _Instance) -> list[Tensor]:
        if instance.uploads:
            buffers, event = instance.uploads.pop(0)  # the oldest: if that is not done, none is
            with contextlib.suppress(Exception):  # its failure was its step's
                if event.query():
                    return buffers
                instance.uploads.insert(0, (buffers, event))
        return [self._backend.host_buffer(static) for static in instance.inputs]

    # ---- signatures ------------------------------------------------------------------------------------------------

    def _resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Signature, Sequence[Tensor]]:
        fast = None
        if not kwargs and all(type(arg) is Tensor for arg in args):
            fast = tuple([(arg.shape, arg.dtype, arg.device, arg.layout) for arg in args])
            if (known := self._by_tensors.get(fast)) is not None:
                return known, args
        args, kwargs = normalise_call(self._signature_of, args, kwargs)
        call, tensors = split_call(args, kwargs)
        key: list[Any] = [call.spec]
        for leaf in call.leaves:
            if isinstance(leaf, Constant):
                key.append((type(leaf.value), repr(leaf.value)))
            else:
                tensor = tensors[leaf]
                key.append((tensor.shape, tensor.dtype, tensor.device, tensor.layout))
        signature = self._by_key.get(tuple(key))
        if signature is None:
            self._check_devices(tensors)
            signature = self._build(call, tensors)
            self._by_key[tuple(key)] = signature
        if fast is not None and len(tensors) == len(args):
            self._by_tensors[fast] = signature
        return signature, tensors

    def _check_devices(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device != self._backend.device and tensor.device.type != "cpu":
                raise InputError(
                    f"an input is on {tensor.device}, the model runs on {self._backend.device}: move it there, or pass"
                    " it on the CPU to have it copied."
                )
            if tensor.layout is not torch.strided:
                raise InputError(f"an input has layout {tensor.layout}: expected a strided (dense) tensor.")

    def _build(self, call: CallSpec, tensors: Sequence[Tensor]) -> _Signature:
        backend = self._backend
        inputs = [tensor.to(backend.device) for tensor in tensors]
        model, walk = self._model, self._walk
        try:
            trace = trace_model(
                model,
                walk,
                call,
                inputs,
                tracer=self._trace,
                verify=self._verify,
                generators=self._generators,
            )
            prepared = prepare_graph(trace.gm, trace.infos, trace.leaf_names, reads=not trace.captures)
        except HostReadError as error:
            if self._verify == "error":
                raise locate_reads(model, walk, call, inputs, error) from None
            trace = retrace_uncaptured(model, walk, call, inputs, error, warn=self._verify == "warn")
            prepared = prepare_graph(trace.gm, trace.infos, trace.leaf_names, reads=True)
        if trace.reason:
            _logger.info("traced opaquely: %s", trace.reason)
        if trace.rebinds and backend.static and trace.captures:
            raise TraceError(
                f"the forward changes {', '.join(trace.rebinds)} at every call, which a replay cannot repeat: keep such"
                " state in registered buffers, and update them in place (copy_, add_)."
            )
        if trace.writes_inputs and backend.static:
            raise TraceError(
                f"the forward writes its tensor inputs {list(trace.writes_inputs)} in place, but a replay has copies of"
                " its own: clone() them first, or keep what must change in registered buffers."
            )
        if trace.tracer == "opaque" and prepared.marks:
            _say_what_is_whole(trace, prepared)
        label = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors) or "no tensors"
        signature = _Signature(label, trace, prepared)
        if trace.tracer == "export" or backend.static:
            signature.weights = Weights(self._model, addresses=backend.static, literals=trace.literals)
        self._add_instances(signature, inputs)
        signature.make_result = _result_maker(trace, signature.cuts, clone_whole=backend.static or self._debug)
        return signature

    def _add_instances(self, signature: _Signature, inputs: Sequence[Tensor]) -> None:
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

        by_name: dict[str, Cut] = {}
        values: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, mark, output in zip(names, marks, prepared.value_outputs, strict=True):
            if mark.info.span is None:
                values[name] = column_of[mark.staged], tuple(val(mark.value).shape[1:])
            else:
                by_name[name] = make_cut(name, column_of[mark.staged], output, mark.info.span, val(mark.value))
        for plan in prepared.cuts:
            cut = by_name[names[plan.mark]]
            own = trace.leaf_names[plan.output] if plan.output < len(trace.leaf_names) else ""
            label = cut.name if plan.output == cut.output or not own else f"{cut.name} (output {own})"
            signature.cuts[plan.output] = replace(cut, output=plan.output, span_map=plan.span_map, label=label)
        first = val(results[0]).shape if results else ()
        num_rows = next(iter(sizes.values())) if sizes else (first[0] if first else 0)
        buffer = self._core.new_buffer(widths, num_rows) if widths else None
        staged = list(column_of)
        # A plain copy's slot is baked in, so it takes a graph per step in flight on every backend.
        count = self._ring.depth if backend.static or self._core.staging == "copy" else 1
        instances = []
        for i in range(count):
            tail = self._core.new_tail(
                widths,
                buffer,
                num_rows=num_rows,
                cuts=by_name,
                values=values,
                slot=i if self._core.staging == "copy" and buffer is not None else None,
            )
            instances.append(_Instance(insert_staging_node(prepared.gm, staged, tail.stage_args), tail))
        if backend.static:
            self._capture(trace, instances, inputs)
        signature.instances, signature.tails = instances, [instance.tail for instance in instances]

    def _capture(self, trace: Trace, instances: Sequence[_Instance], inputs: Sequence[Tensor]) -> None:
        backend = self._backend
        with backend.guard(), contextlib.ExitStack() as stack:
            backend.synchronize()
            stack.enter_context(preserve_generators(backend.device, self._generators))
            stack.enter_context(Watch(self._model))
            for instance in instances:
                with torch.inference_mode(False):
                    instance.inputs = [torch.empty_like(t, requires_grad=False).copy_(t.detach()) for t in inputs]
                if trace.captures:
                    run = _Runner(trace, instance)
                    instance.graph, instance.tail.outputs = backend.capture(run, generators=self._generators)
                else:
                    outputs = [torch.empty_like(t) for t in _call(trace, instance.gm, instance.inputs)]
                    instance.tail.outputs = outputs
                    instance.graph = _Uncaptured(backend, _Runner(trace, instance), outputs)

    # ---- inspection and end ----------------------------------------------------------------------------------------

    def explain(self) -> str:
        """What was traced, staged and cut, signature by signature, as text."""
        name = type(self._model).__name__
        lines = [f"{name}, walk {self._walk!r}, backend {self._backend.name}, depth {self._ring.depth}"]
        if not self._by_key:
            lines.append("  nothing launched yet: signatures are traced at their first launch")
        for signature in self._by_key.values():
            trace, prepared = signature.trace, signature.prepared
            captured = "" if not self._backend.static else ", captured" if trace.captures else ", uncaptured"
            lines.append(f"  signature ({signature.label})")
            lines.append(
                f"    trace: {trace.tracer}{captured}, {len(prepared.gm.graph.nodes)} nodes,"
                f" {len(signature.instances)} instance(s)"
            )
            if trace.reason:
                lines.append(f"    opaque because: {trace.reason}")
            names = public_names(prepared.marks)
            for name, mark in zip(names, prepared.marks, strict=True):
                what = "row value" if mark.info.span is None else f"spanned {mark.info.span.dims}"
                lines.append(f"    {name}: {what}, declared by {mark.info.fqn or 'the root'} ({mark.info.where})")
            if not names:
                lines.append("    no spans: nothing is staged")
            for output, node in enumerate(prepared.results[: len(trace.leaf_names)]):
                cut = signature.cuts.get(output)
                own = trace.leaf_names[output] or str(output)
                how = f"cut by {cut.name!r}" if cut else "delivered whole"
                moved = ", moved with its positions" if cut and not cut.span_map.is_identity else ""
                lines.append(f"    output {own}: {list(val(node).shape)}, {how}{moved}")
            lines += [f"    {text}" for text in dict.fromkeys(map(str, (*prepared.diagnostics, *trace.diagnostics)))]
        return "\n".join(lines)

    def close(self) -> None:
        """Wait for all work, then refuse launches. Steps that were launched can still be read."""
        self._ring.close()
        self._by_key.clear()
        self._by_tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Compiled {type(self._model).__name__} on {self._backend.name}; {self._ring.describe()}>"


def _call(trace: Trace, gm: fx.GraphModule, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run the graph under the modes of its trace."""
    device_type, autocast, _ = trace.autocast
    if (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled() is not trace.inference
        or autocast
        or torch.is_autocast_enabled(device_type)
    ):
        with trace.context():
            return gm.forward(*leaves)  # type: ignore[no-any-return]
    return gm.forward(*leaves)  # type: ignore[no-any-return]


@dataclass
class _Runner:
    """Runs one instance's graph on its own inputs."""

    trace: Trace
    instance: _Instance

    def __call__(self) -> Sequence[Tensor]:
        return _call(self.trace, self.instance.gm, self.instance.inputs)


@dataclass
class _Uncaptured:
    """Stands in for the graph of a forward that cannot be captured: a replay runs it, into static outputs."""

    backend: Backend
    run: _Runner
    outputs: Sequence[Tensor]

    def replay(self) -> None:
        self.backend.enqueue(self._step)

    def _step(self) -> None:
        for static, fresh in zip(self.outputs, self.run(), strict=True):
            if static.shape != fresh.shape:
                raise TraceError(
                    f"an output has shape {list(fresh.shape)}, and had {list(static.shape)} at the trace: its shape"
                    " depends on values. Pad it, and declare its extent as a span."
                )
            static.copy_(fresh)


def _say_what_is_whole(trace: Trace, prepared: Prepared) -> None:
    """An opaque trace knows aliases, not derivations: name the outputs for which that leaves a question."""
    cut = {plan.output for plan in prepared.cuts}
    spans = {mark.spans for mark in prepared.marks}
    whole = [
        name or str(i)
        for i, (name, node) in enumerate(zip(trace.leaf_names, prepared.results, strict=False))
        if i not in cut and node not in spans and val(node).ndim > 0
    ]
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


def _result_maker(trace: Trace, cuts: Mapping[int, Cut], *, clone_whole: bool) -> Callable[[Step, bool], Any]:
    """A function that builds a step's result in the model's own output structure."""

    plan = [
        (None, leaf.value, None) if isinstance(leaf, Constant) else (cuts.get(leaf), None, leaf)
        for leaf in trace.out_leaves
    ]

    def make_result(step: Step, own: bool) -> Any:
        leaves: list[Any] = []
        for cut, constant, output in plan:
            if cut is not None:
                rows = step.cut_rows(cut)
                leaves.append(rows.own() if own else rows)
            elif output is None:
                leaves.append(constant)
            else:
                whole = step.output(output)
                leaves.append(whole.clone() if own and clone_whole else whole)
        return trace.unflatten(leaves)

    return make_result
