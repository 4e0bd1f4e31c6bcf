"""Streams: what each request has produced so far, over steps."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from spangraph.errors import RowLookupError, SpanError, StepStateError
from spangraph.ring import Ring
from spangraph.rows import Entry
from spangraph.step import Step


class Stream:
    """The items of one request: per output, one owned entry per step that delivered one. See `Streams`.

    Attributes:
        is_finished: whether a stop check has ended the request.
        counts: output -> number of items delivered so far, popped ones included; withheld ones are none.
    """

    def __init__(self) -> None:
        self.is_finished = False
        self.counts: dict[str, int] = {}
        self._items: dict[str, list[Entry]] = {}
        self._last: weakref.WeakKeyDictionary[Ring, int] = weakref.WeakKeyDictionary()  # newest step of each ring

    @property
    def num_items(self) -> int:
        """Number of items delivered so far, of all outputs."""
        return sum(self.counts.values())

    def items(self, name: str | None = None) -> list[Entry]:
        """The items of an output that were not popped, oldest first: `torch.cat(stream.items("audio"), -1)`.

        Args:
            name: may be left out where the stream has one output.

        Raises:
            RowLookupError: if there is no such output.
        """
        return list(self._items[self._name(name)])

    def pop(self, name: str | None = None) -> list[Entry]:
        """The same, and forget them."""
        name = self._name(name)
        items, self._items[name] = self._items[name], []
        return items

    def _name(self, name: str | None) -> str:
        if name is None and len(self._items) == 1:
            return next(iter(self._items))
        if name is None or name not in self._items:
            asked = "one name" if name is None else repr(name)
            raise RowLookupError(f"no output for {asked} in this stream; it has {sorted(self._items)}.")
        return name

    def _append(self, names: Iterable[str], entries: Mapping[str, Entry]) -> None:
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + (name in entries)
            self._items.setdefault(name, []).extend([entries[name]] if name in entries else [])

    def __repr__(self) -> str:
        return f"<Stream {self.counts}{', finished' if self.is_finished else ''}>"


class Streams(Mapping[Hashable, Stream]):
    """Row id -> `Stream`, of all requests whose steps were fed and that were not popped. For one thread at a time.

        streams = Streams("audio")
        with compiled.launch(...) as step:
            streams.feed(step)

    Args:
        *names: the spanned outputs to keep, default all of each step.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._streams: dict[Hashable, Stream] = {}
        self._fed: weakref.WeakSet[Step] = weakref.WeakSet()

    def feed(self, step: Step) -> None:
        """Wait, then add what each row delivers to its request's stream, and mark the requests that stop.

        A row that the host withheld altogether and that does not stop is passed over, as of an aborted request.

        Raises:
            SpanError: for bad spans, once; the good rows have been added, and nothing of the bad ones.
            StepStateError: if the step was fed already, comes after a later step of one of its requests, or delivers
                something for a finished one. Nothing is added then.
            RowLookupError: if the step has no such output.
            and what `wait` raises.
        """
        stops, names = step.stops, self._names or step.output_names
        if step in self._fed:
            raise StepStateError(f"{step} was fed to these streams already.")
        rows = [step.rows(name).own() for name in names]
        fed: list[tuple[Hashable, dict[str, Any]]] = []
        bad: list[SpanError] = []
        refused: dict[str, list[Hashable]] = {}
        for position, row_id in enumerate(step.row_ids):
            if (position, None) in step._launch.withheld and row_id not in stops:
                continue
            stream, num_bad = self._streams.get(row_id), len(bad)
            entries: dict[str, Any] = {}
            for name, cut in zip(names, rows, strict=True):
                try:
                    if (entry := cut.at(position)) is not None:
                        entries[name] = entry
                except SpanError as error:
                    bad.append(error)
            is_bad = len(bad) > num_bad
            if stream is not None and stream.is_finished:
                if entries or is_bad:
                    refused.setdefault("are finished: withhold their rows (step.withhold)", []).append(row_id)
                continue
            if stream is not None and stream._last.get(step._ring, 0) > step.generation:
                refused.setdefault("were fed a later step before: feed steps in launch order", []).append(row_id)
            fed.append((row_id, {} if is_bad else entries))
        for why, ids in refused.items():
            raise StepStateError(f"{step} cannot be fed: requests {ids} {why}.")
        self._fed.add(step)
        for row_id, entries in fed:
            stream = self._streams.setdefault(row_id, Stream())
            stream._append(names, entries)
            stream._last[step._ring] = step.generation
            stream.is_finished = row_id in stops
        if bad:
            raise SpanError("\n".join(map(str, bad)), list(dict.fromkeys(row for error in bad for row in error.rows)))

    def pop(self, row_id: Hashable) -> Stream:
        """A request's stream, which is forgotten here.

        Raises:
            RowLookupError: if there is none.
        """
        stream = self[row_id]
        del self._streams[row_id]
        return stream

    def __getitem__(self, row_id: Hashable) -> Stream:
        if row_id not in self._streams:
            raise RowLookupError(f"no stream of request {row_id!r}: no step of it was fed, or it was popped.")
        return self._streams[row_id]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)
