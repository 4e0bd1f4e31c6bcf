"""Where a host read only cuts rows: the span declaration that replaces the cut, found in the source around the read."""

from __future__ import annotations

import ast
import copy
import functools
import linecache
from collections.abc import Iterator
from typing import Any

Position = tuple[int, int, int, int]  # first line, last line, first column, last column, as in `code.co_positions()`
_READS, _CASTS = {"item", "tolist", "cpu", "numpy"}, {"int", "float", "round"}
_NO_HINT = (AttributeError, LookupError, OSError, RecursionError, StopIteration, SyntaxError, TypeError, ValueError)
_parse = functools.lru_cache(maxsize=8)(ast.parse)


def cut_hint(where: str, position: Position | None = None) -> str | None:
    """How to declare what the read at `where` (`"file:line"`) cuts, or None where it cuts nothing that is recognised.

    Args:
        position: of the expression that reads; without it, any call of the line that reads is tried.
    """
    try:
        file, _, line = where.rpartition(":")
        tree = _parse("".join(linecache.getlines(file)))
        if position is not None:
            return _hint(tree, ((position[0], position[2]), (position[1], position[3])))
        calls = [_range(node) for node in ast.walk(tree) if _is_read(node) and _range(node)[0][0] == int(line)]
        return next(filter(None, (_hint(tree, call) for call in calls)), None)
    except _NO_HINT:  # source that cannot be found or parsed, or that is written in a way nobody thought of
        return None


def _hint(tree: ast.AST, read: Any) -> str | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds) and _inside(read, node)]
    nodes = list(ast.walk(max(functions, key=lambda node: _range(node)[0], default=tree)))
    loops = dict(_bindings(nodes, (ast.For, ast.comprehension)))
    names = loops | dict(_bindings(nodes, (ast.Assign, ast.AnnAssign, ast.NamedExpr)))
    ours: dict[str, Any] = {}
    if any(_is_read(node) and _range(node) == read for node in nodes):
        ours = {name: expr for name, expr in names.items() if _inside(read, expr)}
    for _ in names:  # what is computed from them, until nothing is new
        ours |= {name: expr for name, expr in names.items() if _used(expr) & ours.keys() and _is_amount(expr)}
    for cut, base, bounds, is_first_dim in _cuts(nodes):
        if is_first_dim and isinstance(base, ast.Name) and base.id not in loops:
            continue  # rows are chosen, not cut
        amounts = [bound for bound in bounds if not isinstance(bound, ast.Constant | None)]
        if amounts and (_range(cut) == read or any(_inside(read, a) or _used(a) & ours.keys() for a in amounts)):
            read_names = {name: expr for name, expr in names.items() if any(map(_is_read, ast.walk(expr)))}
            return _span_text(cut, base, bounds, loops | read_names | ours)
    for node in nodes:
        if isinstance(node, ast.Subscript) and _range(node) == read:
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            name, mask = _name(node.value, loops), ast.unparse(next(i for i in indices if not isinstance(i, ast.Slice)))
            spans = f"output_spans={{{name!r}: spangraph.from_mask({mask})}}"
            return f"if {mask!r} says where rows are valid, return {name!r} padded with {spans}; else use torch.where."
    return None


def _cuts(nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr, list[Any], bool]]:
    """Cuts: the expression, what it cuts, [start, end, length] where given, and whether it cuts the first dim."""
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            for i, part in enumerate(node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]):
                if isinstance(part, ast.Slice):
                    yield node, node.value, [part.lower, part.upper, None], i == 0
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            args = node.args if ast.unparse(node.func.value) == "torch" else [node.func.value, *node.args]
            if node.func.attr == "narrow" and len(args) == 4:
                yield node, args[0], [args[2], None, args[3]], ast.unparse(args[1]) == "0"
            elif node.func.attr == "split" and len(args) > 1:
                yield node, args[0], [None, None, args[1]], len(args) < 3 or ast.unparse(args[2]) == "0"


