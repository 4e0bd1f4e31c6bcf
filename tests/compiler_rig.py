"""A `torch.compile` backend that notes what it is given and what its code returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx
from torch._dynamo.backends import registry

_numbers = itertools.count()


class Recorder:
    """A registered backend around another one.

    Attributes:
        name: what it is registered as.
        graphs: what it was given to compile.
        calls: arguments and results of each call of what it compiled, cloned.
        on_compile, on_call: called at the start of each.
    """

    def __init__(self, inner: str) -> None:
        self.name = f"recorder_{next(_numbers)}"
        self.graphs: list[fx.GraphModule] = []
        self.calls: list[tuple[list[Tensor], list[Tensor]]] = []
        self.on_compile: Callable[[], object] = bool
        self.on_call: Callable[[], object] = bool
        self._inner = inner

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.on_compile()
        self.graphs.append(gm)
        compiled = torch._dynamo.lookup_backend(self._inner)(gm, inputs)

        def run(*args: Tensor) -> Any:
            self.on_call()
            before = [arg.clone() for arg in args]
            results = compiled(*args)
            self.calls.append((before, [result.clone() for result in results]))
            return results

        return run


@contextmanager
def recorded(inner: str = "eager") -> Iterator[Recorder]:
    """A `Recorder` that is registered for the time of the block."""
    recorder = Recorder(inner)
    torch._dynamo.register_backend(recorder, name=recorder.name)
    try:
        yield recorder
    finally:
        del registry._BACKENDS[recorder.name], registry._COMPILER_FNS[recorder.name]
