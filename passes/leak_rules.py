"""What operators do to one dim: where positions lie afterwards, and how far padding reaches into valid ones.

Where operators only move positions, `propagate_spans.RULES` says it; here is what that table leaves out, as where a
convolution's output belongs is a convention, and how far each operator looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, inf
from typing import Any

import torch

from spangraph.passes.nodes import val
from spangraph.passes.propagate_spans import NOT_KNOWN, REDUCTIONS, RULES, packets, shape_of
from spangraph.passes.span_maps import Call, Move, NotStaticError, Place, mix_along_rule


@dataclass(frozen=True)
class Track:
    """Where the positions of one axis of a source lie along one dim of a tensor.

    Attributes:
        axis: the rows, or which spanned dim of which source.
        place: the dim, and how positions moved.
        before, after: in which rows what lies before and after the valid positions may hold padding: those shorter
            than so many positions of the source; 0 in none, `inf` in any.
        width: size of the source's dim.
    """

    axis: str
    place: Place
    before: float
    after: float
    width: int

    @property
    def dim(self) -> int:
        return self.place.dim

    @property
    def moves(self) -> tuple[Move, ...]:
        return self.place.moves

    @property
    def is_reversed(self) -> bool:
        return sum(move.scale < 0 for move in self.moves) % 2 == 1

    @property
    def affine(self) -> tuple[Fraction, Fraction, Fraction]:
        """Rate and offset of the map from positions to where they lie now, and how much more it may have rounded up."""
        rate, offset, rounded, slack = Fraction(1), Fraction(0), Fraction(0), Fraction(0)
        for move in self.moves:
            rate, offset = rate * move.scale / move.step, (offset * move.scale + move.shift) / move.step
            if abs(move.scale) != 1:  # what was rounded before is scaled with it; else it is rounded again, at most
                slack, rounded = (slack + rounded) * abs(move.scale), Fraction(0)
            slack, rounded = slack / move.step, (rounded + move.step - 1) / move.step
        return rate, offset, slack

    @property
    def is_cut(self) -> bool:
        """Whether some of the source's positions are gone."""
        rate, offset, _ = self.affine
        ends = offset, rate * self.width + offset
        return min(ends) < 0 or max(ends) > (self.moves[-1].width if self.moves else self.width)

    def misses(self, other: Track) -> tuple[float, float]:
        """How far `other` begins after this track, and ends before it, in positions that lie together now."""
        (rate, offset, slack), (other_rate, other_offset, other_slack) = self.affine, other.affine
        if rate != other_rate:
            return inf, inf
        return max(ceil(other_offset - offset + other_slack), 0), max(ceil(offset - other_offset + slack), 0)

    def shorter_than(self, count: float) -> float:
        """How many positions of the source become `count` of them now."""
        return count if count in (0, inf) else ceil(count / abs(self.affine[0]))

    @property
    def origin(self) -> int:
        """Where the source's position 0 lies now; 0 where the dim was reversed."""
        at = 0
        for move in self.moves:
            at = ceil((at * move.scale + move.shift) / move.step)
        return 0 if any(move.scale < 0 for move in self.moves) else at


@dataclass(frozen=True)
class Effect:
    """What an operator does to one track of one operand.

    Attributes:
        place: where it goes; None: nowhere, the positions are gone or their places unknown.
        before, after: how many valid positions of the output, at the span's start and end, padding there can touch.
            0 and 0 without a place: unknown.
        reason: what the operator does.
    """

    place: Place | None
    before: float = 0
    after: float = 0
    reason: str = NOT_KNOWN


_Rule = Callable[[Call, Track], Effect]
_all = partial(Effect, before=inf, after=inf)
_CHOSEN = "it chooses them by an index"
_BROADCAST = "it broadcasts a spanned dim"

