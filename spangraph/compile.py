"""`spangraph.compile`: a model whose steps return at once and are cut after they are done."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from spangraph.backends import Backend, resolve_backend
from spangraph.declare import find_declarations
from spangraph.errors import ClosedError, DeclarationError, InputError
from spangraph.memory import Memory, measure_compiled
from spangraph.passes.marks import public_names
from spangraph.passes.nodes import val
from spangraph.pipeline import Pipeline
from spangraph.report import Report
from spangraph.signature import Instance, Signature, SignatureBuilder, run
from spangraph.slots import Copy, Counts, copies_of
from spangraph.step import Step, profiled
from spangraph.structure import Constant, normalise_call, split_call
from spangraph.tail import StagerCore, refuse_copies
from spangraph.tracer import refuse_nested

_OPTIONS = ("rows", "num_rows", "wait", "timeout")


def compile(
    model: nn.Module,
    *,
    walk: str = "forward",
    depth: int = 1,
    copies: Mapping[str, Copy | str] | None = None,
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
            depth, each with memory of its own; but one alone, in a pool with those of other signatures, if all its
            outputs are copied (spans and row values are, too).
        copies: how long rows live, and where: declared name -> `"view"` (the default: until the step's release, in the
            graph's output), `"device"`, `"host"`, or a `Copy`. It holds for all outputs that are cut by that name.
        trace: `"export"`, `"dynamo"` (in one graph; when an attribute or global that the forward has read changes, the
            model is traced again, and both graphs are kept), `"opaque"` (the model is one leaf of the graph), or
            `"auto"`: export, else opaque, with the reason in `explain()`.
        backend: a device, a backend, or the name of a `torch.compile` backend, such as `"inductor"`, which compiles
            graphs up to their tail; default the device of the model's parameters. On CPU, steps run inline.
        verify: what to do about host reads that stay in the graph: `"error"` refuses them with file:line, `"warn"`
            runs the model uncaptured, `"off"` does so silently. The same for conflicts in `pipeline`. Warnings, as of
            padding that may leak, are in `explain()`; `spangraph.verify` checks more.
        staging: `"kernel"`, or `"copy"` for the plain async copy.
        wait: how waits wait: `"block"`, `"spin"`, or `"header"` (poll the slot's header).
        generators: device generators that the model draws from, to be registered with its graphs.
        pipeline: the pipeline that the model is a node of, to be checked on this walk.

    Raises:
        InputError: for an option out of range, a `torch.compile` backend that captures CUDA graphs itself, a forward
            whose parameter is called like an option of `launch`, or a pipeline that the model is no node of.
        DeclarationError: for copies of what the model does not declare, or that do not fit a float output.
        VerificationError: for speculation conflicts in the pipeline, all of them.
    """
    if pipeline is not None and verify != "off":
        report = _verified(pipeline, model, walk)
        if verify == "error":
            report.raise_for_errors()
        elif report.errors:
            warnings.warn(f"the pipeline has conflicts:\n{report}", stacklevel=2)
    return Compiled(model, walk, depth, copies_of(copies), trace, backend, verify, staging, wait, tuple(generators))


