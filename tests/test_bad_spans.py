"""A span that could not be built stays a bad span whatever the model does with it, and says why."""

import pytest
import torch
from torch import Tensor

from spangraph import from_lengths, from_mask
from spangraph.spans import describe_bad_span

pytestmark = pytest.mark.usefixtures("with_and_without_debugging")

# Powers of two and their neighbours overflow sentinels near int64's limits; 1 is unscaled; 2**20 is the largest hop.
HOPS = (1, 2, 3, 6, 256, 320, 2**20)


def _bad(spans: Tensor) -> list[bool]:
    return [not 0 <= start <= end for start, end in spans.reshape(-1, 2).tolist()]


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("length", [3.5, -3.5, 0.25, float("nan"), float("inf"), float("-inf")])
def test_fraction_survives_scaling_and_clamping(hop: int, length: float) -> None:
    """K37: a sentinel at -(2**62) - 1, times a hop of 3, became a huge positive end, which a `minimum` with the row's
    length made a span that looked right."""
    spans = from_lengths(torch.tensor([length, 4.0])) * hop
    limit = torch.tensor([[100], [100]])
    assert _bad(spans) == [True, False]
    assert _bad(torch.minimum(spans, limit)) == [True, False]
    assert _bad(spans.clamp(0, 2**30)) == [True, False]
    assert str(length) in describe_bad_span(*spans[0].tolist(), width=100)
    assert spans[1].tolist() == [0, 4 * hop]


@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("max_spans", [1, 2])
def test_too_many_runs_survive_scaling_and_clamping(hop: int, max_spans: int) -> None:
    """A mask with more runs than `max_spans`; beside it one that fits."""
    spans = from_mask(torch.tensor([[1, 0, 1, 0, 1], [0, 1, 1, 0, 0]]), max_spans=max_spans) * hop
    for kept in (spans, torch.minimum(spans, torch.tensor(100 * hop)), spans.clamp(0, 2**40)):
        assert all(_bad(kept[0]))
        assert not any(_bad(kept[1]))
    assert "3 runs" in describe_bad_span(*spans[0].reshape(-1, 2)[0].tolist(), width=100)
    assert spans[1].reshape(-1, 2)[0].tolist() == [hop, 3 * hop]


def test_plain_bad_spans_are_not_mistaken_for_others() -> None:
    for start, end in ((3, 1), (0, 11), (-(2**63), 2**63 - 1), (2**50, -(2**40) + 1), (0, -(2**40)), (7, -(2**41))):
        assert describe_bad_span(start, end, 10) == f"span [{start}, {end}) does not fit 0 <= start <= end <= 10"
