"""How an output of a graph is cut into rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spangraph.errors import SpanError
from spangraph.kernels.compact import check_source
from spangraph.passes.span_maps import SpanMap
from spangraph.slots import Copy, Region, aligned
from spangraph.spans import Span, describe_bad_span

# One of a row's parts: (start, end) along each spanned dim of the output.
Window = tuple[tuple[int, int], ...]


# What all rows of an output have in common that are views which one operator each makes: `as_strided` of the output;
# shape and strides of a padded row; which of its dims is the spanned one, and that one's width and stride; and where
# the rows begin: offset and stride, in elements.
Grid = tuple[Callable[..., Tensor], Sequence[int], Sequence[int], int, int, int, int | torch.SymInt, int]


@dataclass(frozen=True, eq=False)
class Cut:
    """How one output tensor of a graph is cut.

    Attributes:
        name: public name of the spanned output whose spans apply.
        column: its column in the slot.
        output: index of the tensor among the graph's outputs.
        span: the declaration.
        widths: size of each spanned dim of the declared value; spans are checked against these.
        span_map: where row and spans lie in this output.
        label: what messages call it.
        row_shape: shape of a padded row of this output.
        dtype: of the delivered rows.
        casts: whether they are int16 PCM made of floats.
        region: where a copy slot holds them; None if they are views.
        single_width: width of the spanned dim where a row has one span, which holds in this output as it is; else -1.
        single_dim: the spanned dim of a row whose view one operator makes; else -1.
    """

    name: str
    column: str
    output: int
    span: Span
    widths: tuple[int, ...]
    span_map: SpanMap
    label: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    casts: bool = False
    region: Region | None = None
    single_width: int = field(init=False, repr=False)
    single_dim: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        has_one = self.span.words_per_row == 2 and self.span_map.is_identity
        is_plain = has_one and self.region is None and not self.dtype.is_complex and self.span_map.row_dim == 0
        object.__setattr__(self, "single_width", self.widths[0] if has_one else -1)
        object.__setattr__(self, "single_dim", self.span_map.row_dims[0] if is_plain else -1)

    def windows(self, words: Sequence[int], position: int) -> list[Window]:
        """A row's parts in this output that are not empty, in the order of its spans.

        Args:
            words: the spans of the step's rows, as they were staged.

        Raises:
            SpanError: for a bad span, without the row's id.
        """
        span_map = self.span_map
        is_identity = span_map.is_identity
        word = position * self.span.words_per_row
        found: list[Window] = []
        for _ in range(self.span.max_spans):
            window: list[tuple[int, int]] = []
            is_empty = False
            for dim, width in enumerate(self.widths):
                start, end = words[word], words[word + 1]
                word += 2
                if not 0 <= start <= end <= width:
                    raise SpanError(
                        f"of {self.label!r} (dim {self.span.dims[dim]}): {describe_bad_span(start, end, width)}."
                        " Other rows of the step are not affected."
                    )
                if not is_identity:
                    start, end = span_map.apply(dim, start, end)
                window.append((start, end))
                is_empty |= start == end
            if not is_empty:
                found.append(tuple(window))
        return found

    @property
    def source_dims(self) -> tuple[int, ...]:
        """The spanned dims once the rows have been moved to dim 0."""
        return tuple(dim + 1 for dim in self.span_map.row_dims)

    def view(self, padded: Tensor, position: int, window: Window) -> Tensor:
        """A row's part, as a view of the output."""
        row_dim = self.span_map.row_dim
        view = padded.select(row_dim, position) if row_dim else padded[position]
        for dim, (start, end) in zip(self.span_map.row_dims, window, strict=True):
            view = view.narrow(dim, start, end - start)
        return view

    def crop_shape(self, window: Window) -> list[int]:
        """Shape of a row's part."""
        shape = list(self.row_shape)
        for dim, (start, end) in zip(self.span_map.row_dims, window, strict=True):
            shape[dim] = end - start
        return shape

    def crop_bytes(self, window: Window) -> int:
        """Bytes of that part in a copy slot."""
        return aligned(math.prod(self.crop_shape(window)) * self.dtype.itemsize)

    def padded_bytes(self, num_rows: int) -> int:
        """The most bytes that a step's rows can take there: each span may be as wide as the output."""
        return num_rows * self.span.max_spans * aligned(math.prod(self.row_shape) * self.dtype.itemsize)

    def copied_to(self, region: Region, copy: Copy) -> Cut:
        """The cut whose rows a copy slot holds, in `region`.

        Raises:
            DeclarationError: if `copy` casts what is no float.
            InputError: if rows of this dtype or size cannot be copied.
        """
        check_source(f"output {self.label!r}", self.row_shape, self.dtype)
        dtype = copy.delivered(self.dtype, self.name)
        return replace(self, region=region, dtype=dtype, casts=dtype is not self.dtype)


def make_cut(name: str, column: str, output: int, span: Span, value: Tensor) -> Cut:
    """A cut of the declared value itself."""
    widths = tuple(value.shape[dim] for dim in span.dims)
    span_map = SpanMap.identity(value.ndim, span.dims)
    return Cut(name, column, output, span, widths, span_map, name, tuple(value.shape[1:]), value.dtype)
