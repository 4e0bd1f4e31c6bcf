"""What the workloads share: their form, their data, and cutting by plain indexing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import soundfile
import torch
from torch import Tensor, nn

from spangraph import Span

ROOT = Path(__file__).resolve().parents[2]

# A row cut by hand: a tensor, a tuple of tensors where a row may have several spans, None where it is withheld.
Row = Tensor | tuple[Tensor, ...] | None


@dataclass(frozen=True)
class Workload:
    """A network, one batch, and how to cut it by hand.

    Attributes:
        model: in eval mode, declared.
        inputs: a padded batch; rows along dim 0 of each tensor.
        spans: declared name -> its `Span`.
        padded: what the model returned and its inputs -> name -> (padded output, spans).
        atol: tolerance against the reference; 0 means bit for bit.
        row_values: what the model returned -> name -> values.
        derived: key in the dict that the model returns -> declared name whose spans it has.
        reads: whether the forward reads values on the host, so that it runs uncaptured when traced opaquely.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    spans: Mapping[str, Span]
    padded: Callable[..., Mapping[str, tuple[Tensor, Tensor]]]
    atol: float = 0.0
    row_values: Callable[[Any], Mapping[str, Tensor]] = field(default=lambda out: {})
    derived: Mapping[str, str] = field(default_factory=dict)
    reads: bool = False


def cut_by_hand(padded: Tensor, spans: Tensor, span: Span) -> list[Row]:
    """Plain indexing on the host, row by row: the truth for any runner, bit for bit."""
    num_rows, num_dims = padded.shape[0], len(span.dims)
    rows: list[Row] = []
    for row, extents in zip(padded, spans.view(num_rows, span.max_spans, num_dims, 2).tolist(), strict=True):
        parts = []
        for extent in extents:
            index = [slice(None)] * padded.ndim
            for dim, (start, end) in zip(span.dims, extent, strict=True):
                index[dim] = slice(start, end)
            part = row[tuple(index[1:])]
            if part.numel():
                parts.append(part)
        rows.append((tuple(parts) if span.max_spans > 1 else parts[0]) if parts else None)
    return rows


def read_speech(*numbers: int) -> list[Tensor]:
    """Utterances of examples/data: float32 at 16 kHz, [samples] each."""
    paths = [ROOT / "examples" / "data" / f"speech_{i}.wav" for i in numbers]
    return [torch.from_numpy(soundfile.read(path, dtype="float32")[0]) for path in paths]


def pad_rows(rows: Sequence[Tensor], *sizes: int) -> Tensor:
    """A batch of `rows`, zero-padded along their last dims to `sizes`."""
    batch = rows[0].new_zeros(len(rows), *rows[0].shape[: -len(sizes)], *sizes)
    for padded, row in zip(batch, rows, strict=True):
        padded[(..., *(slice(size) for size in row.shape[-len(sizes) :]))] = row
    return batch


def load_module(name: str, path: Path) -> ModuleType:
    """Import one file that is not in an importable package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"no module at {path}"
    assert spec.loader is not None, f"no loader for {path}"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dynamo looks it up there
    spec.loader.exec_module(module)
    return module
