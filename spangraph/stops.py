"""Stop checks: what ends or is withheld after a step, decided on the host from the step's row values."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spangraph.errors import InputError, RowLookupError, StepStateError, StepTimeoutError
from spangraph.launch import Launch

if TYPE_CHECKING:
    from spangraph.ring import Ring

# Row id -> name -> value: an int, or a tuple of ints where a row has several.
RowValues = Mapping[Hashable, Mapping[str, Any]]


@dataclass(frozen=True)
class StopCheck:
    """What a stop check decides about the rows of a step. A row may do one without the other: `ignore_eos` withholds
    the end token and goes on.

    Args:
        stops: ids of the rows that end with this step.
        withheld: ids of the rows whose outputs are all withheld, as if their spans were empty; or row id -> names of
            the spanned outputs that are.

    Raises:
        InputError: if these are no collections of row ids and of names.
    """

    stops: Collection[Hashable] = frozenset()
    withheld: Collection[Hashable] | Mapping[Hashable, Collection[str]] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", _set_of("stops", self.stops))
        if isinstance(self.withheld, Mapping):
            names = {row_id: _set_of(f"withheld[{row_id!r}]", names) for row_id, names in self.withheld.items()}
            object.__setattr__(self, "withheld", names)
        else:
            object.__setattr__(self, "withheld", _set_of("withheld", self.withheld))

    def keys(self, launch: Launch) -> set[tuple[int, str | None]]:
        """What is withheld of a launch, in its own terms.

        Raises:
            RowLookupError: if the launch has no such row or output.
        """
        ids = range(launch.num_rows) if launch.row_ids is None else launch.row_ids
        positions = {row_id: position for position, row_id in enumerate(ids)}
        if unknown := [row_id for row_id in (*self.stops, *self.withheld) if row_id not in positions]:
            raise RowLookupError(
                f"the stop check names rows {unknown}, which this step does not have; its rows are {list(ids)}."
            )
        if not isinstance(self.withheld, Mapping):
            return {(positions[row_id], None) for row_id in self.withheld}
        return {
            (positions[row_id], launch.tail.cut(name).name) for row_id, names in self.withheld.items() for name in names
        }


def _set_of(what: str, values: Any) -> frozenset[Any]:
    if isinstance(values, str):
        raise InputError(f"StopCheck: {what} is the string {values!r}: expected a collection, e.g. [{values!r}].")
    try:
        return frozenset(values)
    except TypeError as error:
        raise InputError(f"StopCheck: {what} is {values!r}: expected a collection of keys ({error}).") from None


class StopChecks:
    """Runs the stop check of a ring's steps, once per step, by whoever waits for it first; the others wait for that. No
    lock is held meanwhile."""

    def __init__(self, check: Callable[[RowValues], StopCheck]) -> None:
        if not callable(check):
            raise InputError(f"stop_check={check!r}: expected a function of the row values that returns a StopCheck.")
        self._check = check
        self._changed = threading.Condition(threading.Lock())
        self._runners: dict[Launch, int] = {}  # step -> thread that runs its check

    def wait(self, ring: Ring, launch: Launch, timeout: float | None = None) -> None:
        """`ring.wait`, then the check; returns without one if the launch was released meanwhile."""
        if launch.stops is not None:
            return
        me, deadline = threading.get_ident(), None if timeout is None else time.monotonic() + timeout
        if me in list(self._runners.values()):
            raise StepStateError(f"a stop check reads {launch}: it may use the row values that it is given, no step.")
        ring.wait(launch, timeout)
        with self._changed:
            left = None if deadline is None else min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            if not self._changed.wait_for(lambda: launch not in self._runners, left):
                raise StepTimeoutError(
                    f"{launch}: its stop check, which another thread runs, was not done within {timeout} s."
                )
            if launch.stops is not None or launch.is_released:
                return
            self._runners[launch] = me
        try:
            self._run(launch)
        finally:
            with self._changed:
                del self._runners[launch]
                self._changed.notify_all()

    def _run(self, launch: Launch) -> None:
        ids = range(launch.num_rows) if launch.row_ids is None else launch.row_ids
        columns = launch.tail.all_values(launch)
        found = self._check(
            {row_id: {name: column[i] for name, column in columns.items()} for i, row_id in enumerate(ids)}
        )
        if not isinstance(found, StopCheck):
            raise InputError(f"the stop check returned {found!r}: expected StopCheck(stops, withheld).")
        withheld = found.keys(launch)
        launch.withhold(withheld)
        for position, output in withheld:
            for name in launch.tail.cut_names if output is None else (output,):
                launch.note(position, name)
        launch.stops = frozenset(found.stops)
