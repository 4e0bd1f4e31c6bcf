"""Where a host read only cuts rows: the span declaration that replaces the cut, found in the source around the read."""

from __future__ import annotations

import ast
import copy
import functools
import linecache
from collections.abc import Iterator
from typing import Any

Position = tuple[int, int, int, int]  # first line, last line, first column, last column, as in `code.co_positions()`
_READS = {"item", "tolist", "cpu", "numpy"}
_CASTS = {"int", "float", "round"}


def cut_hint(where: str, position: Position | None = None) -> str | None:
    """How to declare what the read at `where` (`"file:line"`) cuts, or None where it cuts nothing that is recognised.

    Args:
        position: of the expression that reads; without it, any of the line may be it.
    """
    try:
        file, _, line = where.rpartition(":")
        tree = _parse("".join(linecache.getlines(file)))
        first, last, left, right = position or (int(line), int(line), 0, 1 << 30)
        return _hint(tree, ((first, left), (last, right)), exact=position is not None)
    except Exception:  # source that cannot be found or parsed, or code nobody thought of: then there is no hint
        return None


@functools.lru_cache(maxsize=8)
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _hint(tree: ast.Module, read: Any, *, exact: bool) -> str | None:
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    around = [function for function in functions if _inside(read, _range(function))]
    scope = max(around, key=lambda n: (n.lineno, n.col_offset), default=tree)
    loops = dict(_bindings(scope, (ast.For, ast.comprehension)))
    for cut, base, bounds in _cuts(scope):
        exprs = [b for b in bounds if b is not None and not isinstance(b, ast.Constant)]
        by_bound = any(_inside(read, _range(b)) if exact else _touches(b, read) and _has_read(b) for b in exprs)
        if exprs and (by_bound or (exact and read == _range(cut))):
            return _span_text(cut, base, bounds, loops, loops)
    assigned = [*_bindings(scope, (ast.Assign, ast.AnnAssign, ast.NamedExpr)), *loops.items()]
    ours = {n: e for n, e in assigned if (_inside(read, _range(e)) if exact else _touches(e, read) and _has_read(e))}
    for _ in assigned:  # what is computed from them, until nothing is new
        ours |= {n: e for n, e in assigned if n not in ours and _names(e) & ours.keys()}
    for cut, base, bounds in _cuts(scope):
        if any(_names(bound) & ours.keys() for bound in bounds if bound is not None):
            return _span_text(cut, base, bounds, loops | ours, loops)
    for node in ast.walk(scope):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            looks = isinstance(node.slice, ast.Compare | ast.UnaryOp) or "mask" in ast.unparse(node.slice)
            if read == _range(node) if exact else _touches(node, read) and looks:
                name, mask = _name(node.value, loops), ast.unparse(node.slice)
                return (
                    f"if '{mask}' marks the valid part of each row, declare {name!r} as spanned: return it padded, with"
                    f" output_spans={{{name!r}: spangraph.from_mask({mask})}}, and cut after the step; else torch.where."
                )
    return None


def _cuts(scope: ast.AST) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Cuts in a function: the expression, what it cuts, and [start, end, length] where given."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
                if isinstance(part, ast.Slice) and part.step is None:
                    yield node, node.value, [part.lower, part.upper, None]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            args = [node.func.value, *node.args] if ast.unparse(node.func.value) != "torch" else node.args
            if node.func.attr == "narrow" and len(args) == 4:
                yield node, args[0], [args[2], None, args[3]]
            elif node.func.attr in ("split", "split_with_sizes") and len(args) > 1:
                yield node, args[0], [None, None, args[1]]


def _span_text(cut: Any, base: Any, bounds: list[Any], known: dict[str, Any], loops: dict[str, Any]) -> str:
    name = _name(base, loops)
    texts = [None if bound is None else ast.unparse(_Strip(known).visit(copy.deepcopy(bound))) for bound in bounds]
    start, end, length = texts
    start = None if start == "0" else start
    if length is None:
        end = "width" if end is None else f"width - {end[1:]}" if end.startswith("-") else end
        length = f"{end} - {start}" if start else end
    spans = f"spangraph.from_lengths({length}, start={start})" if start else f"spangraph.from_lengths({length})"
    return (
        f"instead of '{ast.unparse(cut)}', declare {name!r} as spanned: return the padded tensor with"
        f" output_spans={{{name!r}: {spans}}} and cut after the step."
    )


class _Strip(ast.NodeTransformer):
    """Take an amount on the host back to the tensor that it was read from, of all rows."""

    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id not in self._known:
            return node
        others = {name: expr for name, expr in self._known.items() if name != node.id}
        return _Strip(others).visit(copy.deepcopy(self._known[node.id]))

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _READS:
            return _of_all_rows(node.func.value)
        is_cast = isinstance(node.func, ast.Name) and node.func.id in _CASTS and len(node.args) == 1
        return _of_all_rows(node.args[0]) if is_cast else node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        known = isinstance(node.value, ast.Name) and node.value.id in self._known
        self.generic_visit(node)
        return _of_all_rows(node) if known else node


def _of_all_rows(node: Any) -> Any:
    is_row = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name | ast.Constant)
    return node.value if is_row else node


def _bindings(scope: ast.AST, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Names that a function binds, and the expression that each stands for (for a loop's: its elements)."""
    for node in ast.walk(scope):
        if isinstance(node, kinds):
            bound: Any = node
            for target in getattr(node, "targets", None) or [bound.target]:
                yield from _pairs(target, getattr(node, "iter", None) or bound.value)


def _pairs(target: Any, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    if not isinstance(target, ast.Tuple):
        return
    parts: list[Any] = value.elts if isinstance(value, ast.Tuple) else []
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("zip", "enumerate"):
        parts = value.args if value.func.id == "zip" else [ast.Constant(0), *value.args]
    for k, part in enumerate(target.elts):
        column = ast.Tuple([ast.Constant(...), ast.Constant(k)], ast.Load())
        other = ast.copy_location(ast.Subscript(value, column, ast.Load()), value)
        yield from _pairs(part, parts[k] if len(parts) == len(target.elts) else other)


def _name(base: Any, loops: dict[str, Any]) -> str:
    while isinstance(base, ast.Subscript | ast.Starred):
        base = base.value
    if isinstance(base, ast.Name) and base.id in loops:
        return _name(loops[base.id], {})
    return base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)


def _names(expr: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(expr) if isinstance(node, ast.Name)}


def _has_read(expr: ast.AST) -> bool:
    calls = [node.func for node in ast.walk(expr) if isinstance(node, ast.Call)]
    return any(getattr(f, "attr", None) in _READS or getattr(f, "id", None) in _CASTS for f in calls)


def _range(node: Any) -> Any:
    if not hasattr(node, "lineno"):
        return (1 << 30, 0), (0, 0)
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _inside(inner: Any, outer: Any) -> bool:
    return bool(outer[0] <= inner[0] and inner[1] <= outer[1])


def _touches(node: Any, read: Any) -> bool:
    first, last = _range(node)
    return bool(first <= read[1] and read[0] <= last)