def _span_text(cut: ast.expr, base: Any, bounds: list[Any], known: dict[str, Any]) -> str:
    is_start = bounds[0] is not None and ast.unparse(bounds[0]) != "0"
    start, end, length = [bound and _Strip(dict(known), is_start).text(bound) for bound in bounds]
    end = "width" if end is None else f"width - {end[1:]}" if end.startswith("-") else end
    if is_start and not length:
        length = ast.unparse(ast.BinOp(_expression(end), ast.Sub(), _expression(str(start))))
    spans = f"{length}, start={start}" if is_start else length or end
    name = _name(base, known)
    declare = f"instead of '{ast.unparse(cut)}', declare {name!r} as spanned: return the padded tensor with"
    if _is_for_numbers(_expression(f"({spans.replace('start=', '')})")):
        amount = ast.unparse(next(bound for bound in (bounds[1], bounds[2], bounds[0]) if bound is not None))
        return f"{declare} output_spans that are made on the device, from what {amount!r} is read from."
    return f"{declare} output_spans={{{name!r}: spangraph.from_lengths({spans})}} and cut after the step."


def _is_for_numbers(expr: ast.expr) -> bool:
    """Whether Python would have to do to a tensor of all rows what it does to numbers: `max(a, b)`, `a if c else b`."""
    calls = [node for node in ast.walk(expr) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return bool(calls) or any(isinstance(node, ast.comprehension | ast.IfExp) for node in ast.walk(expr))


def _expression(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


class _Strip(ast.NodeTransformer):
    """Takes an amount on the host back to the tensor that it was read from, of all rows."""

    def __init__(self, known: dict[str, Any], is_pair: bool) -> None:
        self._known, self._rows = known, ast.Name if is_pair else (ast.Name, ast.Constant)  # start, end = n[0], n[1]

    def text(self, bound: ast.expr) -> str:
        return ast.unparse(self.visit(ast.Call(ast.Name("int"), [copy.deepcopy(bound)], [])))

    def visit_Name(self, node: ast.Name) -> Any:
        return self.visit(copy.deepcopy(self._known.pop(node.id))) if node.id in self._known else node

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("max", "amax") and not node.args:
            return self.visit(node.func.value)  # a cut to the longest row: each has a length of its own
        if not _is_read(node):
            return self.generic_visit(node)
        value: Any = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
        is_row = isinstance(value, ast.Subscript) and isinstance(value.slice, self._rows)
        return self.visit(value.value if is_row else value)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        is_row = isinstance(node.value, ast.Name) and node.value.id in self._known
        node.value = self.visit(node.value)
        return node.value if is_row else node


def _bindings(nodes: list[Any], kinds: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Names that are bound, and the expression that each stands for; a loop's variables stand for all its elements."""
    for node in nodes:
        if isinstance(node, kinds):
            for target in getattr(node, "targets", None) or [node.target]:
                yield from _pairs(target, getattr(node, "iter", None) or node.value)


def _pairs(target: Any, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        call = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        parts = getattr(value, "elts", value.args if call == "zip" else [])
        parts = [ast.Constant(0), *value.args] if call == "enumerate" else parts
        for k, part in enumerate(target.elts):
            column = ast.Subscript(value, ast.Tuple([ast.Constant(...), ast.Constant(k)], ast.Load()), ast.Load())
            column = ast.copy_location(column, value)
            yield from _pairs(part, parts[k] if len(parts) == len(target.elts) else column)


def _name(base: Any, known: dict[str, Any]) -> str:
    while isinstance(base, ast.Subscript):
        base = base.value
    if isinstance(base, ast.Name) and base.id in known:
        return _name(known[base.id], {})
    return base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)


def _is_read(node: Any) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", "") in _READS or (getattr(node.func, "id", "") in _CASTS and len(node.args) == 1)


def _is_amount(expr: Any) -> bool:
    calls = [node for node in ast.walk(expr) if isinstance(node, ast.Call)]
    return all(_is_read(call) or ast.unparse(call.func) in ("min", "max", "zip", "enumerate") for call in calls)


def _used(expr: Any) -> set[str]:
    return {node.id for node in ast.walk(expr) if isinstance(node, ast.Name)}


def _range(node: Any) -> Any:
    if not hasattr(node, "lineno"):
        return (1 << 30, 0), (0, 0)
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _inside(inner: Any, outer: Any) -> bool:
    first, last = _range(outer)
    return bool(first <= inner[0] and inner[1] <= last)
