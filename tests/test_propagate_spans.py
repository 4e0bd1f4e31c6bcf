"""Span propagation where values change, where spans are lost, and where tensors share memory.

Two oracles run the real operators. *Noise*: where the invalid part changes, a cut must not; where one row's valid part
changes, nothing outside its cut may. *Ramps*: positions are values, and interpolated values round to their source.
What only moves data is tested with the span arithmetic.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from spangraph.passes.propagate_spans import Unknown, propagate_spans
from spangraph.passes.span_maps import Move, Place, SpanMap

from .span_rig import Spans, cut_mask, random_spans, span_map, valid_mask


class _Model(nn.Module):
    state: Tensor

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


def check_noise(
    fn: Callable[[Tensor], Any], maps: Sequence[Any], x: Tensor, dims: Sequence[int], rows: Sequence[Spans]
) -> list[bool]:
    """Returns for each output whether a cut changed with its row, as it must at some time."""

    def run(value: Tensor) -> list[Tensor]:
        outs = fn(value.clone())
        return list(outs) if isinstance(outs, (list, tuple)) else [outs]

    noise = torch.rand_like(x) + 0.1
    before = run(x)
    responds = [False] * len(before)
    for row in range(x.shape[0]):
        valid = valid_mask(x.shape, dims, rows, row)
        others, own = run(torch.where(valid, x, noise)), run(torch.where(valid, noise, x))
        for i, (found, out, other, changed) in enumerate(zip(maps, before, others, own, strict=True)):
            inside = cut_mask(out, found, row, rows[row])
            assert torch.equal(out[inside], other[inside]), (found, row, rows[row])
            assert torch.equal(out[~inside], changed[~inside]), (found, row, rows[row])
            responds[i] |= not torch.equal(out, changed)
    return responds


# One spanned dim (odd, last), one in the middle, two spanned dims in either order.
SOUND, TOKENS, IMAGE, TURNED = ((3, 4, 9), (-1,)), ((3, 9, 4), (1,)), ((2, 4, 5, 6), (-2, -1)), ((2, 4, 5, 6), (3, 2))

WEIGHT, INDEX = torch.rand(5, 4), torch.tensor([2, 0, 1])

# Values change, positions stay, and nothing crosses rows or spanned positions.
POINTWISE: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "elementwise": (SOUND, lambda y: (
        y.tanh(), F.gelu(y), y * 2 + 1, 3 - y, y.half(), y > 0.5, F.hardswish(y), y.nan_to_num())),
    "operands": (SOUND, lambda y: (
        y * torch.ones(4, 1), torch.ones(9) / y, y + y.detach(), torch.lerp(y, y * 2, y), y**y)),
    "broadcast": (SOUND, lambda y: (y + torch.ones(2, 3, 1, 9), y[:, :1] * y, y.unsqueeze(1) - y.unsqueeze(2))),
    "choices": (SOUND, lambda y: (
        torch.where(y > 0.5, 1.0, 0.0), torch.where(y > 0.5, y, -y), y.masked_fill(y > 0.5, 2.0))),
    "eval-dropout": (IMAGE, lambda y: (
        F.dropout(y, 0.5, False), F.dropout2d(y, 0.5, False), F.alpha_dropout(y, 0.5, False))),
    "in-place": (SOUND, lambda y: (y.add_(1).mul_(2), F.relu_(y), y.clamp_(0.2, 9.0))),
    "reductions": (SOUND, lambda y: (
        y.sum(1), y.mean(-2, keepdim=True), y.amax(1), y.amin([1], True), y.std(1), y.norm(dim=1))),
    "more-reductions": (SOUND, lambda y: (
        y.prod(1), y.logsumexp((1,)), torch.linalg.vector_norm(y, dim=1), y.var(1, keepdim=True))),
    "choosing-reductions": (SOUND, lambda y: (
        y.argmax(1), y.argmin(-2, True), (y > 0.6).any(1), (y > 0.3).all(1), (y > 0.6).count_nonzero(1))),
    "pairs": (SOUND, lambda y: (
        *y.max(1), *y.min(-2, keepdim=True), *y.median(1), *torch.var_mean(y, 1), *y.sort(1), *y.topk(2, 1))),
    "scans": (SOUND, lambda y: (
        y.softmax(1), y.log_softmax(-2), y.cumsum(1), *y.cummax(1), F.glu(y, 1), F.normalize(y, dim=1))),
    "features": (TOKENS, lambda y: (F.linear(y, WEIGHT), F.layer_norm(y, (4,)), F.rms_norm(y, (4,)), y.mean(-1))),
    "image-features": (TURNED, lambda y: (y.sum(1), y.permute(2, 3, 1, 0).mean(2), y.softmax(1), y[:, 0] * y[:, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_noise_does_not_cross_the_edge_of_a_cut(name):
    (shape, dims), fn = POINTWISE[name]
    maps = follow(fn, torch.rand(shape), dims)
    assert all(isinstance(found, SpanMap) for found in maps), maps
    rng = random.Random(name)
    responses = [check_noise(fn, maps, torch.rand(shape) + 0.1, dims, random_spans(rng, shape, dims)) for _ in range(6)]
    assert all(map(any, zip(*responses, strict=True)))


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
    "rows-reordered": (SOUND, lambda y: (
        y.flip(0), y.flip(0, 2), y.roll(1, 0), y[INDEX], y.index_select(0, INDEX), y.sort(0)[0])),
    "rows-dropped": (SOUND, lambda y: (
        y[:2], y[1:], y[::2], y[0], y[-1:], y.narrow(0, 1, 2), y.chunk(3)[1], y.unbind()[0])),
    "rows-added": (SOUND, lambda y: (
        torch.cat([y, y]), torch.cat([torch.zeros(1, 4, 9), y]), y.repeat(2, 1, 1), F.pad(y, (0, 0, 0, 0, 1, 0)))),
    "rows-repeated": (SOUND, lambda y: (
        y.repeat_interleave(2, 0), y.repeat_interleave(2), F.interpolate(y.transpose(0, 2), scale_factor=2))),
    "rows-mixed": (SOUND, lambda y: (
        y.sum(0), y.mean(0, True), y.softmax(0), y.cumsum(0), y.sum(), y - y.mean(0, True), y * y[:1])),
    "rows-merged": (SOUND, lambda y: (
        y.reshape(-1), y.flatten(), y.view(12, 9), y.flatten(0, 1), y.transpose(0, 1).reshape(-1, 9))),
    "span-gone": (SOUND, lambda y: (
        y.sum(-1), y.amax((1, 2)), y[..., 3], y.mean(-1, True), *y.max(-1), y.argmax(), y.unbind(-1)[0])),
    "span-split": (SOUND, lambda y: (
        y.view(3, 4, 3, 3), y.flatten(1), y.reshape(3, 9, 4), y.unfold(-1, 3, 2),
        y.reshape(3, 4, 9, 1, 1).flatten(1, 2))),
    "span-moved": (SOUND, lambda y: (
        y.roll(2, -1), y.roll(1), y.sort(-1)[0], y.topk(3)[0], y[..., INDEX], y.gather(2, y.long()),
        F.glu(y[..., 1:]))),
    "span-joined": (SOUND, lambda y: (
        torch.cat([y, y], -1), torch.cat([y, torch.zeros(3, 4, 2), y], 2), y.repeat(1, 1, 2),
        y.tensor_split((3, 1), -1)[2])),
    "places-differ": (SOUND, lambda y: (
        y + y.flip(-1), y[..., 1:] - y[..., :-1], y.diff(), torch.cat([y, y.flip(-1)], 1),
        torch.stack([y[..., 1:], y[..., :-1]]))),
    "row-against-row": (((3, 4, 3), (-1,)), lambda y: (
        y + y.transpose(0, 2), y + y.flip(0), torch.stack([y, y.transpose(0, 2)]))),
    "a-whole-row-beside-it": (SOUND, lambda y: (
        y + y.flip(0)[:, :1], torch.where(y.roll(1, 0) > 0, y, 0), y.mul_(y.flip(0)))),
    "one-position": (((3, 4, 1), (-1,)), lambda y: (y.expand(3, 4, 5), y + torch.zeros(9), y.squeeze(), y + y.flip(0))),
    "one-row": (((1, 4, 9), (-1,)), lambda y: (
        y.squeeze(), y[0], y.squeeze(0), y.expand(5, 4, 9), y + torch.zeros(2, 1, 1), y.repeat(2, 1, 1))),
    "fractions": (SOUND, lambda y: (
        F.interpolate(y, scale_factor=2.05), F.interpolate(y, 20), F.interpolate(y, 4),
        F.interpolate(y, scale_factor=2.1, mode="linear"))),
    "not-by-position": (SOUND, lambda y: (
        F.interpolate(y, scale_factor=41), F.interpolate(y, 18, mode="linear", align_corners=True))),
    "weights": (SOUND, lambda y: (
        y @ torch.rand(9, 9), F.conv1d(y, torch.rand(2, 4, 3)), F.linear(y, torch.rand(2, 9)),
        F.linear(WEIGHT, y[0, :, :4]))),
    "channels": (((2, 4, 5, 6), (1,)), lambda y: (F.pixel_shuffle(y, 2), y.view(2, 2, 2, 5, 6))),
    "pixels-of-rows": (IMAGE, lambda y: (
        F.pixel_shuffle(y.transpose(0, 2), 2), F.pixel_shuffle(y.permute(2, 1, 0, 3), 2))),
    "written-elsewhere": (SOUND, lambda y: (
        torch.zeros(3, 4, 9).index_put((INDEX,), y), torch.zeros(3, 4, 11).slice_scatter(y, 2, 1, 10),
        y[:, :1].masked_scatter(torch.ones(3, 4, 9, dtype=torch.bool), torch.ones(108)))),
    "amounts": (SOUND, lambda y: (
        y.repeat_interleave(torch.tensor([1, 2, 0]), 0, output_size=3), y.flip(0).relu().flip(0))),
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
    labels = torch.arange(108.0).view(3, 4, 9)
    (found,) = follow(lambda y: F.pad(y, amounts, mode), labels, (-1,))
    assert isinstance(found, SpanMap)
    out = F.pad(labels, amounts, mode)
    cropped = range(max(-amounts[0], 0), 9 + min(amounts[1], 0))
    for start, end in [(0, 9), (1, 4), (2, 9), (0, 2), (5, 5)]:
        content = [p for p in range(start, end) if p in cropped]
        for row in range(3):
            assert torch.equal(found.cut(out, row, [(start, end)]), labels[row][:, content])


# Linear and cubic weights on one to three dims; odd and even factors, which put centres on and between positions.
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
        return (
            F.interpolate(y, size, mode=mode) if by_size else F.interpolate(y, None, tuple(map(float, factors)), mode)
        )

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


def test_a_view_carries_its_spans_to_everything_that_shares_its_tensor():
    def fn(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        conv = x.clone()
        marked = conv.transpose(1, 2).unsqueeze(1).contiguous().view(3, 9, 4)
        return marked, conv, conv.unsqueeze(0), conv.flip(-1), conv.movedim(0, 1) * 1, marked[:, 1:], x, x * 2

    graph, (marked, *rest) = trace(fn, torch.rand(3, 4, 9))
    found = propagate_spans(graph, marked, (1,))
    assert found[marked] == SpanMap.identity(3, (1,))
    assert [found.get(node) for node in rest] == [
        span_map(0, Place(2)),
        span_map(1, Place(3)),
        span_map(0, Place(2, (Move(-1, 9, 9),))),
        span_map(1, Place(2)),
        span_map(0, Place(1, (Move(1, -1, 8),))),
        None,
        None,
    ]  # what it was computed from is another tensor


def test_a_view_that_merged_rows_leaves_what_it_shows_unknown():
    def fn(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        flat = x.reshape(12, 9).clone()
        return flat.view(3, 4, 9), flat, flat + 1

    graph, (marked, flat, later) = trace(fn, torch.rand(3, 4, 9))
    found = propagate_spans(graph, marked, (-1,))
    assert found[marked] == SpanMap.identity(3, (-1,))
    unknown = found[flat]
    assert found[later] == unknown
    assert isinstance(unknown, Unknown)
    assert unknown.node is marked
    assert "does not hold rows and spans along dims of their own" in unknown.reason


def test_a_cast_is_the_same_tensor_only_if_it_changes_nothing():
    graph, casts = trace(lambda x, _: (x.clone().float(), x.clone().half()), torch.rand(3, 4, 9))
    same, new = (propagate_spans(graph, cast, (-1,)).keys() for cast in casts)
    assert same == {casts[0], casts[0].all_input_nodes[0]}
    assert new == {casts[1]}


@pytest.mark.parametrize("lifted", [True, False])
@pytest.mark.parametrize(
    "pick",
    [
        pytest.param(lambda x, state: x, id="input"),
        pytest.param(lambda x, state: state, id="buffer"),
        pytest.param(lambda x, state: x.detach().detach(), id="second-name-of-an-input"),
        pytest.param(lambda x, state: x.transpose(0, 1).transpose(0, 1), id="view-of-an-input"),
        pytest.param(lambda x, state: state[..., :9], id="slice-of-a-buffer"),
    ],
)
def test_an_input_counts_as_itself_only(pick, lifted):
    """Else a model that returns its padded input as an output has spans all over."""

    def fn(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        given = pick(x, state)
        computed = given.relu()
        return given, given.detach(), computed, given[..., 1:], x + state, computed[..., 1:], computed + state

    graph, (given, same, *derived) = trace(fn, torch.rand(3, 4, 9), lifted=lifted)
    found = propagate_spans(graph, given, (-1,))
    assert found[given] == found[same] == SpanMap.identity(3, (-1,))
    assert not found.keys() & set(derived)
    assert given.target != torch.ops.aten.detach.default or {node.op for node in found} > {"call_function"}
    # The mirrored case: what the model computed has spans wherever it goes.
    assert found.keys().isdisjoint(later := propagate_spans(graph, derived[0], (-1,)))
    assert later.keys() >= {derived[0], *derived[-2:]}


@pytest.mark.parametrize("own", [True, False])
def test_before_an_in_place_write_only_views_are_the_marked_value(own):
    def fn(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        memory = torch.zeros_like(x) if own else state
        view, copy, shifted = memory.transpose(1, 2), memory.clone(), memory[..., 1:] + 1
        return memory.copy_(x * 2), view, copy, shifted, view + 1

    graph, (marked, view, copy, shifted, later) = trace(fn, torch.rand(3, 4, 9))
    found = propagate_spans(graph, marked, (-1,))
    assert found[marked] == found[marked.all_input_nodes[0]] == SpanMap.identity(3, (-1,))
    assert found[view] == found[later] == span_map(0, Place(1))
    assert not {copy, shifted} & found.keys()


def test_what_the_value_is_written_into_derives_from_then_on():
    def fn(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        part, whole, early, other = (
            torch.zeros(3, 4, 11),
            torch.zeros(3, 4, 9),
            torch.zeros(3, 4, 9),
            torch.zeros(3, 4, 9),
        )
        view, before = part.flatten(1), early + 1
        part[..., 2:] = y
        whole.copy_(y)
        early.add_(y)
        return y, part, view, part * 2, whole, whole[..., 1:], early, before, other + 1

    graph, nodes = trace(fn, torch.rand(3, 4, 9))
    y, part, view, after, whole, sliced, early, before, other = nodes
    found = propagate_spans(graph, y, (-1,))
    for node in (part, view, after):
        unknown = found[node]
        assert isinstance(unknown, Unknown)
        assert "it writes the marked value into the memory of" in unknown.reason
    assert found[whole] == found[early] == found[whole.all_input_nodes[0]] == SpanMap.identity(3, (-1,))
    assert found[sliced] == span_map(0, Place(2, (Move(1, -1, 8),)))
    assert not {before, other} & found.keys()


def test_a_write_into_a_marked_slice_does_not_mark_the_whole():
    def fn(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        whole = x.clone()
        part, other = whole[..., 1:8], whole[:, 1:]
        return part.add_(x[..., 1:8]), whole, other, part

    graph, (written, whole, other, part) = trace(fn, torch.rand(3, 4, 9))
    for value in (written, written.all_input_nodes[0]):
        found = propagate_spans(graph, value, (-1,))
        assert found[written] == found[part] == found[value] == SpanMap.identity(3, (-1,))
        assert not {whole, other} & found.keys()


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
