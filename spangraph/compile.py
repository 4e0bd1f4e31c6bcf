"""`spangraph.compile`: a model whose steps return at once and are cut after they are done."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from spangraph.backends import Backend, resolve_backend
from spangraph.buckets import Buckets, pad, regions
from spangraph.counts import Counts, Statistics, count_miss
from spangraph.declare import find_declarations
from spangraph.errors import ClosedError, DeclarationError, InputError, StaleGraphError
from spangraph.memory import Memory, measure_compiled
from spangraph.merge import run_each
from spangraph.passes.marks import public_names
from spangraph.passes.nodes import val
from spangraph.pipeline import Pipeline
from spangraph.report import Report
from spangraph.signature import Instance, Signature, SignatureBuilder, restrided, run
from spangraph.slots import Copy, copies_of
from spangraph.step import Step
from spangraph.stops import RowValues, StopCheck
from spangraph.structure import example_args
from spangraph.tail import StagerCore, refuse_copies
from spangraph.tracer import refuse_nested
from spangraph.walks import Found, GraphCache, Walk, WalkGraphs

_OPTIONS = ("rows", "num_rows", "wait", "timeout")


def compile(
    model: nn.Module,
    *,
    walk: str = "forward",
    walks: Mapping[str, Walk | str] | Sequence[str] | None = None,
    depth: int = 1,
    copies: Mapping[str, Copy | str] | None = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
    dims: Mapping[str, Mapping[int, str]] | None = None,
    pad_values: Mapping[str, float | int | bool] | None = None,
    on_miss: str = "eager",
    max_graphs: int | None = None,
    on_stale: str = "error",
    trace: str = "auto",
    backend: Backend | torch.device | str | None = None,
    verify: str = "error",
    staging: str = "kernel",
    wait: str = "block",
    generators: Sequence[torch.Generator] = (),
    pipeline: Pipeline | None = None,
    stop_check: Callable[[RowValues], StopCheck] | None = None,
) -> Compiled:
    """Wrap a model with spanned outputs so that its steps run without a host read and its rows are cut afterwards.

    Each input signature (shapes, dtypes, devices, non-tensor constants) is traced and captured at its first launch, or
    in `warmup()`; with `buckets=` shapes are first padded to few. The model must neither run elsewhere nor be changed
    meanwhile.

    Tensors change from step to step; what Python computes at the trace does not (`random`, clocks). State that the
    forward keeps on the host (a counter, a list, a tensor bound to an attribute) is noticed: inline such a model runs
    opaquely, and where steps are captured it is refused, as is one that writes its inputs in place.

    Args:
        model: declares its spanned outputs (`spanned_outputs`, or `spangraph.declare`). Switch to eval mode yourself.
        walk: the execution path, given to `spanned_outputs(walk)`, and to the forward if it has a parameter `walk`.
        walks: several paths, for `launch(walk=...)`: names; or name -> `Walk` with options of its own, or -> the name
            of another walk, of which it is an alias: both replay the same graphs. `walk` is then the default.
        depth: steps that may be open or leased at once. On a captured backend a signature has one graph per step of
            depth, each with memory of its own; but one alone, in a pool with those of other signatures, if all its
            outputs are copied (spans and row values are, too).
        copies: how long rows live, and where: declared name -> `"view"` (the default: until the step's release, in the
            graph's output), `"device"`, `"host"`, or a `Copy`. It holds for all outputs that are cut by that name.
        buckets: sizes of named input dims, `{"batch": (1, 2, 4, 8), "frames": (50, 100, 200)}`: a launch takes the
            smallest that fits and pads its inputs. `"batch"` is the rows: those that were added never surface, and
            whole outputs of as many rows as the bucket are cut to the real ones. Other dims stay padded, up to spans.
        dims: which dims of which inputs these are: path of an input -> dim -> name, `{"mel": {0: "batch", 2: "frames"},
            "lengths": {0: "batch"}}`. By default dim 0 of every tensor is `"batch"`.
        pad_values: path of an input -> what its padding holds, default 0.
        on_miss: what becomes of a launch that fits no bucket: `"eager"` runs the model as it is and cuts the same
            outputs, `"error"` refuses it.
        max_graphs: graphs that may be had at once, over all walks; for one more, those of the signature that was not
            used for longest are dropped, once the device is done. By default there is no limit.
        on_stale: what to do when a parameter or buffer was replaced since the trace: `"error"`, or `"recapture"`.
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
        pipeline: the pipeline that the model is a node of, to be checked on its walks.
        stop_check: a function of a step's row values (row id -> name -> an int, or a tuple of ints; real rows only)
            that returns a `StopCheck`. It runs on the host, once per step that is read, in the thread that waits for
            the step first, before anything is delivered; see `Step.stops`. Where it raises, that wait does, and the
            next one runs it again. It may use these values, and no step.

    Raises:
        InputError: for an option out of range, a `torch.compile` backend that captures CUDA graphs itself, a forward
            whose parameter is called like an option of `launch`, or a pipeline that the model is no node of.
        DeclarationError: for copies of what the model does not declare, or that do not fit a float output.
        VerificationError: for speculation conflicts in the pipeline, all of them.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"compile() got {type(model).__name__}: expected an nn.Module.")
    common = Walk(buckets, dims, pad_values, copies)
    options, aliases = _walks_of(walk, walks, common)
    for name in options if pipeline is not None and verify != "off" else ():
        report = _verified(pipeline, model, name)
        if verify == "error":
            report.raise_for_errors()
        elif report.errors:
            warnings.warn(f"the pipeline has conflicts:\n{report}", stacklevel=2)
    return Compiled(
        model,
        walk,
        options,
        aliases,
        depth=depth,
        on_miss=on_miss,
        max_graphs=max_graphs,
        on_stale=on_stale,
        trace=trace,
        backend=backend,
        verify=verify,
        staging=staging,
        wait=wait,
        generators=tuple(generators),
        stop_check=stop_check,
    )


