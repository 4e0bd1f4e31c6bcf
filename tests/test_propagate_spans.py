"""Span propagation, checked against where data really goes, never against a second table.

Three oracles run the real operators. *Labels*: every element gets a number of its own, and a cut must hold all numbers
of a row's valid part and no others. *Noise*: where the invalid part changes, a cut must not; where one row's valid part
changes, nothing outside its cut may. *Ramps*: positions are values, and interpolated values round to their source.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from spangraph.passes.propagate_spans import Unknown, propagate_spans
from spangraph.passes.span_maps import SpanMap

NEUTRAL = -1  # label of elements that an operator adds beside a row's own along dims that are not spanned
Outputs = Tensor | tuple[Tensor, ...]
Spans = list[tuple[int, int]]


class _Model(nn.Module):
    def __init__(self, fn: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn
        self.register_buffer("state", torch.rand(3, 4, 9))

    def forward(self, x: Tensor) -> Any:
        return self.fn(x, self.state)


def trace(fn: Callable[[Tensor, Tensor], Any], x: Tensor, *, lifted: bool = True) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph of `fn(x, buffer)` and its output nodes. The buffer is an input of the graph, or an attribute."""
    program = torch.export.export(_Model(fn), (x,), strict=False)
    graph = program.graph_module.graph if lifted else program.module().graph
    return graph, list(next(node for node in graph.nodes if node.op == "output").args[0])


def follow(fn: Callable[[Tensor], Any], x: Tensor, dims: tuple[int, ...]) -> list[SpanMap | Unknown | None]:
    """What propagation says about each output of `fn(y)`, where the marked value y is computed, and no input."""
    graph, results = trace(lambda x, _: fn(x.clone()), x)
    found = propagate_spans(graph, next(node for node in graph.nodes if node.name == "clone"), dims)
    return [found.get(node) for node in results]


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


def check_labels(out: Tensor, found: SpanMap, labels: Tensor, dims: Sequence[int], rows: Sequence[Spans]) -> None:
    for row in range(labels.shape[0]):
        valid = labels[valid_mask(labels.shape, dims, rows, row)]
        cut = cut_mask(out, found, row, rows[row])
        assert torch.equal(torch.isin(out, valid), cut & (out != NEUTRAL)), (found, row, rows[row])


