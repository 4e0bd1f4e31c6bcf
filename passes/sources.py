"""The source texts of compiled graphs, which torch.fx keeps for tracebacks, and for ever."""

from __future__ import annotations

import contextlib
import linecache
import weakref
from collections.abc import Iterable, Iterator
from types import MethodType

from torch.fx.graph_module import _loader


@contextlib.contextmanager
def drop_sources() -> Iterator[list[tuple[object, MethodType]]]:
    """Drop the texts of all graphs that are compiled in the block: at its end, and those of the methods that are put
    into the list when their owners are collected."""
    before, kept = set(_loader.eval_cache), list[tuple[object, MethodType]]()
    try:
        yield kept
    finally:
        names = {method.__func__.__code__.co_filename: owner for owner, method in kept}
        _drop(set(_loader.eval_cache) - before - names.keys())
        for name, owner in names.items():
            weakref.finalize(owner, _drop, [name]).atexit = False


def _drop(names: Iterable[str]) -> None:
    for name in names:
        _loader.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)