def _walks_of(
    walk: str, walks: Mapping[str, Walk | str] | Sequence[str] | None, common: Walk
) -> tuple[dict[str, Walk], dict[str, str]]:
    """Options of each walk, and what other names walks have."""
    if walks is None:
        return {walk: common}, {}
    if isinstance(walks, str) or not isinstance(walks, Mapping | Sequence) or not walks:
        raise InputError(f"walks={walks!r}: expected names, or name -> Walk or the name of another walk.")
    given = walks if isinstance(walks, Mapping) else dict.fromkeys(walks, Walk())
    options, aliases = {}, {}
    for name, what in given.items():
        if isinstance(what, Walk):
            options[name] = what.with_defaults(common)
        elif isinstance(what, str) and isinstance(given.get(what), Walk):
            aliases[name] = what
        else:
            raise InputError(
                f"walks[{name!r}] is {what!r}: expected a Walk, or the name of another walk that is one"
                f" ({sorted(n for n, w in given.items() if isinstance(w, Walk))})."
            )
    return options, aliases


def _check_names(model: nn.Module, walk: str, copies: Mapping[str, Copy]) -> None:
    known: set[str] = set()
    for declaration in find_declarations(model, walk):
        known |= {*declaration.spans, *(f"{declaration.fqn}.{name}" for name in declaration.spans if declaration.fqn)}
    if unknown := sorted(name for name in copies if re.sub(r"\[\d+\]", "", name) not in known):
        raise DeclarationError(f"copies of {unknown}, but walk {walk!r} declares the spanned outputs {sorted(known)}.")