def check_noise(fn: Callable[[Tensor], Any], maps: Sequence[Any], x: Tensor, dims: Any, rows: Sequence[Spans]) -> None:
    def run(value: Tensor) -> list[Tensor]:
        outs = fn(value.clone())
        return list(outs) if isinstance(outs, (list, tuple)) else [outs]

    noise = torch.rand_like(x) + 0.1
    before = run(x)
    for row in range(x.shape[0]):
        valid = valid_mask(x.shape, dims, rows, row)
        others, own = run(torch.where(valid, x, noise)), run(torch.where(valid, noise, x))
        for found, out, other, changed in zip(maps, before, others, own, strict=True):
            inside = cut_mask(out, found, row, rows[row])
            assert torch.equal(out[inside], other[inside]), (found, row, rows[row])
            assert torch.equal(out[~inside], changed[~inside]), (found, row, rows[row])
            if out.is_floating_point() and inside.any():
                assert not torch.equal(out, changed)


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
    "views": (SOUND, lambda y: (y.view(3, 2, 2, 9), y.reshape(3, 1, -1, 9), y.view(3, 4, 9, 1), y.unflatten(1, (2, -1)))),
    "flatten": (TOKENS, lambda y: (y.unsqueeze(-1).flatten(2), y.unsqueeze(2).flatten(-2, -1), y.view_as(y[:]))),
    "split-image": (((2, 6, 5, 6), (2,)), lambda y: (y.view(2, 2, 3, 5, 2, 3), y.flatten(0, 0), y.reshape(1, 2, 6, 5, 6))),
    "expand": (((3, 1, 9), (-1,)), lambda y: (y.expand(3, 5, 9), y.expand(2, -1, 4, -1), y.expand_as(y.new_zeros(3, 2, 9)))),
    "repeat": (SOUND, lambda y: (y.repeat(1, 2, 1), y.repeat(2, 1, 1, 1), y.tile((3, 1)), torch.broadcast_to(y, (2, 3, 4, 9)))),
    "select": (IMAGE, lambda y: (y[:, 1], y.select(1, -1), y[:, None, 2], y.transpose(0, 1)[3])),
    "slice": (SOUND, lambda y: (y[..., 2:7], y[..., -8:], y[..., :-3], y[..., 4:400], y[:, 1:3], y[..., :], y[:3])),
    "stride": (SOUND, lambda y: (y[..., ::2], y[..., 1::3], y[..., 2:8:2], y[..., -5::4], y[:, ::2], y[..., ::2][..., ::2])),
    "slice-to-nothing": (SOUND, lambda y: (y[..., 9:], y[..., 5:2], y[:, :0])),
    "narrow": (TURNED, lambda y: (y.narrow(3, 1, 4), y.narrow(2, -3, 2), y.narrow(1, 2, 1), y.narrow(0, 0, 2))),
    "chunk": (SOUND, lambda y: (*y.chunk(2, -1), *y.chunk(2, 1), *y.chunk(1, 0))),
    "split": (SOUND, lambda y: (*y.split(4, -1), *y.split([2, 0, 7], 2), *y.split_with_sizes([1, 3], 1))),
    "tensor-split": (SOUND, lambda y: (*y.tensor_split(4, -1), *y.tensor_split((2, 3), 2), *y.tensor_split(3, 1))),
    "unbind": (TOKENS, lambda y: (*y.unbind(-1), *y.unsqueeze(0).unbind())),
    "pad": (SOUND, lambda y: (F.pad(y, (2, 3)), F.pad(y, (-2, 1)), F.pad(y, (1, -4)), F.pad(y, (0, 0, 1, 2), value=NEUTRAL))),
    "pad-two": (IMAGE, lambda y: (F.pad(y, (1, 0, -2, 3)), F.pad(y, (2, 2)), F.pad(y, (0, 0, 0, 0, 1, 1), value=NEUTRAL))),
    "flip": (TURNED, lambda y: (y.flip(-1), y.flip(1, 2), y.flip((2, 3)), y.flip(-1).flip(-1), y.flip(-1)[..., 1:4])),
    "repeat-interleave": (SOUND, lambda y: (y.repeat_interleave(3, -1), y.repeat_interleave(2, dim=1), y.repeat_interleave(1, 2))),
    "pixel-shuffle": (IMAGE, lambda y: (F.pixel_shuffle(y, 2), F.pixel_shuffle(y.unsqueeze(2), 1))),
    "cat": (SOUND, lambda y: (torch.cat([y, y], 1), torch.cat([y, y.new_full((3, 2, 9), NEUTRAL)], -2), torch.concat([y[:, 1:], y], 1))),
    "stack": (SOUND, lambda y: (torch.stack([y, y]), torch.stack([y, torch.full_like(y, NEUTRAL)], -1), torch.stack((y, y), 2))),
    "masks": (SOUND, lambda y: (torch.where(y > 0, y, 0), y.masked_fill(y < 0, 0), y.clamp(min=0), y.index_select(1, torch.tensor([2, 0])))),
    "in-place": (SOUND, lambda y: (y.mul_(1), y.relu_(), y[..., 1:].clamp_(min=0), y.copy_(y * 1))),
}  # fmt: skip

NEAREST: dict[str, tuple[Any, Callable[[Tensor], Outputs]]] = {
    "nearest": (SOUND, lambda y: (F.interpolate(y, scale_factor=3), F.interpolate(y, 18), F.interpolate(y, 9))),
    "nearest-exact": (SOUND, lambda y: (F.interpolate(y, scale_factor=41, mode="nearest-exact"), F.interpolate(y, 45))),
    "nearest-2d": (TURNED, lambda y: (F.interpolate(y, scale_factor=(3, 2)), F.interpolate(y, (5, 12)))),
    "nearest-3d": (((2, 3, 4, 5, 6), (-1, 2)), lambda y: F.interpolate(y, scale_factor=2.0)),
    "overloads": (SOUND, lambda y: (torch.ops.aten.upsample_nearest1d(y, [27], 3.0), torch.ops.aten.upsample_nearest1d(y, [18]))),
    "one-dim-of-two": (((2, 4, 5, 6), (-1,)), lambda y: F.interpolate(y, (7, 12))),
}  # fmt: skip


