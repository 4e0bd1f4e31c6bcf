"""Small questions about fx nodes that several passes ask."""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from spangraph import errors, kernels

# Folders whose frames are never the user's. An editable install has ours side by side in the repository's root.
_NOT_USER = tuple(os.path.dirname(os.path.abspath(str(m.__file__))) + os.sep for m in (torch, errors, kernels))
_NOT_USER += (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')

# Composite ops that return their input itself without an alias annotation in their schema (in eval mode).
_UNANNOTATED_ALIASES = {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"}

# What a batch or instance norm writes while it trains, without an annotation; and what says so.
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats")


def where(node: fx.Node) -> str:
    """`"file:line"` of the innermost user frame that made the node, or `""`."""
    return where_in(node.meta.get("stack_trace") or "")


def where_in(trace: str) -> str:
    """`"file:line"` of the innermost frame in a formatted stack trace that is neither torch's nor ours."""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(trace)]
    for file, line in reversed(frames):
        if is_user_file(file):
            return f"{file}:{line}"
    return ""


def is_user_file(file: str) -> bool:
    """Whether a frame is neither inside torch nor inside spangraph."""
    return not file.startswith(_NOT_USER)


def val(node: fx.Node) -> Any:
    """The node's example value (a fake tensor after export), or None."""
    return node.meta.get("val")


def is_call(node: fx.Node, target: Any) -> bool:
    """Whether the node calls that operator."""
    return node.op == "call_function" and node.target is target


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's output node; its first argument is a flat tuple."""
    node: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return node


def result_nodes(graph: fx.Graph) -> list[fx.Node]:
    """What a flat graph returns, in order."""
    (results,) = output_node(graph).args
    return list(results) if isinstance(results, list | tuple) else [results]  # type: ignore[list-item, arg-type]


def _schema(node: fx.Node) -> torch.FunctionSchema | None:
    target = node.target
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def _arguments(schema: torch.FunctionSchema, args: Any, kwargs: Any) -> Iterator[tuple[torch.Argument, Any]]:
    for i, argument in enumerate(schema.arguments):
        if i < len(args) and not argument.kwarg_only:
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


@functools.cache
def _may_write(target: torch._ops.OpOverload) -> bool:
    """Whether some call of it may write an argument; most operators never do."""
    arguments = target._schema.arguments
    return any(a.name in _TRAINING or (a.alias_info is not None and a.alias_info.is_write) for a in arguments)


def written_values(target: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """Arguments of an operator call that it writes: by its schema, or as the statistics of a norm that is training."""
    if not _may_write(target):
        return []
    given = list(_arguments(target._schema, args, kwargs))
    trains = any(argument.name in _TRAINING and value is True for argument, value in given)
    found: list[Any] = []
    for argument, value in given:
        by_schema = argument.alias_info is not None and argument.alias_info.is_write
        if by_schema or (trains and argument.name in _STATISTICS):
            found += value if isinstance(value, list | tuple) else [value]
    return found


def subgraph(node: fx.Node) -> tuple[fx.GraphModule, list[Any]] | None:
    """Graph and operands of a higher-order call of one graph, such as `wrap_with_autocast`, or None."""
    graphs = _graphs_of(node)
    if len(graphs) != 1:  # branches and loops: what of them runs is not known
        return None
    ((i, module),) = graphs
    return module, list(node.args[i + 1 :])


def _graphs_of(node: fx.Node) -> list[tuple[int, fx.GraphModule]]:
    """The graphs among a higher-order call's arguments, with their places."""
    owner = node.graph.owning_module
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator) or owner is None:
        return []
    attributes = [(i, arg) for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    found = [(i, getattr(owner, str(arg.target), None)) for i, arg in attributes]
    return [(i, module) for i, module in found if isinstance(module, fx.GraphModule)]


def nested_graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph and the graphs in it. Not all of `gm.modules()`: the user's model may hold graphs of its own."""
    yield gm
    for node in gm.graph.nodes:
        for _, inner in _graphs_of(node):
            yield from nested_graphs(inner)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The graph's inputs, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def written(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory this node writes."""
    if inner := subgraph(node):
        module, operands = inner
        inputs, touched = placeholders(module.graph), last_writes(module.graph)
        return [o for o, i in zip(operands, inputs, strict=False) if i in touched and isinstance(o, fx.Node)]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [value for value in written_values(node.target, node.args, node.kwargs) if isinstance(value, fx.Node)]


def _memory(node: fx.Node) -> int | None:
    """Identity of the memory of the node's example value, if it has any."""
    example = val(node)
    if not isinstance(example, Tensor) or example.layout is not torch.strided:
        return None
    known = node.meta.get("memory")
    if known is None or known[0] is not example:
        try:
            known = example, int(example.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # inside vmap, grad, ...: it has none
            known = example, None
        node.meta["memory"] = known
    return known[1]


def aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the node's result shares, by their example values; where one has none, the argument
    whose memory it may share by its schema."""
    schema = _schema(node)
    if schema is not None and schema.name in _UNANNOTATED_ALIASES:  # their example values do not show it either
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    memory = _memory(node)
    if memory is not None and node.op == "call_function":
        sources = node.all_input_nodes
        memories = [_memory(source) for source in sources]
        if memory in memories:
            return sources[memories.index(memory)]
        if None not in memories:
            return None
    if is_call(node, operator.getitem) and isinstance(node.args[0], fx.Node):
        if inner := subgraph(node.args[0]):
            module, operands = inner
            results, inputs = result_nodes(module.graph), placeholders(module.graph)
            root = storage_roots(module.graph)[results[node.args[1]]]  # type: ignore[index]
            return operands[inputs.index(root)] if root in inputs else None
        return node.args[0]
    if schema is None or not any(ret.alias_info is not None for ret in schema.returns):
        return None
    for argument, value in _arguments(schema, node.args, node.kwargs):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the first node in whose memory it lies (or may lie, without example values): itself, unless it is a
    view."""
    roots: dict[fx.Node, fx.Node] = {}
    owners: dict[int | None, fx.Node] = {}
    for node in graph.nodes:
        memory = _memory(node)
        base = aliased(node)
        if memory is not None and memory in owners:
            roots[node] = owners[memory]
        elif base is None or (memory is not None and is_call(node, operator.getitem)):  # one of several new tensors
            roots[node] = owners[memory] = node
        else:
            roots[node] = owners[memory] = roots[base]
    return roots


def last_writes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The first node of each memory that the graph writes (see `storage_roots`), and the last node that writes it."""
    writes = [(target, node) for node in graph.nodes for target in written(node)]
    roots = storage_roots(graph) if writes else {}
    return {roots[target]: node for target, node in writes}


def find_late_writes(graph: fx.Graph) -> Callable[[fx.Node, fx.Node], fx.Node | None]:
    """A function of a tensor and a node: the last write to the tensor's memory, if it comes after the node."""
    last = last_writes(graph)
    roots = storage_roots(graph) if last else {}
    order = {node: i for i, node in enumerate(graph.nodes)}

    def late_write(tensor: fx.Node, node: fx.Node) -> fx.Node | None:
        writer = last.get(roots.get(tensor, tensor))
        return writer if writer is not None and order[writer] > order[node] else None

    return late_write


def is_part_of(node: fx.Node, value: fx.Node) -> bool:
    """Whether the elements of `node` are some of those of `value`: it is a view or a copy of it."""
    source: fx.Node | None = node
    while source is not None and source is not value:
        is_clone = is_call(source, torch.ops.aten.clone.default)
        source = source.all_input_nodes[0] if is_clone else aliased(source)
    return source is value


def clone_of(node: fx.Node) -> fx.Node:
    """A new node at the graph's insertion point: a copy of `node` in memory of its own."""
    clone = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    example = val(node)
    clone.meta["val"] = example.clone() if isinstance(example, Tensor) else example
    return clone
