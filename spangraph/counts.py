"""What a compiled object or a stager has done: plain numbers, cheap enough to be kept at every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

WAIT_BOUNDS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Upper ends of the bins of `Counts.wait_times`, in seconds; the last bin has none."""


@dataclass
class Counts:
    """What happened, as numbers that only grow. Of a `SpanStager`, what belongs to inputs and graphs stays 0.

    Attributes:
        launches: steps launched; each is a hit or a miss.
        hits, misses: whether the graph was there already. Why not is in `reasons`.
        reasons: reason -> misses: a first launch, weights that were replaced, a size that fits no bucket.
        captures: signatures traced, and captured where the backend captures.
        evictions: signatures dropped again, for `max_graphs` or for stale weights.
        rows, padding_rows: real rows, and rows of the batch that were not.
        elements, padding_elements: elements of the inputs as the caller gave them, and what buckets added.
        staged_bytes: bytes that staging nodes wrote to the host, of steps that were read.
        host_bytes, device_bytes: bytes that copies moved to the host and inside the device, up to 15 behind each crop
            included, of steps that were read.
        overflows: outputs of a step that did not fit, and were cut from the padded output instead.
        nans: NaNs that a cast to PCM met, but for outputs that did not fit (`Rows.nans` counts those, too).
        withheld, bad_spans: rows of an output that were found to be withheld, and to have a bad span, when somebody
            looked at them; each once.
        waits: steps whose spans were read after a wait, long or short; inline, where none waits, at the launch.
        wait_times: how long those took: a bin per `WAIT_BOUNDS` (10 us, 100 us, ... 1 s), and one for more.
    """

    launches: int = 0
    hits: int = 0
    misses: int = 0
    captures: int = 0
    evictions: int = 0
    rows: int = 0
    padding_rows: int = 0
    elements: int = 0
    padding_elements: int = 0
    staged_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    overflows: int = 0
    nans: int = 0
    withheld: int = 0
    bad_spans: int = 0
    waits: int = 0
    wait_times: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS) + 1))
    reasons: dict[str, int] = field(default_factory=dict)
    _parts: ClassVar[Mapping[Any, Counts] | None] = None  # of an object that is a sum: what it is the sum of

    def now(self) -> Counts:
        """A copy that does not change."""
        if self._parts is not None:
            return _sum(self._parts)
        return replace(self, wait_times=self.wait_times.copy(), reasons=self.reasons.copy())

    @contextlib.contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """For tests: by how much the block changes some counts.

            with compiled.counts.expect(launches=1, hits=1, captures=0):
                compiled(x)

        Raises:
            AssertionError: naming every count that changed by something else.
            TypeError: for what is no count.
        """
        known = {f.name for f in fields(self) if isinstance(getattr(self, f.name), int)}
        if unknown := sorted(set(deltas) - known):
            raise TypeError(f"expect() got {unknown}: expected some of {sorted(known)}.")
        before = self.now()
        yield
        after = self.now()
        found = {name: getattr(after, name) - getattr(before, name) for name in deltas}
        wrong = [f"{name} changed by {found[name]}, expected {n}" for name, n in deltas.items() if found[name] != n]
        if wrong:
            raise AssertionError("; ".join(wrong))

    def as_dict(self) -> dict[str, Any]:
        """The same as plain numbers, lists and dicts."""
        return {f.name: _copied(getattr(self, f.name)) for f in fields(self)}


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value


def _sum(parts: Mapping[Any, Counts]) -> Counts:
    """All of them together, as of now; `expect` sees what is added later."""
    total = Counts()
    vars(total)["_parts"] = parts
    for part in list(parts.values()):  # at once: other threads launch meanwhile
        for name, value in part.as_dict().items():
            if name == "reasons":
                for reason, number in value.items():
                    total.reasons[reason] = total.reasons.get(reason, 0) + number
            elif name == "wait_times":
                total.wait_times = [own + other for own, other in zip(total.wait_times, value, strict=True)]
            else:
                setattr(total, name, getattr(total, name) + value)
    return total


class Statistics(Mapping[tuple[str, str], Counts]):
    """Counts per walk and bucket: `(walk, bucket) -> Counts`. A bucket is named like `"batch=8, frames=200"`; launches
    without buckets are under `""`, and those that ran eagerly under `"(eager)"`.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], Counts] = {}

    @property
    def total(self) -> Counts:
        """All of them together, as of now."""
        return _sum(self._parts)

    def of(self, walk: str, bucket: str) -> Counts:
        """What a launch of this walk and bucket counts in."""
        return self._parts.setdefault((walk, bucket), Counts())

    def __getitem__(self, key: tuple[str, str]) -> Counts:
        return self._parts[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(list(self._parts))

    def __len__(self) -> int:
        return len(self._parts)

    def as_dict(self) -> dict[str, Any]:
        """All counts, for programs: walk -> bucket -> name -> number, and those of all together under `"total"`."""
        walks: dict[str, Any] = {}
        for (walk, bucket), counts in list(self._parts.items()):
            walks.setdefault(walk, {})[bucket] = counts.as_dict()
        return {"total": self.total.as_dict(), "walks": walks}

    def __str__(self) -> str:
        """A table for people."""
        columns = ("walk", "bucket", "launches", "hits", "rows", "padding", "elements", "padding", "staged", "copied")
        table: list[tuple[str, ...]] = [(*columns, "withheld", "bad", "overflows", "evictions", "wait (median)")]
        total = self.total
        for (walk, bucket), c in [*self._parts.items(), (("total", ""), total)]:
            cells = [f"{c.launches:,}", _share(c.hits, c.launches)]
            cells += f"{c.rows:,}", _share(c.padding_rows, c.rows + c.padding_rows)
            cells += f"{c.elements:,}", _share(c.padding_elements, c.elements + c.padding_elements)
            others = c.staged_bytes, c.host_bytes + c.device_bytes, c.withheld, c.bad_spans, c.overflows, c.evictions
            table.append((walk, bucket, *cells, *(f"{number:,}" for number in others), _median(c)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for row in table:
            names = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
            numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join(names + numbers))
        misses = [f"misses, {reason}: {number:,}" for reason, number in total.reasons.items()]
        return "\n".join([*map(str.rstrip, lines), *misses])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _median(counts: Counts) -> str:
    """The bin in which the median wait lies."""
    so_far = 0
    for bound, number in zip((*WAIT_BOUNDS, None), counts.wait_times, strict=True):
        so_far += number
        if 2 * so_far >= counts.waits > 0:
            return "> 1 s" if bound is None else f"< {bound * 1e3:g} ms"
    return "-"
