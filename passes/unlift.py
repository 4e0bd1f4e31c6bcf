"""An exported program as a graph module that holds its parameters, buffers and constants."""

from __future__ import annotations

import keyword
import re
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from spangraph.errors import TraceError
from spangraph.passes.nodes import placeholders, result_nodes

# Names that torch.fx puts into its code as they are, where they are none.
_UNWRITABLE = re.compile(rf"""["\\\x00-\x1f]|(^|\.)({"|".join(keyword.kwlist)})(\.|$)""")
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)


def unlift(exported: ExportedProgram) -> fx.GraphModule:
    """What `exported.module()` returns, with flat inputs and outputs, without its checks of inputs, and for a fraction
    of its time: that generates code four times, and this does so once, when the graph first runs.

    Raises:
        TraceError: for inputs or outputs that are none of the model's, as effect tokens.
    """
    gm, signature = exported.graph_module, exported.graph_signature
    graph = fx.Graph()  # a copy: export leaves nodes behind that do not know all of their users
    copies: dict[fx.Node, fx.Node] = {}
    named: dict[str, fx.Node] = {}
    for node, spec in zip(placeholders(gm.graph), signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            copies[node] = named[node.name] = graph.node_copy(node)
        elif spec.target is None:
            raise TraceError(f"torch.export gives the graph an input of kind {spec.kind.name}, which launches cannot.")
        else:
            values: dict[str, Any] = exported.state_dict if spec.target in exported.state_dict else exported.constants
            target = spec.target if _UNWRITABLE.search(spec.target) is None else f"_spangraph_held_{len(named)}"
            _hold(gm, target, values[spec.target], is_buffer=spec.kind is InputKind.BUFFER)
            copies[node] = named[spec.target] = graph.create_node("get_attr", target)
            copies[node].meta = node.meta
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results: list[Any] = []
    written: dict[Any, fx.Node] = {}
    for value, spec in zip(result_nodes(gm.graph), signature.output_specs, strict=True):
        if spec.kind in _MUTATIONS:
            args = named[str(spec.target)], copies[value]
            written[value] = graph.call_function(torch.ops.aten.copy_.default, args)
        elif spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
        else:
            raise TraceError(f"torch.export gives the graph an output of kind {spec.kind.name}, which steps cannot.")
    graph.output(tuple(written.get(value) or copies.get(value, value) for value in results))
    with _use_lazy_graph_module(True):
        return _make_graph_module(gm, graph)


def _hold(gm: fx.GraphModule, name: str, value: Any, *, is_buffer: bool) -> None:
    *path, attribute = name.split(".")
    owner: nn.Module = gm
    for part in path:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    if is_buffer and isinstance(value, Tensor):
        owner.register_buffer(attribute, value)
    else:
        setattr(owner, attribute, value)
