"""Where rows and spans of a marked value lie in a tensor that derives from it: plain integer arithmetic.

A marked value is a padded tensor `[bs, ...]` whose row i is valid in `[start, end)` along each of its spanned dims. In
a derived tensor the rows may lie along another dim, each spanned dim may be another dim, and positions may have moved.
The rules say so per kind of operator, from its arguments and shapes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Move:
    """One step of a span along one dim: position p goes to `(p * scale + shift) / step`, inside `[0, width)`.

    Attributes:
        scale: how many positions one position becomes; negative where the dim is reversed.
        shift: added after scaling.
        width: size of the dim afterwards. What falls outside was cut off, so the span is intersected with it.
        step: every step-th position is kept, counted from the shifted origin.
    """

    scale: int
    shift: int
    width: int
    step: int = 1

    def apply(self, start: int, end: int) -> tuple[int, int]:
        """Where `[start, end)` lies afterwards. A span that is empty, or becomes so, is `(0, 0)`."""
        if start >= end:
            return 0, 0
        first, last = start * self.scale + self.shift, end * self.scale + self.shift
        if self.scale < 0:
            first, last = last, first
        first = max(-(-first // self.step), 0)
        last = min(-(-last // self.step), self.width)
        return (first, last) if first < last else (0, 0)

    def keeps(self, width: int) -> bool:
        """Whether every span of a dim of size `width` stays as it is."""
        return self.scale == 1 and self.shift == 0 and self.step == 1 and self.width >= width


@dataclass(frozen=True)
class SpanMap:
    """How rows and spans of a marked value lie in one tensor.

    Spans must have been checked against the marked value's width (`0 <= start <= end <= width`): nothing here can tell
    a bad span from one that a slice of the graph has cut.

    Attributes:
        row_dim: dim of the tensor along which the rows lie; None where only positions are followed.
        dims: dim of the tensor for each declared spanned dim, in declaration order, none negative.
        moves: for each of them, what happened to its positions, in order.
    """

    row_dim: int | None
    dims: tuple[int, ...]
    moves: tuple[tuple[Move, ...], ...]

    @classmethod
    def identity(cls, ndim: int, dims: Sequence[int]) -> SpanMap:
        """The map of a marked value itself: rows along dim 0, spans along `dims` (may be negative)."""
        places = tuple(dim + ndim if dim < 0 else dim for dim in dims)
        if len(set(places)) != len(places) or not all(0 < place < ndim for place in places):
            raise ValueError(
                f"spanned dims {tuple(dims)} do not fit a value of {ndim} dims: they must be different dims, none of "
                f"them the row dim 0"
            )
        return cls(0, places, ((),) * len(places))

    @cached_property
    def is_identity(self) -> bool:
        """Whether spans hold as they were declared. Rows and spanned dims may still be other dims than they were."""
        return not any(self.moves)

    @property
    def tracked(self) -> tuple[int, ...]:
        """The row dim and the spanned dims."""
        return self.dims if self.row_dim is None else (self.row_dim, *self.dims)

    def apply(self, dim_index: int, start: int, end: int) -> tuple[int, int]:
        """Where the span `[start, end)` of the `dim_index`-th declared spanned dim lies. Empty is always `(0, 0)`."""
        if start >= end:
            return 0, 0
        for move in self.moves[dim_index]:
            start, end = move.apply(start, end)
        return start, end

    def cut(self, tensor: Tensor, row: int, spans: Sequence[tuple[int, int]]) -> Tensor:
        """View of one row's valid part.

        Args:
            tensor: the tensor that this map describes.
            row: position of the row.
            spans: the declared `(start, end)` per spanned dim; the map is applied here.
        """
        view = tensor[row] if not self.row_dim else tensor.select(self.row_dim, row)
        if self.is_identity:
            for dim, (start, end) in zip(self.row_dims, spans, strict=True):
                view = view.narrow(dim, start, end - start)
            return view
        for index, (dim, span) in enumerate(zip(self.row_dims, spans, strict=True)):
            start, end = self.apply(index, *span)
            view = view.narrow(dim, start, end - start)
        return view

    @cached_property
    def row_dims(self) -> tuple[int, ...]:
        """The spanned dims once the row has been selected."""
        return tuple(dim - (self.row_dim is not None and dim > self.row_dim) for dim in self.dims)

    def relaid(self, places: Mapping[int, int | None]) -> SpanMap | None:
        """The same spans after dim d has become dim `places[d]`; None if the row dim or a spanned dim has no place."""
        found = [place for dim in self.tracked if (place := places.get(dim)) is not None]
        return self._at(found) if len(found) == len(self.tracked) else None

    def _at(self, tracked: Sequence[int]) -> SpanMap:
        row_dim, dims = (None, tracked) if self.row_dim is None else (tracked[0], tracked[1:])
        return SpanMap(row_dim, tuple(dims), self.moves)

    def shifted(self, first: int, by: int) -> SpanMap:
        """The same spans after dims from `first` on have become dims `by` further right."""
        return self._at([dim + by if dim >= first else dim for dim in self.tracked])

    def aligned(self, shape: Sequence[int], out: Sequence[int]) -> SpanMap | None:
        """The map after broadcasting from `shape` to `out`; None where the row dim or a spanned dim grows."""
        ahead = len(out) - len(shape)
        if ahead < 0 or any(shape[dim] != out[dim + ahead] for dim in self.tracked):
            return None
        return self.shifted(0, ahead)

    def reseated(self, shape: Sequence[int], out: Sequence[int]) -> SpanMap | None:
        """The map after viewing elements in `shape` as `out`; None where the row dim or a spanned dim is taken apart.

        A dim is the same in both if its size and the number of elements to its left are. Neighbouring dims of size 1
        are told apart by their order, and only where as many of them are in both; but rows that come first stay first.
        """
        if 0 in shape:
            return self if tuple(shape) == tuple(out) else None
        before, after = _kinds(tuple(shape)), _kinds(tuple(out))
        places: dict[int, int | None] = {}
        for dim in self.tracked:
            same = [at for at, kind in enumerate(before) if kind == before[dim]]
            seats = [at for at, kind in enumerate(after) if kind == before[dim]]
            if len(same) == len(seats):
                places[dim] = seats[same.index(dim)]
            elif dim == self.row_dim == 0 and seats:
                places[dim] = seats[0]
        return self.relaid(places)

    def moved(self, dim: int, move: Move, *, width: int) -> SpanMap:
        """The map after one more step along the spanned dim `dim`, whose size was `width`."""
        if move.keeps(width):
            return self
        index = self.dims.index(dim)
        moves = (*self.moves[:index], (*self.moves[index], move), *self.moves[index + 1 :])
        return SpanMap(self.row_dim, self.dims, moves)


@lru_cache(maxsize=4096)
def _kinds(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each dim the number of elements to its left, and its size."""
    return [(prod(sizes[:dim]), sizes[dim]) for dim in range(len(sizes))]


