"""Random spans, and what they and their maps make valid: for the tests of span propagation."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from spangraph.passes.span_maps import Place, SpanMap

Spans = list[tuple[int, int]]


def span_map(row_dim: int, *places: Place) -> SpanMap:
    return SpanMap((Place(row_dim, keeps_rows=True), *places))


def random_spans(rng: random.Random, shape: Sequence[int], dims: Sequence[int]) -> list[Spans]:
    """Spans per row: random ones, and among them empty and full ones."""
    rows = []
    for _ in range(shape[0]):
        kind, ends = rng.random(), [sorted(rng.sample(range(shape[dim] + 1), 2)) for dim in dims]
        if kind < 0.15:
            ends = [[rng.randrange(shape[dim] + 1)] * 2 for dim in dims]
        elif kind < 0.3:
            ends = [[0, shape[dim]] for dim in dims]
        rows.append([(start, end) for start, end in ends])
    return rows


def valid_mask(shape: Sequence[int], dims: Sequence[int], rows: Sequence[Spans], row: int) -> Tensor:
    mask = torch.zeros(*shape, dtype=torch.bool)
    SpanMap.identity(len(shape), dims).cut(mask, row, rows[row]).fill_(True)
    return mask


def cut_mask(out: Tensor, found: SpanMap, row: int, spans: Spans) -> Tensor:
    mask = torch.zeros(out.shape, dtype=torch.bool)
    found.cut(mask, row, spans).fill_(True)
    return mask
