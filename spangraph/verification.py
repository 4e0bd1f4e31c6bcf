"""`spangraph.verify`: what a model's spans, padding and host reads would do, found before anything is served."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spangraph.declare import find_declarations, source_of
from spangraph.diagnostics import Diagnostic
from spangraph.errors import DeclarationError, InputError, TraceError
from spangraph.hazards import find_capture_hazards
from spangraph.marking import Marking, check_marked
from spangraph.passes.host_reads import erase_assertions, find_host_reads
from spangraph.passes.leaks import Source
from spangraph.passes.nodes import placeholders, val
from spangraph.passes.prepare import prepare_graph
from spangraph.report import Report
from spangraph.spans import Span, describe_bad_span
from spangraph.structure import example_args, normalise_call, split_call, tensor_paths
from spangraph.trace import Trace
from spangraph.tracer import TRACE_LOCK, trace_model


def verify(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    walk: str = "forward",
    input_spans: Mapping[str, Span | int | Sequence[int]] | None = None,
    padding: str = "both",
    strict: bool = False,
) -> Report:
    """Check a model on example inputs: declarations, padding leaks, host reads. Nothing of the model is changed.

    The forward runs eagerly, once (twice if it changes host state), and is exported once.

    Args:
        model: in eval mode, as it will be served.
        args, kwargs: example inputs of the shapes that will be served. Values matter only to branches of the forward,
            and to the spans that it computes, which are checked: give full rows, too.
        walk: the execution path, given to `spanned_outputs(walk)`.
        input_spans: for inputs whose padding is to be followed, the spanned dims: name of the forward's parameter (or a
            path to a tensor in it, `"batch.mel"`, `"batch[0]"`) -> `Span`, dim or dims; `()` follows rows only.
            Spanned values are always followed from where they are declared.
        padding: where positions outside spans can lie: `"right"` if every span begins at 0, `"left"` if every span
            ends at the width, else `"both"`.
        strict: count as errors what may leak padding (SG2xx), and host reads that an export leaves out (SG401).

    Returns:
        All findings, each with its rule, place and a way out. `report.raise_for_errors()` raises them.

    Raises:
        InputError: for inputs or options that cannot be taken.
        DeclarationError: for a declaration that is not one (names of a wrong type).
        and whatever the forward raises.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"verify() got {type(model).__name__}: expected an nn.Module.")
    if padding not in ("both", "left", "right"):
        raise InputError(f"padding={padding!r}: expected 'both', 'left' or 'right'.")
    signature = inspect.signature(model.forward)
    given = normalise_call(signature, example_args(args), kwargs or {}, walk)
    call, tensors = split_call(*given)
    dims = _input_dims(tensor_paths(signature, call, tensors), tensors, {} if input_spans is None else input_spans)
    declarations = find_declarations(model, walk)
    forward = source_of(model, "forward")
    refused: list[DeclarationError] = []
    marking = Marking(declarations, emit=False)

    def run(*tensors: Tensor) -> Any:
        nonlocal marking
        refused.clear()
        marking = Marking(declarations, emit=False, refuse=refused.append)
        args, kwargs = call.build(tensors)
        with marking.hooked():
            out = model(*args, **kwargs)
        try:
            if not refused:  # else a submodule's spans may be unknown for that reason
                check_marked(out, marking)
        except DeclarationError as error:
            refused.append(error)
        return out

    with TRACE_LOCK:  # an export in another thread may have put other tensors in the model's place
        found = find_capture_hazards(model, run, tensors, declared=lambda: marking.returned)
    found += [_refusal(error, forward) for error in refused]
    found += _bad_spans(marking)
    if not refused:
        try:
            trace = trace_model(model, walk, call, tensors, tracer="export", verify="off")
            if not strict and not find_host_reads(erase_assertions(trace.gm)):
                found = [_traced_around(d) if d.rule == "SG401" else d for d in found]
            found += trace.diagnostics
            inputs = placeholders(trace.gm.graph)
            _refuse_dynamic_widths(trace)
            sources = [Source(inputs[i], name, spanned, padding) for name, (at, spanned) in dims.items() for i in at]
            prepared = prepare_graph(
                trace.gm, trace.infos, trace.leaf_names, reads=True, sources=sources, padding=padding
            )
            found += prepared.diagnostics
        except DeclarationError as error:
            found.append(_refusal(error, forward))
        except TraceError as error:
            if declarations or dims:
                found.append(_not_followed(error, forward, any(d.rule == "SG401" for d in found)))
    if strict:
        found = [replace(d, severity="error") if d.rule.startswith("SG2") else d for d in found]
    return Report(found)


