"""Span arithmetic, and what it says about real operators, checked against where numbered elements really go."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spangraph.passes.propagate_spans import Unknown, propagate_spans
from spangraph.passes.span_maps import Move, Place, SpanMap

from .span_rig import Spans, cut_mask, random_spans, span_map, valid_mask

NEUTRAL = -1  # label of elements that an operator adds beside a row's own along dims that are not spanned
Outputs = Tensor | tuple[Tensor, ...]


def span_of(kept: Tensor) -> tuple[int, int]:
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
        pytest.param(lambda w: Move(1, 2, w + 5), lambda x: F.pad(x, (2, 3)), id="pad"),
        pytest.param(lambda w: Move(1, -2, w - 1), lambda x: F.pad(x, (-2, 1)), id="crop-and-pad"),
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
    spans = span_map(0, Place(1, (crop, grow)))
    assert spans.apply(0, 5, 9) == (6, 8)
    assert spans.apply(0, 0, 4) == (0, 0)  # cut away by the first move: the pad must not bring it back
    assert spans.apply(0, 6, 6) == (0, 0)


def test_identity_normalises_dims_and_empty_spans():
    spans = SpanMap.identity(4, (-1, -2))
    assert spans == span_map(0, Place(3), Place(2))
    assert spans.is_identity
    assert spans.apply(1, 2, 5) == (2, 5)
    assert spans.apply(0, 5, 5) == (0, 0)
    assert not span_map(0, Place(3, (Move(2, 0, 8),)), Place(2)).is_identity


@pytest.mark.parametrize(
    ("ndim", "dims"), [(3, (0,)), (3, (-3,)), (3, (3,)), (3, (2, -1)), (3, (-4,)), (1, (-1,)), (0, (-1,))]
)
def test_identity_refuses_dims_that_cannot_hold_spans(ndim, dims):
    with pytest.raises(ValueError, match=f"do not fit a value of {ndim} dims"):
        SpanMap.identity(ndim, dims)


@pytest.mark.parametrize("width", [8, 9, 20])
def test_moves_that_keep_every_span_are_not_recorded(width):
    place = Place(1)
    assert place.moved(Move(1, 0, width), width=8) is place
    assert place.moved(Move(1, 0, 7), width=8) is not place  # the mirrored case: one position less


# Row dim before, between and after the spanned dims, which are declared in either order.
@pytest.mark.parametrize(
    ("row_dim", "dims"), [(0, (1, 2)), (0, (2, 1)), (1, (0, 2)), (2, (1, 0)), (2, (0,)), (0, (2,))]
)
@pytest.mark.parametrize("moves", [(), (Move(1, -1, 3),), (Move(-1, 4, 4), Move(1, 1, 5))])
def test_cut_is_a_view_of_exactly_the_valid_part(row_dim, dims, moves):
    tensor = torch.randn(5, 5, 5)
    spans = span_map(row_dim, *(Place(dim, moves) for dim in dims))
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
    """Random regroupings of the same elements. Sizes are small and repeat, so that dims are easily mistaken."""
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
        spans = span_map(*tracked[:1], *map(Place, tracked[1:]))
        seats = spans.mapped(lambda place: place.reseated(shape, out))  # noqa: B023 - called at once
        index = torch.arange(torch.Size(shape).numel())
        coordinates = [index.div(torch.Size(shape[dim + 1 :]).numel(), rounding_mode="floor") for dim in tracked]
        coordinates = [c.remainder(shape[dim]).view(out) for c, dim in zip(coordinates, tracked, strict=True)]
        if seats is None:
            refused += 1
            assert not all(any(varies_along(c, at) for at in range(len(out))) for c in coordinates) or 1 in shape
            continue
        placed += 1
        found = [place.dim for place in seats.places]
        assert len(set(found)) == len(tracked)
        for at, c, dim in zip(found, coordinates, tracked, strict=True):
            assert out[at] == shape[dim]
            assert varies_along(c, at)
    assert min(placed, refused) > 500


def varies_along(coordinate: Tensor, dim: int) -> bool:
    """Whether a coordinate is the position along that dim, and does not depend on any other."""
    places = torch.arange(coordinate.shape[dim]).view(-1, *(1,) * (coordinate.ndim - dim - 1))
    return torch.equal(coordinate, places.expand(coordinate.shape))


def test_aligned_counts_dims_from_the_right():
    def aligned(shape: Sequence[int], out: Sequence[int]) -> SpanMap | None:
        return span_map(0, Place(2)).mapped(lambda place: place.aligned(shape, out))

    assert aligned((3, 4, 9), (2, 3, 7, 9)) == span_map(1, Place(3))
    assert aligned((9, 4, 9), (4, 9)) is None
    assert aligned((3, 4, 1), (3, 4, 9)) is None
    assert aligned((1, 4, 9), (3, 4, 9)) is None


@pytest.mark.parametrize(
    ("shape", "row_dim", "dims", "out", "seats"),
    [
        ((1, 1, 4), 0, (2,), (1, 4), (0, 1)),
        ((1, 3, 4), 0, (2,), (1, 1, 3, 4), (0, 3)),
        ((2, 1, 1, 5), 0, (2,), (2, 1, 1, 5, 1), (0, 2)),
        ((2, 1, 6), 0, (1,), (2, 1, 2, 3), (0, 1)),
        ((2, 3, 1), 0, (2,), (2, 3, 1), (0, 2)),
        # Which of two dims of size 1 went, or which of two is the new one?
        ((2, 1, 1, 5), 0, (2,), (2, 1, 5), None),
        ((2, 1, 5), 0, (1,), (2, 1, 1, 5), None),
        ((1, 1, 4), 0, (1,), (1, 4), None),
        ((3, 1, 4), 1, (2,), (3, 1, 1, 4), None),
        ((0, 3), 0, (1,), (0, 3), (0, 1)),
        ((0, 3), 0, (1,), (3, 0), None),
    ],
)
def test_reseated_does_not_guess_among_dims_of_size_1(shape, row_dim, dims, out, seats):
    """A span on the wrong dim of size 1 has the same elements, until that dim is padded."""
    found = span_map(row_dim, *map(Place, dims)).mapped(lambda place: place.reseated(shape, out))
    assert (found and tuple(place.dim for place in found.places)) == seats


class _Model(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Outputs]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Outputs:
        return self.fn(x.clone())


def follow(fn: Callable[[Tensor], Outputs], x: Tensor, dims: Sequence[int]) -> list[SpanMap | Unknown | None]:
    """What propagation says about each output of `fn(y)`, where y is the marked value."""
    graph = torch.export.export(_Model(fn), (x,), strict=False).graph_module.graph
    nodes = {node.name: node for node in graph.nodes}
    found = propagate_spans(graph, nodes["clone"], dims)
    return [found.get(node) for node in nodes["output"].args[0]]


def labelled(shape: Sequence[int]) -> Tensor:
    """Every element has a number of its own."""
    return torch.arange(1, torch.Size(shape).numel() + 1).view(*shape)


def check_labels(out: Tensor, found: SpanMap, labels: Tensor, dims: Sequence[int], rows: Sequence[Spans]) -> None:
    for row in range(labels.shape[0]):
        valid = labels[valid_mask(labels.shape, dims, rows, row)]
        cut = cut_mask(out, found, row, rows[row])
        assert torch.equal(torch.isin(out, valid), cut & (out != NEUTRAL)), (found, row, rows[row])


# One spanned dim (odd, last), one in the middle, two spanned dims in either order.
SOUND, TOKENS, IMAGE, TURNED = ((3, 4, 9), (-1,)), ((3, 9, 4), (1,)), ((2, 4, 5, 6), (-2, -1)), ((2, 4, 5, 6), (3, 2))

MOVEMENT: dict[str, tuple[Any, Callable[[Tensor], Outputs]]] = {
    "same": (SOUND, lambda y: (y, y.detach(), y.contiguous(), y.clone(), y.view(y.shape), torch.ops.aten.alias(y))),
    "casts": (SOUND, lambda y: (y.to(torch.int32), y.double(), y.type_as(y.int()), y.to(y.short()))),
    "transposes": (SOUND, lambda y: (y.transpose(1, 2), y.transpose(-3, -1), y.mT, y.swapaxes(0, 1), y.swapdims(0, 2))),
    "permutes": (IMAGE, lambda y: (y.permute(2, 0, -1, 1), y.movedim(0, -1), y.movedim((2, 3), (0, 1)), y.adjoint())),
    "moveaxis": (TURNED, lambda y: (y.moveaxis(-1, 1), y.permute(3, 2, 1, 0))),
    "two-dims": (((3, 7), (1,)), lambda y: (y.t(), y.T, y.mT, y.unsqueeze(1), y[:, None, :, None])),
    "unsqueeze": (IMAGE, lambda y: (y.unsqueeze(0), y.unsqueeze(-1), y.unsqueeze(3), y.unsqueeze(2).squeeze(2))),
    "squeeze": (((3, 1, 9), (-1,)), lambda y: (y.squeeze(), y.squeeze(1), y.squeeze(-1), y.squeeze((1, 2)))),
    "views": (SOUND, lambda y: (
        y.view(3, 2, 2, 9), y.reshape(3, 1, -1, 9), y.view(3, 4, 9, 1), y.unflatten(1, (2, -1)))),
    "flatten": (TOKENS, lambda y: (y.unsqueeze(-1).flatten(2), y.unsqueeze(2).flatten(-2, -1), y.view_as(y[:]))),
    "split-image": (((2, 6, 5, 6), (2,)), lambda y: (
        y.view(2, 2, 3, 5, 2, 3), y.flatten(0, 0), y.reshape(1, 2, 6, 5, 6))),
    "expand": (((3, 1, 9), (-1,)), lambda y: (
        y.expand(3, 5, 9), y.expand(2, -1, 4, -1), y.expand_as(y.new_zeros(3, 2, 9)))),
    "repeat": (SOUND, lambda y: (
        y.repeat(1, 2, 1), y.repeat(2, 1, 1, 1), y.tile((3, 1)), torch.broadcast_to(y, (2, 3, 4, 9)))),
    "select": (IMAGE, lambda y: (y[:, 1], y.select(1, -1), y[:, None, 2], y.transpose(0, 1)[3])),
    "slice": (SOUND, lambda y: (y[..., 2:7], y[..., -8:], y[..., :-3], y[..., 4:400], y[:, 1:3], y[..., :], y[:3])),
    "stride": (SOUND, lambda y: (
        y[..., ::2], y[..., 1::3], y[..., 2:8:2], y[..., -5::4], y[:, ::2], y[..., ::2][..., ::2])),
    "slice-to-nothing": (SOUND, lambda y: (y[..., 9:], y[..., 5:2], y[:, :0])),
    "narrow": (TURNED, lambda y: (y.narrow(3, 1, 4), y.narrow(2, -3, 2), y.narrow(1, 2, 1), y.narrow(0, 0, 2))),
    "chunk": (SOUND, lambda y: (*y.chunk(2, -1), *y.chunk(2, 1), *y.chunk(1, 0))),
    "split": (SOUND, lambda y: (*y.split(4, -1), *y.split([2, 0, 7], 2), *y.split_with_sizes([1, 3], 1))),
    "tensor-split": (SOUND, lambda y: (*y.tensor_split(4, -1), *y.tensor_split((2, 3), 2), *y.tensor_split(3, 1))),
    "unbind": (TOKENS, lambda y: (*y.unbind(-1), *y.unsqueeze(0).unbind())),
    "pad": (SOUND, lambda y: (
        F.pad(y, (2, 3)), F.pad(y, (-2, 1)), F.pad(y, (1, -4)), F.pad(y, (0, 0, 1, 2), value=NEUTRAL))),
    "pad-two": (IMAGE, lambda y: (
        F.pad(y, (1, 0, -2, 3)), F.pad(y, (2, 2)), F.pad(y, (0, 0, 0, 0, 1, 1), value=NEUTRAL))),
    "cat-constants": (SOUND, lambda y: (
        torch.cat([y.new_full((3, 4, 2), NEUTRAL), y, y.new_full((3, 4, 1), NEUTRAL)], -1),
        torch.cat([y, y.new_full((3, 4, 2), NEUTRAL)], 2))),
    "flip": (TURNED, lambda y: (y.flip(-1), y.flip(1, 2), y.flip((2, 3)), y.flip(-1).flip(-1), y.flip(-1)[..., 1:4])),
    "repeat-interleave": (SOUND, lambda y: (
        y.repeat_interleave(3, -1), y.repeat_interleave(2, dim=1), y.repeat_interleave(1, 2))),
    "pixel-shuffle": (IMAGE, lambda y: (F.pixel_shuffle(y, 2), F.pixel_shuffle(y.unsqueeze(2), 1))),
    "cat": (SOUND, lambda y: (
        torch.cat([y, y], 1), torch.cat([y, y.new_full((3, 2, 9), NEUTRAL)], -2), torch.concat([y[:, 1:], y], 1))),
    "stack": (SOUND, lambda y: (
        torch.stack([y, y]), torch.stack([y, torch.full_like(y, NEUTRAL)], -1), torch.stack((y, y), 2))),
    "masks": (SOUND, lambda y: (
        torch.where(y > 0, y, 0), y.masked_fill(y < 0, 0), y.clamp(min=0), y.index_select(1, torch.tensor([2, 0])))),
    "in-place": (SOUND, lambda y: (y.mul_(1), y.relu_(), y[..., 1:].clamp_(min=0), y.copy_(y * 1))),
}  # fmt: skip

NEAREST: dict[str, tuple[Any, Callable[[Tensor], Outputs]]] = {
    "nearest": (SOUND, lambda y: (F.interpolate(y, scale_factor=3), F.interpolate(y, 18), F.interpolate(y, 9))),
    "nearest-exact": (SOUND, lambda y: (F.interpolate(y, scale_factor=41, mode="nearest-exact"), F.interpolate(y, 45))),
    "nearest-2d": (TURNED, lambda y: (F.interpolate(y, scale_factor=(3, 2)), F.interpolate(y, (5, 12)))),
    "nearest-3d": (((2, 3, 4, 5, 6), (-1, 2)), lambda y: F.interpolate(y, scale_factor=2.0)),
    "overloads": (SOUND, lambda y: (
        torch.ops.aten.upsample_nearest1d(y, [27], 3.0), torch.ops.aten.upsample_nearest1d(y, [18]))),
    "one-dim-of-two": (((2, 4, 5, 6), (-1,)), lambda y: F.interpolate(y, (7, 12))),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVEMENT)
def test_movement_takes_each_valid_element_and_no_other(name):
    (shape, dims), fn = MOVEMENT[name]
    labels = labelled(shape)
    maps = follow(fn, labels, dims)
    outs = fn(labels.clone())
    rng = random.Random(name)
    for _ in range(5):
        rows = random_spans(rng, shape, dims)
        for i, (found, out) in enumerate(zip(maps, outs, strict=True)):
            assert isinstance(found, SpanMap), (i, found)
            check_labels(out, found, labels, dims, rows)


@pytest.mark.parametrize("name", NEAREST)
def test_nearest_upsampling_takes_each_valid_element_and_no_other(name):
    (shape, dims), fn = NEAREST[name]
    labels = labelled(shape).float()
    maps = follow(fn, labels, dims)
    outs = fn(labels)
    rng = random.Random(name)
    for _ in range(5):
        rows = random_spans(rng, shape, dims)
        for found, out in zip(maps, outs if isinstance(outs, tuple) else (outs,), strict=True):
            assert isinstance(found, SpanMap), found
            check_labels(out, found, labels, dims, rows)


def random_step(rng: random.Random, y: Tensor, names: list[str]) -> tuple[Tensor, list[str]]:
    """One operator that takes nothing apart, on a tensor whose dims are named: "row", "span", or "" for any other."""
    ndim, at = y.ndim, rng.randrange(y.ndim)
    movable = [dim for dim, name in enumerate(names) if name != "row"]
    others = [dim for dim, name in enumerate(names) if name == ""]
    along, width = (dim := rng.choice(movable)), y.shape[dim]
    fill = 0 if names[along] == "span" else NEUTRAL
    start, end = rng.randint(-width - 1, width + 1), rng.choice((None, rng.randint(-width - 1, width + 1)))
    kind = rng.randrange(13 if y.numel() < 4000 else 9)
    if kind == 0:
        order = rng.sample(range(ndim), ndim)
        return y.permute(order), [names[dim] for dim in order]
    if kind == 1 and ndim < 6:
        return y.unsqueeze(at - ndim - 1), [*names[:at], "", *names[at:]]
    if kind in (2, 3):
        return y[(*(slice(None),) * along, slice(start, end, rng.choice((1, 1, 2, 3))))], names
    if kind == 4:
        return y.flip(along - rng.choice((0, ndim))), names
    if kind == 5 and others and y.shape[dim := rng.choice(others)]:
        return y.select(dim, -1), [*names[:dim], *names[dim + 1 :]]
    if kind == 6 and width:
        return rng.choice(y.chunk(rng.randint(1, 3), along)), names
    if kind == 7 and y.numel() and (pairs := [dim for dim in others if dim + 1 in others]):
        return y.flatten(dim := rng.choice(pairs), dim + 1), [*names[:dim], *names[dim + 1 :]]
    if kind == 8:
        same = y.reshape(*y.shape, 1).squeeze(-1) if y.numel() and y.shape[-1] > 1 else y
        return rng.choice((y + 0, y.contiguous(), y.clone(), same)), names
    if kind == 9:
        return F.pad(
            y, (0, 0) * (ndim - 1 - along) + (rng.randint(-min(2, width), 2), rng.randint(0, 3)), value=fill
        ), names
    if kind == 10:
        return y.repeat_interleave(rng.randint(2, 3), along), names
    if kind == 11 and others:
        return torch.cat([y, y], rng.choice(others)), names
    if kind == 12 and ndim < 6:
        return torch.stack([y, torch.full_like(y, NEUTRAL)], at), [*names[:at], "", *names[at:]]
    return y, names


def take_apart(rng: random.Random, y: Tensor, names: list[str]) -> Tensor:
    """One operator that loses the rows or the span."""
    row, span = names.index("row"), names.index("span")
    return rng.choice(
        [
            lambda: y.flip(row),
            lambda: y.narrow(row, 0, y.shape[row] - 1),
            lambda: y.select(row, 0),
            lambda: y.reshape(-1),
            lambda: y.roll(1, rng.choice((row, span))),
            lambda: torch.cat([y, y], rng.choice((row, span))),
            lambda: y.transpose(row, span).flatten(*sorted((row, span))),
        ]
    )()


def random_chain(seed: int, y: Tensor, names: Sequence[str], *, broken: bool) -> Tensor:
    rng, names = random.Random(seed), list(names)
    steps = rng.randint(1, 6)
    breaks = rng.randrange(steps) if broken else None
    for i in range(steps):
        if i == breaks:
            return take_apart(rng, y, names)
        y, names = random_step(rng, y, names)
    return y


# Enough chains that each pair of steps occurs; all chains of one shape are one graph, which is traced once.
@pytest.mark.parametrize(
    ("shape", "dims", "names"),
    [
        ((3, 4, 9), (-1,), ["row", "", "span"]),
        ((2, 5, 3), (1,), ["row", "span", ""]),
        ((2, 3, 5, 6), (-1, 2), ["row", "", "span", "span"]),
        ((1, 2, 7), (2,), ["row", "", "span"]),
    ],
)
def test_random_chains(shape, dims, names):
    labels, rng = labelled(shape), random.Random(str(shape))

    def fn(y: Tensor) -> tuple[Tensor, ...]:
        return tuple(random_chain(seed, y, names, broken=False) for seed in range(70))

    maps = follow(fn, labels, dims)
    for seed, (found, out) in enumerate(zip(maps, fn(labels), strict=True)):
        assert isinstance(found, SpanMap), (seed, found)
        for _ in range(3):
            check_labels(out, found, labels, dims, random_spans(rng, shape, dims))


@pytest.mark.parametrize(("shape", "dims", "names"), [((3, 4, 9), (-1,), ["row", "", "span"])])
def test_random_chains_that_take_something_apart(shape, dims, names):
    maps = follow(lambda y: tuple(random_chain(i, y, names, broken=True) for i in range(70)), labelled(shape), dims)
    assert all(isinstance(found, Unknown) for found in maps), maps
