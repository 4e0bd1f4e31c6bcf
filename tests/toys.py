"""Toy models for the trace, pass and compile tests, and what reads their rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import spangraph
from spangraph import Backend, Compiled, Span, SpannedOutput
from spangraph.testing import SimulatedDevice

Values = dict[Hashable, list[Any]]


class Spanned(nn.Module):
    """Declares `audio`; `forward` returns `self.spanned(y, lengths)`."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def spanned(self, y: Tensor, lengths: Tensor, **others: Tensor) -> SpannedOutput:
        return SpannedOutput({"audio": y, **others}, {"audio": spangraph.from_lengths(lengths)})


class Toy(Spanned):
    """`audio` is `x * gain + 1`."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, lengths: Tensor) -> SpannedOutput:
        return self.spanned(x * self.gain + 1, lengths)


class Spans(nn.Module):
    """Returns `fn(x)` as `audio`, under the spans that it is given."""

    def __init__(self, span: Span | None = None, fn: Any = lambda x: x * 1) -> None:
        super().__init__()
        self.span, self.fn = span or Span(), fn

    def spanned_outputs(self, walk: str) -> dict[str, Span]:
        return {"audio": self.span}

    def forward(self, x: Tensor, spans: Tensor) -> SpannedOutput:
        return SpannedOutput({"audio": self.fn(x)}, {"audio": spans * 1})


def spanned(fn: Callable[..., Any], **buffers: Tensor) -> Spanned:
    """A `Spanned` module whose forward is `fn`, with these buffers."""
    module = type("Made", (Spanned,), {"forward": fn})()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def plain(fn: Callable[..., Any], **modules: nn.Module) -> nn.Module:
    """A module that declares nothing, whose forward is `fn`, with these submodules."""
    module = type("Plain", (nn.Module,), {"forward": fn})()
    for name, child in modules.items():
        module.add_module(name, child)
    return module


def backend(name: str) -> Backend | None:
    """The inline backend, or a new simulated device."""
    return SimulatedDevice() if name == "simulated" else None


def compiled(model: nn.Module, on: str = "inline", trace: str = "auto", **options: Any) -> Compiled:
    """`spangraph.compile` on a backend by name."""
    return spangraph.compile(model, backend=backend(on), trace=trace, **options)


def num_instances(compiled_model: Compiled) -> int:
    """Graphs that it holds, of all signatures."""
    return sum(len(signature.instances) for signature in compiled_model._by_key.values())


def tracer_of(compiled_model: Compiled) -> str:
    """What traced its first signature."""
    return compiled_model.explain().split("trace: ")[1].split(",")[0]


def values(rows: Mapping[Hashable, Any]) -> Values:
    """Row id -> values."""
    return {row_id: row.tolist() for row_id, row in rows.items()}


def cut(padded: Tensor, lengths: Sequence[int]) -> Values:
    """What must be delivered of `padded` [bs, width] under these lengths."""
    return {i: padded[i, :n].tolist() for i, n in enumerate(lengths) if n}


def batch(lengths: Sequence[int] = (3, 5), width: int = 5) -> tuple[Tensor, Tensor]:
    """Fresh `x` [bs, width], and the lengths."""
    return torch.randn(len(lengths), width), torch.tensor(lengths)


def line_of(obj: Any, text: str) -> str:
    """`"file:line"` of the first line with `text` in the source of `obj`."""
    lines, first = inspect.getsourcelines(obj)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(obj)}:{first + offset}"
