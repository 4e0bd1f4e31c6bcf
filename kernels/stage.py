"""Staging: the one node at a graph's tail that copies spans and row values into a pinned host slot.

Three implementations of one contract:

* `stage`: a Triton kernel, the default on CUDA.
* `stage_copy`: torch operators and an asynchronous copy, for where Triton is not to be had. Its slot is baked in.
* `HostStage`, `stage_ref`: plain PyTorch on the host, which is also what the CPU backends run at each step.

All of them take int64 tensors:

* `cursor`, device `[1]`: how many launches have been staged so far.
* `control`, pinned `[num_records, CONTROL_WORDS]`: launch `n` looks at record `(n - 1) % num_records`, which is
  (generation, slot, num_rows, graph, copy_slot); the last is for `compact`.
* `slots`, pinned `[num_slots, words]`: the ring. Word 0 of a slot is the generation it holds.
* `columns`, device `[bs, ...]` each, one `bs` for all: column `j` goes to the words from `offsets[j]` on.

A record matches if its generation is `cursor + 1`, its graph is the caller's and its slot exists. Then rows below
`num_rows` are copied, the other rows of the bucket are zeroed (an empty span, whatever they held), the generation goes
to the header and the cursor advances by one. If none matches the call is a dry run, which changes no byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spangraph.errors import InputError, StagingError

if TYPE_CHECKING:
    # Triton ships no types. At run time `_load_kernel` binds `tl`: importing spangraph must not import Triton.
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: TC004

CONTROL_WORDS = 5
"""Words of a control record: generation, slot, num_rows, graph, copy_slot."""

HEADER_WORDS = 2
"""Words before a slot's columns: the generation, and one reserved so that columns start at a 16-byte boundary."""

# 1024 rows x 8 outputs, 8 words a thread and tile: 36 registers on sm_90, 16-byte stores, 0.2 s to compile. A block of
# 32768 words spills; one block over everything takes 17 s to compile as well.
_WARPS = 8
_BLOCK = 2048

# gfx942 puts no `s_waitcnt vmcnt(0)` between the stores and `s_barrier`, so a barrier does not order one wave's spans
# before another wave's header. A single wave waits for its own stores in the release.
_HIP_WARPS = 1
_HIP_BLOCK = 1024


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _load_kernel() -> Any:
    """The jitted `_stage_kernel`; imports Triton at the first call."""
    if not has_triton():
        raise StagingError(
            "the staging kernel needs Triton, which is not installed: `pip install spangraph[triton]`, "
            "or stage with the plain copy"
        )
    global tl
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # What is specialised compiles anew, and the first launch of a new kernel fails inside a capture.
    return triton.jit(do_not_specialize=["graph"])(_stage_kernel)


def _pack(column: Tensor) -> Tensor:
    """`column`, or a contiguous copy at a 16-byte boundary (alignment is specialised too)."""
    if column.is_contiguous() and column.data_ptr() % 16 == 0:
        return column
    return column.clone(memory_format=torch.contiguous_format)


def _kernel_options(
    slots: Tensor, control: Tensor, columns: Sequence[Tensor], offsets: Sequence[int], *, hip: bool
) -> dict[str, Any]:
    """The constexpr arguments and launch options of `_stage_kernel`."""
    return {
        "NUM_RECORDS": control.size(0),
        "RECORD_WORDS": CONTROL_WORDS,
        "NUM_SLOTS": slots.size(0),
        "SLOT_WORDS": slots.size(1),
        "ROWS": columns[0].size(0),
        "WIDTHS": tuple(column.shape[1:].numel() for column in columns),
        "OFFSETS": tuple(offsets),
        "BLOCK": _HIP_BLOCK if hip else _BLOCK,
        "num_warps": _HIP_WARPS if hip else _WARPS,
    }


