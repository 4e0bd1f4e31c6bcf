"""Fold all marks into one staging node at the graph's tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from spangraph.passes.marks import Mark
from spangraph.passes.nodes import output_node


def erase_marks(gm: fx.GraphModule, marks: Sequence[Mark]) -> fx.GraphModule:
    """Remove the marks; what they name stays. `insert_staging_node` compiles the copy that runs."""
    for mark in marks:
        gm.graph.erase_node(mark.node)
    return gm


def insert_staging_node(
    gm: fx.GraphModule, staged: Sequence[fx.Node], stage_args: Callable[[Sequence[fx.Node]], tuple[Any, ...]]
) -> fx.GraphModule:
    """A copy of the graph with one staging node at its tail; the same object if nothing is staged.

        y, s = ...                                y, s = ...
        return (y,)                               stage(cursor, slots, control, [s], [2], graph); return (y,)

    Args:
        staged: spans and row values, each once.
        stage_args: arguments of `torch.ops.spangraph.stage` for the staged nodes; its tensors become attributes.
    """
    if not staged:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    result = fx.GraphModule(gm, graph)
    args = []
    with graph.inserting_before(output_node(graph)):
        for i, arg in enumerate(stage_args([copies[node] for node in staged])):
            if isinstance(arg, Tensor):
                # A plain attribute, never a buffer: the ring belongs to no module, and must not be moved or cloned.
                setattr(result, f"_spangraph_ring_{i}", arg)
                arg = graph.create_node("get_attr", f"_spangraph_ring_{i}")
            args.append(arg)
        graph.call_function(torch.ops.spangraph.stage.default, tuple(args))
    graph.lint()
    result.recompile()
    return result
