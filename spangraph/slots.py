"""Memory that a graph's tail writes and the host reads: slots of spans and row values, and slots of copied rows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spangraph.backends import Backend, Pinned
from spangraph.errors import DeclarationError
from spangraph.kernels.stage import HEADER_WORDS, words_of

_WORD = 8
ALIGNMENT = 16
"""Rows of a copy begin at multiples of this many bytes, so that they can be stored 16 bytes at a time."""

COPIES = "<copies>"
"""The column of a slot that says what became of each row's copies."""


@dataclass(frozen=True)
class Layout:
    """Where each column lies in a slot: name -> (first word, words per row)."""

    columns: Mapping[str, tuple[int, int]]
    num_rows: int
    num_words: int

    @staticmethod
    def of(widths: Mapping[str, int], num_rows: int) -> Layout:
        """Columns one after the other behind the header, each with room for `num_rows` rows."""
        columns, word = {}, HEADER_WORDS
        for name, width in widths.items():
            columns[name] = (word, width)
            word += width * num_rows
        return Layout(columns, num_rows, word + word % 2)


class SlotBuffer:
    """Pinned memory of one layout, one row per slot of the ring."""

    def __init__(self, backend: Backend, layout: Layout, num_slots: int) -> None:
        self._backend = backend
        self.layout = layout
        self.slot_bytes = layout.num_words * _WORD
        self.memory: Pinned = backend.pinned(num_slots, layout.num_words, writer="device")
        self._words = words_of(self.memory.host)

    def header(self, slot: int) -> int:
        """The generation that the slot holds."""
        return self._words[slot * self.layout.num_words]

    def copy_out(self, slot: int) -> memoryview:
        """A private copy of the slot's words."""
        size = self.layout.num_words
        return memoryview(self._words[slot * size : (slot + 1) * size].tobytes()).cast("q")

    def __del__(self) -> None:
        self._backend.before_free(vars(self).get("memory"))


@dataclass(frozen=True)
class Copy:
    """How long rows of a spanned output live, and where: an entry of `copies=`.

    Args:
        to: `"view"`: rows are views of the graph's output. `"device"`: the valid bytes are copied at the graph's tail
            into a ring on the device. `"host"`: the same, into pinned host memory.
        dtype: `torch.int16` makes 16-bit PCM of a float output on the way (`pcm16`); default the output's own dtype.
        capacity: bytes that a step's rows may take together, each crop rounded up to 16; default the worst case. A step
            that takes more is cut from the padded output, which the next launch of its graph is held back from
            overwriting: with less than the worst case, a launch waits until the one before it is known to have fitted.

    Raises:
        DeclarationError: for any other place or dtype, a capacity below 1, or options of a `"view"`.
    """

    to: str
    dtype: torch.dtype | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.to not in ("view", "device", "host"):
            raise DeclarationError(f"Copy(to={self.to!r}): expected 'view', 'device' or 'host'.")
        if self.dtype is not None and self.dtype is not torch.int16:
            raise DeclarationError(f"Copy(dtype={self.dtype}): expected torch.int16 (PCM), or None for no cast.")
        if self.capacity is not None and (type(self.capacity) is not int or self.capacity < 1):
            raise DeclarationError(f"Copy(capacity={self.capacity!r}): expected bytes of a step's rows, at least 1.")
        if self.to == "view" and (self.dtype, self.capacity) != (None, None):
            raise DeclarationError("Copy('view') moves nothing, so it takes no dtype and no capacity.")

    def delivered(self, dtype: torch.dtype, name: str) -> torch.dtype:
        """dtype of the delivered rows of an output of `dtype`.

        Raises:
            DeclarationError: for a cast of what is no float.
        """
        if self.dtype is None or self.dtype is dtype:
            return dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise DeclarationError(
                f"copies[{name!r}] casts {dtype} to {self.dtype}: expected a float of 16 to 64 bits."
            )
        return self.dtype


