"""What each operator lets through, by hand: SG201, SG202 or SG203, and how far. Random graphs: test_leaks_random.py."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from spangraph.passes.leaks import Source, _Follower, diagnose_leaks, find_leaks

X = torch.randn(3, 4, 12)  # rows, channels, positions
IMAGE = torch.randn(2, 4, 8, 10)
TOKENS = torch.randint(0, 5, (3, 12))
W3, W5, W8 = torch.randn(4, 4, 3), torch.randn(4, 4, 5), torch.randn(4, 4, 8)
TABLE = torch.randn(5, 6)
ALL, NONE = (inf, inf), []
Found = list[tuple[str, float, float]]


def leaks_of(forward: Callable[[Tensor], object], x: Tensor, dims: tuple[int, ...], padding: str) -> Found:
    gm = make_fx(forward, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(x)
    for node in gm.graph.find_nodes(op="get_attr"):
        node.meta["val"] = getattr(gm, str(node.target))
    (source,) = gm.graph.find_nodes(op="placeholder")
    return [
        (leak.rule, leak.before, leak.after) for leak in find_leaks(gm.graph, [Source(source, "x", dims, padding)])[0]
    ]


def two(reach: tuple[float, float]) -> Found:
    return [("SG201", *reach)]


# Positions along the last dim, padding at both ends: what the padding before and after the span can touch.
@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        pytest.param(lambda x: x.relu() * 2 + x.to(torch.float64), NONE, id="elementwise"),
        pytest.param(lambda x: F.layer_norm(x.mT, (4,)).mT, NONE, id="norm-over-channels"),
        pytest.param(lambda x: x.mT.softmax(-1).mT, NONE, id="softmax-over-channels"),
        pytest.param(lambda x: x[..., 2:9:2].flip(-1), NONE, id="slice-flip"),
        pytest.param(lambda x: F.pad(x, (3, 2)).repeat_interleave(3, -1), NONE, id="pad-repeat"),
        pytest.param(lambda x: torch.cat([x.new_zeros(3, 4, 2), x], -1), NONE, id="cat-zeros"),
        pytest.param(lambda x: torch.cat([x, x], -1), [("SG203", *ALL)], id="cat-twice"),
        pytest.param(lambda x: F.linear(x.mT, torch.ones(7, 4)), NONE, id="linear-over-channels"),
        pytest.param(lambda x: torch.ones(5, 4) @ x, NONE, id="matmul-over-channels"),
        pytest.param(lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), NONE, id="batch-norm-eval"),
        pytest.param(lambda x: F.interpolate(x, scale_factor=2.0), NONE, id="nearest"),
        pytest.param(lambda x: F.conv1d(x, W3[..., :1]), NONE, id="conv-1"),
        pytest.param(lambda x: F.conv1d(x, W3, padding=1), two((1, 1)), id="conv-3-same"),
        pytest.param(lambda x: F.conv1d(x, W5, padding="same"), two((2, 2)), id="conv-5-same"),
        pytest.param(lambda x: F.conv1d(x, W3, padding=2, dilation=2), two((2, 2)), id="conv-3-dilated"),
        pytest.param(lambda x: F.conv1d(x, W5), two((0, 4)), id="conv-5-valid"),
        pytest.param(lambda x: F.conv1d(F.pad(x, (4, 0)), W5), two((4, 0)), id="conv-5-causal"),
        pytest.param(lambda x: F.conv1d(x, W5, padding=2, stride=2), two((1, 1)), id="conv-5-strided"),
        pytest.param(lambda x: F.conv_transpose1d(x, W8, stride=4, padding=2), two((2, 2)), id="transposed-8-4"),
        pytest.param(lambda x: F.conv_transpose1d(x, W8[..., :4], stride=4), NONE, id="transposed-4-4"),
        pytest.param(lambda x: F.conv_transpose1d(x, W8, stride=4)[..., :-4], two((4, 0)), id="transposed-causal"),
        pytest.param(lambda x: F.max_pool1d(x, 2), two((0, 1)), id="max-pool"),
        pytest.param(lambda x: F.avg_pool1d(x, 3, 1, 1), two((1, 1)), id="avg-pool"),
        pytest.param(lambda x: x.unfold(-1, 4, 2), two((0, 2)), id="unfold"),
        pytest.param(lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), two((1, 2)), id="linear-upsample"),
        pytest.param(lambda x: x.softmax(-1), two(ALL), id="softmax"),
        pytest.param(lambda x: x.mean(-1), two(ALL), id="mean"),
        pytest.param(lambda x: x / x.abs().amax(-1, keepdim=True), two(ALL), id="gain"),
        pytest.param(lambda x: F.layer_norm(x, (12,)), two(ALL), id="layer-norm"),
        pytest.param(lambda x: F.group_norm(x, 2), two(ALL), id="group-norm"),
        pytest.param(lambda x: F.instance_norm(x), two(ALL), id="instance-norm"),
        pytest.param(lambda x: x.cumsum(-1), two((inf, 0)), id="cumsum"),
        pytest.param(lambda x: torch.fft.rfft(x).real, two(ALL), id="fft"),
        pytest.param(lambda x: x.roll(1, -1), two(ALL), id="roll"),
        pytest.param(lambda x: x.sort(-1).values, two(ALL), id="sort"),
        pytest.param(lambda x: x[..., -1], two(ALL), id="last"),
        pytest.param(lambda x: x[..., 0], two((inf, 0)), id="first"),
        pytest.param(lambda x: x[..., 1:] - x[..., :-1], two((0, 1)), id="difference"),
        pytest.param(lambda x: x + x.flip(-1), two(ALL), id="mirrored"),
        pytest.param(lambda x: F.linear(x, torch.ones(7, 12)), two(ALL), id="linear-over-positions"),
        pytest.param(lambda x: x.mT @ x, NONE, id="scores"),
        pytest.param(lambda x: (x.mT @ x).sum(-1), two(ALL), id="scores-summed"),
        pytest.param(lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT), two(ALL), id="attention"),
        pytest.param(lambda x: x[..., torch.tensor([3, 1])], [("SG203", *ALL)], id="chosen-positions"),
        pytest.param(lambda x: x.reshape(-1), [("SG203", *ALL)] * 2, id="flattened"),
        pytest.param(lambda x: x.view(3, 4, 3, 4), [("SG203", *ALL)], id="split"),
        pytest.param(lambda x: torch.special.zeta(x, 1).tril().mean(1), NONE, id="tril"),
    ],
)  # fmt: skip
def test_positions(forward: Callable[[Tensor], Tensor], expected: Found) -> None:
    assert leaks_of(forward, X, (-1,), "both") == expected


# The mirrored question: where padding lies at one end only, what reaches from the other end is nothing.
@pytest.mark.parametrize(
    ("forward", "right", "left"),
    [
        pytest.param(lambda x: F.conv1d(x, W3, padding=1), two((0, 1)), two((1, 0)), id="conv-same"),
        pytest.param(lambda x: F.conv1d(F.pad(x, (2, 0)), W3), NONE, two((2, 0)), id="conv-causal"),
        pytest.param(
            lambda x: F.conv1d(F.pad(x, (2, 0), mode="reflect"), W3), two((2, 0)), two((2, 0)), id="reflected"
        ),
        pytest.param(lambda x: x.cumsum(-1), NONE, two((inf, 0)), id="cumsum"),
        pytest.param(lambda x: x.flip(-1).cumsum(-1).flip(-1), two((inf, 0)), NONE, id="cumsum-reversed"),
        pytest.param(lambda x: x - x[..., :1], NONE, two((inf, 0)), id="first-slice"),
        pytest.param(lambda x: x - x[..., 0, None], NONE, two((inf, 0)), id="first"),
        pytest.param(lambda x: x.softmax(-1), two((0, inf)), two((inf, 0)), id="softmax"),
    ],
)
def test_one_sided_padding(forward: Callable[[Tensor], Tensor], right: Found, left: Found) -> None:
    assert leaks_of(forward, X, (-1,), "right") == right
    assert leaks_of(forward, X, (-1,), "left") == left


def lstm(bidirectional: bool, part: int) -> Callable[[Tensor], Tensor]:
    module = torch.nn.LSTM(4, 5, batch_first=True, bidirectional=bidirectional).requires_grad_(False)
    params = list(module._flat_weights)
    zeros = torch.zeros(1 + bidirectional, 3, 5)
    return lambda x: torch._VF.lstm(x.mT, (zeros, zeros), params, True, 1, 0.0, False, bidirectional, True)[part]


def test_recurrent_nets_look_back_or_both_ways() -> None:
    assert leaks_of(lstm(False, 0), X, (-1,), "right") == NONE
    assert leaks_of(lstm(False, 0), X, (-1,), "both") == two((inf, 0))
    assert leaks_of(lstm(True, 0), X, (-1,), "right") == two((0, inf))


def test_the_last_state_has_seen_the_padding() -> None:
    """Of all outputs it is the last state alone that padding at the end reaches, and only where it is used."""
    gm = make_fx(lstm(False, 1), tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(X)
    (source,) = gm.graph.find_nodes(op="placeholder")
    leaks, states = find_leaks(gm.graph, [Source(source, "x", (-1,), "right")])
    assert [(leak.rule, leak.before, leak.after) for leak in leaks] == [("SG201", 0, inf)]
    out = gm.graph.output_node().args[0]
    assert [(track.axis, track.dim) for track in states[out]] == [("rows", 1)]


@pytest.mark.parametrize(
    ("forward", "rules"),
    [
        pytest.param(lambda x: x.amax(0), ["SG202"], id="amax"),
        pytest.param(lambda x: x / x.amax(), ["SG202", "SG201"], id="amax-of-all"),
        pytest.param(lambda x: F.batch_norm(x, None, None, training=True), ["SG202", "SG201"], id="batch-norm"),
        pytest.param(lambda x: x[torch.tensor([1, 0])], ["SG202"], id="routed"),
        pytest.param(lambda x: x.index_select(0, torch.tensor([1, 0])), ["SG202"], id="index-select"),
        pytest.param(lambda x: x.softmax(0), ["SG202"], id="softmax"),
        pytest.param(lambda x: x.cumsum(0), ["SG202"], id="cumsum-over-rows-of-other-lengths"),
        pytest.param(lambda x: x - x[:1], ["SG202"], id="one-row-for-all"),
        pytest.param(lambda x: x + x.flip(0), ["SG202"], id="mirrored-rows"),
        pytest.param(lambda x: x.flatten(1).flip(0)[:2], ["SG203"], id="features"),
        pytest.param(lambda x: x[1:].transpose(0, 1), NONE, id="rows-moved"),
        pytest.param(lambda x: x.flatten(0, 1), ["SG203"], id="rows-merged"),
    ],
)  # fmt: skip
def test_rows(forward: Callable[[Tensor], Tensor], rules: list[str]) -> None:
    """K6: padding rows hold anything; an operator over rows lets it into the others."""
    assert list(dict.fromkeys(rule for rule, _, _ in leaks_of(forward, X, (-1,), "both"))) == rules


def test_two_spanned_dims_are_followed_apart() -> None:
    assert leaks_of(lambda x: x.mean(-1), IMAGE, (-2, -1), "both") == two(ALL)
    assert leaks_of(lambda x: F.conv2d(x, torch.ones(4, 4, 3, 5), padding=(1, 2)), IMAGE, (-2, -1), "both") == [
        ("SG201", 1, 1),
        ("SG201", 2, 2),
    ]
    assert leaks_of(lambda x: F.pixel_shuffle(x, 2), IMAGE, (-2, -1), "both") == NONE


def test_token_ids_are_looked_up_in_place() -> None:
    assert leaks_of(lambda ids: F.embedding(ids, TABLE).sum(-1), TOKENS, (-1,), "both") == NONE
    assert leaks_of(lambda ids: TABLE[ids].mean(1), TOKENS, (-1,), "both") == two(ALL)


def test_writes_are_followed() -> None:
    def shifted(x: Tensor) -> Tensor:
        y = x.clone()
        y[..., 1:].add_(x[..., :-1])
        return y

    def partly(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[..., :6].copy_(x[..., 2:8])
        return y * 2

    def emptied(x: Tensor) -> Tensor:
        y = x.clone()
        y[..., :3].zero_()
        y[y > 0] = 0
        return y

    assert leaks_of(shifted, X, (-1,), "both") == two((1, 0))
    assert [rule for rule, _, _ in leaks_of(partly, X, (-1,), "both")] == ["SG203", "SG203"]  # rows, positions
    assert leaks_of(emptied, X, (-1,), "both") == NONE


def test_a_diagnostic_says_operator_line_reach_and_way_out() -> None:
    """K10: a mean over time takes padding in."""
    gm = make_fx(lambda x: F.conv1d(x, W3, padding=1).mean(-1), pre_dispatch=True, tracing_mode="fake",
                 _allow_non_fake_inputs=True)(X)  # fmt: skip
    for node in gm.graph.find_nodes(op="get_attr"):
        node.meta["val"] = getattr(gm, str(node.target))
    (source,) = gm.graph.find_nodes(op="placeholder")
    conv, mean = diagnose_leaks(gm, [Source(source, "mel", (-1,), "right")])
    assert conv.rule == mean.rule == "SG201"
    assert conv.severity == mean.severity == "warning"
    assert conv.message == (
        "conv1d mixes positions of 'mel' along dim -1: its windows of 3 see neighbours. Padding reaches valid positions"
        " of a span, up to 1 at its end."
    )
    assert "mean mixes positions of 'mel' along dim -1" in mean.message
    assert "every valid position" in mean.message
    assert "torch.where(mask, x, 0)" in conv.fix
    assert "a masked sum by the number of them" in mean.fix


def padded_after_cut(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda x: x + F.pad(x[..., 3:], (3, 0), mode=mode)


def written_transposed(x: Tensor) -> Tensor:
    y = x.clone()
    y.mT.copy_(x)
    return y * 2


def written_by_an_operator_without_results(x: Tensor) -> Tensor:
    y = x.clone()
    torch.ops.aten._foreach_add_.List([y], [x.flip(-1)])
    return y * 2


def view_of_a_reflected(x: Tensor) -> Tensor:
    y = F.pad(x, (3, 0)).clone()
    view = y.view(y.shape)
    y.copy_(F.pad(x, (3, 0), mode="reflect"))
    return F.conv1d(F.pad(view, (2, 0)), W3)


SQUARE = torch.randn(4, 12, 12)


# Each was missed once: padding at the right reaches a valid position, and nothing else may say so.
@pytest.mark.parametrize(
    ("forward", "x"),
    [
        pytest.param(padded_after_cut("replicate"), X, id="replicated-where-cut"),
        pytest.param(padded_after_cut("reflect"), X, id="reflected-where-cut"),
        pytest.param(lambda x: F.pad(x[..., 3:], (3, 0), mode="replicate")[..., 0], X, id="select-of-a-copy"),
        pytest.param(lambda x: x[..., 1::2][..., 0], X, id="first-of-a-strided-slice"),
        pytest.param(lambda x: F.conv1d(x, W3[..., :1], stride=2, padding=1)[..., 1], X, id="second-of-strided"),
        pytest.param(written_transposed, SQUARE, id="written-transposed"),
        pytest.param(written_by_an_operator_without_results, X, id="written-without-results"),
        pytest.param(view_of_a_reflected, X, id="view-of-a-reflected"),
    ],
)
def test_what_was_missed_once(forward: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert leaks_of(forward, x, (-1,), "right")


def test_bicubic_windows_see_neighbours_where_nothing_is_resized() -> None:
    found = leaks_of(lambda x: F.interpolate(x, scale_factor=(2.0, 1.0), mode="bicubic"), IMAGE, (-1,), "both")
    assert found == two((2, 2))
    assert not leaks_of(lambda x: F.interpolate(x, scale_factor=(2.0, 1.0), mode="bilinear"), IMAGE, (-1,), "both")


# Each crashed once.
@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda x: x[:, 0, 0].sum(), id="reduction-of-one-dim"),
        pytest.param(lambda x: torch.cat([torch.empty(0), x], -1), id="empty-cache"),
        pytest.param(lambda x: torch.vmap(lambda row: row * 2)(x), id="vmap"),
    ],
)
def test_what_crashed_once(forward: Callable[[Tensor], Tensor]) -> None:
    leaks_of(forward, X, (-1,), "right")


def test_many_writes_to_one_buffer_take_no_longer_each() -> None:
    """The work for one write must not grow with the number of writes before."""

    def forward(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i in range(300):
            y[:, i % 4].copy_(x[:, 0] * 2)
        return y

    gm = make_fx(forward, tracing_mode="fake", pre_dispatch=True)(X)
    (source,) = gm.graph.find_nodes(op="placeholder")
    follower = _Follower(gm.graph, [Source(source, "x", (-1,), "right")])
    assert follower.run()[0]
    (buffer,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.zeros_like.default)
    assert len(follower._views[buffer]) < 10