def labelled(shape: Sequence[int]) -> Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).view(*shape)


@pytest.mark.parametrize("name", MOVEMENT)
def test_movement_takes_each_valid_element_and_no_other(name):
    (shape, dims), fn = MOVEMENT[name]
    labels = labelled(shape)
    maps = follow(fn, labels, dims)
    outs = fn(labels.clone())
    rng = random.Random(name)
    for _ in range(8):
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
    for _ in range(8):
        rows = random_spans(rng, shape, dims)
        for found, out in zip(maps, outs if isinstance(outs, tuple) else (outs,), strict=True):
            assert isinstance(found, SpanMap), found
            check_labels(out, found, labels, dims, rows)


WEIGHT, INDEX = torch.rand(5, 4), torch.tensor([2, 0, 1])

# Values change, positions stay, and nothing crosses rows or spanned positions.
POINTWISE: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "elementwise": (SOUND, lambda y: (y.tanh(), F.gelu(y), y * 2 + 1, 3 - y, y.half(), y > 0.5, F.hardswish(y), y.nan_to_num())),
    "operands": (SOUND, lambda y: (y * torch.ones(4, 1), torch.ones(9) / y, y + y.detach(), torch.lerp(y, y * 2, y), y**y)),
    "broadcast": (SOUND, lambda y: (y + torch.ones(2, 3, 1, 9), y[:, :1] * y, y.unsqueeze(1) - y.unsqueeze(2))),
    "choices": (SOUND, lambda y: (torch.where(y > 0.5, 1.0, 0.0), torch.where(y > 0.5, y, -y), y.masked_fill(y > 0.5, 2.0))),
    "eval-dropout": (IMAGE, lambda y: (F.dropout(y, 0.5, False), F.dropout2d(y, 0.5, False), F.alpha_dropout(y, 0.5, False))),
    "in-place": (SOUND, lambda y: (y.add_(1).mul_(2), F.relu_(y), y.clamp_(0.2, 9.0))),
    "reductions": (SOUND, lambda y: (y.sum(1), y.mean(-2, keepdim=True), y.amax(1), y.amin([1], True), y.std(1), y.norm(dim=1))),
    "more-reductions": (SOUND, lambda y: (y.prod(1), y.logsumexp((1,)), torch.linalg.vector_norm(y, dim=1), y.var(1, keepdim=True))),
    "choosing-reductions": (SOUND, lambda y: (y.argmax(1), y.argmin(-2, True), (y > 0.6).any(1), (y > 0.6).all(1), y.count_nonzero(1))),
    "pairs": (SOUND, lambda y: (*y.max(1), *y.min(-2, keepdim=True), *y.median(1), *torch.var_mean(y, 1), *y.sort(1), *y.topk(2, 1))),
    "scans": (SOUND, lambda y: (y.softmax(1), y.log_softmax(-2), y.cumsum(1), *y.cummax(1), F.glu(y, 1), F.normalize(y, dim=1))),
    "features": (TOKENS, lambda y: (F.linear(y, WEIGHT), F.layer_norm(y, (4,)), F.rms_norm(y, (4,)), y.mean(-1))),
    "image-features": (TURNED, lambda y: (y.sum(1), y.permute(2, 3, 1, 0).mean(2), y.softmax(1), y[:, 0] * y[:, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_noise_does_not_cross_the_edge_of_a_cut(name):
    (shape, dims), fn = POINTWISE[name]
    maps = follow(fn, torch.rand(shape), dims)
    assert all(isinstance(found, SpanMap) for found in maps), maps
    rng = random.Random(name)
    for _ in range(4):
        check_noise(fn, maps, torch.rand(shape) + 0.1, dims, random_spans(rng, shape, dims))


# These mix positions or rows, so that padding leaks in; where the spans lie is known all the same.
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda y: y / y.abs().amax(-1, keepdim=True), id="peak-normalised"),
        pytest.param(lambda y: y - y.mean((1, 2), keepdim=True), id="mean-free"),
        pytest.param(lambda y: y / y.std(), id="scaled-by-all-rows"),
        pytest.param(lambda y: y * y[..., -1].unsqueeze(-1), id="gain-from-the-last-position"),
        pytest.param(lambda y: y - y[..., 3:4], id="gain-from-a-slice"),
        pytest.param(lambda y: y.softmax(-1), id="softmax"),
        pytest.param(lambda y: y.cumsum(-1), id="cumsum"),
        pytest.param(lambda y: F.layer_norm(y, (9,)), id="layer_norm"),
        pytest.param(lambda y: F.group_norm(y, 2), id="group_norm"),
        pytest.param(lambda y: F.instance_norm(y), id="instance_norm"),
        pytest.param(lambda y: F.batch_norm(y, torch.zeros(4), torch.ones(4)), id="batch_norm"),
        pytest.param(lambda y: F.dropout(y, 0.5, True), id="training-dropout"),
        pytest.param(lambda y: torch.bernoulli(y), id="bernoulli"),
        pytest.param(lambda y: y.index_fill(2, INDEX, 0.0), id="index_fill"),
        pytest.param(lambda y: y.tril(), id="tril"),
    ],
)
def test_what_mixes_positions_in_place_keeps_spans(fn):
    assert follow(fn, torch.rand(3, 4, 9), (-1,)) == [SpanMap.identity(3, (-1,))]


