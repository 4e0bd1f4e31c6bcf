"""Marks in a graph: what they mean, hoisting them out of nested graphs, and finding them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from spangraph.errors import DeclarationError
from spangraph.passes.nodes import (
    clone_of,
    find_late_writes,
    is_call,
    output_node,
    placeholders,
    result_nodes,
    subgraph,
    val,
    where,
)

if TYPE_CHECKING:
    from spangraph.spans import Span

_MARKS = (torch.ops.spangraph.mark.default, torch.ops.spangraph.mark_value.default)


@dataclass(frozen=True)
class MarkInfo:
    """What the tracer knows of a mark: call key (`fqn`, `fqn[1]`, ...), submodule, name, span, and `"file:line"`.

    `span` is None for a row value.
    """

    key: str
    fqn: str
    name: str
    span: Span | None
    where: str


@dataclass(frozen=True)
class Mark:
    """A mark in a graph. `spans` is None for a row value, whose values are `value`."""

    info: MarkInfo
    node: fx.Node
    value: fx.Node
    spans: fx.Node | None

    @property
    def staged(self) -> fx.Node:
        """What travels to the host: the spans, or the row values."""
        return self.value if self.spans is None else self.spans

    @property
    def full_name(self) -> str:
        """`"fqn.name"`, unique in the graph."""
        return f"{self.info.key}.{self.info.name}" if self.info.key else self.info.name


def find_marks(gm: fx.GraphModule, infos: Mapping[tuple[str, str], MarkInfo]) -> list[Mark]:
    """The graph's marks, in the order in which they fire."""
    marks = []
    for node in gm.graph.nodes:
        if is_call(node, _MARKS[0]):
            value, spans, key, name = node.args
            marks.append(Mark(infos[key, name], node, value, spans))
        elif is_call(node, _MARKS[1]):
            value, key, name = node.args
            marks.append(Mark(infos[key, name], node, value, None))
    return marks


def overwritten_error(value: str, writer: fx.Node) -> DeclarationError:
    """SG109, for a spanned value that `writer` overwrites after its mark."""
    return DeclarationError(
        f"SG109 {value} is overwritten after its submodule returned it, by {writer.target} at"
        f" {where(writer) or 'an unknown line'}: its rows would hold the later values. Return a clone().",
        where(writer),
    )


def public_names(marks: Sequence[Mark]) -> list[str]:
    """What `step.rows` calls each mark: its name where that is unique, else `"fqn.name"`."""
    count = Counter(mark.info.name for mark in marks)
    return [mark.info.name if count[mark.info.name] == 1 else mark.full_name for mark in marks]


def hoist_marks(gm: fx.GraphModule) -> fx.GraphModule:
    """Move marks out of nested graphs, which export makes of autocast and inner no_grad blocks.

    What such a graph writes again after a mark is cloned inside, as `snapshot_spans` does it outside.

        sub: mark(v, s); return (v,)             sub: return (v, s)
        out = wrap_with_autocast(..., sub, x)    out = wrap_with_autocast(..., sub, x)
        y = out[0]                               y = out[0]; s = out[1]
                                                 mark(y, s)
    """
    hoisted = sum(_hoist_from(node) for node in list(gm.graph.nodes) if subgraph(node) is not None)
    if hoisted:
        gm.graph.lint()
    return gm


def _hoist_from(call: fx.Node) -> int:
    inner = subgraph(call)
    assert inner is not None, "the caller checked"
    module, operands = inner
    hoist_marks(module)
    marks = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _MARKS]
    if not marks:
        return 0
    out = output_node(module.graph)
    results = result_nodes(module.graph)
    inputs = placeholders(module.graph)
    graph = call.graph
    last = call

    def outer(node: fx.Node) -> fx.Node:
        """The node's value outside: the operand it is, or a result (an existing one where there is one)."""
        nonlocal last
        if node in inputs:
            return operands[inputs.index(node)]  # type: ignore[no-any-return]
        if node not in results:
            results.append(node)
        index = results.index(node)
        for user in call.users:
            if is_call(user, operator.getitem) and user.args[1] == index:
                last = max(last, user)
                return user
        with graph.inserting_after(call):
            item = graph.call_function(operator.getitem, (call, index))
        item.meta.update(val=val(node), stack_trace=node.meta.get("stack_trace"))
        last = max(last, item)
        return item

    late_write = find_late_writes(module.graph)
    for mark in marks:
        value, *_, key, name = mark.args
        staged = mark.args[1] if mark.target is _MARKS[0] else value
        if staged is not value and (writer := late_write(value, mark)):
            raise overwritten_error(repr(f"{key}.{name}" if key else name), writer)
        if late_write(staged, mark):  # outside, the mark comes after that write
            with module.graph.inserting_before(mark):
                mark.replace_input_with(staged, clone_of(staged))
        args = tuple(outer(arg) if isinstance(arg, fx.Node) else arg for arg in mark.args)
        with graph.inserting_after(last):
            last = graph.call_function(mark.target, args)
        last.meta["stack_trace"] = mark.meta.get("stack_trace")
        module.graph.erase_node(mark)
    out.args = (tuple(results),)
    module.graph.lint()
    module.recompile()
    return len(marks)