def _check_names(model: nn.Module, walk: str, copies: Mapping[str, Copy]) -> None:
    known: set[str] = set()
    for declaration in find_declarations(model, walk):
        known |= {*declaration.spans, *(f"{declaration.fqn}.{name}" for name in declaration.spans if declaration.fqn)}
    if unknown := sorted(name for name in copies if re.sub(r"\[\d+\]", "", name) not in known):
        raise DeclarationError(f"copies of {unknown}, but walk {walk!r} declares the spanned outputs {sorted(known)}.")


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
        copies: Mapping[str, Copy],
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
            ("trace", trace, ("auto", "export", "dynamo", "opaque")),
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
        device = next((p.device for p in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
        if copies:
            _check_names(model, walk, copies)
            refuse_copies(copies, staging)
        self._model = model
        self._walk = walk
        self._backend = resolve_backend(device if backend is None else backend, device)
        self._core = StagerCore(self._backend, depth=depth, staging=staging, wait=wait)
        self._ring = self._core.ring
        self._builder = SignatureBuilder(
            model, walk, self._core, trace=trace, verify=verify, copies=copies, generators=generators
        )
        self._by_key: dict[Any, Signature] = {}
        self._by_tensors: dict[Any, Signature] = {}

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
        """Start a step and return its ticket. Never waits for the device, but for a signature's first launch, and where
        a `Copy` has less capacity than the worst case: then until the graph's last step is known to have fitted.

        Args:
            *args, **kwargs: the model's inputs.
            rows: ids of the real rows, default their positions.
            num_rows: number of real rows, default the batch size; the rest are padding and never surface.
            wait: wait for room instead of raising `RingFullError`.
            timeout: seconds that a launch may wait; None waits for ever.

        Raises:
            InputError: for inputs or row ids that cannot be taken.
            RingFullError: if `depth` steps are open or leased, or rows of an earlier step lie in the graph's outputs.
            StepTimeoutError: after `timeout`.
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
                        ring.commit(launch, run(signature.trace, instance.gm, leaves))
                    else:
                        if ring.debug:
                            instance.tail.check_inputs()
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

    def _upload(self, instance: Instance, leaves: Sequence[Tensor]) -> list[Tensor] | None:
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

    def _host_buffers(self, instance: Instance) -> list[Tensor]:
        if instance.uploads:
            buffers, event = instance.uploads.pop(0)  # the oldest: if that is not done, none is
            with contextlib.suppress(Exception):  # its failure was its step's
                if event.query():
                    return buffers
                instance.uploads.insert(0, (buffers, event))
        return [self._backend.host_buffer(static) for static in instance.inputs]

    # ---- signatures ------------------------------------------------------------------------------------------------

    def _resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Sequence[Tensor]]:
        fast = None
        if not kwargs and all(type(arg) is Tensor for arg in args):
            fast = tuple([(arg.shape, arg.dtype, arg.device, arg.layout) for arg in args])
            if (known := self._by_tensors.get(fast)) is not None and (current := known.current()) is not None:
                return current, args
        args, kwargs = normalise_call(self._signature_of, args, kwargs)
        call, tensors = split_call(args, kwargs)
        key: list[Any] = [call.spec]
        for leaf in call.leaves:
            if isinstance(leaf, Constant):
                key.append((type(leaf.value), repr(leaf.value)))
            else:
                tensor = tensors[leaf]
                key.append((tensor.shape, tensor.dtype, tensor.device, tensor.layout))
        older = self._by_key.get(tuple(key))
        signature = older and older.current()
        if signature is None:
            self._check_devices(tensors)
            signature = self._builder.build(call, tensors, older)
            if older is not None:
                self._by_key[*key, len(older.versions)] = older
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

    # ---- inspection and end ----------------------------------------------------------------------------------------

    def explain(self) -> str:
        """What was traced, staged and cut, signature by signature, as text."""
        name = type(self._model).__name__
        lines = [f"{name}, walk {self._walk!r}, backend {self._backend.name}, depth {self._ring.depth}"]
        if not self._by_key:
            lines.append("  nothing launched yet: signatures are traced at their first launch")
        for signature in list(self._by_key.values()):
            trace, prepared = signature.trace, signature.prepared
            captured = "" if not self._backend.static else ", captured" if trace.captures else ", uncaptured"
            compiled = f", compiled by {trace.compiler}" if trace.compiler else ""
            lines.append(f"  signature ({signature.label})")
            lines.append(
                f"    trace: {trace.tracer}{compiled}{captured}, {len(prepared.gm.graph.nodes)} nodes,"
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
                is_staged = output in prepared.staged_outputs
                how = f"cut by {cut.name!r}" if cut else "spans or row values" if is_staged else "delivered whole"
                if cut is not None and cut.region is not None:
                    place = "host" if cut.region.on_host else "device"
                    how += f", copied to the {place} ({cut.region.capacity} bytes a step)"
                moved = ", moved with its positions" if cut and not cut.span_map.is_identity else ""
                lines.append(f"    output {own}: {list(val(node).shape)}, {how}{moved}")
            lines += [f"    {text}" for text in dict.fromkeys(map(str, (*prepared.diagnostics, *trace.diagnostics)))]
        return "\n".join(lines)

    @property
    def counts(self) -> Counts:
        """What became of the copies of all steps that were read."""
        return self._ring.counts

    def memory(self) -> Memory:
        """Pinned, device and graph-pool bytes per output and graph, and what open leases retain."""
        return measure_compiled(self._core, self._by_key.values())

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
