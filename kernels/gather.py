"""Crops of padded rows: how a row lies, the device code that copies a crop, and `gather`, which copies a list of them.

A crop is the part of one row of a source `[bs, ...]` that lies within a (start, end) of each spanned dim. Here the host
has checked them; `compact` copies those that it checks on the device.
"""

# What pyright sees of Triton's constants: no attributes, and no `for` over a static range.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spangraph.errors import StagingError
from spangraph.kernels.stage import bytes_at, has_triton

if TYPE_CHECKING:
    # See `stage`: at run time `load_copying` binds `tl`.
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: TC004

Crop = tuple[int, tuple[tuple[int, int], ...]]
"""A row, and (start, end) of each spanned dim."""

UNIT_BYTES = 16
"""The widest store: targets start at multiples of it, and are written in whole units."""

NUM_THREADS = 128
"""Threads of a CTA. On HIP with its wide waves too, so that a tile has 16 bytes for each."""

# Of a padded row, up to which `bytearray` copies: an operator costs more a row, but lets go of the GIL and may take
# several threads.
_MAX_COPIED_BYTES = 2**18

# Two 16-byte stores a thread and tile, but no more than 16 items a thread: with 32 of one byte, in two spanned dims,
# sm_90 takes 255 registers. Items of 4 bytes and more take 24 to 48 registers, which leaves the SM full of warps.
_TILE_BYTES = 4096
_TILE_ITEMS = 2048

# Not measured on a GPU. Chunks grow with the rows until an output has no more than about so many CTAs: each reads the
# record, and all rows' spans, before it copies.
_CHUNK_BYTES = 16384
_MAX_CTAS = 4096

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def load_once(load: Callable[[], Any]) -> Callable[[], Any]:
    """`load` that runs once, whatever threads call it: it replaces globals that kernels call by jitted functions."""
    lock, cached = threading.Lock(), functools.cache(load)

    def get() -> Any:
        with lock:
            return cached()

    return get


@load_once
def load_copying() -> tuple[Any, Any]:
    """The jitted `_crop_size` and `_copy_chunk`; imports Triton at the first call."""
    if not has_triton():
        raise StagingError("copying rows needs Triton, which is not installed: `pip install spangraph[triton]`")
    global tl
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return triton.jit(_crop_size), triton.jit(_copy_chunk)


@load_once
def _load_kernel() -> Any:
    """The jitted `_gather_kernel`."""
    helpers = load_copying()
    import triton

    globals().update(_crop_size=helpers[0], _copy_chunk=helpers[1])
    return triton.jit(do_not_specialize_on_alignment=["source_ptr"])(_gather_kernel)


@dataclass(frozen=True)
class Layout:
    """How the rows of a source lie, and how they are copied; a constant to the kernels. Items are integers.

    Attributes:
        scales, spans, strides: the dims of a row from the innermost, merged where that changes nothing. A dim has
            `scale * (end - start)` items, of the spanned dim number `span`; or `scale` items if that is -1.
        row_stride: between rows.
        sizes: of the spanned dims, unmerged, in the order of the spans.
        fixed: items of a crop for each position of its spanned dims.
        vector: items in 16 bytes of the target.
        tile: items that a CTA copies at a time.
        chunk: items of a crop that a CTA copies, a multiple of `tile`.
        num_chunks: in a whole row; at least 1.
        is_pcm: whether the target is int16 PCM.
    """

    scales: tuple[int, ...]
    spans: tuple[int, ...]
    strides: tuple[int, ...]
    row_stride: int
    sizes: tuple[int, ...]
    fixed: int
    vector: int
    tile: int
    chunk: int
    num_chunks: int
    is_pcm: bool


def lay_out(source: Tensor, dims: Sequence[int], num_crops: int, *, is_pcm: bool = False) -> Layout:
    """The layout of `source` (integers, see `as_ints`, unless for PCM), of which up to `num_crops` crops are copied."""
    item_bytes = 2 if is_pcm else source.element_size()
    return _lay_out(tuple(source.shape), source.stride(), tuple(dims), num_crops, item_bytes, is_pcm)