PADS = packets(
    "pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"
)
# These choose rows, or positions, by values.
ROUTES = packets("index_select index gather take_along_dim scatter scatter_add index_add index_put")
_MIXERS = {
    **dict.fromkeys(REDUCTIONS | packets("sort topk"), "it reduces or sorts them"),
    **dict.fromkeys(packets("linear"), "it sums over them"),
}
_SOFTMAX = packets("softmax log_softmax _softmax _log_softmax")
_ALONG = frozenset(packet for packet, rule in RULES.items() if rule is mix_along_rule)
_BLENDS = packets("upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d")
# Over which dims a norm takes its statistics.
_NORMS: Mapping[Any, Callable[[Call, int], bool]] = {
    **dict.fromkeys(
        packets("layer_norm rms_norm"), lambda call, dim: dim >= len(call.shape) - len(call.args["normalized_shape"])
    ),
    **dict.fromkeys(packets("group_norm"), lambda call, dim: dim >= 1),
    **dict.fromkeys(packets("instance_norm"), lambda call, dim: dim >= 2 and bool(call.args["use_input_stats"])),
    **dict.fromkeys(packets("batch_norm"), lambda call, dim: dim != 1 and bool(call.args["training"])),
}


def effect_of(packet: Any, call: Call, track: Track) -> Effect:
    """What an operator that is not elementwise does to a track of one operand, in one output."""
    try:
        if packet in _EFFECTS:
            return _EFFECTS[packet](call, track)
        if packet not in RULES or call.name != next(iter(call.args)):
            return Effect(None)
        found = RULES[packet](call, track.place)
    except NotStaticError:
        return Effect(None, reason="an amount is only known when it runs")
    if isinstance(found, str):
        return _all(None, reason=_MIXERS[packet]) if packet in _MIXERS else Effect(None, reason=found)
    if packet in _NORMS and _NORMS[packet](call, track.dim):
        return _all(found, reason="its statistics are taken over them")
    if packet in _ALONG and track.dim in call.dims():
        return Effect(found, inf, inf if packet in _SOFTMAX else 0, "it runs along them")
    if packet in _BLENDS and track.dim > 1 and call.out != call.shape:
        factor = call.out[track.dim] // call.shape[track.dim]
        further = factor if "bicubic" in call.op else 0
        if factor == 1 and not further:
            return Effect(found)
        # Position 0 is blended with position 1, with weight 0, which NaN survives.
        return Effect(found, ceil(factor / 2) + further, factor + further, "it interpolates between neighbours")
    return Effect(found)


def _windowed(call: Call, track: Track, kernel: int, stride: int, pad: int, dilation: int) -> Effect:
    """A window that slides along the dim: output o sees inputs `[o * stride - pad, o * stride - pad + reach]`.

    Which of them it belongs to is a convention: that which brings the source's position 0 back to 0, if the window
    allows. So a causal convolution looks back only, whoever has padded its input.
    """
    reach = dilation * (kernel - 1)
    ahead = min(max(track.origin + pad, 0), reach)
    move = Move(1, pad - ahead, call.out[track.dim], stride)
    place = track.place.moved(move, width=call.shape[track.dim])
    reason = f"its windows of {kernel}" + (f", dilation {dilation}," if dilation > 1 else "") + " see neighbours"
    return Effect(place, ceil(ahead / stride), ceil((reach - ahead) / stride), reason)


def _transposed(call: Call, track: Track, kernel: int, stride: int, pad: int, dilation: int) -> Effect:
    """Input i reaches outputs `[i * stride - pad, i * stride - pad + reach]`; `stride` of them are its own."""
    spare = max(dilation * (kernel - 1) - stride + 1, 0)
    ahead = min(max(pad - track.origin * stride, 0), spare)
    move = Move(stride, ahead - pad, call.out[track.dim])
    place = track.place.moved(move, width=call.shape[track.dim])
    return Effect(place, spare - ahead, ahead, f"its windows of {kernel}, stride {stride}, overlap")


