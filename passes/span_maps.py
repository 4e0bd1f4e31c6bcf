"""Where rows and spans of a marked value lie in a tensor that derives from it: plain integer arithmetic.

A marked value is a padded tensor `[bs, ...]` whose row i is valid in `[start, end)` along each of its spanned dims. In
a derived tensor the rows may lie along another dim, each spanned dim may be another dim, and positions may have moved.
The rules say so per kind of operator, from its arguments and shapes, for one of these dims at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod
from typing import Any, TypeVar

from torch import Tensor

_Refusal = TypeVar("_Refusal")


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


@dataclass(frozen=True)
class Place:
    """Where the rows, or the positions of one spanned dim, lie in one tensor.

    Attributes:
        dim: dim of the tensor, not negative.
        moves: what happened to the positions, in order.
        keeps_rows: whether they are rows that must all stay where they are; rules refuse what moves them.
    """

    dim: int
    moves: tuple[Move, ...] = ()
    keeps_rows: bool = False

    def apply(self, start: int, end: int) -> tuple[int, int]:
        """Where `[start, end)` lies. Empty is always `(0, 0)`."""
        if start >= end:
            return 0, 0
        for move in self.moves:
            start, end = move.apply(start, end)
        return start, end

    def at(self, dim: int) -> Place:
        """The same positions along another dim."""
        return self if dim == self.dim else replace(self, dim=dim)

    def shifted(self, first: int, by: int) -> Place:
        """The place after dims from `first` on have become dims `by` further right."""
        return self.at(self.dim + by) if self.dim >= first else self

    def aligned(self, shape: Sequence[int], out: Sequence[int]) -> Place | None:
        """The place after broadcasting from `shape` to `out`; None where the dim grows."""
        dim = self.dim + len(out) - len(shape)
        return self.at(dim) if len(out) >= len(shape) and shape[self.dim] == out[dim] else None

    def reseated(self, shape: Sequence[int], out: Sequence[int]) -> Place | None:
        """The place after viewing elements in `shape` as `out`; None where the dim is taken apart.

        A dim is the same in both if its size and the number of elements to its left are. Neighbouring dims of size 1
        are told apart by their order, and only where as many of them are in both; but rows that come first stay first.
        """
        if 0 in shape:
            return self if tuple(shape) == tuple(out) else None
        before, after = _kinds(tuple(shape)), _kinds(tuple(out))
        same = [at for at, kind in enumerate(before) if kind == before[self.dim]]
        seats = [at for at, kind in enumerate(after) if kind == before[self.dim]]
        if len(same) == len(seats):
            return self.at(seats[same.index(self.dim)])
        return self.at(seats[0]) if self.keeps_rows and self.dim == 0 and seats else None

    def moved(self, move: Move, *, width: int) -> Place:
        """The place after one more step along the dim, whose size was `width`."""
        if move.scale == 1 and move.shift == 0 and move.step == 1 and move.width >= width:
            return self  # every span stays as it is
        return replace(self, moves=(*self.moves, move))


@dataclass(frozen=True)
class SpanMap:
    """How rows and spans of a marked value lie in one tensor.

    Spans must have been checked against the marked value's width (`0 <= start <= end <= width`): nothing here can tell
    a bad span from one that a slice of the graph has cut.

    Attributes:
        places: of the rows, then of each declared spanned dim, in declaration order.
    """

    places: tuple[Place, ...]

    @classmethod
    def identity(cls, ndim: int, dims: Sequence[int]) -> SpanMap:
        """The map of a marked value itself: rows along dim 0, spans along `dims` (may be negative)."""
        places = tuple(dim + ndim if dim < 0 else dim for dim in dims)
        if len(set(places)) != len(places) or not all(0 < place < ndim for place in places):
            raise ValueError(
                f"spanned dims {tuple(dims)} do not fit a value of {ndim} dims: they must be different dims, none of "
                f"them the row dim 0"
            )
        return cls((Place(0, keeps_rows=True), *map(Place, places)))

    @property
    def row_dim(self) -> int:
        """Dim of the tensor along which the rows lie."""
        return self.places[0].dim

    @cached_property
    def row_dims(self) -> tuple[int, ...]:
        """The spanned dims of a row, in declaration order."""
        return tuple(dim for dim, _ in self._row_places)

    @cached_property
    def is_identity(self) -> bool:
        """Whether spans hold as they were declared. Rows and spanned dims may still be other dims than they were."""
        return not any(place.moves for place in self.places)

    def mapped(self, rule: Callable[[Place], Place | _Refusal]) -> SpanMap | _Refusal:
        """The map of what a rule makes of each place; or what it says where that is no place, of the first such."""
        places = []
        for place in self.places:
            if not isinstance(found := rule(place), Place):
                return found
            places.append(found)
        return SpanMap(tuple(places))

    def apply(self, dim_index: int, start: int, end: int) -> tuple[int, int]:
        """Where the span `[start, end)` of the `dim_index`-th declared spanned dim lies. Empty is always `(0, 0)`."""
        return self.places[1 + dim_index].apply(start, end)

    def cut(self, tensor: Tensor, row: int, spans: Sequence[tuple[int, int]]) -> Tensor:
        """View of one row's valid part.

        Args:
            tensor: the tensor that this map describes.
            row: position of the row.
            spans: the declared `(start, end)` per spanned dim; the map is applied here.
        """
        view = tensor.select(self.row_dim, row) if self.row_dim else tensor[row]
        for (dim, place), (start, end) in zip(self._row_places, spans, strict=True):
            if place.moves:
                start, end = place.apply(start, end)
            view = view.narrow(dim, start, end - start)
        return view

    @cached_property
    def _row_places(self) -> list[tuple[int, Place]]:
        """The spanned dims once the row has been selected, and their places."""
        rows, *others = self.places
        return [(place.dim - (place.dim > rows.dim), place) for place in others]


@lru_cache(maxsize=4096)
def _kinds(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each dim the number of elements to its left, and its size."""
    return [(prod(sizes[:dim]), sizes[dim]) for dim in range(len(sizes))]


