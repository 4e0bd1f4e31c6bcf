"""The per-request path: requests that run one by one, merged to what the batch of them would return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spangraph.cuts import Window
from spangraph.errors import InputError, MergeError, RingFullError
from spangraph.launch import Launch, checked_ids
from spangraph.rows import Rows
from spangraph.spans import refuse_mixed
from spangraph.step import Step

# Of a launch.
_OPTIONS = ("walk", "rows", "num_rows", "wait", "timeout")


def run_each(
    launch: Callable[..., Step],
    requests: Iterable[Sequence[Any] | Mapping[str, Any]],
    rows: Sequence[Hashable] | None,
    *,
    wait: bool,
    timeout: float | None,
) -> Any:
    """See `Compiled.run_each`."""
    ids = None if rows is None else checked_ids(rows)
    in_flight: deque[Step] = deque()
    results: list[Any] = []
    row_ids: list[tuple[Hashable, ...]] = []
    names: list[tuple[str, ...]] = []
    num_rows = 0

    def finish() -> None:
        with in_flight.popleft() as step:
            results.append(step._result(own=True))

    try:
        for i, request in enumerate(requests):
            args, kwargs = _call(i, request)
            while True:
                options = {} if in_flight else {"wait": wait, "timeout": timeout}
                try:
                    step = launch(*args, rows=None, num_rows=None, **options, **kwargs)
                    break
                except RingFullError:
                    if not in_flight:
                        raise
                    finish()
            in_flight.append(step)
            first, num_rows = num_rows, num_rows + len(step.row_ids)
            # Nobody has seen the step yet: these are its row ids at launch.
            step._launch.row_ids = tuple(range(first, num_rows)) if ids is None else ids[first:num_rows]
            row_ids.append(step._launch.row_ids)
            names.append(step.output_names)
            if ids is not None and num_rows > len(ids):
                break
        if ids is not None and num_rows != len(ids):
            raise InputError(
                f"{len(ids)} row ids for {num_rows} rows of {len(row_ids)} requests: give one id per row of each."
            )
        if not names:
            raise InputError("run_each got no requests: expected at least one.")
        refuse_mixed("output_spans", names, [found or (i,) for i, found in enumerate(row_ids)])
        while in_flight:
            finish()
    finally:
        for step in in_flight:
            step.release()
    return _merge_results(results, row_ids)


def _call(index: int, request: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(request, Mapping):
        if clash := [name for name in _OPTIONS if name in request]:
            raise InputError(
                f"request {index} has {clash}: launch() takes these itself. A request names the model's inputs; walk,"
                " rows, wait and timeout are options of run_each()."
            )
        return (), request
    if not isinstance(request, tuple | list):
        raise InputError(
            f"request {index} is a {type(request).__name__}: expected a tuple of the model's inputs, such as (x,), or a"
            " mapping of them by name."
        )
    return request, {}


def _merge_results(results: Sequence[Any], row_ids: Sequence[tuple[Hashable, ...]]) -> Any:
    flat = [_flatten(result) for result in results]
    spec = flat[0][1]
    for ids, (_, other) in zip(row_ids, flat, strict=True):
        if other != spec:
            raise MergeError(
                f"requests {list(row_ids[0])} and {list(ids)} return different structures, {spec} and {other}: merge"
                " requests of one kind."
            )
    merged = []
    for leaves in zip(*(paths for paths, _ in flat), strict=True):
        where = f"output{pytree.keystr(leaves[0][0])}"
        merged.append(_merge_leaf(where, [leaf for _, leaf in leaves], row_ids))
    return pytree.tree_unflatten(merged, spec)


def _flatten(result: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    try:
        return pytree.tree_flatten_with_path(result)
    except ValueError:  # a class that was registered without keys
        leaves, spec = pytree.tree_flatten(result)
        return [((), leaf) for leaf in leaves], spec


def _merge_leaf(where: str, leaves: Sequence[Any], row_ids: Sequence[tuple[Hashable, ...]]) -> Any:
    first = leaves[0]
    if len({type(leaf) for leaf in leaves}) > 1:
        found = sorted({type(leaf).__name__ for leaf in leaves})
        raise MergeError(f"{where} is of types {found} in different requests: merge requests of one kind.")
    if isinstance(first, Rows):
        return merge_rows(leaves)
    if not isinstance(first, Tensor):
        found = list(dict.fromkeys(map(repr, leaves)))
        if len(found) > 1 and any(leaf != first for leaf in leaves):
            raise MergeError(f"{where} differs between requests: {', '.join(found)}.")
        return first
    if all(leaf.ndim > 0 and len(leaf) == len(ids) for leaf, ids in zip(leaves, row_ids, strict=True)):
        if len({(leaf.shape[1:], leaf.dtype) for leaf in leaves}) == 1:
            return torch.cat(list(leaves))
    elif all(_is_equal(leaf, first) for leaf in leaves):
        return first
    shapes = [list(leaf.shape) for leaf in leaves]
    raise MergeError(
        f"{where} is delivered whole, and cannot be merged: its shapes by request are {shapes}. Give it one shape"
        " beside the rows in dim 0, make it the same in all requests, or return spans for it."
    )


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def merge_rows(parts: Sequence[Rows]) -> Rows:
    """Owned rows of one output of several steps, one after the other; each is cut as its own step's was."""
    ids = [row_id for part in parts for row_id in part.row_ids]
    return _MergedRows(parts, ids)


class _MergedRows(Rows):
    def __init__(self, parts: Sequence[Rows], ids: Sequence[Hashable]) -> None:
        self._places = [(part, i) for part in parts for i in range(len(part.row_ids))]
        owned: dict[int, Any] = {}
        nans: dict[int, int] = {}
        for position, (part, i) in enumerate(self._places):
            assert part._owned is not None, "parts are owned"
            if i in part._owned:
                owned[position] = part._owned[i]
                nans[position] = 0 if part._nans is None else part._nans[i]
        none: Any = None
        launch = Launch(none, parts[0]._launch.generation, None, None, ids, len(ids))
        super().__init__(None, launch, parts[0]._cut, (), owned, nans)

    def spans(self, row_id: Hashable) -> tuple[Window, ...]:
        return tuple(self._windows(self._position(row_id)))

    def _windows(self, position: int) -> list[Window]:
        """As the row's own step has it: padded widths and withheld rows are those of the step."""
        part, i = self._places[position]
        return part._windows(i)
