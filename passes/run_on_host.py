"""A staged graph as a plain function, for where it runs on the calling thread at every step."""

from __future__ import annotations

from types import MethodType, SimpleNamespace

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from spangraph.errors import TraceError
from spangraph.kernels.stage import HostStage

_STAGE = "_spangraph_stage"


def graph_method(gm: fx.GraphModule) -> MethodType:
    """`gm.forward`, with its code generated.

    Raises:
        TraceError: if torch.fx writes code for it that is none.
    """
    try:
        _LazyGraphModule.force_recompile(gm)
    except SyntaxError as error:
        raise TraceError(f"torch.fx cannot write the graph as code ({error}): compile with trace='opaque'.") from error
    return MethodType(type(gm).forward, gm)


def host_method(gm: fx.GraphModule) -> MethodType:
    """`gm.forward` without what costs more than it does, call by call, on the host:

    * the staging operator, whose arguments the dispatcher converts twice, becomes a call of `HostStage`;
    * tensors and modules that the graph names are plain attributes: a module's own lookup is `nn.Module.__getattr__`.
    """
    if staging := gm.graph.find_nodes(op="call_function", target=torch.ops.spangraph.stage.default):
        gm = _on_host(gm, staging[0].name)
    root = SimpleNamespace()
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            owner, held = root, gm
            *path, name = str(node.target).split(".")
            for part in path:
                owner, held = vars(owner).setdefault(part, SimpleNamespace()), getattr(held, part)
            if isinstance(owner, SimpleNamespace):  # and no module that is called, too
                setattr(owner, name, getattr(held, name))
    return MethodType(graph_method(gm).__func__, root)


def _on_host(gm: fx.GraphModule, name: str) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    node = next(node for node in graph.nodes if node.name == name)
    *ring, columns, offsets, number, mirror, _ = node.args
    if mirror is not None:
        return gm
    cursor, slots, control = (getattr(gm, memory.target) for memory in ring)
    setattr(gm, _STAGE, HostStage(cursor, slots, control, offsets, number))
    with graph.inserting_before(node):
        graph.create_node("call_module", _STAGE, (columns,))
    for unused in (node, *ring):
        if not unused.users:  # by the node that copies rows
            graph.erase_node(unused)
    result = fx.GraphModule(gm, graph)
    delattr(gm, _STAGE)
    return result
