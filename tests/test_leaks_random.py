"""Random graphs: where no leak is reported, no fill of the padding changes a valid position, bit for bit.

And where one is, only positions within its reach change. False alarms are counted and printed.
"""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from spangraph.passes.leak_rules import Track
from spangraph.passes.leaks import ROWS, Leak, Source, find_leaks
from spangraph.passes.nodes import storage_roots, written

NUM_ROWS, CHANNELS, WIDTH = 3, 4, 17  # the last row is padding
Op = Callable[[Tensor], Tensor]
Make = Callable[[random.Random, Tensor], Op | None]


def weights(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))


def some_dim(rng: random.Random, x: Tensor) -> int:
    return rng.randrange(x.ndim)


def conv(rng: random.Random, x: Tensor) -> Op | None:
    kernel, dilation, stride = rng.choice([1, 2, 3, 5]), rng.choice([1, 1, 2]), rng.choice([1, 1, 2, 3])
    pad = rng.choice([0, dilation * (kernel - 1) // 2, dilation * (kernel - 1)])
    if x.ndim not in (3, 4) or min(x.shape[2:]) + 2 * pad <= dilation * (kernel - 1) or x.shape[1] > 16:
        return None
    weight = weights(rng, CHANNELS, x.shape[1], *[kernel] * (x.ndim - 2))
    op = F.conv1d if x.ndim == 3 else F.conv2d
    return lambda x: op(x, weight, stride=stride, padding=pad, dilation=dilation)


def conv_transpose(rng: random.Random, x: Tensor) -> Op | None:
    kernel, stride = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 3, 4])
    pad = rng.choice([0, (kernel - stride) // 2, kernel // 2]) if kernel > stride else 0
    if x.ndim != 3 or x.shape[-1] > 60 or x.shape[1] > 16 or (x.shape[-1] - 1) * stride + kernel - 2 * pad < 1:
        return None
    weight = weights(rng, x.shape[1], CHANNELS, kernel)
    return lambda x: F.conv_transpose1d(x, weight, stride=stride, padding=pad)


def pad(rng: random.Random, x: Tensor) -> Op | None:
    left, right, mode = rng.randrange(5), rng.randrange(5), rng.choice(["constant", "constant", "reflect", "replicate"])
    if x.ndim != 3 or (mode == "reflect" and max(left, right) >= x.shape[-1]) or x.shape[-1] > 80:
        return None
    return lambda x: F.pad(x, (left, right), mode=mode)


def pool(rng: random.Random, x: Tensor) -> Op | None:
    kernel, stride, op = rng.choice([2, 3]), rng.choice([1, 2, None]), rng.choice([F.avg_pool1d, F.max_pool1d])
    if x.ndim != 3 or x.shape[-1] < 4:
        return None
    return lambda x: op(x, kernel, stride, padding=kernel // 2)


def slice_(rng: random.Random, x: Tensor) -> Op | None:
    dim, start, step = some_dim(rng, x), rng.randrange(3), rng.choice([1, 1, 2])
    if x.shape[dim] < 6:
        return None
    stop = rng.choice([None, -1, -2])
    return lambda x: x.movedim(dim, 0)[start:stop:step].movedim(0, dim)


def upsample(rng: random.Random, x: Tensor) -> Op | None:
    factor, mode = rng.choice([2, 3]), rng.choice(["nearest", "linear", "nearest-exact"])
    if x.ndim != 3 or x.shape[-1] > 40:
        return None
    return lambda x: F.interpolate(x, scale_factor=float(factor), mode=mode)


def recurrent(rng: random.Random, x: Tensor) -> Op | None:
    if x.ndim != 3 or x.shape[1] > 16:
        return None
    bidirectional, state = rng.random() < 0.3, rng.random() < 0.2
    torch.manual_seed(rng.randrange(2**31))
    lstm = torch.nn.LSTM(x.shape[1], CHANNELS, batch_first=True, bidirectional=bidirectional).requires_grad_(False)
    params = [weight.clone() for weight in lstm.parameters()]
    num = 2 if bidirectional else 1

    def run(x: Tensor) -> Tensor:
        zeros = torch.zeros(num, x.shape[0], CHANNELS)
        out = torch._VF.lstm(x.mT, (zeros, zeros), params, True, 1, 0.0, False, bidirectional, True)
        return out[1].movedim(0, -1) if state else out[0].mT

    return run


def norm(rng: random.Random, x: Tensor) -> Op | None:
    kind = rng.choice(["layer", "group", "instance", "batch", "batch_train"])
    if x.ndim < 3 or x.shape[1] % 2 or x.shape[0] * x[0, 0].numel() < 2 or x[0, 0].numel() < 2:
        return None
    mean, var = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    return {
        "layer": lambda x: F.layer_norm(x, x.shape[-1:]),
        "group": lambda x: F.group_norm(x, 2),
        "instance": lambda x: F.instance_norm(x),
        "batch": lambda x: F.batch_norm(x, mean.clone(), var.clone()),
        "batch_train": lambda x: F.batch_norm(x, mean.clone(), var.clone(), training=True),
    }[kind]


def reduce_(rng: random.Random, x: Tensor) -> Op | None:
    dim, keep = some_dim(rng, x), rng.random() < 0.5
    kind = rng.choice(["sum", "mean", "amax", "std", "max"])
    if x.ndim < 2 or x.shape[dim] < 2:
        return None
    if rng.random() < 0.7:  # most often a statistic that every position sees
        return lambda x: x / (1 + x.abs().amax(dim, keepdim=True))
    return {
        "sum": lambda x: x.sum(dim, keepdim=keep),
        "mean": lambda x: x.mean(dim, keepdim=keep),
        "amax": lambda x: x.amax(dim, keepdim=keep),
        "std": lambda x: x.std(dim, keepdim=keep),
        "max": lambda x: x.max(dim, keepdim=keep).values,
    }[kind]


def along(rng: random.Random, x: Tensor) -> Op | None:
    dim = some_dim(rng, x)
    kind = rng.choice(["softmax", "cumsum", "flip", "roll", "sort", "fft"])
    return {
        "softmax": lambda x: x.softmax(dim),
        "cumsum": lambda x: x.cumsum(dim) / 100,
        "flip": lambda x: x.flip(dim),
        "roll": lambda x: x.roll(1, dim),
        "sort": lambda x: x.sort(dim).values,
        "fft": lambda x: torch.fft.fft(x, dim=dim).real,
    }[kind]


def product(rng: random.Random, x: Tensor) -> Op | None:
    kind = rng.choice(["linear", "gram", "attention", "weights"])
    if x.ndim != 3 or x.shape[-1] > 64:
        return None
    weight = weights(rng, max(x.shape), max(x.shape))
    return {
        "linear": lambda x: F.linear(x, weight[:, : x.shape[-1]]),
        "gram": lambda x: x.mT @ x,
        "attention": lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT).mT,
        "weights": lambda x: torch.matmul(weight[: x.shape[1], : x.shape[1]], x),
    }[kind]


def combine(rng: random.Random, x: Tensor) -> Op | None:
    dim, kind = some_dim(rng, x), rng.choice(["shifted", "flipped", "cat", "cat_zeros", "outer", "select", "stack"])
    if x.ndim != 3 or x.shape[dim] < 4 or x.numel() > 20_000:
        return None
    at = rng.choice([0, 1, -1])
    zeros = torch.zeros([size if d != dim else 2 for d, size in enumerate(x.shape)])
    return {
        "shifted": lambda x: x.narrow(dim, 1, x.shape[dim] - 1) - x.narrow(dim, 0, x.shape[dim] - 1),
        "flipped": lambda x: x + x.flip(dim),
        "cat": lambda x: torch.cat([x, x * 2], dim),
        "cat_zeros": lambda x: torch.cat([zeros, x, zeros], dim),
        "outer": lambda x: (x.amax(1)[:, :, None] * x.amax(1)[:, None, :]) if x.shape[1] > 1 else x,
        "select": lambda x: x - x.select(dim, at).unsqueeze(dim),
        "stack": lambda x: torch.stack([x, x.abs()], 1).sum(1),
    }[kind]


def in_place(rng: random.Random, x: Tensor) -> Op | None:
    kind, dim = rng.choice(["zero", "fill", "add_shifted", "copy_shifted", "buffer", "buffer_part"]), some_dim(rng, x)
    if x.shape[dim] < 4:
        return None

    def run(x: Tensor) -> Tensor:
        y = x.clone()
        if kind == "zero":
            y.narrow(dim, 0, 2).zero_()
        elif kind == "fill":
            y[y > 0] = 0.5
        elif kind == "add_shifted":
            y.narrow(dim, 1, y.shape[dim] - 1).add_(x.narrow(dim, 0, x.shape[dim] - 1))
        elif kind == "copy_shifted":
            y.narrow(dim, 0, y.shape[dim] - 1).copy_(x.narrow(dim, 1, x.shape[dim] - 1))
        elif kind == "buffer":
            y = torch.zeros_like(x)
            view = y.view(y.shape)
            y.copy_(x)
            y = view + 1
        else:
            y = torch.zeros_like(x)
            y.narrow(dim, 0, y.shape[dim] - 1).copy_(x.narrow(dim, 1, y.shape[dim] - 1))
        return y

    return run


def shape(rng: random.Random, x: Tensor) -> Op | None:
    kind = rng.choice(
        ["transpose", "unsqueeze", "mask", "repeat", "repeat_interleave", "unfold", "gelu", "index", "view"]
    )
    if x.ndim != 3 or x.shape[-1] < 5 or x.numel() > 5_000:
        return None
    index = torch.tensor([2, 0, 1])
    return {
        "transpose": lambda x: x.transpose(1, 2),
        "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
        "mask": lambda x: torch.where(torch.arange(x.shape[-1]) > 3, x, 0.0),
        "repeat": lambda x: x.repeat(1, 2, 1),
        "repeat_interleave": lambda x: x.repeat_interleave(2, -1),
        "unfold": lambda x: x.unfold(-1, 4, 2).amax(-1),
        "gelu": lambda x: F.gelu(x),
        "index": lambda x: x[:, index % x.shape[1]],
        "view": lambda x: x.reshape(x.shape[0], -1, 1, x.shape[-1]).flatten(1, 2),
    }[kind]


MAKERS: list[Make] = [
    conv, conv, conv_transpose, pad, pool, slice_, upsample, recurrent, norm, reduce_, along, product, combine,
    in_place, shape, shape,
]  # fmt: skip


def random_graph(rng: random.Random, x: Tensor) -> fx.GraphModule:
    ops: list[Op] = []
    value = x
    for _ in range(200):
        if len(ops) == 5:
            break
        op = rng.choice(MAKERS)(rng, value)
        if op is None:
            continue
        out = op(value)
        if out.numel() == 0 or not out.dtype.is_floating_point or out.ndim < 2:
            continue
        ops.append(op)
        value = out

    def forward(x: Tensor) -> Tensor:
        for op in ops:
            x = op(x)
        return x

    gm = make_fx(forward, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(x)
    for node in gm.graph.find_nodes(op="get_attr"):
        node.meta["val"] = getattr(gm, str(node.target))
    return gm


class _Values(fx.Interpreter):
    """Every node's value, as it was when the node ran."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        self.values[n] = out.clone() if isinstance(out, Tensor) else out
        return out


def values_of(gm: fx.GraphModule, x: Tensor) -> dict[fx.Node, Any]:
    interpreter = _Values(gm)
    with torch.no_grad():
        interpreter.run(x.clone())
    return interpreter.values


def random_spans(rng: random.Random, padding: str) -> list[tuple[int, int]]:
    spans = []
    for _ in range(NUM_ROWS - 1):
        start, end = sorted(rng.sample(range(WIDTH + 1), 2))
        spans.append((0 if padding == "right" else start, WIDTH if padding == "left" else end))
    return spans


def valid_mask(value: Tensor, tracks: tuple[Track, ...], row: int, span: tuple[int, int]) -> Tensor:
    """The positions of one row that are valid: along every track."""
    mask = torch.ones(value.shape, dtype=torch.bool)
    for track in tracks:
        start, end = track.place.apply(*((row, row + 1) if track.axis == ROWS else span))
        kept = torch.zeros(value.shape[track.dim], dtype=torch.bool)
        kept[start:end] = True
        mask &= kept.view([-1 if d == track.dim else 1 for d in range(value.ndim)])
    return mask


def within_reach(value: Tensor, tracks: tuple[Track, ...], leaks: list[Leak], span: tuple[int, int]) -> Tensor:
    """Positions that the leaks of one node say may change."""
    mask = torch.zeros(value.shape, dtype=torch.bool)
    for leak in leaks:
        if span[1] - span[0] >= leak.shorter_than:
            continue
        along = [track for track in tracks if track.axis == leak.axis and leak.axis != ROWS]
        if leak.axis == ROWS or not along:
            return torch.ones_like(mask)
        for track in along:
            start, end = track.place.apply(*span)
            kept = torch.zeros(value.shape[track.dim], dtype=torch.bool)
            kept[start : int(min(start + leak.before, end))] = True
            kept[int(max(end - leak.after, start)) : end] = True
            mask |= kept.view([-1 if d == track.dim else 1 for d in range(value.ndim)])
    return mask


def changed(one: Tensor, other: Tensor) -> Tensor:
    return ~((one == other) | (one.isnan() & other.isnan()))


def check_graph(seed: int) -> tuple[int, int, list[str]]:
    """Returns the numbers of tensors followed and of first leaks, and those of the latter that changed nothing."""
    rng = random.Random(seed)
    padding = rng.choice(["right", "right", "left", "both"])
    x = weights(rng, NUM_ROWS, CHANNELS, WIDTH)
    gm = random_graph(rng, x)
    (source,) = (node for node in gm.graph.nodes if node.op == "placeholder")
    found, states = find_leaks(gm.graph, [Source(source, "x", (-1,), padding)])
    leaks: dict[fx.Node, list[Leak]] = {}
    for leak in found:
        leaks.setdefault(leak.node, []).append(leak)
    roots = storage_roots(gm.graph)
    tainted: set[fx.Node] = set()  # behind a leak
    touched: set[fx.Node] = set()
    for _ in range(3):
        spans = random_spans(rng, padding)
        valid = torch.zeros(x.shape, dtype=torch.bool)
        for row, (start, end) in enumerate(spans):
            valid[row, :, start:end] = True
        base = values_of(gm, torch.where(valid, x, 0.0))
        for fill in (torch.full_like(x, torch.nan), torch.full_like(x, 1e6), 1e3 * weights(rng, *x.shape)):
            filled = values_of(gm, torch.where(valid, x, fill))
            tainted.clear()
            for node in gm.graph.nodes:
                if any(source in tainted or source in leaks for source in node.all_input_nodes):
                    tainted.add(node)
                if node in tainted or node in leaks:
                    written_roots = {roots[target] for target in written(node)}
                    tainted.update(view for view, root in roots.items() if root in written_roots and view is not node)
                value = base.get(node)
                if node.target is operator.getitem and not node.users:  # nobody asks
                    continue
                if node.target is operator.getitem and node.args[0] in leaks and changed(value, filled[node]).any():
                    touched.add(node.args[0])
                if node in tainted or node.op == "output" or not isinstance(value, Tensor):
                    continue
                tracks, moved = states.get(node, ()), changed(value, filled[node])
                for row, span in enumerate(spans):
                    mask = moved & valid_mask(value, tracks, row, span)
                    if node in leaks:
                        if mask.any():
                            touched.add(node)
                        mask &= ~within_reach(value, tracks, leaks[node], span)
                    assert not mask.any(), (
                        f"seed {seed}, {padding}: {node.format_node()} changed at {mask.nonzero()[:5].tolist()} of row"
                        f" {row} {span}, tracks {tracks}, leaks {leaks.get(node)}\n{gm.code}"
                    )
    first = [node for node in leaks if node not in tainted]
    return len(states), len(first), [str(node.target) for node in first if node not in touched]


# 40 graphs each: a minute in all, shared between processes.
@pytest.mark.parametrize("block", range(8))
def test_no_leak_is_missed_and_reach_is_right(block: int, record_property: Callable[[str, object], None]) -> None:
    checked = [check_graph(block * 1000 + seed) for seed in range(40)]
    nodes, first = sum(nodes for nodes, _, _ in checked), sum(first for _, first, _ in checked)
    false = Counter(op for _, _, ops in checked for op in ops)
    counted = f"{nodes} tensors, {first} first leaks, of which {false.total()} changed nothing: {dict(false)}"
    record_property("counted", counted)
    assert nodes > 100
    assert first - false.total() > 10
