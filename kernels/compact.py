"""Compaction: one node before the staging node that packs the valid part of every row into a slot of a ring.

Two implementations of one contract, and the same copying for a list of crops that the host has checked (`gather`):

* `compact`: a Triton kernel, for CUDA.
* `compact_ref`: plain PyTorch on the host, which is also what the CPU backends run at each step.

The arguments, one of each list for every output `j`:

* `cursor` and `control`: the staging node's (see `stage`). Here the record's copy slot must exist, and its slot is
  nobody's concern; the cursor stays, for the staging node comes after.
* `sources`: device `[bs, ...]`, one `bs` for all, any strides, any dtype of 1 to 16 bytes an item.
* `spans`: device int64 `[bs, ...]`, whose words per row are `[max_spans, num_dims, (start, end)]`.
* `dims`: the spanned dims of all sources one after the other, each of 1 to `source.dim() - 1`.
* `rings`: int64 `[num_slots, words]`, whose rows start at 16-byte boundaries; on the device, or pinned host memory.
* `ring_of`, `firsts`, `capacities`: output `j` owns the bytes from `firsts[j]` on of each slot of `rings[ring_of[j]]`.
* `status`: device int64 `[bs, n, COPY_WORDS]`.
* `casts`: `NO_CAST`, or `PCM16` for int16 samples of a float output (see `pcm16`).

A matching launch copies the crops of the rows below `num_rows`, row by row and span by span, each to the next 16-byte
boundary of the output's region, and fills up its last 16 bytes with zeros. A row with a span that fails
`0 <= start <= end <= size` takes no room. If the crops of an output exceed its region, none of them is copied. Then
`status[row, j]` is (generation, the row's offset in 16-byte units or -1 for an output that did not fit, NaNs that its
cast met or 0 where nothing was copied); rows from `num_rows` on are unspecified. If no record matches the call is a dry
run, which changes no byte, but for `compact` with a cast: it may zero the counts of NaNs.
"""

# What pyright sees of Triton's constants: no attributes, and no `for` over a static range.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spangraph.errors import InputError
from spangraph.kernels.gather import (
    NUM_THREADS,
    UNIT_BYTES,
    Layout,
    as_ints,
    lay_out,
    load_copying,
    load_once,
    on_device_of,
)
from spangraph.kernels.stage import CONTROL_WORDS, _pack

if TYPE_CHECKING:
    # See `stage`: at run time `_load_kernel` binds `tl`.
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: TC004

    from spangraph.kernels.gather import _copy_chunk, _crop_size  # noqa: TC004

COPY_WORDS = 3
"""Words of a row's copy record: generation, offset, NaNs."""

NO_CAST, PCM16 = 0, 1

# Rows whose spans a CTA reads at a time, two a thread.
_ROW_LANES = 256

# Flat indices within a row are 32-bit.
_MAX_ITEMS = 2**31 - 1

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = re.compile(r"torch\.(bool|u?int(8|16|32|64)|b?float(8|16|32|64)(_e\dm\d\w*)?|complex\d+)")


@load_once
def _load_kernel() -> Any:
    """The jitted `_compact_kernel`; imports Triton at the first call."""
    helpers = load_copying()
    global tl
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    globals().update(_crop_size=helpers[0], _copy_chunk=helpers[1])
    globals().update(_place=triton.jit(_place), _compact_output=triton.jit(_compact_output))
    # What is specialised compiles anew, and the first launch of a new kernel fails inside a capture.
    return triton.jit(do_not_specialize=["graph"])(_compact_kernel)


@dataclass(frozen=True)
class _Region:
    """Where an output goes, and which CTAs bring it there; a constant to `_compact_kernel`. Units are of 16 bytes."""

    first_cta: int
    end_cta: int
    num_chunks: int
    max_spans: int
    slot_units: int
    first_unit: int
    num_units: int


# ---- the kernels -------------------------------------------------------------------------------------------------