@functools.lru_cache(1024)
def _lay_out(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dims: tuple[int, ...],
    num_crops: int,
    item_bytes: int,
    is_pcm: bool,
) -> Layout:
    merged: list[tuple[int, int, int]] = []
    for dim in range(len(shape) - 1, 0, -1):
        span = dims.index(dim) if dim in dims else -1
        scale, stride = 1 if span >= 0 else shape[dim], strides[dim]
        if merged and merged[-1][1] < 0 and stride == merged[-1][0] * merged[-1][2]:
            scale, stride = scale * merged[-1][0], merged.pop()[2]
        elif scale == 1 and span < 0:
            continue
        merged.append((scale, span, stride))
    row_bytes = math.prod(shape[1:]) * item_bytes
    chunk = _CHUNK_BYTES
    while chunk < row_bytes and num_crops * math.ceil(row_bytes / chunk) > _MAX_CTAS:
        chunk *= 2
    scales, spans, merged_strides = zip(*merged, strict=True)
    return Layout(
        scales=scales,
        spans=spans,
        strides=merged_strides,
        row_stride=strides[0],
        sizes=tuple(shape[dim] for dim in dims),
        fixed=math.prod(scales),
        vector=UNIT_BYTES // item_bytes,
        tile=min(_TILE_BYTES // item_bytes, _TILE_ITEMS),
        chunk=chunk // item_bytes,
        num_chunks=max(1, math.ceil(row_bytes / chunk)),
        is_pcm=is_pcm,
    )


def as_ints(source: Tensor) -> Tensor:
    """`source` as a view of integers; an item of 16 bytes becomes two, in a further dim."""
    source = source.detach().resolve_conj().resolve_neg()
    if source.element_size() == 16:
        source = torch.view_as_real(source)
    return source.view(_INTS[source.element_size()])


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, not on the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _crop_size(crop_ptr, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Items of the crop whose (start, end) of each spanned dim are at `crop_ptr`."""
    size = (tl.load(crop_ptr + 1) - tl.load(crop_ptr)) * LAYOUT.fixed
    for k in tl.static_range(1, len(LAYOUT.sizes)):
        size *= tl.load(crop_ptr + 2 * k + 1) - tl.load(crop_ptr + 2 * k)
    return size


def _copy_chunk(source_ptr, target_ptr, crop_ptr, row, chunk, size, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies chunk `chunk` of a crop of `size` items, padded to whole units; returns how many were NaN, by lane."""
    TILE: tl.constexpr = LAYOUT.tile
    VECTOR: tl.constexpr = LAYOUT.vector
    source_ptr += row.to(tl.int64) * LAYOUT.row_stride
    for k in tl.static_range(len(LAYOUT.scales)):
        if LAYOUT.spans[k] >= 0:
            source_ptr += tl.load(crop_ptr + 2 * LAYOUT.spans[k]) * (LAYOUT.scales[k] * LAYOUT.strides[k])
    lane = tl.arange(0, TILE)
    nans = tl.zeros([TILE], tl.int32)
    tile = chunk.to(tl.int64) * (LAYOUT.chunk // TILE)
    end = tl.minimum(size, (chunk.to(tl.int64) + 1) * LAYOUT.chunk)
    while tile * TILE < end:
        first = tile * TILE  # a product, of which Triton knows that 16 bytes divide it
        rest = first.to(tl.int32) + lane  # may wrap where the mask is off
        offset = tl.zeros([TILE], tl.int64)
        for k in tl.static_range(len(LAYOUT.scales) - 1):
            extent = LAYOUT.scales[k]
            if LAYOUT.spans[k] >= 0:
                span_ptr = crop_ptr + 2 * LAYOUT.spans[k]
                extent = (tl.load(span_ptr + 1) - tl.load(span_ptr)).to(tl.int32) * LAYOUT.scales[k]
            offset += (rest % extent).to(tl.int64) * LAYOUT.strides[k]
            rest = rest // extent
        offset += rest.to(tl.int64) * LAYOUT.strides[-1]
        values = tl.load(source_ptr + offset, mask=lane < end - first, other=0)
        if LAYOUT.is_pcm:
            # The clamp stands between the product and the sum: next to each other they would be fused, and round once.
            values = values.to(tl.float32) * 32767.0
            is_nan = values != values  # noqa: PLR0124 - of all floats a NaN alone differs from itself
            nans += is_nan.to(tl.int32)
            values = tl.where(is_nan, 0.0, values)
            values = tl.minimum(tl.maximum(values, -32767.0), 32767.0)
            values = ((values + 12582912.0) - 12582912.0).to(tl.int16)  # 1.5 * 2**23: half to even
        # Whole units: under the exact mask the stores would be of single items.
        units = (end - first + VECTOR - 1) // VECTOR
        tl.store(target_ptr + first + lane, values, mask=lane < units * VECTOR)
        tile += 1
    return nans


def _gather_kernel(source_ptr, target_ptr, table_ptr, LAYOUT: tl.constexpr):  # type: ignore[no-untyped-def]
    entry_ptr = table_ptr + tl.program_id(0).to(tl.int64) * (2 + 2 * len(LAYOUT.sizes))
    row = tl.load(entry_ptr)
    target_ptr += tl.load(entry_ptr + 1) * LAYOUT.vector
    size = _crop_size(entry_ptr + 2, LAYOUT)
    _copy_chunk(source_ptr, target_ptr, entry_ptr + 2, row, tl.program_id(1), size, LAYOUT)


def gather(source: Tensor, dims: Sequence[int], crops: Sequence[Crop]) -> list[Tensor]:
    """Copies of crops, each contiguous and in memory of its own, made outside inference mode.

    On CUDA with Triton by one launch on the current stream of the source's device, without a synchronisation.

    Args:
        source: `[bs, ...]`, any strides.
        dims: its spanned dims, each of 1 to `source.dim() - 1`.
        crops: known to lie within the source.
    """
    if not crops:
        return []
    if source.is_cuda and has_triton():
        return _gather(source, dims, crops)
    return gather_ref(source, dims, crops)


def _gather(source: Tensor, dims: Sequence[int], crops: Sequence[Crop]) -> list[Tensor]:
    with torch.inference_mode(False), torch.no_grad(), on_device_of(source):
        copies = [_allocate(source, dims, extents) for _, extents in crops]
        items = as_ints(source)
        layout = lay_out(items, dims, len(crops))
        # Offsets from one of them, which may be negative: allocations start at 16-byte boundaries.
        base = copies[0].untyped_storage().data_ptr()
        table: list[int] = []
        most = 0
        for (row, extents), copy in zip(crops, copies, strict=True):
            table += [row, (copy.untyped_storage().data_ptr() - base) // UNIT_BYTES]
            table += [word for extent in extents for word in extent]
            most = max(most, copy.numel() * copy.element_size())
        num_chunks = math.ceil(most / UNIT_BYTES * layout.vector / layout.chunk)
        if num_chunks:
            target = torch.empty(0, dtype=items.dtype, device=source.device).set_(copies[0].untyped_storage())
            entries = torch.tensor(table, device="cpu", pin_memory=source.is_cuda).to(source.device, non_blocking=True)
            grid = (len(crops), num_chunks)
            num_warps = NUM_THREADS // (64 if torch.version.hip else 32)
            _load_kernel()[grid](items, target, entries, LAYOUT=layout, num_warps=num_warps)
    return copies


def _allocate(source: Tensor, dims: Sequence[int], extents: tuple[tuple[int, int], ...]) -> Tensor:
    """Memory for a crop, of whole units. Not a view of anything: such a view could not be changed under autograd."""
    shape = list(source.shape[1:])
    for dim, (start, end) in zip(dims, extents, strict=True):
        shape[dim - 1] = end - start
    num_units = max(1, math.ceil(math.prod(shape) * source.element_size() / UNIT_BYTES))
    num_items = num_units * UNIT_BYTES // source.element_size()
    return torch.empty(num_items, dtype=source.dtype, device=source.device).resize_(shape)


def gather_ref(source: Tensor, dims: Sequence[int], crops: Sequence[Crop]) -> list[Tensor]:
    """`gather` by torch operators, on any device; on the host by one call each where crops lie in one piece."""
    source = source.detach().resolve_conj().resolve_neg()
    shape, strides, begin = list(source.shape[1:]), source.stride(), source.storage_offset()
    if len(dims) == 1 and (copy := _copying(source, dims[0])) is not None:
        row_stride, stride = strides[0], strides[dims[0]]
        with torch.inference_mode(False):
            copies = [
                copy(begin + row * row_stride + start * stride, (end - start) * stride)
                for row, ((start, end),) in crops
            ]
        if len(shape) > 1:
            for flat, (_, ((start, end),)) in zip(copies, crops, strict=True):
                shape[dims[0] - 1] = end - start
                flat.resize_(shape)  # not a view, see `_allocate`
        return copies
    views: list[Tensor] = []
    for row, extents in crops:
        offset = begin + row * strides[0]
        for dim, (start, end) in zip(dims, extents, strict=True):
            shape[dim - 1] = end - start
            offset += start * strides[dim]
        views += [source.as_strided(shape, strides[1:], offset)]  # one operator, however many dims; `append` is a call
    return clone_each(views)


def _copying(source: Tensor, dim: int) -> Callable[[Any, int], Tensor] | None:
    """What copies a number of items from a storage offset on, by one call that allocates and copies.

    `source` must outlive it. None where crops along `dim` have gaps in memory, are not on the host, or are large.
    """
    shape, item, dtype = source.shape, source.itemsize, source.dtype
    if (
        type(source) is not Tensor
        or not source.is_cpu
        or source.is_quantized  # bytes alone have no scale
        or shape[1:].numel() * item > _MAX_COPIED_BYTES
        or math.prod(shape[1:dim]) != 1
        or source.stride(dim) != math.prod(shape[dim + 1 :])
        or not source[:1].is_contiguous()
    ):
        return None
    with contextlib.suppress(RuntimeError):  # under vmap it has no memory
        storage = source.untyped_storage()
        memory = bytes_at(storage.data_ptr(), storage.nbytes())

        def copy(first: int, count: int) -> Tensor:
            if not count:  # of which `frombuffer` makes nothing
                return torch.empty(0, dtype=dtype)
            return torch.frombuffer(bytearray(memory[first * item : (first + count) * item]), dtype=dtype, count=count)

        return copy
    return None


def clone_each(views: Collection[Tensor]) -> list[Tensor]:
    """Copies of tensors, made together, each contiguous and in memory of its own."""
    views = list(views)
    with torch.inference_mode(False), torch.no_grad():
        if not views or not views[0].is_cuda:
            if views and (clone := getattr(torch, "_foreach_clone", None)) is not None:  # of torch 2.13: one call
                with contextlib.suppress(RuntimeError):  # which vmap does not know
                    return list(clone(views, memory_format=torch.contiguous_format))
            return [view.clone(memory_format=torch.contiguous_format) for view in views]
        copies = [torch.empty(view.shape, dtype=view.dtype, device=view.device) for view in views]
        torch._foreach_copy_(copies, views)  # pyright: ignore[reportPrivateImportUsage]
    return copies
