"""Fold all marks into one staging node at the graph's tail, behind one that copies rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from spangraph.passes.marks import Mark
from spangraph.passes.nodes import output_node, result_nodes
from spangraph.passes.span_maps import SpanMap


@dataclass(frozen=True)
class Copied:
    """A graph output whose rows are copied at the tail.

    Attributes:
        output: its index among the graph's outputs.
        spans: the node of the spans, as they were declared.
        widths: size of each spanned dim of the declared value; the spans hold for these.
        span_map: where rows and spans lie in the output.
    """

    output: int
    spans: fx.Node
    widths: tuple[int, ...]
    span_map: SpanMap


def erase_marks(gm: fx.GraphModule, marks: Sequence[Mark]) -> fx.GraphModule:
    """Remove the marks; what they name stays."""
    for mark in marks:
        gm.graph.erase_node(mark.node)
    return gm


def insert_staging_node(
    gm: fx.GraphModule,
    staged: Sequence[fx.Node],
    stage_args: Callable[[Sequence[fx.Node]], tuple[Any, ...]],
    *,
    copied: Sequence[Copied] = (),
    compact_args: Callable[[Sequence[fx.Node], Sequence[fx.Node]], tuple[Any, ...]] | None = None,
    keep: Sequence[int] | None = None,
) -> fx.GraphModule:
    """A copy of the graph with one staging node at its tail, compiled when it first runs; the same object if nothing is
    staged.

        y, s = ...                     y, s = ...
        return (y,)                    compact(cursor, control, [y], [s], rings, status, ...)   # if y is copied
                                       stage(cursor, slots, control, [s, status], [2, 10], graph)
                                       return (y,)                                              # unless dropped

    Args:
        staged: spans and row values, each once.
        stage_args: arguments of `torch.ops.spangraph.stage` for the staged nodes; its tensors become attributes.
        copied: outputs whose rows are copied.
        compact_args: the same for `torch.ops.spangraph.compact` and the copied outputs and their spans.
        keep: outputs that the graph still returns, default all.
    """
    if not staged:
        gm.recompile()
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    out = output_node(graph)
    results = result_nodes(graph)
    attributes: dict[int, fx.Node] = {}
    held: dict[str, Tensor] = {}

    def as_node(arg: Any) -> Any:
        if isinstance(arg, list):
            return [as_node(item) for item in arg]
        if not isinstance(arg, Tensor):
            return arg
        if id(arg) not in attributes:
            name = f"_spangraph_ring_{len(attributes)}"
            held[name] = arg
            attributes[id(arg)] = graph.create_node("get_attr", name)
        return attributes[id(arg)]

    with graph.inserting_before(out):
        if copied and compact_args is not None:
            sources, spans = [], []
            for copy in copied:
                row_dim, value = copy.span_map.row_dim, results[copy.output]
                sources.append(graph.call_method("movedim", (value, row_dim, 0)) if row_dim else value)
                moves = tuple(tuple(map(astuple, place.moves)) for place in copy.span_map.places[1:])
                args = copies[copy.spans], copy.widths, moves
                spans.append(args[0] if copy.span_map.is_identity else graph.call_function(map_spans, args))
            graph.call_function(torch.ops.spangraph.compact.default, tuple(map(as_node, compact_args(sources, spans))))
        args = tuple(map(as_node, stage_args([copies[node] for node in staged])))
        graph.call_function(torch.ops.spangraph.stage.default, args)
    if keep is not None:
        out.args = (tuple(results[i] for i in keep),)
    return _as_module(gm, graph, held)


def _as_module(gm: fx.GraphModule, graph: fx.Graph, held: Mapping[str, Tensor]) -> fx.GraphModule:
    """The graph as a module, with what `gm` holds, and these tensors.

    They become plain attributes, never buffers: the ring belongs to no module, and must not be moved or cloned.
    """
    for name, tensor in held.items():
        setattr(gm, name, tensor)
    with _use_lazy_graph_module(True):
        result = _make_graph_module(gm, graph)  # makes buffers of what the graph names
    for name, tensor in held.items():
        delattr(gm, name)
        delattr(result, name)
        setattr(result, name, tensor)
    graph.lint()
    return result


def map_spans(spans: Tensor, widths: Sequence[int], moves: Sequence[Sequence[tuple[int, int, int, int]]]) -> Tensor:
    """Where declared spans lie in a tensor that derives from the declared value: `SpanMap.apply`, on the device.

    A row with a bad span (any that fails `0 <= start <= end <= width`) gets empty ones, so that nothing of it is moved.

    Args:
        spans: int64 `[bs, ...]`, as declared.
        widths: size of each spanned dim of the declared value.
        moves: for each spanned dim what happened to its positions, in order: the fields of each `Move`.

    Returns:
        int64 spans of the same shape.
    """
    max_spans = spans.shape[1:].numel() // (2 * len(widths))
    pairs = spans.view(spans.shape[0], max_spans, len(widths), 2)
    starts, ends = pairs[..., 0].unbind(-1), pairs[..., 1].unbind(-1)
    fits = [(s >= 0) & (s <= e) & (e <= width) for s, e, width in zip(starts, ends, widths, strict=True)]
    good = torch.stack(fits, -1).all(-1).all(-1, keepdim=True)
    mapped = []
    for start, end, steps in zip(starts, ends, moves, strict=True):
        start, end = torch.where(good, start, 0), torch.where(good, end, 0)
        for scale, shift, width, step in steps:
            first, last = start * scale + shift, end * scale + shift
            if scale < 0:
                first, last = last, first
            first = (first + (step - 1)).div(step, rounding_mode="floor").clamp(min=0)
            last = (last + (step - 1)).div(step, rounding_mode="floor").clamp(max=width)
            kept = (start < end) & (first < last)
            start, end = torch.where(kept, first, 0), torch.where(kept, last, 0)
        mapped.append(torch.stack((start, end), -1))
    return torch.stack(mapped, -2).view(spans.shape)
