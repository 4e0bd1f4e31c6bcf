"""A compiled model: launches, warm-up, and what it says of itself."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from spangraph.backends import Backend, resolve_backend
from spangraph.buckets import Buckets, pad, regions
from spangraph.builder import SignatureBuilder
from spangraph.counts import Counts, Statistics
from spangraph.declare import find_declarations
from spangraph.errors import ClosedError, DeclarationError, InputError, StaleGraphError
from spangraph.launch import Launch
from spangraph.memory import Memory, measure_compiled
from spangraph.merge import run_each
from spangraph.passes.marks import public_names
from spangraph.passes.nodes import val
from spangraph.signature import Instance, Signature, restrided, run
from spangraph.slots import Copy, copies_of
from spangraph.step import Step
from spangraph.stops import RowValues, StopCheck
from spangraph.structure import example_args
from spangraph.tail import StagerCore, refuse_copies
from spangraph.tracer import Tracing, refuse_nested
from spangraph.walks import Found, GraphCache, WalkGraphs

if TYPE_CHECKING:
    from spangraph.compile import Walk

_OPTIONS = ("rows", "num_rows", "wait", "timeout")


def _check_names(model: nn.Module, walk: str, copies: Mapping[str, Copy]) -> None:
    known: set[str] = set()
    for declaration in find_declarations(model, walk):
        known |= {*declaration.spans, *(f"{declaration.fqn}.{name}" for name in declaration.spans if declaration.fqn)}
    if unknown := sorted(name for name in copies if re.sub(r"\[\d+\]", "", name) not in known):
        raise DeclarationError(f"copies of {unknown}, but walk {walk!r} declares the spanned outputs {sorted(known)}.")


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
        self._default = self._walks.get(walk)

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
        if profiler._is_profiler_enabled or self._backend.always_ranges:
            with self._backend.range("spangraph.launch"):
                return self._launch(args, kwargs, walk, rows, num_rows, wait, timeout)
        return self._launch(args, kwargs, walk, rows, num_rows, wait, timeout)

    def _launch(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        walk: str | None,
        rows: Sequence[Hashable] | None,
        num_rows: int | None,
        wait: bool,
        timeout: float | None,
    ) -> Step:
        # This runs at every step, so it is written to call little.
        ring = self._ring
        if Tracing.thread is not None:
            refuse_nested()
        with ring.lock:
            if ring.is_closed:
                raise ClosedError("launch on a closed object: compile the model again.")
            graphs = self._default if walk is None else self._walks.get(walk)
            if graphs is None:
                graphs = self._graphs_of(walk)
            found, signature, leaves = graphs.find(args, kwargs)
            if (weights := signature.weights) is not None and weights.are_suspect() and self._drop_stale(signature):
                found, signature, leaves = graphs.find(args, kwargs, "weights replaced")
            tails = signature.tails
            if rows is None and num_rows is None:
                ids, real = None, tails[0].num_rows if found.batch is None else found.batch
            else:
                ids, real = tails[0].check_rows(rows, num_rows, found.batch)
            if self._backend.static:
                with self._backend.guard():
                    launch = ring.reserve(tails, ids, real, wait=wait, timeout=timeout)
                    self._replay(signature, launch, leaves)
            else:
                launch = ring.reserve(tails, ids, real, wait=wait, timeout=timeout)
                try:
                    inputs = leaves if found.strides is signature.strides else _inputs(signature, found, leaves)
                    number = 0 if launch.tail is tails[0] else tails.index(launch.tail)
                    instance = signature.instances[number]
                    ring.commit(launch, run(signature.trace, instance.forward, inputs))
                except BaseException:
                    ring.abort(launch)
                    raise
            counts = signature.counts
            counts.elements += found.elements
            counts.padding_elements += signature.num_elements - found.elements
            if found.reason:
                counts.misses += 1
                counts.reasons[found.reason] = counts.reasons.get(found.reason, 0) + 1
            else:
                counts.hits += 1
        return Step(ring, launch, signature.results)

    def _replay(self, signature: Signature, launch: Launch, leaves: Sequence[Tensor]) -> None:
        """Enqueue the launch's graph on its inputs."""
        ring = self._ring
        try:
            instance = signature.instances[signature.tails.index(launch.tail)]
            assert instance.graph is not None, "it was captured"
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


def _inputs(signature: Signature, found: Found, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """What a graph that runs inline is given: padded, and with the strides that it was traced for."""
    given = leaves
    if signature.pad_values:
        padding = zip(leaves, signature.shapes, signature.pad_values, strict=True)
        leaves = [pad(leaf, shape, value) for leaf, shape, value in padding]
    if signature.strides:
        leaves = [restrided(leaf, stride) for leaf, stride in zip(leaves, signature.strides, strict=True)]
    if all(leaf is own for leaf, own in zip(leaves, given, strict=True)):
        found.strides = signature.strides  # the next ones of this kind fit, too
    return leaves