UNKNOWN: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "rows-reordered": (SOUND, lambda y: (y.flip(0), y.flip(0, 2), y.roll(1, 0), y[INDEX], y.index_select(0, INDEX), y.sort(0)[0])),
    "rows-dropped": (SOUND, lambda y: (y[:2], y[1:], y[::2], y[0], y[-1:], y.narrow(0, 1, 2), y.chunk(3)[1], y.unbind()[0])),
    "rows-added": (SOUND, lambda y: (torch.cat([y, y]), torch.cat([torch.zeros(1, 4, 9), y]), y.repeat(2, 1, 1), F.pad(y, (0, 0, 0, 0, 1, 0)))),
    "rows-repeated": (SOUND, lambda y: (y.repeat_interleave(2, 0), y.repeat_interleave(2), F.interpolate(y.transpose(0, 2), scale_factor=2))),
    "rows-mixed": (SOUND, lambda y: (y.sum(0), y.mean(0, True), y.softmax(0), y.cumsum(0), y.sum(), y - y.mean(0, True), y * y[:1])),
    "rows-merged": (SOUND, lambda y: (y.reshape(-1), y.flatten(), y.view(12, 9), y.flatten(0, 1), y.transpose(0, 1).reshape(-1, 9))),
    "span-gone": (SOUND, lambda y: (y.sum(-1), y.amax((1, 2)), y[..., 3], y.mean(-1, True), *y.max(-1), y.argmax(), y.unbind(-1)[0])),
    "span-split": (SOUND, lambda y: (y.view(3, 4, 3, 3), y.flatten(1), y.reshape(3, 9, 4), y.unfold(-1, 3, 2), y.reshape(3, 4, 9, 1, 1).flatten(1, 2))),
    "span-moved": (SOUND, lambda y: (y.roll(2, -1), y.roll(1), y.sort(-1)[0], y.topk(3)[0], y[..., INDEX], y.gather(2, y.long()), F.glu(y[..., 1:]))),
    "span-joined": (SOUND, lambda y: (torch.cat([y, y], -1), torch.cat([y, torch.zeros(3, 4, 2)], 2), y.repeat(1, 1, 2))),
    "places-differ": (SOUND, lambda y: (y + y.flip(-1), y[..., 1:] - y[..., :-1], y.diff(), torch.cat([y, y.flip(-1)], 1), torch.stack([y[..., 1:], y[..., :-1]]))),
    "row-against-row": (((3, 4, 3), (-1,)), lambda y: (y + y.transpose(0, 2), y + y.flip(0), torch.stack([y, y.transpose(0, 2)]))),
    "a-whole-row-beside-it": (SOUND, lambda y: (y + y.flip(0)[:, :1], torch.where(y.roll(1, 0) > 0, y, 0), y.mul_(y.flip(0)))),
    "one-position": (((3, 4, 1), (-1,)), lambda y: (y.expand(3, 4, 5), y + torch.zeros(9), y.squeeze(), y + y.flip(0))),
    "one-row": (((1, 4, 9), (-1,)), lambda y: (y.squeeze(), y[0], y.squeeze(0), y.expand(5, 4, 9), y + torch.zeros(2, 1, 1), y.repeat(2, 1, 1))),
    "fractions": (SOUND, lambda y: (F.interpolate(y, scale_factor=2.05), F.interpolate(y, 20), F.interpolate(y, 4), F.interpolate(y, scale_factor=2.1, mode="linear"))),
    "not-by-position": (SOUND, lambda y: (F.interpolate(y, scale_factor=41), F.interpolate(y, 18, mode="linear", align_corners=True))),
    "weights": (SOUND, lambda y: (y @ torch.rand(9, 9), F.conv1d(y, torch.rand(2, 4, 3)), F.linear(y, torch.rand(2, 9)), F.linear(WEIGHT, y[0, :, :4]))),
    "channels": (((2, 4, 5, 6), (1,)), lambda y: (F.pixel_shuffle(y, 2), y.view(2, 2, 2, 5, 6))),
    "pixels-of-rows": (IMAGE, lambda y: (F.pixel_shuffle(y.transpose(0, 2), 2), F.pixel_shuffle(y.permute(2, 1, 0, 3), 2))),
    "written-elsewhere": (SOUND, lambda y: (torch.zeros(3, 4, 9).index_put((INDEX,), y), torch.zeros(3, 4, 11).slice_scatter(y, 2, 1, 10))),
    "amounts": (SOUND, lambda y: (y.repeat_interleave(torch.tensor([1, 2, 0]), 0, output_size=3), y.flip(0).relu().flip(0))),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_takes_rows_or_spans_apart_is_unknown(name):
    (shape, dims), fn = UNKNOWN[name]
    for i, found in enumerate(follow(fn, torch.rand(shape), dims)):
        assert isinstance(found, Unknown), (i, found)
        assert str(found.node.target) in found.reason