def _sizes(call: Call, at: int, *names: str) -> list[int]:
    """Arguments that are one number, or one per spatial dim, at one of these dims."""
    given = [call.ints(name) for name in names]
    return [sizes[at] if len(sizes) > 1 else sizes[0] for sizes in given]


def _convolution(call: Call, track: Track) -> Effect:
    if call.name != "input":
        return Effect(None)
    weight = shape_of(call.args["weight"])
    channel = len(call.shape) - len(weight) + 1
    if track.dim <= channel:
        return Effect(track.place) if track.dim < channel else _all(None, reason="it sums over channels")
    at = track.dim - channel - 1
    kernel = weight[2 + at]
    stride, dilation = _sizes(call, at, "stride", "dilation")
    if isinstance(call.args["padding"], str):
        pad = dilation * (kernel - 1) // 2 if call.args["padding"] == "same" else 0
    else:
        (pad,) = _sizes(call, at, "padding")
    slide = _transposed if "transpose" in call.op else _windowed
    return slide(call, track, kernel, stride, pad, dilation)


def _pool(num: int, call: Call, track: Track) -> Effect:
    at = track.dim - (len(call.shape) - num)
    if at < 0:
        return Effect(track.place)
    kernel, pad = _sizes(call, at, "kernel_size", "padding")
    stride = _sizes(call, at, "stride")[0] if call.args["stride"] else kernel
    dilation = _sizes(call, at, "dilation")[0] if "dilation" in call.args else 1
    return _windowed(call, track, kernel, stride, pad, dilation)


def _adaptive_pool(num: int, call: Call, track: Track) -> Effect:
    if track.dim < len(call.shape) - num or call.out[track.dim] == call.shape[track.dim]:
        return Effect(track.place)
    return _all(None, reason="it pools over them")


def _unfold(call: Call, track: Track) -> Effect:
    (dim,), (size,), (step,) = call.dims("dimension"), call.ints("size"), call.ints("step")
    return _windowed(call, track, size, step, 0, 1) if track.dim == dim else Effect(track.place)


def elementwise(track: Track, shape: Sequence[int], out: Sequence[int]) -> Effect:
    """What an elementwise operator does to a track of an operand that it broadcasts from `shape` to `out`."""
    place = track.place.aligned(shape, out)
    return _one_for_all(track, 0) if place is None and shape[track.dim] == 1 else Effect(place)


def _one_for_all(track: Track, at: int) -> Effect:
    """One position is taken for all: padding, unless it is the first, and rows begin there."""
    _, end = track.place.apply(0, 1)  # an empty one if it was dropped
    return Effect(None, inf, 0 if at < end and not track.is_reversed else inf, "it takes one of them for all")


def _select(call: Call, track: Track) -> Effect:
    (dim,) = call.dims()
    if track.dim != dim:
        return Effect(track.place.shifted(dim, -1))
    return _one_for_all(track, call.ints("index")[0] % call.shape[dim] if "index" in call.args else call.index)


def _matmul(call: Call, track: Track) -> Effect:
    names = list(call.args)
    left, right = names[1:3] if names[1] in ("mat1", "batch1") else names[:2]  # addmm and baddbmm add their first
    if call.name not in (left, right):
        return elementwise(track, call.shape, call.out)
    ndim, from_right = len(call.shape), len(call.shape) - track.dim
    if from_right == (1 if call.name == left else min(2, ndim)):
        return _all(None, reason="it sums over them")
    other = len(shape_of(call.args[right if call.name == left else left]))
    return _seated(call, track, from_right - (other == 1 and from_right > 1))


def _seated(call: Call, track: Track, from_right: int) -> Effect:
    """The track at a dim of the output counted from the right, unless it is broadcast there."""
    dim = len(call.out) - from_right
    kept = dim >= 0 and call.out[dim] == call.shape[track.dim]
    return Effect(track.place.at(dim) if kept else None, reason=_BROADCAST)