class NotStaticError(Exception):
    """A rule needs a number that is computed in the graph."""


@dataclass(frozen=True)
class Call:
    """One call of an operator, as the rules see it.

    Attributes:
        op: name of the operator.
        args: its arguments by schema name, defaults filled in.
        shape: shape of the operand that carries the spans.
        outs: shape of each output.
        landing: which dim of the n-th output a dim of the operand becomes, `(dim, n)`, for operators that keep or drop
            whole dims.
    """

    op: str
    args: Mapping[str, Any]
    shape: tuple[int, ...]
    outs: tuple[tuple[int, ...], ...]
    landing: Callable[[int, int], int | None]

    def ints(self, name: str) -> list[int]:
        """An argument that is an int or a list of ints."""
        given = self.args[name]
        amounts = list(given) if isinstance(given, (list, tuple)) else [given]
        if not all(isinstance(amount, int) for amount in amounts):
            raise NotStaticError
        return amounts

    def dims(self, name: str = "dim") -> list[int]:
        """An argument that names dims of the operand, none negative."""
        return [dim % len(self.shape) for dim in self.ints(name)]


# A rule says where the spans of the operand lie in the index-th output, or gives the reason why that is not known.
Rule = Callable[[Call, SpanMap, int], SpanMap | str]


def keep_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    return spans if call.outs[index] == call.shape else "it changes the shape"


def mix_along_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    return "it mixes rows" if spans.row_dim in call.dims() else spans


def elsewhere_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    return "it re-orders rows or spanned positions" if set(call.dims()) & set(spans.tracked) else spans


def before_last_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    return "it mixes the row dim or a spanned dim into features" if len(call.shape) - 1 in spans.tracked else spans


def drop_dim_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    (dropped,) = call.dims()
    if dropped in spans.tracked:
        return "it takes one position of the row dim or of a spanned dim"
    return spans.shifted(dropped, -1)


def land_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    places = {dim: call.landing(dim, index) for dim in spans.tracked}
    return spans.relaid(places) or "it reduces, merges or drops the row dim or a spanned dim"


def seat_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    return spans.reseated(call.shape, call.outs[index]) or "it merges or splits the row dim or a spanned dim"


def align_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    return spans.aligned(call.shape, call.outs[index]) or "it repeats the row dim or a spanned dim"