def test_the_first_unknown_node_is_named():
    (found,) = follow(lambda y: y.tanh().roll(1, 0).relu().flip(0), torch.rand(3, 4, 9), (-1,))
    assert isinstance(found, Unknown)
    assert (found.node.name, found.reason) == ("roll", "aten.roll.default: its effect on spans is not known")


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("amounts", [(2, 3), (0, 4), (-2, 1), (3, -1)])
def test_other_paddings_move_content_as_zeros_do(mode, amounts):
    """Copies beside the content count as padding: the cut is the content itself."""
    labels = labelled((3, 4, 9)).float()
    (found,) = follow(lambda y: F.pad(y, amounts, mode), labels, (-1,))
    assert isinstance(found, SpanMap)
    out = F.pad(labels, amounts, mode)
    cropped = range(max(-amounts[0], 0), 9 + min(amounts[1], 0))
    for start, end in [(0, 9), (1, 4), (2, 9), (0, 2), (5, 5)]:
        content = [p for p in range(start, end) if p in cropped]
        for row in range(3):
            assert torch.equal(found.cut(out, row, [(start, end)]), labels[row][:, content])


# Linear and cubic weights, on one, two and three dims; odd and even factors, which put centres on and between positions.
@pytest.mark.parametrize(
    ("shape", "mode", "factors"),
    [
        ((2, 3, 9), "linear", (2,)),
        ((2, 3, 9), "linear", (5,)),
        ((2, 3, 5, 6), "bilinear", (3, 2)),
        ((2, 3, 5, 6), "bicubic", (2, 3)),
        ((2, 3, 4, 5, 6), "trilinear", (2, 3, 4)),
    ],
)
@pytest.mark.parametrize("by_size", [False, True])
def test_interpolated_positions_round_to_their_source(shape, mode, factors, by_size):
    dims = tuple(range(2, len(shape)))
    size = tuple(shape[dim] * factor for dim, factor in zip(dims, factors, strict=True))

    def fn(y: Tensor) -> Tensor:
        return F.interpolate(y, size, mode=mode) if by_size else F.interpolate(y, None, tuple(map(float, factors)), mode)

    (found,) = follow(fn, torch.rand(shape), dims)
    assert isinstance(found, SpanMap)
    full: Spans = [(0, shape[dim]) for dim in dims]
    for i, dim in enumerate(dims):
        ramp = torch.arange(float(shape[dim])).view(-1, *(1,) * (len(shape) - dim - 1)).expand(shape)
        source = fn(ramp).round()
        for start, end in [(0, shape[dim]), (1, 3), (0, 1), (2, shape[dim]), (3, 3)]:
            spans = [*full[:i], (start, end), *full[i + 1 :]]
            for row in range(2):
                cut = cut_mask(source, found, row, spans)
                assert torch.equal(cut[row], (source[row] >= start) & (source[row] < end))
                assert not cut[1 - row].any()


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
    if kind == 7 and len(pairs := [dim for dim in others if dim + 1 in others]):
        return y.flatten(dim := rng.choice(pairs), dim + 1), [*names[:dim], *names[dim + 1 :]]
    if kind == 8:
        return rng.choice((y + 0, y.contiguous(), y.clone(), y.reshape(*y.shape, 1).squeeze(-1))), names
    if kind == 9:
        return F.pad(y, (0, 0) * (ndim - 1 - along) + (rng.randint(-min(2, width), 2), rng.randint(0, 3)), value=fill), names
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
        return tuple(random_chain(seed, y, names, broken=False) for seed in range(100))

    maps = follow(fn, labels, dims)
    for seed, (found, out) in enumerate(zip(maps, fn(labels), strict=True)):
        assert isinstance(found, SpanMap), (seed, found)
        for _ in range(3):
            check_labels(out, found, labels, dims, random_spans(rng, shape, dims))