def copies_of(given: Mapping[str, Copy | str] | None) -> dict[str, Copy]:
    """What `copies=` says: a string stands for a copy.

    Raises:
        DeclarationError: for anything else.
    """
    if not isinstance(given, Mapping | None):
        raise DeclarationError(f'copies={given!r}: expected a mapping such as {{"audio": "host"}}.')
    copies: dict[str, Copy] = {}
    for name, copy in (given or {}).items():
        if not isinstance(name, str):
            raise DeclarationError(f"copies has the key {name!r}: expected names of spanned outputs.")
        if not isinstance(copy, Copy | str):
            raise DeclarationError(f"copies[{name!r}] is {copy!r}: expected 'view', 'device', 'host' or a Copy.")
        copies[name] = Copy(copy) if isinstance(copy, str) else copy
    return copies


@dataclass(frozen=True)
class Region:
    """The part of a copy slot that holds one output's rows.

    Attributes:
        index: its place among the copies of its graph.
        ring: which of the rings of its slots it is in.
        on_host: whether the slot is in pinned host memory.
        first: byte at which it begins, a multiple of 16.
        capacity: its bytes, a multiple of 16.
    """

    index: int
    ring: int
    on_host: bool
    first: int
    capacity: int


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to where the next row begins."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class CopySlots:
    """A ring of slots for copied rows: on the device, in pinned memory, or a part on either.

    Attributes:
        regions: the parts of a slot, as they were asked for: `(copy, bytes)` each.
        rings: what the kernel writes, int64 `[num_slots, words]`: at most one on the device and one on the host.
        slot_bytes: bytes of one slot.
    """

    def __init__(self, backend: Backend, wanted: Sequence[tuple[Copy, int]], num_slots: int) -> None:
        self._backend = backend
        self.regions: list[Region] = []
        ends: dict[bool, int] = {}
        for index, (copy, num_bytes) in enumerate(wanted):
            on_host = copy.to == "host"
            first = ends.get(on_host, 0)
            ends[on_host] = first + aligned(num_bytes)
            ring = list(ends).index(on_host)
            self.regions.append(Region(index, ring, on_host, first, aligned(num_bytes)))
        self.slot_bytes = sum(ends.values())
        self._memory = [self._allocate(on_host, num_slots, end) for on_host, end in ends.items()]
        self.rings = [memory.device for memory in self._memory]
        self._buffers = [_buffer_of(memory.host) for memory in self._memory]

    def _allocate(self, on_host: bool, num_slots: int, num_bytes: int) -> Pinned:
        num_words = max(num_bytes, ALIGNMENT) // _WORD
        if on_host:
            return self._backend.pinned(num_slots, num_words, writer="device")
        with torch.inference_mode(False):
            ring = torch.zeros(num_slots, num_words, dtype=torch.int64, device=self._backend.device)
        return Pinned(ring, ring)

    def crop(self, region: Region, slot: int, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """What lies in a slot from byte `offset` of a region on.

        In host memory it has a storage of its own, of just these bytes: whoever saves, shares or sends it to another
        process must not take the ring along, nor move it.
        """
        ring, buffer, size = self._memory[region.ring].host, self._buffers[region.ring], math.prod(shape)
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=ring.device)
        at = slot * ring.size(1) * _WORD + region.first + offset
        if buffer is None:
            strides, step = [], 1
            for extent in reversed(shape):
                strides.append(step)
                step *= extent
            return ring.view(dtype).as_strided(tuple(shape), strides[::-1], at // dtype.itemsize)
        flat = torch.frombuffer(buffer, dtype=dtype, count=size, offset=at)
        return flat if len(shape) == 1 else flat.resize_(tuple(shape))

    def memory_of(self, slot: int) -> list[Tensor]:
        """All bytes of a slot, wherever they lie, to be poisoned."""
        rings = {ring.data_ptr(): ring for memory in self._memory for ring in (memory.host, memory.device)}
        return [ring[slot].view(torch.uint8) for ring in rings.values()]

    def __del__(self) -> None:
        self._backend.before_free(vars(self).get("_memory"))


def _buffer_of(ring: Tensor) -> Any:
    """The bytes of a ring in host memory, which keep it alive; None for one on the device."""
    if ring.device.type != "cpu":
        return None
    buffer = (ctypes.c_uint8 * ring.untyped_storage().nbytes()).from_address(ring.data_ptr())
    buffer.owner = ring  # type: ignore[attr-defined]
    return buffer