def _attention(call: Call, track: Track) -> Effect:
    from_right = len(call.shape) - track.dim
    if (from_right == 2 and call.name in ("key", "value")) or (from_right == 1 and call.name != "value"):
        return _all(None, reason="it attends to them (masked ones count only where they are NaN or infinite)")
    return _seated(call, track, from_right)


def _recurrent(call: Call, track: Track) -> Effect:
    if call.name != "input" or len(call.shape) != 3:
        return Effect(None)
    time = 1 if call.args["batch_first"] else 0
    if track.dim == 1 - time:
        return Effect(track.place if call.index == 0 else track.place.at(1))
    if track.dim == 2 or call.index:
        return _all(None, reason="it mixes them")
    return Effect(track.place, inf, inf if call.args["bidirectional"] else 0, "its state runs along them")


def _lookup(call: Call, track: Track) -> Effect:
    """`embedding(weight, indices)` and `x[..., indices, ...]`."""
    if "weight" in call.args:
        return Effect(track.place if call.name == "indices" else None, reason=_CHOSEN)
    indexed = [(dim, given) for dim, given in enumerate(call.args["indices"]) if given is not None]
    (at, indices), *more = indexed
    if more or val(indices).dtype in (torch.bool, torch.uint8):
        return Effect(None, reason=_CHOSEN)
    if call.name == "indices":
        return Effect(track.place.shifted(0, at))
    if track.dim == at:
        return Effect(None, reason=_CHOSEN)
    return Effect(track.place.shifted(at, len(shape_of(indices)) - 1))


def _gather(call: Call, track: Track) -> Effect:
    if call.name == "index":
        return Effect(track.place)
    if call.name != "self" or track.dim in call.dims() or call.out[track.dim] != call.shape[track.dim]:
        return Effect(None, reason=_CHOSEN)
    return Effect(track.place)


def _index_put(call: Call, track: Track) -> Effect:
    """`x[mask] = value` is elementwise; other writes leave places where they are, and what they write is unknown."""
    first = call.args["indices"][0]
    is_mask = first is not None and val(first).dtype is torch.bool
    return Effect(track.place if call.name == "self" or (call.name == "indices" and is_mask) else None, reason=_CHOSEN)


def _over(argument: str, reason: str, call: Call, track: Track) -> Effect:
    """Operators that mix the dims that an argument names, or all."""
    given = call.args[argument]
    mixed = range(len(call.shape)) if given is None or given == [] else call.dims(argument)
    return _all(None, reason=reason) if track.dim in mixed else Effect(track.place)


def _by_num(rule: Callable[..., Effect], names: str) -> dict[Any, _Rule]:
    """A rule for 1, 2 and 3 spatial dims."""
    return {packet: partial(rule, num) for num in (1, 2, 3) for packet in packets(names.format(num))}


_EFFECTS: Mapping[Any, _Rule] = {
    **dict.fromkeys(packets("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"), _convolution),
    **_by_num(_pool, "avg_pool{0}d max_pool{0}d max_pool{0}d_with_indices"),
    **_by_num(_adaptive_pool, "adaptive_avg_pool{0}d adaptive_max_pool{0}d"),
    **dict.fromkeys(packets("unfold"), _unfold),
    **dict.fromkeys(packets("select unbind"), _select),
    **dict.fromkeys(packets("matmul mm bmm mv dot addmm baddbmm"), _matmul),
    **dict.fromkeys(packets("scaled_dot_product_attention"), _attention),
    **dict.fromkeys(packets("lstm gru rnn_tanh rnn_relu"), _recurrent),
    **dict.fromkeys(packets("embedding index"), _lookup),
    **dict.fromkeys(packets("gather take_along_dim"), _gather),
    **dict.fromkeys(packets("index_put index_put_"), _index_put),
    **dict.fromkeys(packets("roll"), partial(_over, "dims", "it wraps them around")),
    **dict.fromkeys(
        packets("fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_fftn fft_ifftn fft_rfftn"),
        partial(_over, "dim", "it transforms along them"),
    ),
}
