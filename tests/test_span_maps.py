"""Span arithmetic, checked against where labelled positions really go."""

import random

import pytest
import torch

from spangraph.passes.span_maps import Move, SpanMap


def span_of(kept: torch.Tensor) -> tuple[int, int]:
    """The span of the true positions of a mask; they must lie together."""
    places = kept.nonzero().flatten().tolist()
    if not places:
        return 0, 0
    assert places == list(range(places[0], places[-1] + 1))
    return places[0], places[-1] + 1


def all_spans(width: int) -> list[tuple[int, int]]:
    return [(start, end) for start in range(width + 1) for end in range(start, width + 1)]


# Every span of an odd and an even width, so that each edge falls before, on and behind each end of the cut.
@pytest.mark.parametrize("width", [7, 8])
@pytest.mark.parametrize(
    ("move", "act"),
    [
        pytest.param(lambda w: Move(1, -2, w - 3), lambda x: x[2:-1], id="slice"),
        pytest.param(lambda w: Move(1, -1, -(-(w - 1) // 3), 3), lambda x: x[1::3], id="strided-slice"),
        pytest.param(lambda w: Move(1, -1, 2, 2), lambda x: x[1:5:2], id="strided-and-bounded"),
        pytest.param(lambda w: Move(1, 0, 0), lambda x: x[:0], id="nothing-left"),
        pytest.param(lambda w: Move(3, 0, 3 * w), lambda x: x.repeat_interleave(3), id="upsample"),
        pytest.param(lambda w: Move(1, 2, w + 5), lambda x: torch.nn.functional.pad(x, (2, 3)), id="pad"),
        pytest.param(lambda w: Move(1, -2, w - 1), lambda x: torch.nn.functional.pad(x, (-2, 1)), id="crop-and-pad"),
        pytest.param(lambda w: Move(-1, w, w), lambda x: x.flip(0), id="flip"),
    ],
)
def test_move_follows_positions(move, act, width):
    for start, end in all_spans(width):
        valid = torch.zeros(width, dtype=torch.int64)
        valid[start:end] = 1
        assert move(width).apply(start, end) == span_of(act(valid)), (start, end)


def test_moves_are_applied_in_order_and_an_empty_span_never_comes_back():
    crop, grow = Move(1, -4, 3), Move(1, 5, 8)
    spans = SpanMap(0, (1,), ((crop, grow),))
    assert spans.apply(0, 5, 9) == (6, 8)
    assert spans.apply(0, 0, 4) == (0, 0)  # cut away by the first move: the pad must not bring it back
    assert spans.apply(0, 6, 6) == (0, 0)


def test_identity_normalises_dims_and_empty_spans():
    spans = SpanMap.identity(4, (-1, -2))
    assert spans == SpanMap(0, (3, 2), ((), ()))
    assert spans.is_identity
    assert spans.apply(1, 2, 5) == (2, 5)
    assert spans.apply(0, 5, 5) == (0, 0)
    assert not spans.moved(3, Move(2, 0, 8), width=4).is_identity


@pytest.mark.parametrize(
    ("ndim", "dims"), [(3, (0,)), (3, (-3,)), (3, (3,)), (3, (2, -1)), (3, (-4,)), (1, (-1,)), (0, (-1,))]
)
def test_identity_refuses_dims_that_cannot_hold_spans(ndim, dims):
    with pytest.raises(ValueError, match=f"do not fit a value of {ndim} dims"):
        SpanMap.identity(ndim, dims)


@pytest.mark.parametrize("width", [8, 9, 20])
def test_moves_that_keep_every_span_are_not_recorded(width):
    spans = SpanMap.identity(2, (1,))
    assert spans.moved(1, Move(1, 0, width), width=8) is spans
    assert spans.moved(1, Move(1, 0, 7), width=8) is not spans  # the mirrored case: one position less


# Row dim before, between and after the spanned dims, which are declared in either order.
@pytest.mark.parametrize(("row_dim", "dims"), [(0, (1, 2)), (0, (2, 1)), (1, (0, 2)), (2, (1, 0)), (2, (0,)), (0, (2,))])
@pytest.mark.parametrize("moves", [(), (Move(1, -1, 3),), (Move(-1, 4, 4), Move(1, 1, 5))])
def test_cut_is_a_view_of_exactly_the_valid_part(row_dim, dims, moves):
    tensor = torch.randn(5, 5, 5)
    spans = SpanMap(row_dim, dims, (moves,) * len(dims))
    for row in (0, 4):
        for given in ([(1, 3), (0, 2)][: len(dims)], [(0, 4), (2, 3)][: len(dims)]):
            index: list[int | slice] = [slice(None)] * 3
            index[row_dim] = row
            for i, dim in enumerate(dims):
                index[dim] = slice(*spans.apply(i, *given[i]))
            part = spans.cut(tensor, row, given)
            assert torch.equal(part, tensor[tuple(index)])
            assert part.numel() == 0 or part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="zip"):
        spans.cut(tensor, 0, [(0, 1)] * (len(dims) + 1))


def test_cut_does_not_clamp():
    """A span that is wider than its tensor was let through by the caller: it must not become a shorter row."""
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        SpanMap.identity(2, (1,)).cut(torch.zeros(2, 5), 0, [(2, 6)])


def test_reseated_agrees_with_where_a_view_puts_elements():
    """Random regroupings of the same elements. Sizes are small and repeat, so that dims are easily mistaken for others."""
    rng = random.Random(0)
    placed = refused = 0
    for _ in range(3000):
        shape = [rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.randint(2, 4))]
        out = list(shape)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(out))
            divisors = [n for n in range(1, out[at] + 1) if out[at] % n == 0]
            if rng.random() < 0.5 and at + 1 < len(out):
                out[at : at + 2] = [out[at] * out[at + 1]]
            else:
                first = rng.choice(divisors)
                out[at : at + 1] = [first, out[at] // first]
        tracked = rng.sample(range(len(shape)), rng.randint(2, len(shape)))
        seats = SpanMap(tracked[0], tuple(tracked[1:]), ((),) * (len(tracked) - 1)).reseated(shape, out)
        index = torch.arange(torch.Size(shape).numel())
        coordinates = [index.div(torch.Size(shape[dim + 1 :]).numel(), rounding_mode="floor") for dim in tracked]
        coordinates = [c.remainder(shape[dim]).view(out) for c, dim in zip(coordinates, tracked, strict=True)]
        if seats is None:
            refused += 1
            assert not all(any(varies_along(c, at) for at in range(len(out))) for c in coordinates) or 1 in shape
            continue
        placed += 1
        assert len(set(seats.tracked)) == len(tracked)
        for at, c, dim in zip(seats.tracked, coordinates, tracked, strict=True):
            assert out[at] == shape[dim]
            assert varies_along(c, at)
    assert min(placed, refused) > 500


def varies_along(coordinate: torch.Tensor, dim: int) -> bool:
    """Whether a coordinate is the position along that dim, and does not depend on any other."""
    places = torch.arange(coordinate.shape[dim]).view(-1, *(1,) * (coordinate.ndim - dim - 1))
    return torch.equal(coordinate, places.expand(coordinate.shape))


def test_reseated_takes_no_dim_twice():
    spans = SpanMap(0, (1,), ((),))
    assert spans.reseated((1, 1, 4), (1, 4)) is None  # row and span would both be dim 0
    assert spans.reseated((1, 1, 4), (1, 1, 2, 2)) == spans
    assert spans.reseated((0, 3), (3, 0)) is None
    assert spans.reseated((0, 3), (0, 3)) is spans
