"""Passes that keep what is staged and delivered from being overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from spangraph.errors import DeclarationError
from spangraph.passes.marks import Mark
from spangraph.passes.nodes import output_node, result_nodes, storage_roots, val, where, written

aten = torch.ops.aten


def snapshot_spans(gm: fx.GraphModule, marks: Sequence[Mark]) -> tuple[fx.GraphModule, list[Mark]]:
    """Clone spans and row values at their mark where their memory is written again before the tail.

        mark(y1, sp)                              c = clone(sp); mark(y1, c)
        sp.copy_(...); mark(y2, sp)               sp.copy_(...); mark(y2, sp)

    Raises:
        DeclarationError: SG109, if a spanned value itself is overwritten after its mark.
    """
    roots = storage_roots(gm.graph)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    last_write: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        for target in written(node):
            last_write[roots[target]] = node
    kept, cloned = [], 0
    for mark in marks:
        if mark.spans is not None:
            writer = last_write.get(roots[mark.value])
            if writer is not None and order[writer] > order[mark.node]:
                raise DeclarationError(
                    f"SG109 {mark.full_name!r} ({mark.info.where}) is overwritten after its submodule returned it, by"
                    f" {writer.target} at {where(writer) or 'an unknown line'}: its rows would hold the later values."
                    " Return a clone()."
                )
        writer = last_write.get(roots[mark.staged])
        if writer is not None and order[writer] > order[mark.node]:
            with gm.graph.inserting_before(mark.node):
                clone = gm.graph.call_function(aten.clone.default, (mark.staged,))
            clone.meta["val"] = val(mark.staged)
            mark.node.replace_input_with(mark.staged, clone)
            mark = replace(mark, value=clone) if mark.spans is None else replace(mark, spans=clone)
            cloned += 1
        kept.append(mark)
    if cloned:
        gm.graph.lint()
        gm.recompile()
    return gm, kept


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
                clones[node] = gm.graph.call_function(aten.clone.default, (node,))
            clones[node].meta["val"] = val(node)
    if clones:
        out.args = (tuple(clones.get(node, node) for node in results),)
        gm.graph.lint()
        gm.recompile()
    return gm
