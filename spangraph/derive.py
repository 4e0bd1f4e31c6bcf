"""A pipeline from a traced model: declaring submodules are nodes, data flow between them is edges."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from spangraph.declare import Declaration, find_declarations
from spangraph.errors import PipelineError
from spangraph.passes.marks import find_marks, hoist_marks
from spangraph.passes.nodes import nested_graphs, storage_roots, where, written
from spangraph.pipeline import Edge, Node
from spangraph.structure import example_args, normalise_call, split_call
from spangraph.tracer import trace_model

_UNNAMED = "unnamed"  # what a submodule gives beside its spanned outputs
_Origin = tuple[str, str]  # node, output


def derive_pipeline(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], walk: str
) -> tuple[list[Node], list[Edge]]:
    """Nodes and edges of one walk; see `Pipeline.from_module`.

    A submodule declared inside another is a node of its own. What lies outside of all of them passes data on, and so
    does memory that is written in place. Submodules that take each other's outputs, in one forward, make a cycle, which
    a pipeline refuses: they are one node.

    Raises:
        TraceError: if the model does not export.
        PipelineError: if nothing in it declares spanned outputs, or where data flow cannot be followed.
    """
    declarations = {d.fqn: d for d in find_declarations(model, walk) if d.names}
    if not declarations:
        raise PipelineError(f"no submodule of {type(model).__name__} declares spanned outputs on walk {walk!r}.")
    call, tensors = split_call(*normalise_call(inspect.signature(model.forward), example_args(args), kwargs, walk))
    trace = trace_model(model, walk, call, tensors, tracer="export", verify="off")
    gm = hoist_marks(trace.gm)
    marked: dict[fx.Node, list[_Origin]] = {}
    for mark in find_marks(gm, trace.infos):
        if mark.spans is not None:
            marked.setdefault(mark.value, []).append((mark.info.fqn, mark.info.name))
    _refuse_blocks(gm, declarations)
    roots = storage_roots(gm.graph)
    origins: dict[fx.Node, dict[_Origin, None]] = {}
    memory: defaultdict[fx.Node, dict[_Origin, None]] = defaultdict(dict)  # what was written there
    edges: dict[tuple[_Origin, str], str] = {}
    for node in gm.graph.nodes:
        owner = _owner(node, declarations)
        taken: dict[_Origin, None] = {}
        for source in node.all_input_nodes:
            taken |= origins.get(source, {}) | memory[roots[source]]
        # An input stays the caller's: a cast that changes nothing is traced as one tensor wherever it is done.
        is_given = roots[node].op in ("placeholder", "get_attr") and not written(node)
        if owner is None or is_given or node.op != "call_function":
            origins[node] = taken
        else:
            for origin in taken:
                if origin[0] != owner:
                    edges.setdefault((origin, owner), where(node))
            origins[node] = {(owner, _UNNAMED): None}
        if node in marked:
            origins[node] = dict.fromkeys(marked[node])
        for target in written(node):
            memory[roots[target]] |= origins[node]
    names = {fqn: fqn or type(model).__name__ for fqn in declarations}
    unnamed = {fqn for (fqn, output), _ in edges if output == _UNNAMED}
    nodes = [
        Node(
            names[fqn],
            spanned=tuple(declaration.spans),
            outputs=(_UNNAMED,) if fqn in unnamed else (),
            where=declaration.where,
        )
        for fqn, declaration in declarations.items()
    ]
    return nodes, [
        Edge(f"{names[fqn]}.{output}", names[taker], where=at) for ((fqn, output), taker), at in edges.items()
    ]


def _refuse_blocks(gm: fx.GraphModule, declarations: Mapping[str, Declaration]) -> None:
    """Declaring submodules inside an autocast or no_grad block are in a graph of their own."""
    for inner in list(nested_graphs(gm))[1:]:
        if hidden := {owner for node in inner.graph.nodes if (owner := _owner(node, declarations)) is not None}:
            raise PipelineError(
                f"{sorted(hidden)} run inside an autocast or no_grad block of the model, where data flow is not"
                " followed: enter it outside of the model, or write the pipeline by hand."
            )


def _owner(node: fx.Node, declarations: Mapping[str, Declaration]) -> str | None:
    """Name of the innermost declaring submodule that a node belongs to.

    A method other than forward has no entry in the stack, but the submodules that it calls have.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    innermost = stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""
    owners = [fqn for fqn in declarations if not fqn or innermost == fqn or innermost.startswith(f"{fqn}.")]
    return max(owners, key=len, default=None)
