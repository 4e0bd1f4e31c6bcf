"""What a compiled object or a stager holds: bytes per output and graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spangraph.backends import storage_bytes
from spangraph.slots import CopySlots, SlotBuffer
from spangraph.tail import StagerCore, Tail

if TYPE_CHECKING:
    from spangraph.signature import Signature


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one part.

    Attributes:
        graph: the input signature it belongs to; `""` for what all share.
        part: the spanned output whose copies these are; or `"(control)"`, `"(spans)"`, `"(inputs)"`,
            `"(graph pool)"`.
        pinned, device, pool: bytes in pinned host memory, on the device, and in memory pools of captured graphs.
    """

    graph: str
    part: str
    pinned: int = 0
    device: int = 0
    pool: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes that a compiled object or a stager holds; `str()` makes a table of it.

    Attributes:
        uses: by part.
        leased: bytes that open and leased steps keep from being used again; a part of the above on a captured backend.
    """

    uses: tuple[MemoryUse, ...]
    leased: int

    @property
    def pinned(self) -> int:
        """Bytes in pinned host memory."""
        return sum(use.pinned for use in self.uses)

    @property
    def device(self) -> int:
        """Bytes on the device, those of graph pools aside."""
        return sum(use.device for use in self.uses)

    @property
    def pool(self) -> int:
        """Bytes in memory pools of captured graphs."""
        return sum(use.pool for use in self.uses)

    def __str__(self) -> str:
        table = [("graph", "part", "pinned", "device", "pool")]
        table += [(u.graph or "(all)", u.part, f"{u.pinned:,}", f"{u.device:,}", f"{u.pool:,}") for u in self.uses]
        table.append(("total", "", f"{self.pinned:,}", f"{self.device:,}", f"{self.pool:,}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join([*map(str.rstrip, lines), f"retained by open leases: {self.leased:,}"])


def measure_compiled(core: StagerCore, signatures: Iterable[Signature]) -> Memory:
    """What these signatures and their ring hold now."""
    uses = [_ring_use(core)]
    pools: set[object] = set()
    for signature in list(signatures):  # another thread may trace one
        label, tail = signature.label, signature.tails[0]
        parts = {cut.region.index: cut.label for cut in tail.copied if cut.region is not None}
        uses += _slot_uses(core, label, tail.buffer, tail.copies, [parts[i] for i in sorted(parts)], signature.tails)
        instances = signature.instances
        uploads = [buffer for instance in instances for buffers, _ in instance.uploads for buffer in buffers]
        inputs = [static for instance in instances for static in instance.inputs]
        uses.append(MemoryUse(label, "(inputs)", storage_bytes(uploads), storage_bytes(inputs)))
        for instance in instances:
            pool, num_bytes = core.backend.pool_bytes(instance.graph)
            if pool is not None and pool not in pools:
                pools.add(pool)
                uses.append(MemoryUse(label, "(graph pool)", pool=num_bytes))
    return Memory(tuple(uses), core.ring.leased_bytes())


def measure_stager(core: StagerCore, buffer: SlotBuffer, copies: CopySlots | None, names: Sequence[str]) -> Memory:
    """What a stager holds; its graphs' memory is not its own."""
    return Memory((_ring_use(core), *_slot_uses(core, "", buffer, copies, names)), core.ring.leased_bytes())


def _ring_use(core: StagerCore) -> MemoryUse:
    return MemoryUse("", "(control)", storage_bytes([core.ring.control.host]), storage_bytes([core.ring.cursor]))


def _slot_uses(
    core: StagerCore,
    label: str,
    buffer: SlotBuffer | None,
    copies: CopySlots | None,
    names: Sequence[str],
    tails: Sequence[Tail] = (),
) -> Iterator[MemoryUse]:
    for name, region in zip(names, [] if copies is None else copies.regions, strict=True):
        num_bytes = region.capacity * core.ring.depth
        yield MemoryUse(label, name, num_bytes * region.on_host, num_bytes * (not region.on_host))
    own = [held for tail in tails for held in (tail.mirror, tail.status) if held is not None]
    yield MemoryUse(label, "(spans)", storage_bytes([] if buffer is None else [buffer.memory.host]), storage_bytes(own))