@pytest.mark.parametrize(("shape", "dims", "names"), [((3, 4, 9), (-1,), ["row", "", "span"])])
def test_random_chains_that_take_something_apart(shape, dims, names):
    maps = follow(lambda y: tuple(random_chain(i, y, names, broken=True) for i in range(100)), labelled(shape), dims)
    assert all(isinstance(found, Unknown) for found in maps), maps


def test_a_view_carries_its_spans_to_everything_that_shares_its_tensor():
    def fn(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        conv = x.clone()
        marked = conv.transpose(1, 2).unsqueeze(1).contiguous().view(3, 9, 4)
        return marked, conv, conv.unsqueeze(0), conv.flip(-1), conv.movedim(0, 1) * 1, marked[:, 1:], x, x * 2

    labels = labelled((3, 4, 9))
    graph, (marked, *rest) = trace(fn, labels)
    found = propagate_spans(graph, marked, (1,))
    assert found[marked] == SpanMap.identity(3, (1,))
    rows: list[Spans] = [[(1, 5)], [(0, 9)], [(3, 3)]]
    for node, out in zip(rest[:-2], fn(labels, labels)[1:-2], strict=True):
        check_labels(out, found[node], labels, (2,), rows)
    assert not found.keys() & set(rest[-2:])  # what it was computed from is another tensor


def test_a_view_that_merged_rows_leaves_what_it_shows_unknown():
    def fn(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        flat = x.reshape(12, 9).clone()
        return flat.view(3, 4, 9), flat, flat + 1

    graph, (marked, flat, later) = trace(fn, torch.rand(3, 4, 9))
    found = propagate_spans(graph, marked, (-1,))
    assert found[marked] == SpanMap.identity(3, (-1,))
    assert found[flat] == found[later] == Unknown(found[flat].reason, marked)
    assert "does not hold rows and spans along dims of their own" in found[flat].reason


@pytest.mark.parametrize("lifted", [True, False])
@pytest.mark.parametrize(
    "pick",
    [
        pytest.param(lambda x, state: x, id="input"),
        pytest.param(lambda x, state: state, id="buffer"),
        pytest.param(lambda x, state: x.transpose(0, 1).transpose(0, 1), id="view-of-an-input"),
        pytest.param(lambda x, state: state[..., :9], id="slice-of-a-buffer"),
    ],
)
def test_an_input_counts_as_itself_only(pick, lifted):
    """Else a model that returns its padded input as an output has spans all over."""

    def fn(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        given = pick(x, state)
        return given, given.detach(), given.relu(), given[..., 1:], x + state

    graph, (given, same, *derived) = trace(fn, torch.rand(3, 4, 9), lifted=lifted)
    found = propagate_spans(graph, given, (-1,))
    assert found[given] == found[same] == SpanMap.identity(3, (-1,))
    assert not found.keys() & set(derived)
    # The mirrored case: once something was computed from it, everything after derives.
    assert set(derived[1:2]).isdisjoint(propagate_spans(graph, derived[0], (-1,)))
    assert derived[0] in propagate_spans(graph, derived[0], (-1,))


def test_before_an_in_place_write_only_views_are_the_marked_value():
    def fn(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        memory = torch.zeros_like(x)
        view, copy, shifted = memory.transpose(1, 2), memory.clone(), memory[..., 1:] + 1
        return memory.copy_(x * 2), view, copy, shifted, view + 1

    graph, (marked, view, copy, shifted, later) = trace(fn, torch.rand(3, 4, 9))
    found = propagate_spans(graph, marked, (-1,))
    assert found[marked] == SpanMap.identity(3, (-1,))
    assert found[view] == found[later] == SpanMap(0, (1,), ((),))
    assert not {copy, shifted} & found.keys()


def test_what_the_value_is_written_into_derives_from_then_on():
    def fn(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        part, whole, early, other = torch.zeros(3, 4, 11), torch.zeros(3, 4, 9), torch.zeros(3, 4, 9), torch.zeros(3, 4, 9)
        view, before = part.flatten(1), early + 1
        part[..., 2:] = y
        whole.copy_(y)
        early.add_(y)
        return y, part, view, part * 2, whole, whole[..., 1:], early, before, other + 1

    graph, nodes = trace(fn, torch.rand(3, 4, 9))
    y, part, view, after, whole, sliced, early, before, other = nodes
    found = propagate_spans(graph, y, (-1,))
    assert all(isinstance(found[node], Unknown) for node in (part, view, after))
    assert "it writes the marked value into the memory of" in found[part].reason
    assert found[whole] == found[early] == SpanMap.identity(3, (-1,))
    assert found[sliced].apply(0, 0, 4) == (0, 3)
    assert not {before, other} & found.keys()


def test_writes_into_the_value_itself_change_bytes_and_no_span():
    def fn(y: Tensor) -> tuple[Tensor, ...]:
        y[..., :2].zero_()
        y[:, 1:3] = 0.5
        y.index_put_((INDEX, INDEX), torch.ones(9))
        y[..., 2:].copy_(y[..., 2:].flip(0))
        return y, y * 2

    assert follow(fn, torch.rand(3, 4, 9), (-1,)) == [SpanMap.identity(3, (-1,))] * 2


def test_a_tensor_whose_dims_are_swapped_in_place_is_unknown():
    def fn(y: Tensor) -> tuple[Tensor, ...]:
        z = y * 1
        z.transpose_(1, 2)
        return z, z + 1, y

    swapped, later, untouched = follow(fn, torch.rand(3, 9, 9), (-1,))
    assert isinstance(swapped, Unknown)
    assert isinstance(later, Unknown)
    assert untouched == SpanMap.identity(3, (-1,))


def test_shapes_and_dtypes_alone_do_not_derive():
    def fn(y: Tensor) -> tuple[Tensor, ...]:
        fresh = torch.arange(4.0)
        new = torch.zeros_like(y), y.new_ones(3), torch.rand_like(y) * 2, torch.full((y.shape[0],), y.shape[1])
        return (*new, fresh.type_as(y), fresh.view(1, 4, 1).expand_as(y), fresh.to(y), y + torch.zeros_like(y))

    *shapes, derived = follow(fn, torch.rand(3, 4, 9), (-1,))
    assert shapes == [None] * len(shapes)
    assert derived == SpanMap.identity(3, (-1,))


def test_nested_graphs_are_unknown():
    def fn(y: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            inner = y @ y.mT
        with torch.no_grad():
            return inner, y.relu()

    inner, _ = follow(fn, torch.rand(3, 4, 9), (-1,))
    assert isinstance(inner, Unknown)
    assert "wrap_with_autocast" in inner.reason


@pytest.mark.parametrize("dims", [(0,), (-3,), (3,), (1, -2)])
def test_dims_that_cannot_hold_spans_are_refused(dims):
    graph, (y,) = trace(lambda x, _: (x.clone(),), torch.rand(3, 4, 9))
    with pytest.raises(ValueError, match="do not fit a value of 3 dims"):
        propagate_spans(graph, y, dims)