def _place(  # type: ignore[no-untyped-def]  # Triton parses the annotations
    spans_ptr,
    row,
    span,
    num_rows,
    LAYOUT: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Units of all rows, units before span `span` of row `row`, and whether that row is good."""
    total = tl.zeros([LANES], tl.int64)
    before = tl.zeros([LANES], tl.int64)
    good = tl.zeros([LANES], tl.int32)
    for first in range(0, ROWS, LANES):
        rows = first + tl.arange(0, LANES)
        is_good = rows < num_rows
        units = tl.zeros([LANES], tl.int64)
        ahead = tl.zeros([LANES], tl.int64)
        for i in range(MAX_SPANS):
            size = tl.full([LANES], LAYOUT.fixed * 16 // LAYOUT.vector, tl.int64)
            for k in tl.static_range(len(LAYOUT.sizes)):
                word_ptr = spans_ptr + ((rows.to(tl.int64) * MAX_SPANS + i) * len(LAYOUT.sizes) + k) * 2
                start = tl.load(word_ptr, mask=rows < num_rows, other=0)
                end = tl.load(word_ptr + 1, mask=rows < num_rows, other=0)
                is_good = is_good & (start >= 0) & (start <= end) & (end <= LAYOUT.sizes[k])
                size *= end - start  # wraps for a bad row alone, which counts for nothing below
            units += (size + 15) >> 4
            ahead += tl.where(i < span, (size + 15) >> 4, 0)
        is_own = is_good & (rows == row)
        total += tl.where(is_good, units, 0)
        before += tl.where(is_good & (rows < row), units, 0) + tl.where(is_own, ahead, 0)
        good += is_own.to(tl.int32)
    return tl.sum(total), tl.sum(before), tl.sum(good) > 0


def _compact_output(  # type: ignore[no-untyped-def]
    source_ptr,
    spans_ptr,
    ring_ptr,
    status_ptr,
    generation,
    slot,
    num_rows,
    LAYOUTS: tl.constexpr,
    REGIONS: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One CTA's part of output `J`: a chunk of a crop, and for the row's first one the row's status."""
    LAYOUT: tl.constexpr = LAYOUTS[J]
    REGION: tl.constexpr = REGIONS[J]
    chunk = (tl.program_id(0) - REGION.first_cta) % REGION.num_chunks
    crop = (tl.program_id(0) - REGION.first_cta) // REGION.num_chunks
    row = crop // REGION.max_spans
    span = crop % REGION.max_spans
    crop_ptr = spans_ptr + crop.to(tl.int64) * (len(LAYOUT.sizes) * 2)
    leads = (span == 0) & (chunk == 0)
    if row < num_rows:
        size = _crop_size(crop_ptr, LAYOUT)  # any number, if the row is bad
        if leads | (size > chunk.to(tl.int64) * LAYOUT.chunk):
            total, before, is_good = _place(spans_ptr, row, span, num_rows, LAYOUT, REGION.max_spans, ROWS, LANES)
            fits = total <= REGION.num_units
            row_ptr = status_ptr + (row.to(tl.int64) * len(LAYOUTS) + J) * 3
            if leads:
                tl.store(row_ptr, generation)
                tl.store(row_ptr + 1, tl.where(fits, before, -1))
                if not LAYOUT.is_pcm:
                    tl.store(row_ptr + 2, generation * 0)
            if is_good & fits:
                target_ptr = ring_ptr + (slot * REGION.slot_units + REGION.first_unit + before) * LAYOUT.vector
                nans = _copy_chunk(source_ptr, target_ptr, crop_ptr, row, chunk, size, LAYOUT)
                if LAYOUT.is_pcm:
                    num_nans = tl.sum(nans)
                    if num_nans > 0:
                        tl.atomic_add(row_ptr + 2, num_nans.to(tl.int64), sem="relaxed")


def _compact_kernel(  # type: ignore[no-untyped-def]
    cursor_ptr,
    control_ptr,
    source_ptrs,
    spans_ptrs,
    ring_ptrs,
    status_ptr,
    graph,
    NUM_RECORDS: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    LAYOUTS: tl.constexpr,
    REGIONS: tl.constexpr,
    RECORD_LANES: tl.constexpr,
    ROW_LANES: tl.constexpr,
):
    lane = tl.arange(0, RECORD_LANES)
    cursor = tl.load(cursor_ptr)
    record_ptr = control_ptr + cursor % NUM_RECORDS * RECORD_WORDS
    # One request over the link for a CTA: the first warp reads all words. volatile: the host writes them meanwhile.
    record = tl.load(record_ptr + lane, mask=lane < RECORD_WORDS, other=0, cache_modifier=".cv", volatile=True)
    generation = tl.sum(tl.where(lane == 0, record, 0))
    num_rows = tl.minimum(tl.sum(tl.where(lane == 2, record, 0)), ROWS)
    owner = tl.sum(tl.where(lane == 3, record, 0))
    slot = tl.sum(tl.where(lane == 4, record, 0))
    cta = tl.program_id(0)
    if (generation == cursor + 1) & (owner == graph) & (slot >= 0) & (slot < NUM_SLOTS):
        for j in tl.static_range(len(REGIONS)):
            if (cta >= REGIONS[j].first_cta) & (cta < REGIONS[j].end_cta):
                _compact_output(
                    source_ptrs[j],
                    spans_ptrs[j],
                    ring_ptrs[j],
                    status_ptr,
                    generation,
                    slot,
                    num_rows,
                    LAYOUTS,
                    REGIONS,
                    j,
                    ROWS,
                    ROW_LANES,
                )


# ---- the operators -----------------------------------------------------------------------------------------------


def compact(
    cursor: Tensor,
    control: Tensor,
    sources: Sequence[Tensor],
    spans: Sequence[Tensor],
    rings: Sequence[Tensor],
    status: Tensor,
    graph: int,
    ring_of: Sequence[int],
    firsts: Sequence[int],
    capacities: Sequence[int],
    dims: Sequence[int],
    max_spans: Sequence[int],
    casts: Sequence[int],
) -> None:
    """Compacts one launch with the Triton kernel, on the current stream of the cursor's device.

    Shapes and strides are compiled in: launch once per device and set of them before a capture (as a dry run, say).
    See the module's docstring for the arguments.

    Raises:
        StagingError: Triton is not installed.
    """
    kernel = _load_kernel()
    hip = torch.version.hip is not None
    arguments, options = _kernel_arguments(
        sources, spans, rings, ring_of, firsts, capacities, dims, max_spans, casts, hip=hip
    )
    num_ctas = options["REGIONS"][-1].end_cta
    if num_ctas == 0:
        return
    options |= {"NUM_RECORDS": control.size(0), "RECORD_WORDS": CONTROL_WORDS}
    with on_device_of(cursor):
        if any(casts):
            status.select(-1, 2).zero_()
        kernel[(num_ctas,)](cursor, control, *arguments, status, graph, **options)


def _kernel_arguments(
    sources: Sequence[Tensor],
    spans: Sequence[Tensor],
    rings: Sequence[Tensor],
    ring_of: Sequence[int],
    firsts: Sequence[int],
    capacities: Sequence[int],
    dims: Sequence[int],
    max_spans: Sequence[int],
    casts: Sequence[int],
    *,
    hip: bool,
) -> tuple[tuple[tuple[Tensor, ...], ...], dict[str, Any]]:
    """What `_compact_kernel` takes for the sources, spans and rings; its constants and launch options."""
    bs = sources[0].size(0)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    layouts: list[Layout] = []
    regions: list[_Region] = []
    for j, own_dims in enumerate(_split_dims(spans, dims, max_spans)):
        source = sources[j].detach().resolve_neg() if casts[j] else as_ints(sources[j])
        layout = lay_out(source, own_dims, bs * max_spans[j], is_pcm=bool(casts[j]))
        ring = rings[ring_of[j]]
        first_cta = regions[-1].end_cta if regions else 0
        region = _Region(
            first_cta=first_cta,
            end_cta=first_cta + bs * max_spans[j] * layout.num_chunks,
            num_chunks=layout.num_chunks,
            max_spans=max_spans[j],
            slot_units=ring.size(1) * 8 // UNIT_BYTES,
            first_unit=firsts[j] // UNIT_BYTES,
            num_units=capacities[j] // UNIT_BYTES,
        )
        columns.append((source, _pack(spans[j]), ring.view(torch.int16 if casts[j] else source.dtype)))
        layouts.append(layout)
        regions.append(region)
    options = {
        "NUM_SLOTS": rings[0].size(0),
        "ROWS": bs,
        "LAYOUTS": tuple(layouts),
        "REGIONS": tuple(regions),
        "RECORD_LANES": NUM_THREADS,
        "ROW_LANES": min(_ROW_LANES, 1 << max(bs - 1, 0).bit_length()),
        "num_warps": NUM_THREADS // (64 if hip else 32),
    }
    return tuple(zip(*columns, strict=True)), options


def _split_dims(spans: Sequence[Tensor], dims: Sequence[int], max_spans: Sequence[int]) -> list[tuple[int, ...]]:
    """The spanned dims of each output."""
    split: list[tuple[int, ...]] = []
    first = 0
    for column, count in zip(spans, max_spans, strict=True):
        end = first + column.shape[1:].numel() // (2 * count)
        split.append(tuple(dims[first:end]))
        first = end
    return split


def pcm16(tensor: Tensor) -> Tensor:
    """Samples in [-1, 1] as int16 PCM: NaN is silence, what lies outside saturates, halves go to the even neighbour."""
    return tensor.to(torch.float32).nan_to_num(0.0).clamp_(-1, 1).mul_(32767).round_().to(torch.int16)


def compact_ref(
    cursor: Tensor,
    control: Tensor,
    sources: Sequence[Tensor],
    spans: Sequence[Tensor],
    rings: Sequence[Tensor],
    status: Tensor,
    graph: int,
    ring_of: Sequence[int],
    firsts: Sequence[int],
    capacities: Sequence[int],
    dims: Sequence[int],
    max_spans: Sequence[int],
    casts: Sequence[int],
) -> None:
    """Compacts one launch on the host: all tensors on the CPU. See the module's docstring for the arguments."""
    count = int(cursor.item())
    records = control.tolist()
    generation, _, num_rows, owner, slot = records[count % len(records)]
    if generation != count + 1 or owner != graph or not 0 <= slot < rings[0].size(0):
        return
    num_real = max(0, min(num_rows, status.size(0)))
    columns: list[list[list[int]]] = []
    for j, own_dims in enumerate(_split_dims(spans, dims, max_spans)):
        source = sources[j].detach().resolve_neg() if casts[j] else as_ints(sources[j])
        ring = rings[ring_of[j]].view(torch.int16 if casts[j] else source.dtype)
        layout = lay_out(source, own_dims, 1, is_pcm=bool(casts[j]))
        first = ring.storage_offset() + slot * ring.size(1) + firsts[j] // UNIT_BYTES * layout.vector
        words = spans[j].flatten(1)[:num_real].tolist()
        offsets, pieces = _cut_rows(source, layout, words)
        nans = [0] * num_real
        size = sum(piece.numel() for piece in pieces)
        if size > capacities[j] // UNIT_BYTES * layout.vector:
            offsets = [-1] * num_real
        elif size:
            # One operator for all rows, a microsecond and more each.
            target = ring.as_strided((size,), (1,), first)
            if casts[j]:
                packed = torch.cat(pieces)
                target.copy_(pcm16(packed))
                nans = _count_nans(packed, [offset * layout.vector for offset in offsets])
            else:
                torch.cat(pieces, out=target)
        columns.append([offsets, nans])
    table = [word for row in range(num_real) for own in columns for word in (generation, own[0][row], own[1][row])]
    status.view(-1)[: len(table)] = torch.tensor(table, dtype=torch.int64, device="cpu")


def _cut_rows(source: Tensor, layout: Layout, words: Sequence[Sequence[int]]) -> tuple[list[int], list[Tensor]]:
    """Each row's offset in units; the crops of all good rows, flat, and zeros after those that end within a unit."""
    width = 2 * len(layout.sizes)
    origin, vector = source.storage_offset(), layout.vector
    # The dims from the outermost, and where the words of a spanned one are.
    dims = [(a, 2 * b, c) for a, b, c in zip(layout.scales, layout.spans, layout.strides, strict=True)][::-1]
    strides = layout.strides[::-1]
    zeros = _zeros(source.dtype)
    offsets: list[int] = []
    pieces: list[Tensor] = []
    num_units = 0
    for row, row_words in enumerate(words):
        offsets.append(num_units)
        starts, ends, sizes = row_words[::2], row_words[1::2], layout.sizes * (len(row_words) // width)
        if not all(0 <= start <= end <= size for start, end, size in zip(starts, ends, sizes, strict=True)):
            continue
        for i in range(0, len(row_words), width):
            first = origin + row * layout.row_stride
            shape: list[int] = []
            size = 1
            for scale, k, stride in dims:
                extent = scale
                if k >= 0:
                    start = row_words[i + k]
                    extent *= row_words[i + k + 1] - start
                    first += start * scale * stride
                size *= extent
                shape.append(extent)
            if size:
                crop = source.as_strided(shape, strides, first)
                pieces.append(crop if len(shape) == 1 else crop.reshape(-1))
                if size % vector:
                    pieces.append(zeros[vector - size % vector])
                num_units += (size + vector - 1) // vector
    return offsets, pieces


@functools.cache
def _zeros(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Zeros of every length that may be missing to a unit, by that length."""
    with torch.inference_mode(False):
        return tuple(torch.zeros(length, dtype=dtype, device="cpu") for length in range(UNIT_BYTES))


def _count_nans(packed: Tensor, firsts: Sequence[int]) -> list[int]:
    """NaNs of `packed` from each of `firsts` to the next."""
    is_nan = packed.isnan()
    if not is_nan.any():
        return [0] * len(firsts)
    ends = [*firsts[1:], packed.numel()]
    return [int(is_nan[first:end].sum()) for first, end in zip(firsts, ends, strict=True)]


def check_source(name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuses rows that cannot be copied. Meant for build time: compaction itself checks nothing.

    Args:
        shape: of a padded row.

    Raises:
        InputError: for items of less than a byte, quantized ones, or too many items.
    """
    if not _DTYPES.fullmatch(str(dtype)):
        raise InputError(
            f"{name} is {dtype}: expected whole bytes an item. Dequantize or unpack it in the model, or deliver it as a"
            " view."
        )
    num_items = math.prod(shape) * math.ceil(dtype.itemsize / 8)
    if num_items > _MAX_ITEMS:
        raise InputError(
            f"{name} has {num_items} items a row, at most {_MAX_ITEMS} can be copied: deliver it as a view."
        )