def slice_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    (dim,) = call.dims()
    if dim not in spans.tracked:
        return spans
    (step,) = call.ints("step")
    bounds = [None if call.args[name] is None else call.ints(name)[0] for name in ("start", "end")]
    start, _, _ = slice(*bounds).indices(call.shape[dim])
    return _sliced(call, spans, dim, start, call.outs[index][dim], step)


def narrow_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    (dim,) = call.dims()
    if dim not in spans.tracked:
        return spans
    (start,) = call.ints("start")
    return _sliced(call, spans, dim, start + (call.shape[dim] if start < 0 else 0), call.outs[index][dim])


def split_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    (dim,) = call.dims()
    widths = [out[dim] for out in call.outs]
    if sum(widths) != call.shape[dim]:
        return "its parts overlap"
    return _sliced(call, spans, dim, sum(widths[:index]), widths[index])


def _sliced(call: Call, spans: SpanMap, dim: int, start: int, width: int, step: int = 1) -> SpanMap | str:
    if dim not in spans.tracked or width == call.shape[dim]:
        return spans
    if dim == spans.row_dim:
        return "it drops rows"
    return spans.moved(dim, Move(1, -start, width, step), width=call.shape[dim])


def pad_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    amounts = call.ints("pad" if "pad" in call.args else "padding")
    for dim, left, right in zip(range(len(call.shape) - 1, -1, -1), amounts[::2], amounts[1::2], strict=False):
        if dim == spans.row_dim and (left or right):
            return "it pads or crops rows"
        if dim in spans.dims:
            spans = spans.moved(dim, Move(1, left, call.outs[index][dim]), width=call.shape[dim])
    return spans


def flip_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    for dim in call.dims("dims"):
        size = call.shape[dim]
        if dim == spans.row_dim:
            return "it re-orders rows"
        if dim in spans.dims:
            spans = spans.moved(dim, Move(-1, size, size), width=size)
    return spans


def repeat_interleave_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    (repeats,) = call.ints("repeats")
    if call.args["dim"] is None:
        return "it flattens its input"
    (dim,) = call.dims()
    if dim == spans.row_dim:
        return "it repeats rows"
    return _scaled(call, spans, dim, repeats, index) if dim in spans.dims else spans


def pixel_shuffle_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    channel, *spatial = range(len(call.shape) - 3, len(call.shape))
    if channel in spans.tracked or spans.row_dim in spatial:
        return "it moves rows or spanned positions between dims"
    (factor,) = call.ints("upscale_factor")
    for dim in set(spatial) & set(spans.dims):
        spans = _scaled(call, spans, dim, factor, index)
    return spans


def upsample_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    out, is_nearest = call.outs[index], "nearest" in call.op
    if spans.row_dim is not None and spans.row_dim > 1:
        return "it resizes the row dim"
    by_dim = [given for name, given in call.args.items() if name.startswith("scales")]  # scales, scales_h, ...
    scales = call.args.get("scale_factors") or by_dim or [None] * len(out)
    for dim in (dim for dim in spans.dims if dim > 1):
        factor, rest = divmod(out[dim], call.shape[dim])
        if rest or scales[dim - 2] not in (None, float(factor)):
            return f"it does not resize {call.shape[dim]} positions by a whole factor"
        if factor == 1:
            continue
        if call.args.get("align_corners"):
            return "align_corners=True maps positions by a fraction"
        if is_nearest and not _nearest_is_exact(call.op, factor, out[dim]):
            return f"in float32 it does not repeat each position exactly {factor} times (repeat_interleave does)"
        spans = _scaled(call, spans, dim, factor, index)
    return spans


def _nearest_is_exact(op: str, factor: int, width: int) -> bool:
    """Whether output j copies input `j // factor`.

    The operator takes `floor(j * float32(1 / factor))`, which is one too low for some j where the rounding error is
    over 2^-25 (first for factor 41). The exact variant, which adds 1/2 to j, has no such case.
    """
    rounded = Fraction(struct.unpack("f", struct.pack("f", 1 / factor))[0])
    return width < 2**22 and ("exact" in op or rounded * factor >= 1 - Fraction(1, 2**25))


def _scaled(call: Call, spans: SpanMap, dim: int, factor: int, index: int) -> SpanMap:
    return spans.moved(dim, Move(factor, 0, call.outs[index][dim]), width=call.shape[dim])


def cat_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    (dim,) = call.dims()
    if dim not in spans.tracked:
        return spans
    ahead = call.args.get("ahead")
    if dim == spans.row_dim or ahead is None:
        return "it joins rows or spanned positions"
    return spans.moved(dim, Move(1, ahead, call.outs[index][dim]), width=call.shape[dim])


def stack_rule(call: Call, spans: SpanMap, index: int) -> SpanMap | str:
    new = call.ints("dim")[0] % len(call.outs[index])
    return spans.shifted(new, 1)
