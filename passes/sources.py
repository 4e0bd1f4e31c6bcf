"""The source texts of compiled graphs, which torch.fx keeps for tracebacks, and for ever."""

from __future__ import annotations

import contextlib
import linecache
import weakref
from collections.abc import Iterable, Iterator

from torch import fx
from torch.fx.graph_module import _loader


@contextlib.contextmanager
def drop_sources() -> Iterator[list[fx.GraphModule]]:
    """Drop the texts of all graphs that are compiled in the block: at its end, and of the graphs that are put into the
    list when those are collected."""
    before, kept = set(_loader.eval_cache), list[fx.GraphModule]()
    try:
        yield kept
    finally:
        names = {type(gm).forward.__code__.co_filename: gm for gm in kept}
        _drop(set(_loader.eval_cache) - before - names.keys())
        for name, gm in names.items():
            weakref.finalize(gm, _drop, [name]).atexit = False


def _drop(names: Iterable[str]) -> None:
    for name in names:
        _loader.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)
