"""Which graph outputs are cut, by whose spans, and how the spans lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from spangraph.diagnostics import Diagnostic
from spangraph.errors import DeclarationError
from spangraph.passes.marks import Mark
from spangraph.passes.nodes import output_node, result_nodes, where
from spangraph.passes.propagate_spans import Unknown, propagate_spans
from spangraph.passes.span_maps import SpanMap


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
