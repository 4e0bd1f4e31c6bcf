"""The ticket for one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import profiler

from spangraph.cuts import Cut
from spangraph.errors import RowLookupError, StepStateError
from spangraph.launch import Launch, stale_error
from spangraph.ring import Ring
from spangraph.rows import Rows

# Of a step and its launch: with rows, and with owned rows.
Results = tuple[Callable[["Step", Launch], Any], Callable[["Step", Launch], Any]]


class Step:
    """The ticket for one launch. Any thread may wait for it and read it; reading twice gives the same rows.

    A step is open until its spans are read, and leased until it is released: `with step:` releases at the end of the
    block, `release()` does it by hand, and so does the collection of the step and its rows.
    """

    __slots__ = ("__weakref__", "_launch", "_results", "_ring")

    def __init__(self, ring: Ring, launch: Launch, results: Results | None = None) -> None:
        self._ring = ring
        self._launch = launch
        self._results = results

    @property
    def generation(self) -> int:
        """The launch's number in the ring."""
        return self._launch.generation

    @property
    def row_ids(self) -> tuple[Hashable, ...]:
        """Ids of the real rows, frozen at launch."""
        ids = self._launch.row_ids
        return tuple(range(self._launch.num_rows) if ids is None else ids)

    @property
    def is_done(self) -> bool:
        """Whether a wait would return at once. Does not wait."""
        if self._launch.is_read or self._launch.error is not None:
            return True
        try:
            return self._launch.event is not None and self._launch.event.query()
        except Exception:  # noqa: BLE001 - the wait raises it
            return True

    @property
    def is_released(self) -> bool:
        """Whether the lease has ended."""
        return self._launch.is_released

    def wait(self, timeout: float | None = None) -> Step:
        """Wait until the step is done, its spans are on the host, and its stop check, if there is one, has run.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            StepTimeoutError: after `timeout`; the step stays open and can be waited for again.
            StagingError: if the step's slot does not hold this step.
            StaleStepError: after the step's release, also by another thread meanwhile.
            StepStateError: inside a stop check.
            and what the stop check raises.
        """
        launch, ring = self._launch, self._ring
        if not launch.is_released:
            if profiler._is_profiler_enabled or ring.backend.always_ranges:
                with ring.backend.range("spangraph.wait"):
                    ring.wait_and_check(launch, timeout)
            elif not launch.is_read or ring.stop_checks is not None:
                ring.wait_and_check(launch, timeout)
        if launch.is_released:
            raise launch.error or stale_error(launch)
        return self

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the step's spanned outputs."""
        return self._launch.tail.cut_names

    @property
    def stops(self) -> frozenset[Hashable]:
        """Wait, then the ids of the rows that the stop check has ended; none without a stop check."""
        self.wait()
        return self._launch.stops or frozenset()

    def rows(self, name: str | None = None) -> Rows:
        """Wait, then cut one spanned output.

        Args:
            name: the declared name, or `"fqn.name"` where several submodules declare it; may be left out where the
                step has one spanned output.

        Raises:
            RowLookupError: if the step has no such spanned output.
            and what `wait` raises.
        """
        launch, ring = self._launch, self._ring
        if not launch.is_read or launch.is_released or ring.stop_checks is not None:
            self.wait()
        cut = launch.tail.cuts.get(name) or launch.tail.cut(name)
        if ring.backend.static:
            ring.note_reader(launch)
        rows: Rows = object.__new__(Rows)  # without the frame of `__init__`, as views in `rows` are made
        rows._step, rows._launch, rows._cut = self, launch, cut
        return rows

    def cut_rows(self, cut: Cut) -> Rows:
        """Rows of one planned cut; after a wait."""
        ring, launch = self._ring, self._launch
        if ring.backend.static:
            ring.note_reader(launch)
        return Rows(self, launch, cut)

    def output(self, index: int) -> Tensor:
        """One whole output of the graph; after a wait."""
        ring, launch = self._ring, self._launch
        if ring.backend.static:
            ring.note_reader(launch)
        outputs = launch.outputs  # before the check: another thread may release meanwhile
        if launch.is_released:
            raise stale_error(launch)
        return outputs[index]

    def row_values(self, name: str) -> Tensor:
        """Wait, then the row values called `name`: a host tensor, int64 `[rows]` or `[rows, k]`, of the real rows.

        Raises:
            RowLookupError: if the step has no such row value.
            and what `wait` raises.
        """
        self.wait()
        column, shape = self._launch.tail.value(name)
        words = self._launch.tail.column(self._launch, column).tolist()
        values = torch.tensor(words, dtype=torch.int64, device="cpu")
        return values.view(self._launch.num_rows, *shape)

    def staged(self, column: str, shape: Sequence[int]) -> Tensor:
        """A whole staged column, padding rows zeroed, as a host tensor; after a wait."""
        words, buffer = self._launch.words, self._launch.tail.buffer
        assert words is not None, "read, so that it has words"
        assert buffer is not None, "it has columns"
        first, width = buffer.layout.columns[column]
        own = words[first : first + width * shape[0]].tolist()
        return torch.tensor(own, dtype=torch.int64, device="cpu").view(*shape)

    def result(self) -> Any:
        """Wait, then the model's own output structure with spanned tensors replaced by `Rows`.

        Outputs without spans are delivered whole and live as long as the rows. Only for compiled models.

        Raises:
            StepStateError: for a step of a `SpanStager`, which knows no output structure.
            and what `wait` raises.
        """
        return self._result(own=False)

    def _result(self, *, own: bool) -> Any:
        launch, ring = self._launch, self._ring
        is_profiled = profiler._is_profiler_enabled or ring.backend.always_ranges
        if not launch.is_read or launch.is_released or ring.stop_checks is not None or is_profiled:
            self.wait()
        if self._results is None:
            raise StepStateError("a step of a SpanStager has no result(): use rows(name) and the graph's own outputs.")
        make = self._results[own]
        if is_profiled:
            with ring.backend.range("spangraph.cut"):
                result = make(self, launch)
        else:
            result = make(self, launch)
        if own and launch.is_released:  # by another thread, so that a later step may have written what was copied
            raise stale_error(launch)
        return result

    def withhold(self, row_id: Hashable, *names: str) -> None:
        """Withhold a row after the launch, for the named outputs or all of them: as if its spans were empty, also in
        rows that were asked for before, owned ones too.

        For stop checks and aborted requests; never waits.

        Raises:
            RowLookupError: if the step has no such row or output.
        """
        if row_id not in self.row_ids:
            raise RowLookupError(f"no row {row_id!r} in this step; its rows are {list(self.row_ids)}.")
        position = self.row_ids.index(row_id)
        which = [self._launch.tail.cut(name).name for name in names]
        self._launch.withhold([(position, name) for name in which] or [(position, None)])
        for name in which or self._launch.tail.cut_names:
            self._launch.note(position, name)

    def release(self) -> None:
        """End the lease. Rows that are not owned become invalid; a consumer's work on the current stream is waited for,
        on the device, by the next launch into this memory. Never waits for the device, but for a launch that another
        thread is making; does nothing the second time."""
        self._ring.release(self._launch)

    def cancel(self) -> None:
        """Give the step up, done or in flight, for requests that nobody waits for any more: who waits or reads gets
        `StaleStepError`. Waits for nothing, not even for another thread's launch. `withhold` gives up one row.

        A wait that blocks without a timeout cannot be woken: it raises once the device is done.
        """
        self._ring.cancel(self._launch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ring.release(self._launch)

    def __del__(self) -> None:
        if not self._launch.is_released:
            self._ring.discard(self._launch)

    def __repr__(self) -> str:
        return f"<{self._launch}>"
