"""Which graph outputs are cut, by whose spans, and how the spans lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx

from spangraph.diagnostics import Diagnostic
from spangraph.errors import DeclarationError
from spangraph.passes.marks import Mark
from spangraph.passes.nodes import output_node, result_nodes, val, where
from spangraph.passes.propagate_spans import Unknown, propagate_spans
from spangraph.passes.span_maps import SpanMap

if TYPE_CHECKING:
    from spangraph.passes import Prepared


@dataclass(frozen=True)
class PlannedCut:
    """Graph output `output` is cut by the spans of mark number `mark`."""

    output: int
    mark: int
    span_map: SpanMap


def deliver_values(gm: fx.GraphModule, marks: Sequence[Mark]) -> fx.GraphModule:
    """Make every marked value a graph output, so that its rows can be read by name.

    mark(y, s); z = relu(y); return (z,)      mark(y, s); z = relu(y); return (z, y)
    """
    out = output_node(gm.graph)
    results = result_nodes(gm.graph)
    hidden = dict.fromkeys(mark.value for mark in marks if mark.spans is not None and mark.value not in results)
    if hidden:
        out.args = ((*results, *hidden),)
        gm.graph.lint()
        gm.recompile()
    return gm


def plan_cuts(
    gm: fx.GraphModule, marks: Sequence[Mark], leaf_names: Sequence[str]
) -> tuple[list[PlannedCut], list[Diagnostic]]:
    """Decide for every graph output whether it is cut. An output that no mark covers has no entry.

    Where several marks reach one output, the nearest value wins, and of marks on one value the outermost submodule's.

    Args:
        leaf_names: the last path key of each of the model's own outputs; later outputs are hidden values.

    Raises:
        DeclarationError: SG109, if two names with different spans lie on one output that bears neither name.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    reach = {
        i: propagate_spans(gm.graph, mark.value, mark.info.span.dims)
        for i, mark in enumerate(marks)
        if mark.info.span is not None
    }
    cuts, diagnostics = [], []
    for index, node in enumerate(result_nodes(gm.graph)):
        known = {i: found for i, r in reach.items() if isinstance(found := r.get(node), SpanMap)}
        unknown = {i: found for i, r in reach.items() if isinstance(found := r.get(node), Unknown)}
        name = leaf_names[index] if index < len(leaf_names) else ""
        if not known:
            diagnostics += [_delivered_whole(marks[i], name or str(index), found) for i, found in unknown.items()]
            continue
        nearest = max(order[marks[i].value] for i in known)
        near = [i for i in known if order[marks[i].value] == nearest]
        winners = _outermost(marks, near)
        if len({(marks[i].spans, known[i]) for i in winners}) > 1:
            named = [i for i in winners if marks[i].info.name == name]
            if len(named) != 1:
                both = " and ".join(repr(marks[i].full_name) for i in winners)
                raise DeclarationError(
                    f"SG109 output {name or index!r} is one tensor under the names {both}, with different spans: return"
                    " it under one of these names, or clone() it for one of them."
                )
            winners = named
        others = [i for i in known if i not in near and not _upstream(marks, i, near, reach)]
        if others and index < len(leaf_names):
            both = " and ".join(repr(marks[i].full_name) for i in (winners[0], *others))
            diagnostics.append(
                Diagnostic(
                    "SG203",
                    f"output {name or index!r} derives from {both}, with spans of their own; it is delivered whole.",
                    where(node),
                    str(node),
                    "declare the output itself.",
                    "warning",
                )
            )
            continue
        cuts.append(PlannedCut(index, winners[0], known[winners[0]]))
    return cuts, diagnostics


def carry_cuts(known: Prepared, prepared: Prepared, num_outputs: int) -> list[PlannedCut] | None:
    """The cuts of the graph of an opaque trace, and of those outputs, too, that are cut in a graph of other shapes;
    None if their spans' places depend on the shapes otherwise than by a factor, so that they cannot be known.

    Args:
        num_outputs: the model's own.
    """
    mark_of = {(mark.info.key, mark.info.name): i for i, mark in enumerate(prepared.marks)}
    cuts: dict[int, Any] = {cut.output: cut for cut in prepared.cuts}
    for cut in known.cuts:
        if cut.output in cuts or cut.output >= num_outputs:
            continue
        info = known.marks[cut.mark].info
        mark = prepared.marks[mark_of[info.key, info.name]] if (info.key, info.name) in mark_of else None
        if mark is None or info.span is None or cut.output >= len(prepared.results):
            return None
        value, shape = val(mark.value), val(prepared.results[cut.output]).shape
        span_map = _resized(cut.span_map, [value.shape[dim] for dim in info.span.dims])
        if span_map is None or len(shape) <= max(place.dim for place in span_map.places):
            return None
        sizes = [value.shape[dim] for dim in (0, *info.span.dims)]
        if any(shape[p.dim] != p.apply(0, size)[1] for p, size in zip(span_map.places, sizes, strict=True)):
            return None
        cuts[cut.output] = PlannedCut(cut.output, mark_of[info.key, info.name], span_map)
    return [cuts[output] for output in sorted(cuts)]


def _resized(span_map: SpanMap, widths: Sequence[int]) -> SpanMap | None:
    """The map for a value of other widths, where positions were at most multiplied."""
    places = [span_map.places[0]]
    for place, width in zip(span_map.places[1:], widths, strict=True):
        moves = []
        for move in place.moves:
            if move.scale < 1 or move.shift or move.step != 1:
                return None
            width *= move.scale
            moves.append(replace(move, width=width))
        places.append(replace(place, moves=tuple(moves)))
    return SpanMap(tuple(places)) if not span_map.places[0].moves else None


def _outermost(marks: Sequence[Mark], candidates: Sequence[int]) -> list[int]:
    fqns = {marks[i].info.fqn for i in candidates}
    outer = [i for i in candidates if not any(_inside(marks[i].info.fqn, fqn) for fqn in fqns)]
    return outer or list(candidates)


def _inside(fqn: str, other: str) -> bool:
    return fqn != other and (other == "" or fqn.startswith(other + "."))


def _upstream(
    marks: Sequence[Mark], far: int, near: Sequence[int], reach: dict[int, dict[fx.Node, SpanMap | Unknown]]
) -> bool:
    """Whether the nearer value derives from the farther one: then its own spans say it all."""
    return any(marks[i].value in reach[far] for i in near)


def _delivered_whole(mark: Mark, name: str, unknown: Unknown) -> Diagnostic:
    return Diagnostic(
        "SG203",
        f"output {name!r} derives from {mark.full_name!r} through {unknown.reason}; it is delivered whole.",
        where(unknown.node),
        str(unknown.node),
        "declare the output itself, with spans of its own.",
        "warning",
    )