def _input_dims(
    paths: Sequence[str],
    tensors: Sequence[Tensor],
    input_spans: Mapping[str, Span | int | Sequence[int]],
) -> dict[str, tuple[list[int], tuple[int, ...]]]:
    """For each named input its places among the tensors (several if it was given twice), and its spanned dims."""
    if not isinstance(input_spans, Mapping):
        raise InputError(f"input_spans is a {type(input_spans).__name__}: expected a mapping from names to dims.")
    named = dict(zip(paths, tensors, strict=True))
    found = {}
    for name, given in input_spans.items():
        if name not in named:
            raise InputError(f"input_spans names {name!r}: the forward was given the tensors {sorted(named)}.")
        ndim = named[name].ndim
        listed: Any = given.dims if isinstance(given, Span) else given if isinstance(given, list | tuple) else (given,)
        try:
            dims = tuple(operator.index(dim) for dim in listed)
        except TypeError:
            dims = (0,)
        if not all(-ndim <= dim < ndim and dim % ndim for dim in dims):
            raise InputError(
                f"input_spans[{name!r}] is {given!r}: expected a Span, or dims of a tensor of {ndim} dims, but not dim"
                " 0, the rows."
            )
        found[name] = [i for i, tensor in enumerate(tensors) if tensor is named[name]], dims
    return found


def _refuse_dynamic_widths(trace: Trace) -> None:
    """A marked value whose size is only known when it runs has no positions to follow, and no static output to cut.

    Raises:
        TraceError: naming it.
    """
    for (_, name), info in trace.infos.items():
        for node in trace.gm.graph.find_nodes(op="call_function", target=torch.ops.spangraph.mark.default):
            value = val(node.args[0]) if node.args[-1] == name else None
            if value is not None and not all(isinstance(size, int) for size in value.shape):
                raise TraceError(
                    f"the width of {name!r} ({info.where}) is computed by the forward: pad it to one that inputs have"
                )


def _refusal(error: DeclarationError, forward: str) -> Diagnostic:
    rule, _, message = str(error).partition(" ")
    if not rule.startswith("SG"):
        raise error
    return Diagnostic(rule, message, error.where or forward)


def _bad_spans(marking: Marking) -> Iterator[Diagnostic]:
    """SG205: spans that do not fit what the example run has produced."""
    for info, (value, spans) in ((marking.infos[key], pair) for key, pair in marking.values.items()):
        if spans is None or info.span is None:
            continue
        rows = spans.reshape(spans.shape[0], -1, 2).tolist()
        widths = [value.shape[dim] for dim in info.span.dims] * info.span.max_spans
        bad = [
            (row, describe_bad_span(start, end, width))
            for row, given in enumerate(rows)
            for (start, end), width in zip(given, widths, strict=True)
            if not 0 <= start <= end <= width
        ]
        if bad:
            row, problem = bad[0]
            yield Diagnostic(
                "SG205",
                f"on the example inputs the span of {info.name!r} is bad in row {row}: {problem}",
                info.where,
                info.fqn,
                "compute the span from what is produced, not from what was asked for.",
                count=len(bad),
            )


def _traced_around(read: Diagnostic) -> Diagnostic:
    """A read that the exported graph does not have: a branch or assertion of eager runs, a buffer that is a number."""
    note = "spangraph.compile traces around it; a capture of your own would stall or break:"
    return replace(read, severity="warning", fix=f"{note} {read.fix}")


def _not_followed(error: TraceError, forward: str, has_reads: bool) -> Diagnostic:
    first = "mend the host reads first; " if has_reads else ""
    return Diagnostic(
        "SG204",
        f"padding could not be followed, because the model does not export: {error}",
        forward,
        fix=f"{first}make the model exportable, or check by hand what mixes rows and positions.",
        severity="warning",
    )