def _verified(pipeline: Pipeline | None, model: nn.Module, walk: str) -> Report:
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
        walks: Mapping[str, Walk],
        aliases: Mapping[str, str],
        *,
        depth: int,
        on_miss: str,
        max_graphs: int | None,
        on_stale: str,
        trace: str,
        backend: Backend | torch.device | str | None,
        verify: str,
        staging: str,
        wait: str,
        generators: tuple[torch.Generator, ...],
        stop_check: Callable[[RowValues], StopCheck] | None,
    ) -> None:
        for name, value, options in (
            ("trace", trace, ("auto", "export", "dynamo", "opaque")),
            ("verify", verify, ("error", "warn", "off")),
            ("on_miss", on_miss, ("eager", "error")),
            ("on_stale", on_stale, ("error", "recapture")),
        ):
            if value not in options:
                raise InputError(f"{name}={value!r}: expected one of {list(options)}.")
        if max_graphs is not None and (type(max_graphs) is not int or max_graphs < 1):
            raise InputError(f"max_graphs={max_graphs!r}: expected an int of at least 1, or None for no limit.")
        forward = inspect.signature(model.forward)
        if clash := [name for name in _OPTIONS if name in forward.parameters]:
            raise InputError(
                f"the model's forward has parameters {clash}, which launch() takes itself: wrap the model in one whose"
                " forward names them otherwise."
            )
        device = next((p.device for p in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
        self._model = model
        self._walk = walk
        self._on_stale = on_stale
        self._backend = resolve_backend(device if backend is None else backend, device)
        self._core = StagerCore(self._backend, depth=depth, staging=staging, wait=wait, stop_check=stop_check)
        self._ring = self._core.ring
        self._statistics = Statistics()
        self._by_key = GraphCache(self._backend, max_graphs)
        self._walks: dict[str, WalkGraphs] = {}
        for name, own in walks.items():
            copies = copies_of(own.copies)
            if copies:
                _check_names(model, name, copies)
                refuse_copies(copies, staging)
            buckets = None
            if own.buckets is not None:
                buckets = Buckets(own.buckets, own.dims, own.pad_values)
            elif own.dims is not None or own.pad_values is not None:
                raise InputError("dims= and pad_values= say how inputs are padded to buckets: pass buckets=, too.")
            builder = SignatureBuilder(
                model,
                name,
                self._core,
                trace=trace,
                verify=verify,
                copies=copies,
                generators=generators,
                pads=buckets is not None,
            )
            self._walks[name] = WalkGraphs(
                name, builder, forward, buckets, self._statistics, self._by_key, on_miss=on_miss
            )
        self._walks.update((alias, self._walks[name]) for alias, name in aliases.items())

    # ---- launching -------------------------------------------------------------------------------------------------

    def launch(
        self,
        *args: Any,
        walk: str | None = None,
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
            walk: which of the walks; default the one that `compile` was given.
            rows: ids of the real rows, default their positions.
            num_rows: number of real rows, default the batch size; the rest are padding and never surface.
            wait: wait for room instead of raising `RingFullError`.
            timeout: seconds that a launch may wait; None waits for ever.

        Raises:
            InputError: for inputs or row ids that cannot be taken, an unknown walk, or inputs that fit no bucket under
                `on_miss="error"`.
            RingFullError: if `depth` steps are open or leased, or rows of an earlier step lie in the graph's outputs.
            StepTimeoutError: after `timeout`.
            StaleGraphError: if a parameter or buffer was replaced since the trace, under `on_stale="error"`.
            ClosedError: after `close`.
            TraceError, HostReadError, DeclarationError, CaptureError: at a signature's first launch.
            and whatever the model raises; later launches are not affected.
        """
        ring = self._ring
        refuse_nested()
        with self._backend.range("spangraph.launch"), ring.lock:
            if ring.is_closed:
                raise ClosedError("launch on a closed object: compile the model again.")
            found, leaves = self._find(walk, args, kwargs)
            signature = found.signature
            ids, real = signature.tails[0].check_rows(rows, num_rows, found.batch)
            with self._backend.guard():
                launch = ring.reserve(signature.tails, ids, real, wait=wait, timeout=timeout)
                try:
                    instance = signature.instances[signature.tails.index(launch.tail)]
                    if instance.graph is None:
                        ring.commit(launch, run(signature.trace, instance.gm, _inputs(signature, leaves)))
                    else:
                        if ring.debug:
                            instance.tail.check_inputs()
                        buffers = self._upload(instance, leaves, signature.pad_values)
                        instance.graph.replay()
                        event = ring.commit(launch, instance.tail.outputs)
                        if buffers is not None:
                            instance.uploads.append((buffers, event))
                except BaseException:
                    ring.abort(launch)
                    raise
            for counts in signature.counts:
                counts.hits += not found.reason
                counts.elements += found.elements
                counts.padding_elements += signature.num_elements - found.elements
            if found.reason:
                count_miss(signature.counts, found.reason)
        return Step(ring, launch, signature.make_result)

    def _find(self, walk: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Found, Sequence[Tensor]]:
        graphs = self._graphs_of(walk)
        found, leaves = graphs.find(args, kwargs)
        if self._drop_stale(found.signature):
            return graphs.find(args, kwargs, "weights replaced")
        return found, leaves

    def _drop_stale(self, signature: Signature) -> bool:
        """Whether the model has other weights than the signature, which is dropped then, to be built anew.

        Raises:
            StaleGraphError: where that is not asked for.
        """
        if signature.weights is None:
            return False
        try:
            signature.weights.check()
            return False
        except StaleGraphError:
            if self._on_stale == "error":
                raise
            signature.place.cache.drop(signature)
            return True

    def _graphs_of(self, walk: str | None) -> WalkGraphs:
        name = self._walk if walk is None else walk
        if (graphs := self._walks.get(name)) is None:
            asked = "the default walk" if walk is None else "walk"
            raise InputError(f"{asked} {name!r} is none of {list(self._walks)}: name one of these, launch(walk=...).")
        return graphs

    def warmup(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        walk: str | None = None,
        progress: bool = True,
    ) -> None:
        """Capture every bucket of a walk before the first launch, the largest first; all of them, or none if one fails.
        Other threads may launch meanwhile, between captures.

        Args:
            args, kwargs: inputs such as `launch` takes. Their bucketed dims are padded, or cut off, to each bucket.
            progress: whether to print a line per capture to standard error.

        Raises:
            InputError: if `max_graphs` has no room for all.
            StaleGraphError: if a bucket was captured with other weights, under `on_stale="error"`.
            and what a signature's first launch raises.
        """
        refuse_nested()
        graphs = self._graphs_of(walk)
        wanted = graphs.captures(example_args(args), dict(kwargs or {}))
        built: dict[Any, Signature] = {}
        for number, (label, key, build) in enumerate(wanted, 1):
            began = time.perf_counter()
            with self._ring.lock:
                if self._ring.is_closed:
                    raise ClosedError("warmup() of a closed object: compile the model again.")
                signature = self._by_key.place(key).current()
                if signature is None or self._drop_stale(signature):
                    signature = built[key] = build(lambda num_graphs: None)  # nothing gives way before all are there
                if number == 1:
                    self._by_key.check_room(len(wanted) * len(signature.instances))
            if progress:
                seconds = time.perf_counter() - began
                what = f"{graphs.name}{f', {label}' if label else ''}"
                print(f"spangraph: captured {number} of {len(wanted)}: {what} ({seconds:.1f} s)", file=sys.stderr)
        with self._ring.lock:
            if self._ring.is_closed:
                raise ClosedError("warmup() of an object that was closed meanwhile: compile the model again.")
            new = {key: signature for key, signature in built.items() if self._by_key.place(key).current() is None}
            self._by_key.make_room(sum(len(signature.instances) for signature in new.values()))
            for key, signature in new.items():  # but for those where a launch was faster
                self._by_key.put(self._by_key.place(key), signature)

    def __call__(
        self,
        *args: Any,
        walk: str | None = None,
        rows: Sequence[Hashable] | None = None,
        num_rows: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Launch, wait, and return the model's output structure with owned rows in place of spanned tensors."""
        with self.launch(*args, walk=walk, rows=rows, num_rows=num_rows, **kwargs) as step:
            return step._result(own=True)

    def run_each(
        self,
        requests: Iterable[Sequence[Any] | Mapping[str, Any]],
        *,
        walk: str | None = None,
        rows: Sequence[Hashable] | None = None,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Run requests one by one, up to `depth` of them in flight, and merge what they return: the same result as one
        call with the batch of them, also where their padded widths differ.

        Rows are merged, tensors whose dim 0 has a request's number of rows are concatenated along it (a table of as
        many rows by chance, too: declare what has rows, or return it as a constant of Python), and everything else must
        be equal in all requests.

        Args:
            requests: each a tuple of the model's inputs, or a mapping of them by name, of one row or more.
            walk: which of the walks.
            rows: ids of the rows of all requests, in order, default their positions.
            wait: wait for room that other steps take, instead of raising `RingFullError`.
            timeout: seconds that each launch may wait for it.

        Raises:
            InputError: if there are no requests, or too few or too many row ids.
            MergeError: if the results cannot be merged: if only some requests return spans, if structures or constants
                differ, or whole tensors in more than dim 0.
            and what `launch` and the waits raise. No step stays leased, and nothing is delivered.
        """
        return run_each(partial(self.launch, walk=walk), requests, rows, wait=wait, timeout=timeout)

    def _upload(
        self, instance: Instance, leaves: Sequence[Tensor], pad_values: Sequence[float | int | bool]
    ) -> list[Tensor] | None:
        """Copy inputs into the graph's own, in stream order, and pad them.

        The caller may overwrite host tensors as soon as the launch returns, so they go through buffers of ours.
        Returns the buffers, which must not be written before this launch is done.
        """
        backend = self._backend
        on_host = [backend.is_host(leaf) for leaf in leaves]
        buffers = self._host_buffers(instance) if any(on_host) else None
        for i, (static, leaf) in enumerate(zip(instance.inputs, leaves, strict=True)):
            corner, rest = (static, []) if static.shape == leaf.shape else regions(static, leaf.shape)
            if buffers is not None and on_host[i]:
                corner, leaf = static, self._fill(buffers[i], leaf.detach(), pad_values[i] if rest else 0)
                rest = []
            for region in rest:
                backend.fill(region, pad_values[i])
            backend.copy_in(corner, leaf)
        return buffers

    def _fill(self, buffer: Tensor, leaf: Tensor, value: float | bool) -> Tensor:
        corner, rest = regions(buffer, leaf.shape)
        corner.copy_(leaf)
        for region in rest:
            region.fill_(value)
        return buffer

    def _host_buffers(self, instance: Instance) -> list[Tensor]:
        if instance.uploads:
            buffers, event = instance.uploads.pop(0)  # the oldest: if that is not done, none is
            with contextlib.suppress(Exception):  # its failure was its step's
                if event.query():
                    return buffers
                instance.uploads.insert(0, (buffers, event))
        return [self._backend.host_buffer(static) for static in instance.inputs]

    # ---- inspection and end ----------------------------------------------------------------------------------------

    def explain(self) -> str:
        """What was traced, staged and cut, signature by signature, as text."""
        name = type(self._model).__name__
        walks = ", ".join(repr(walk) for walk, graphs in self._walks.items() if graphs.name == walk)
        lines = [f"{name}, walk {walks}, backend {self._backend.name}, depth {self._ring.depth}"]
        signatures = self._by_key.values()
        if not signatures:
            lines.append("  nothing launched yet: signatures are traced at their first launch")
        for signature in signatures:
            trace, prepared = signature.trace, signature.prepared
            captured = "" if not self._backend.static else ", captured" if trace.captures else ", uncaptured"
            compiled = f", compiled by {trace.compiler}" if trace.compiler else ""
            of_walk = f" of walk {signature.place.key[0]!r}" if len(self._walks) > 1 else ""
            lines.append(f"  signature ({signature.label}){of_walk}")
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
        """What all walks and buckets have done together: `statistics().total`."""
        return self._statistics.total

    def statistics(self) -> Statistics:
        """Counts per walk and bucket, as a mapping, a dict for programs (`as_dict`), or a table for people (`str`)."""
        return self._statistics

    def memory(self) -> Memory:
        """Pinned, device and graph-pool bytes per output and graph, and what open leases retain."""
        return measure_compiled(self._core, self._by_key.values())

    def close(self) -> None:
        """Wait for all work, then refuse launches. Steps that were launched can still be read."""
        self._ring.close()
        self._by_key.clear()
        for graphs in self._walks.values():
            graphs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Compiled {type(self._model).__name__} on {self._backend.name}; {self._ring.describe()}>"


def _inputs(signature: Signature, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """What a graph that runs inline is given: padded, and with the strides that it was traced for."""
    if signature.pad_values:
        padding = zip(leaves, signature.shapes, signature.pad_values, strict=True)
        leaves = [pad(leaf, shape, value) for leaf, shape, value in padding]
    if not signature.strides:
        return leaves
    return [restrided(leaf, stride) for leaf, stride in zip(leaves, signature.strides, strict=True)]