def _stage_kernel(  # type: ignore[no-untyped-def]  # Triton parses the annotations
    cursor_ptr,
    slots_ptr,
    control_ptr,
    column_ptrs,
    graph,
    NUM_RECORDS: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTHS: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cursor = tl.load(cursor_ptr)
    record_ptr = control_ptr + cursor % NUM_RECORDS * RECORD_WORDS
    # volatile: the host writes these words between launches; read them at system scope.
    generation = tl.load(record_ptr, cache_modifier=".cv", volatile=True)
    slot = tl.load(record_ptr + 1, cache_modifier=".cv", volatile=True)
    num_rows = tl.load(record_ptr + 2, cache_modifier=".cv", volatile=True)
    owner = tl.load(record_ptr + 3, cache_modifier=".cv", volatile=True)
    if (generation == cursor + 1) & (owner == graph) & (slot >= 0) & (slot < NUM_SLOTS):
        slot_ptr = slots_ptr + slot * SLOT_WORDS
        real_rows = tl.minimum(num_rows, ROWS)
        lane = tl.arange(0, BLOCK)
        for i in tl.static_range(len(WIDTHS)):  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
            for start in range(0, ROWS * WIDTHS[i], BLOCK):
                word = start + lane
                values = tl.load(column_ptrs[i] + word, mask=word < real_rows * WIDTHS[i], other=0)
                tl.store(slot_ptr + OFFSETS[i] + word, values, mask=word < ROWS * WIDTHS[i])
        # Triton puts none before the atomic. Without it a slow warp's spans may land after the header, and a slow warp
        # may read the cursor after it was advanced.
        tl.debug_barrier()
        tl.store(cursor_ptr, generation)
        # Last, so that a host which sees the generation also sees the spans and may rely on the cursor.
        tl.atomic_xchg(slot_ptr, generation, sem="release", scope="sys")


def stage(
    cursor: Tensor, slots: Tensor, control: Tensor, columns: Sequence[Tensor], offsets: Sequence[int], graph: int
) -> None:
    """Stages one launch with the Triton kernel, in one CTA on the current stream of the cursor's device.

    Shapes are compiled in: launch once per device and set of shapes before a capture (as a dry run, say), since loading
    a module is not permitted while a stream captures. See the module's docstring for the arguments.

    Raises:
        StagingError: Triton is not installed.
    """
    kernel = _load_kernel()
    packed = tuple(_pack(column) for column in columns)  # Triton takes tuples, not lists
    options = _kernel_options(slots, control, packed, offsets, hip=torch.version.hip is not None)
    # Triton launches on the current device, not on the tensors'.
    guard = torch.cuda.device(cursor.device) if cursor.is_cuda else contextlib.nullcontext()
    with guard:
        kernel[(1,)](cursor, slots, control, packed, graph, **options)


_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_WRITE = 0x200


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """The bytes of host memory, which must outlive them."""
    view: memoryview = _memory_at(address, num_bytes, _PYBUF_WRITE)
    return view


def words_of(memory: Tensor) -> memoryview:
    """The words of contiguous int64 host memory, which must outlive them. Reading a tensor's is an operator each."""
    return bytes_at(memory.data_ptr(), memory.nbytes).cast("q")


class HostStage:
    """Stages launches of one graph on the host, with its memory at hand: what the inline backend runs at each step.

    All tensors are on the CPU. See the module's docstring for the arguments.
    """

    def __init__(self, cursor: Tensor, slots: Tensor, control: Tensor, offsets: Sequence[int], graph: int) -> None:
        self._memory = slots, (cursor, control)  # which the words do not keep alive
        self._cursor, self._control, self._slots = words_of(cursor), words_of(control), words_of(slots)
        self._num_records, (self._num_slots, self._slot_words) = control.size(0), slots.shape
        self._offsets = offsets
        self._graph = graph
        self._views: dict[int, list[Tensor]] = {}

    def __call__(self, columns: Sequence[Tensor]) -> None:
        """Stage one launch."""
        cursor, control = self._cursor, self._control
        generation = cursor[0] + 1
        record = cursor[0] % self._num_records * CONTROL_WORDS
        slot = control[record + 1]
        if control[record] != generation or control[record + 3] != self._graph or not 0 <= slot < self._num_slots:
            return
        num_rows = control[record + 2]
        for staged, column in zip(self._views.get(slot) or self._view(slot, columns), columns, strict=True):
            staged.copy_(column)
            if num_rows < staged.size(0):
                staged[max(num_rows, 0) :].zero_()
        cursor[0] = generation
        self._slots[slot * self._slot_words] = generation

    def _view(self, slot: int, columns: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode(False):  # else they could not be written outside of it
            words = self._memory[0][slot].detach()
            ends = [offset + column.numel() for offset, column in zip(self._offsets, columns, strict=True)]
            parts = [words[first:end] for first, end in zip(self._offsets, ends, strict=True)]
            views = [part.view(column.shape) for part, column in zip(parts, columns, strict=True)]
        self._views[slot] = views
        return views


def stage_ref(
    cursor: Tensor, slots: Tensor, control: Tensor, columns: Sequence[Tensor], offsets: Sequence[int], graph: int
) -> None:
    """Stages one launch on the host: all tensors on the CPU. See the module's docstring for the arguments."""
    # Few operators and few views, a microsecond each. Reading all records costs less than a view of one.
    count = int(cursor.item())
    records = control.tolist()
    generation, slot, num_rows, owner, _ = records[count % len(records)]
    if generation != count + 1 or owner != graph or not 0 <= slot < slots.size(0):
        return
    base = slots.storage_offset() + slot * slots.size(1)
    for column, offset in zip(columns, offsets, strict=True):
        packed = column.contiguous()
        staged = slots.as_strided(packed.shape, packed.stride(), base + offset)
        staged.copy_(packed)
        if num_rows < packed.size(0):
            staged[max(num_rows, 0) :].zero_()
    cursor.fill_(generation)
    slots.as_strided((), (), base).fill_(generation)


def stage_copy(
    cursor: Tensor,
    slots: Tensor,
    control: Tensor,
    columns: Sequence[Tensor],
    offsets: Sequence[int],
    graph: int,
    mirror: Tensor,
    slot: int,
) -> None:
    """Stages one launch with torch operators and one asynchronous copy. It can be captured: no host read.

    The destination is baked in: a record for another slot is a dry run too, so there is one captured graph per slot. A
    dry run rewrites the bytes that the slot already holds. The header travels with the spans, in no order that is
    known: wait for an event, do not poll the header.

    Args:
        mirror: device `[words]`, what `slots[slot]` holds; must start equal to it.
        slot: the slot that `mirror` mirrors.
    """
    records = control.to(mirror.device, non_blocking=True)
    generation, target, num_rows, owner, _ = records.index_select(0, cursor % records.size(0))[0].unbind()
    live = (generation == cursor + 1) & (target == slot) & (owner == graph)
    fresh = mirror.clone()
    fresh[0].copy_(generation)
    is_padding = torch.arange(columns[0].size(0), device=mirror.device) >= num_rows
    for column, offset in zip(columns, offsets, strict=True):
        staged = fresh[offset : offset + column.numel()].view(column.shape)
        padding_rows = is_padding.view([-1] + [1] * (column.dim() - 1))
        staged.copy_(column.masked_fill(padding_rows, 0))
    mirror.copy_(torch.where(live, fresh, mirror))
    slots[slot].copy_(mirror, non_blocking=True)
    cursor.add_(live)


def check_stage_args(
    cursor: Tensor,
    slots: Tensor,
    control: Tensor,
    columns: Sequence[Tensor],
    offsets: Sequence[int],
    mirror: Tensor | None = None,
    slot: int = 0,
) -> None:
    """Refuses arguments that staging would silently misread. Meant for build time: staging itself checks nothing.

    Raises:
        InputError: a wrong dtype, shape, device, layout, offset or slot; or host memory that is not pinned.
    """
    device = cursor.device
    named = [("cursor", cursor), ("slots", slots), ("control", control)]
    named += [(f"columns[{i}]", column) for i, column in enumerate(columns)]
    if mirror is not None:
        named.append(("mirror", mirror))
    for name, tensor in named:
        if tensor.dtype != torch.int64:
            raise InputError(f"{name} is {tensor.dtype}, staging takes torch.int64: convert it with `.to(torch.int64)`")
        if name in ("slots", "control"):
            _check_host_memory(name, tensor, device)
        elif tensor.device != device:
            raise InputError(f"{name} is on {tensor.device}, the cursor is on {device}: put both on one device")
        if not name.startswith("columns") and not tensor.is_contiguous():
            raise InputError(f"{name} is not contiguous (strides {tensor.stride()}): staging writes through it")

    if tuple(cursor.shape) != (1,):
        raise InputError(f"cursor has shape {tuple(cursor.shape)}, expected (1,)")
    if control.dim() != 2 or control.size(0) < 1 or control.size(1) != CONTROL_WORDS:
        raise InputError(f"control has shape {tuple(control.shape)}, expected (num_records >= 1, {CONTROL_WORDS})")
    if slots.dim() != 2 or slots.size(0) < 1 or slots.size(1) < HEADER_WORDS:
        raise InputError(f"slots has shape {tuple(slots.shape)}, expected (num_slots >= 1, words >= {HEADER_WORDS})")
    _check_columns(columns, offsets, slots.size(1))
    if mirror is not None:
        if mirror.shape != slots.shape[1:]:
            raise InputError(f"mirror has shape {tuple(mirror.shape)}, expected one slot's: ({slots.size(1)},)")
        if not 0 <= slot < slots.size(0):
            raise InputError(f"slot is {slot}, the ring has slots 0 to {slots.size(0) - 1}")


def _check_host_memory(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device.type != "cpu":
        raise InputError(f"{name} is on {tensor.device}, expected host memory")
    # A copy into pageable memory is captured without an error, and lands as garbage.
    if device.type == "cuda" and not tensor.is_pinned():
        raise InputError(f"{name} is not pinned: allocate it with `pin_memory=True`, before any capture")


def _check_columns(columns: Sequence[Tensor], offsets: Sequence[int], words: int) -> None:
    if not columns or len(columns) != len(offsets):
        raise InputError(
            f"{len(columns)} columns and {len(offsets)} offsets: expected one offset for each, at least one"
        )
    free_from, previous = HEADER_WORDS, "the header"
    for offset, i in sorted((offset, i) for i, offset in enumerate(offsets)):
        column, name = columns[i], f"columns[{i}]"
        if column.dim() < 1 or columns[0].dim() < 1 or column.size(0) != columns[0].size(0):
            raise InputError(
                f"{name} has shape {tuple(column.shape)}, columns[0] has {tuple(columns[0].shape)}: "
                "expected [bs, ...] with one bs for all"
            )
        if offset < free_from:
            raise InputError(f"{name} starts at word {offset}, inside {previous}, which ends at word {free_from}")
        if offset + column.numel() > words:
            raise InputError(
                f"{name} ends at word {offset + column.numel()}, a slot has {words} words: widen the slots"
            )
        free_from, previous = offset + column.numel(), name