class NotStaticError(Exception):
    """A rule needs a number that is computed in the graph."""


@dataclass(frozen=True)
class Call:
    """One call of an operator, as the rules see it: one of its operands, and one of its outputs.

    Attributes:
        op: name of the operator.
        args: its arguments by schema name, defaults filled in.
        name: of the operand that carries the spans.
        shape: its shape.
        outs: shape of each output.
        index: which output.
        landing: which dim of that output a dim of the operand becomes, for operators that keep or drop whole dims.
    """

    op: str
    args: Mapping[str, Any]
    name: str
    shape: tuple[int, ...]
    outs: tuple[tuple[int, ...], ...]
    index: int
    landing: Callable[[int], int | None]

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the output."""
        return self.outs[self.index]

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


# A rule says where one place of the operand lies in the output, or gives the reason why that is not known.
Rule = Callable[[Call, Place], Place | str]


def keep_rule(call: Call, place: Place) -> Place | str:
    return place if call.out == call.shape else "it changes the shape"


def mix_along_rule(call: Call, place: Place) -> Place | str:
    return "it mixes rows" if place.keeps_rows and place.dim in call.dims() else place


def elsewhere_rule(call: Call, place: Place) -> Place | str:
    return "it re-orders rows or spanned positions" if place.dim in call.dims() else place


def before_last_rule(call: Call, place: Place) -> Place | str:
    return "it mixes the row dim or a spanned dim into features" if place.dim == len(call.shape) - 1 else place


def drop_dim_rule(call: Call, place: Place) -> Place | str:
    (dropped,) = call.dims()
    if dropped == place.dim:
        return "it takes one position of the row dim or of a spanned dim"
    return place.shifted(dropped, -1)


def land_rule(call: Call, place: Place) -> Place | str:
    dim = call.landing(place.dim)
    return "it reduces, merges or drops the row dim or a spanned dim" if dim is None else place.at(dim)


def seat_rule(call: Call, place: Place) -> Place | str:
    return place.reseated(call.shape, call.out) or "it merges or splits the row dim or a spanned dim"


def align_rule(call: Call, place: Place) -> Place | str:
    return place.aligned(call.shape, call.out) or "it repeats the row dim or a spanned dim"


def slice_rule(call: Call, place: Place) -> Place | str:
    if call.dims() != [place.dim]:
        return place
    # `narrow` has a length, and no step; the output's size says where either ends.
    (step,) = call.ints("step") if "step" in call.args else (1,)
    first = None if call.args["start"] is None else call.ints("start")[0]
    start, _, _ = slice(first, None).indices(call.shape[place.dim])
    return _sliced(call, place, start, step)


def split_rule(call: Call, place: Place) -> Place | str:
    (dim,) = call.dims()
    widths = [out[dim] for out in call.outs]
    if sum(widths) != call.shape[dim]:
        return "its parts overlap"
    return _sliced(call, place, sum(widths[: call.index])) if dim == place.dim else place


def _sliced(call: Call, place: Place, start: int, step: int = 1) -> Place | str:
    width = call.out[place.dim]
    if width == call.shape[place.dim]:
        return place
    return "it drops rows" if place.keeps_rows else _moved(call, place, Move(1, -start, width, step))


def _moved(call: Call, place: Place, move: Move) -> Place:
    return place.moved(move, width=call.shape[place.dim])


def pad_rule(call: Call, place: Place) -> Place | str:
    at = 2 * (len(call.shape) - 1 - place.dim)  # amounts begin with the last dim
    left, right = call.ints("pad" if "pad" in call.args else "padding")[at : at + 2] or (0, 0)
    if place.keeps_rows:
        return "it pads or crops rows" if left or right else place
    return _moved(call, place, Move(1, left, call.out[place.dim]))


def flip_rule(call: Call, place: Place) -> Place | str:
    if place.dim not in call.dims("dims"):
        return place
    size = call.shape[place.dim]
    return "it re-orders rows" if place.keeps_rows else _moved(call, place, Move(-1, size, size))


def repeat_interleave_rule(call: Call, place: Place) -> Place | str:
    (repeats,) = call.ints("repeats")
    if call.args["dim"] is None:
        return "it flattens its input"
    if call.dims() != [place.dim]:
        return place
    return "it repeats rows" if place.keeps_rows else _scaled(call, place, repeats)


def pixel_shuffle_rule(call: Call, place: Place) -> Place | str:
    channel = len(call.shape) - 3
    if place.dim == channel or (place.keeps_rows and place.dim > channel):
        return "it moves rows or spanned positions between dims"
    (factor,) = call.ints("upscale_factor")
    return _scaled(call, place, factor) if place.dim > channel else place


def upsample_rule(call: Call, place: Place) -> Place | str:
    dim = place.dim
    if dim < 2:
        return place
    if place.keeps_rows:
        return "it resizes the row dim"
    width = call.out[dim]
    by_dim = [given for name, given in call.args.items() if name.startswith("scales")]  # scales, scales_h, ...
    scales = call.args.get("scale_factors") or by_dim or [None] * len(call.out)
    factor, rest = divmod(width, call.shape[dim])
    if rest or scales[dim - 2] not in (None, float(factor)):
        return f"it does not resize {call.shape[dim]} positions by a whole factor"
    if factor == 1:
        return place
    if call.args.get("align_corners"):
        return "align_corners=True maps positions by a fraction"
    if "nearest" in call.op and not _nearest_is_exact(call.op, factor, width):
        return f"in float32 it does not repeat each position exactly {factor} times (repeat_interleave does)"
    return _scaled(call, place, factor)


def _nearest_is_exact(op: str, factor: int, width: int) -> bool:
    """Whether output j copies input `j // factor`.

    The operator takes `floor(j * float32(1 / factor))`, which is one too low for some j where the rounding error is
    over 2^-25 (first for factor 41). The exact variant, which adds 1/2 to j, has no such case.
    """
    rounded = Fraction(struct.unpack("f", struct.pack("f", 1 / factor))[0])
    return width < 2**22 and ("exact" in op or rounded * factor >= 1 - Fraction(1, 2**25))


def _scaled(call: Call, place: Place, factor: int) -> Place:
    return _moved(call, place, Move(factor, 0, call.out[place.dim]))


def cat_rule(call: Call, place: Place) -> Place | str:
    if call.dims() != [place.dim]:
        return place
    ahead = call.args.get("ahead")
    if place.keeps_rows or ahead is None:
        return "it joins rows or spanned positions"
    return _moved(call, place, Move(1, ahead, call.out[place.dim]))


def stack_rule(call: Call, place: Place) -> Place | str:
    return place.shifted(call.ints("dim")[0] % len(call.out), 1)
