"""Small questions about fx nodes that several passes ask."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

_TORCH = os.path.dirname(torch.__file__)
_OURS = tuple(os.path.dirname(os.path.abspath(m)) for m in (__file__, os.path.join(__file__, "..", "..", "spangraph")))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')

# Composite ops that return their input itself without an alias annotation in their schema (in eval mode).
_UNANNOTATED_ALIASES = {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"}


def where(node: fx.Node) -> str:
    """`"file:line"` of the innermost user frame that made the node, or `""`."""
    return where_in(node.meta.get("stack_trace") or "")


def where_in(trace: str) -> str:
    """`"file:line"` of the innermost frame in a formatted stack trace that is neither torch's nor ours."""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(trace)]
    for file, line in reversed(frames):
        if is_user_file(file):
            return f"{file}:{line}"
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def is_user_file(file: str) -> bool:
    """Whether a frame is neither inside torch nor inside spangraph."""
    return not file.startswith((_TORCH, *_OURS, "<")) and "importlib" not in file


def val(node: fx.Node) -> Any:
    """The node's example value (a fake tensor after export), or None."""
    return node.meta.get("val")


def is_call(node: fx.Node, target: Any) -> bool:
    """Whether the node calls that operator."""
    return node.op == "call_function" and node.target is target


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's output node; its first argument is a flat tuple."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def result_nodes(graph: fx.Graph) -> list[fx.Node]:
    """What a flat graph returns, in order."""
    return list(output_node(graph).args[0])  # type: ignore[arg-type]


def _schema(node: fx.Node) -> torch.FunctionSchema | None:
    target = node.target
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def _arguments(node: fx.Node, schema: torch.FunctionSchema) -> Iterator[tuple[torch.Argument, Any]]:
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def subgraph(node: fx.Node) -> tuple[fx.GraphModule, list[Any]] | None:
    """Graph and operands of a higher-order call such as `wrap_with_autocast`, or None."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    owner = node.graph.owning_module
    for i, arg in enumerate(node.args):
        if isinstance(arg, fx.Node) and arg.op == "get_attr" and owner is not None:
            module = getattr(owner, str(arg.target), None)
            if isinstance(module, fx.GraphModule):
                return module, list(node.args[i + 1 :])
    return None


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The graph's inputs, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def written(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory this node writes."""
    if inner := subgraph(node):
        module, operands = inner
        roots, inputs = storage_roots(module.graph), placeholders(module.graph)
        touched = {roots[w] for n in module.graph.nodes for w in written(n)}
        return [o for o, i in zip(operands, inputs, strict=False) if i in touched and isinstance(o, fx.Node)]
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return []
    nodes: list[fx.Node] = []
    for argument, value in _arguments(node, schema):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, list | tuple) else [value]
            nodes += [v for v in values if isinstance(v, fx.Node)]
    return nodes


def aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the node's result may share, by its schema."""
    if is_call(node, operator.getitem) and isinstance(node.args[0], fx.Node):
        if inner := subgraph(node.args[0]):
            module, operands = inner
            results, inputs = result_nodes(module.graph), placeholders(module.graph)
            root = storage_roots(module.graph)[results[node.args[1]]]  # type: ignore[index]
            return operands[inputs.index(root)] if root in inputs else None
        return node.args[0]
    schema = _schema(node)
    if schema is None:
        return None
    if schema.name in _UNANNOTATED_ALIASES:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if not any(ret.alias_info is not None for ret in schema.returns):
        return None
    for argument, value in _arguments(node, schema):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the node whose memory it may be a view of: itself, unless it is a view."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        base = aliased(node)
        roots[node] = node if base is None else roots[base]
    return roots
