"""What a compiled object holds: bytes per output and graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spangraph.backends import Backend, storage_bytes
from spangraph.ring import Ring
from spangraph.signature import Signature


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one part.

    Attributes:
        graph: the input signature it belongs to; `""` for what all share.
        part: the spanned output whose copies these are; or `"(staging)"`, `"(inputs)"`, `"(graph pool)"`.
        pinned, device, pool: bytes in pinned host memory, on the device, and in memory pools of captured graphs.
    """

    graph: str
    part: str
    pinned: int = 0
    device: int = 0
    pool: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes that a compiled object holds; `str()` makes a table of it.

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


def measure(backend: Backend, ring: Ring, signatures: Iterable[Signature]) -> Memory:
    """What these signatures and their ring hold now."""
    uses = [MemoryUse("", "(staging)", storage_bytes([ring.control.host]), storage_bytes([ring.cursor]))]
    pools: set[object] = set()
    for signature in signatures:
        label, tail = signature.label, signature.tails[0]
        for cut in tail.copied:
            if cut.region is not None:
                num_bytes = cut.region.capacity * ring.depth
                on_host = cut.region.on_host
                uses.append(MemoryUse(label, cut.label, num_bytes * on_host, num_bytes * (not on_host)))
        own = [held for t in signature.tails for held in (t.mirror, t.status) if held is not None]
        slots = [] if tail.buffer is None else [tail.buffer.memory.host]
        uses.append(MemoryUse(label, "(staging)", storage_bytes(slots), storage_bytes(own)))
        instances = signature.instances
        uploads = [buffer for instance in instances for buffers, _ in instance.uploads for buffer in buffers]
        inputs = [static for instance in instances for static in instance.inputs]
        uses.append(MemoryUse(label, "(inputs)", storage_bytes(uploads), storage_bytes(inputs)))
        for instance in instances:
            pool, num_bytes = backend.pool_bytes(instance.graph)
            if pool is not None and pool not in pools:
                pools.add(pool)
                uses.append(MemoryUse(label, "(graph pool)", pool=num_bytes))
    return Memory(tuple(uses), ring.leased_bytes())
