"""Passes that keep what is staged and delivered from being overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from spangraph.diagnostics import Diagnostic
from spangraph.passes.marks import Mark, overwritten_error
from spangraph.passes.nodes import (
    aliased,
    clone_of,
    find_late_writes,
    output_node,
    result_nodes,
    storage_roots,
    val,
    written,
)


def snapshot_spans(gm: fx.GraphModule, marks: Sequence[Mark]) -> tuple[fx.GraphModule, list[Mark]]:
    """Clone spans and row values at their mark where their memory is written again before the tail.

        mark(y1, sp)                              c = clone(sp); mark(y1, c)
        sp.copy_(...); mark(y2, sp)               sp.copy_(...); mark(y2, sp)

    Raises:
        DeclarationError: SG109, if a spanned value itself is overwritten after its mark.
    """
    late_write = find_late_writes(gm.graph)
    kept, cloned = [], 0
    for mark in marks:
        if mark.spans is not None and (writer := late_write(mark.value, mark.node)):
            raise overwritten_error(f"{mark.full_name!r} ({mark.info.where})", writer)
        if late_write(mark.staged, mark.node):
            with gm.graph.inserting_before(mark.node):
                clone = clone_of(mark.staged)
            mark.node.replace_input_with(mark.staged, clone)
            mark = replace(mark, value=clone) if mark.spans is None else replace(mark, spans=clone)
            cloned += 1
        kept.append(mark)
    if cloned:
        gm.graph.lint()
    return gm, kept


def diagnose_kept_spans(gm: fx.GraphModule, marks: Sequence[Mark]) -> list[Diagnostic]:
    """SG206, a warning: spans in a buffer of which a step may write a part only."""
    found = []
    roots: dict[fx.Node, fx.Node] = {}
    for mark in marks:
        root = mark.staged
        while (source := aliased(root)) is not None:
            root = source
        if mark.spans is None or root.op != "get_attr":
            continue
        roots = roots or storage_roots(gm.graph)
        targets = [target for node in gm.graph.nodes for target in written(node) if roots[target] is root]
        if not any(val(target).shape == val(root).shape for target in targets):
            message = (
                f"the spans of {mark.full_name!r} lie in {root.target!s}, which outlives the step and is not wholly"
                " written by it: rows that a step does not write keep an earlier step's spans."
            )
            fix = "build the spans anew in each step, or write all of the buffer (copy_, zero_)."
            found.append(Diagnostic("SG206", message, mark.info.where, mark.info.fqn, fix, "warning"))
    return found


def isolate_outputs(gm: fx.GraphModule) -> fx.GraphModule:
    """Clone, at the tail, outputs in memory of an input, parameter or buffer, which the next step may overwrite.

    cache.copy_(x)                            cache.copy_(x)
    return (cache, y)                         c = clone(cache); return (c, y)
    """
    roots = storage_roots(gm.graph)
    out = output_node(gm.graph)
    results = result_nodes(gm.graph)
    clones: dict[fx.Node, fx.Node] = {}
    for node in dict.fromkeys(results):
        if roots[node].op in ("placeholder", "get_attr"):
            with gm.graph.inserting_before(out):
                clones[node] = clone_of(node)
    if clones:
        out.args = (tuple(clones.get(node, node) for node in results),)
        gm.graph.lint()
    return gm
