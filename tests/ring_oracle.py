"""The oracle of `ring_machine`: what was launched on a ring over a simulated device, and what must come of it.

What the oracle demands:

* A step that delivers, delivers its own rows, bit for bit, whatever happened to it or before it.
* A step that no fault can have touched delivers (it is not `excused`). Faults of the device strike whatever runs next,
  so they excuse all that is in flight; a lost staging node also excuses the steps launched behind it, until a launch
  that comes after somebody (a reader, or the ring when it takes a dropped step back) could notice it.
* A launch is refused if the depth or the graph's outputs are leased, and only then.
* Each slot is free, held by one step, or in quarantine; at the end all are free, and fresh launches are right.

While the device is held, its copies are, or a consumer has yet to read (`is_blocked`), waits are short and may time
out. What drains the device lets it run first. The oracle looks into the ring to steer (which slots are left) and to
count slots; never to judge rows.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from spangraph import (
    ClosedError,
    RingFullError,
    RowLookupError,
    Rows,
    SpanError,
    StagingError,
    StaleStepError,
    StepStateError,
    StepTimeoutError,
)
from spangraph.testing import SimulatedDevice

from .ring_engines import Engine, Flight, Inputs, Lane, Raised, captured_by_hand, compiled, is_same

SHORT, LONG = 0.002, 60.0
FAULTS = ("replay", "kernel", "staging", "compaction", "copy", "late", "wait")


class Oracle:
    """One example: an engine, and what the oracle knows."""

    def __init__(self, rng: random.Random, figures: Counter[str] | None = None) -> None:
        self.figures = Counter() if figures is None else figures
        self.device = SimulatedDevice()
        self.depth = rng.randint(1, 4)
        build = compiled if rng.random() < 0.25 else captured_by_hand
        self.engine: Engine = build(self.device, rng, self.depth, rng.choice(["block", "spin", "header"]))
        self.ring, self.lanes = self.engine.ring, self.engine.lanes
        self.streams = [self.device.stream(), self.device.new_stream()]
        self.consumer = self.device.new_stream()
        self.helper, self.reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.flights: list[Flight] = []
        self.owned: list[tuple[Rows, Flight, str]] = []
        self.gates: list[threading.Event] = []
        self.seen: list[tuple[list[Tensor], list[Tensor], threading.Event]] = []
        self.is_held = self.is_closed = False
        self.is_behind = False  # a staging node may have been lost, and nobody has noticed
        self.is_noticed = False
        self.racing: Flight | None = None  # another thread may read it
        self.num_launched = 0
        self.figures["examples"] += 1

    def anywhere(self, rng: random.Random, fn: Callable[[], Any]) -> Any:
        """`fn()` on a stream and a thread."""
        stream = rng.choice([*self.streams, self.streams[0], self.streams[0]])

        def there() -> Any:
            with self.device.use_stream(stream):
                return fn()

        return self.helper.submit(there).result() if rng.random() < 0.25 else there()

    @property
    def is_blocked(self) -> bool:
        """Whether work may not get done."""
        return self.is_held or bool(self.gates)

    def unblock(self) -> None:
        """Let everything run; then late readers must have seen what they were to see."""
        self.device.resume()
        self.device.land_copies()
        for gate in self.gates:
            gate.set()
        self.gates.clear()
        self.is_held = False
        for copies, values, is_read in self.seen:
            assert is_read.wait(LONG)
            for copy, value in zip(copies, values, strict=True):
                assert is_same(copy, value), "WRONG ROW: a consumer on another stream"
            self.figures["rows compared"] += len(values)
        self.seen.clear()

    def _launch(self, rng: random.Random, body: str, lane: Lane | None = None, sure: bool = False) -> Flight | None:
        lane = lane or rng.choice(self.lanes)
        body = body if lane.replay else ""
        inputs = Inputs.draw(rng, lane.bs, lane.width)
        num_rows = lane.bs if rng.random() < 0.6 else rng.randint(0, lane.bs)
        self.num_launched += 1
        ids: list[Hashable] = [f"{self.num_launched}-{i}" for i in range(num_rows)]
        given = ids if rng.random() < 0.7 else None
        ids = ids if given else list(range(num_rows))
        pending = {kind for kind in FAULTS if self.device._faults[kind]}
        if "raise" in body or "replay" in pending or self._may_drain(lane):
            self.unblock()
        wait = rng.random() < 0.2
        allowed = {"ok"} if sure else self._outcomes(lane, wait)
        timeout = SHORT if "timeout" in allowed or self.is_blocked else LONG
        outcome, raised, step = "ok", None, None
        was_noticed = self.is_noticed or any(f.may_be_lost and f.end and f.is_done() for f in self.flights)
        try:
            step = self.anywhere(rng, lambda: lane.start(inputs, given, num_rows, wait, timeout, body))
        except (RingFullError, StepTimeoutError, ClosedError) as error:
            outcome = {RingFullError: "full", StepTimeoutError: "timeout", ClosedError: "closed"}[type(error)]
            self.figures[f"launch {type(error).__name__}"] += 1
        except (Raised, RuntimeError) as error:
            raised = error
        assert outcome in allowed, f"launch: {outcome}, expected {allowed} of {lane}; {self.ring.describe()}"
        if outcome != "ok":
            return None
        self.figures["launches"] += 1
        if was_noticed:
            self.is_behind = self.is_noticed = False
            for flight in self.flights:
                flight.may_be_lost = flight.may_be_lost and not (flight.end and flight.is_done())
        if raised is not None:
            self._check_raised(raised, body, pending)
            return None
        assert step is not None
        assert "raise" not in body, "a launch that had to raise"
        assert body == "forget" or "replay" not in pending, "a launch that had to raise"
        struck = pending & ({"kernel", "copy", "late"} if body == "forget" else {*FAULTS} - {"wait", "replay"})
        failing: Any = step._launch.event
        is_excused = bool(struck) or self.is_behind or failing.fail is not None or body == "forget"
        may_be_lost = bool(struck & {"kernel", "staging"}) or body == "forget"
        self.is_behind |= may_be_lost
        flight = Flight.of(lane, inputs, ids, step, is_excused, may_be_lost)
        self.flights.append(flight)
        return flight

    def _check_raised(self, raised: BaseException, body: str, pending: set[str]) -> None:
        """A launch that raised lost itself alone: the ring has drained, and counts on from what the device did."""
        self.figures["launches that raised"] += 1
        if isinstance(raised, Raised):
            with pytest.raises(StepStateError, match="its launch raised"):
                raised.step.rows()
            self.is_behind = False
        else:
            assert "simulated" in str(raised), raised
            assert pending & {"replay", "kernel"}, raised
            # What a kernel raised was in nobody's event, so it is the drain that failed; the next launch settles that.
            self.is_behind = False

    def _outcomes(self, lane: Lane, wait: bool) -> set[str]:
        """What may become of a launch now."""
        if self.is_closed:
            return {"closed"}
        live = [flight for flight in self.flights if flight.is_live]
        sure = [flight for flight in live if not flight.is_excused and flight is not self.racing]
        mine = [flight for flight in live if flight.lane is lane]
        refused = "timeout" if wait else "full"
        if len(sure) >= self.depth or (lane.holds and lane.num_graphs == 1 and set(mine) & set(sure)):
            return {refused, "timeout"} if lane.may_overflow and self.is_blocked else {refused}
        allowed = {"ok"}
        undone = [flight for flight in self.flights if flight.end and not flight.is_done()]
        if len(live) >= self.depth or len(live) + len(undone) >= self.ring.num_slots or (lane.holds and mine):
            allowed.add(refused)
        if lane.may_overflow and mine and not lane.holds:
            last = mine[-1]
            if not last.is_read and self.is_blocked:
                allowed |= {"timeout", refused}
            if last.is_excused or last is self.racing:
                allowed.add(refused)
            elif last.overflows:
                allowed = (allowed | {refused}) - {"ok"}
        elif lane.may_overflow and mine and self.is_blocked:
            allowed.add("timeout")
        return allowed

    def _may_drain(self, lane: Lane) -> bool:
        """Whether a launch may find only the slots of failed waits left, and drain the device."""
        ring = self.ring
        is_doubtful = bool(ring._quarantine) or any(f.is_excused and not f.is_read for f in self.flights)
        return is_doubtful and (len(ring._free) < 2 or (bool(lane.copied()) and len(ring._free_copies) < 2))

    def wait(self, flight: Flight) -> bool:
        """Wait; whether there is something to read."""
        assert flight.step is not None
        must = flight.is_read or not self.is_blocked
        try:
            flight.step.wait(LONG if must else SHORT)
        except StepTimeoutError:
            assert not must, f"HUNG: {self.ring.describe()}"
            self.figures["wait StepTimeoutError"] += 1
            return False
        except Exception as error:
            if not flight.is_excused:
                raise
            assert isinstance(error, StagingError) or "simulated" in str(error)  # noqa: PT017
            flight.end, flight.error, self.is_noticed = "failed", type(error), True
            self.figures[f"wait {type(error).__name__}"] += 1
            return False
        self.figures["overflows"] += flight.overflows and not flight.is_read
        flight.is_read = True
        return True

    def check(self, flight: Flight) -> bool:
        """Everything that a step delivers."""
        step = flight.step
        assert step is not None
        token = flight.inputs.token[: flight.num_rows]
        assert torch.equal(step.row_values("token"), token), "WRONG ROW VALUE"
        for name in flight.lane.names:
            self.check_rows(step.rows(name), flight, name)
        if flight.lane.replay is None:
            result = step.result()
            if flight.lane.whole:
                assert is_same(result.outputs["total"], flight.inputs.x.sum(1)[: flight.num_rows]), "WRONG OUTPUT"
            for name in flight.lane.names:
                self.check_rows(result.outputs[name], flight, name)
            given = {"audio": flight.inputs.spans, "turns": flight.inputs.pairs}
            if not flight.lane.holds:  # staged: padding rows are empty
                for name, spans in result.output_spans.items():
                    assert spans[: flight.num_rows].equal(given[name][: flight.num_rows]), "WRONG SPANS"
                    assert not spans[flight.num_rows :].any(), "WRONG SPANS of padding rows"
        return True

    def check_rows(self, rows: Rows, flight: Flight, name: str) -> None:
        """All rows of an output, good, bad, empty, withheld and padding."""
        good, bad, nans = flight.expected(name)
        found: list[Hashable] = []
        raised: list[Hashable] = []
        try:
            for row_id in rows:
                found.append(row_id)  # noqa: PERF402 - the good ones come before it raises
        except SpanError as error:
            raised = list(error.rows)
        assert (found, raised) == (list(good), bad)
        assert len(rows) == len(good)
        for i, row_id in enumerate(flight.ids):
            if row_id in good:
                entry = rows[row_id]
                parts = list(entry) if name == "turns" else [entry]
                assert len(parts) == len(good[row_id])
                assert all(map(is_same, parts, good[row_id])), f"WRONG ROW {row_id} of {flight.launch}"
                assert rows._owned is not None or rows.nans(row_id) == nans[row_id], "WRONG NANS"
            elif row_id in bad:
                with pytest.raises(SpanError):
                    rows[row_id]
            else:
                assert rows.at(i) is None
                with pytest.raises(RowLookupError):
                    rows[row_id]
        self.figures["rows compared"] += len(good)
        self.figures["bad spans"] += len(bad)
        self.figures["rows withheld"] += flight.num_rows - len(good) - len(bad)

    def _end(self, flight: Flight, how: str) -> None:
        step = flight.step
        assert step is not None
        flight.end = how
        self.figures[how] += 1
        if how == "dropped":
            flight.step, gone = None, weakref.ref(step)
            del step
            for other in self.flights:  # the simulated device keeps errors, and with them the frames that they crossed
                for error in (other.launch.event.fail, other.launch.event._error):  # type: ignore[union-attr]
                    if error is not None:
                        error.__traceback__ = None
            if gone() is not None:
                gc.collect()
            assert gone() is None, f"a dropped step lives on: {gc.get_referrers(gone())}"
            return
        views = {name: step.rows(name) for name in flight.lane.names} if flight.is_read else {}
        step.release() if how == "released" else step.cancel()
        for name, rows in views.items():
            for row_id in flight.expected(name)[0]:
                with pytest.raises(StaleStepError):
                    rows[row_id]

    def check_slots(self) -> None:
        """Each is free, held by one step, or in quarantine."""
        ring = self.ring
        with ring.lock:
            held = [*ring._live, *ring._dying]
            for free, all_slots, name in (
                (ring._free, ring.num_slots, "slot"),
                (ring._free_copies, ring.depth, "copy_slot"),
            ):
                found = [*free, *(slot for into, slot, _ in ring._quarantine if into is free)]
                found += [slot for launch in held if (slot := getattr(launch, name)) is not None]
                assert sorted(found) == list(range(all_slots)), f"LEAKED {name}: {ring.describe()}"
            for flight in self.flights[-2 * ring.num_slots :]:
                if not flight.is_read and not flight.launch.event._reached.is_set():  # type: ignore[union-attr]
                    slot, copy_slot = flight.slots
                    assert slot not in ring._free, f"the device may write to slot {slot}: {ring.describe()}"
                    assert flight.end != "failed" or copy_slot not in ring._free_copies, ring.describe()

    def finish(self) -> None:
        """Read and release everything; then all slots must be free, and what is launched right."""
        self.unblock()
        for faults in self.device._faults.values():
            faults.clear()
        for flight in self.flights:
            if not flight.end and self.wait(flight):
                self.check(flight)
        for flight in self.flights:
            if not flight.end and flight.step is not None:
                self._end(flight, "released")
        self.device.synchronize()
        rng = random.Random(0)
        for lane in [] if self.is_closed else [*self.lanes, *self.lanes]:
            fresh = self._launch(rng, "", lane, sure=True)
            assert fresh is not None
            fresh.is_excused = False
            assert self.wait(fresh)
            self.check(fresh)
            self._end(fresh, "released")
        self.device.synchronize()
        ring = self.ring
        with ring.lock:
            ring._reap()
            assert not [*ring._live, *ring._dying], f"LEAKED steps: {ring.describe()}"
            assert self.is_closed or not ring._quarantine, f"LEAKED slots: {ring.describe()}"
        self.check_slots()
        for rows, flight, name in self.owned:
            self.check_rows(rows, flight, name)
        self.figures["owned rows kept"] += sum(len(rows) for rows, *_ in self.owned)
        self.stop()

    def stop(self) -> None:
        """Let its threads end."""
        self.device.resume()
        self.device.land_copies()
        for gate in self.gates:
            gate.set()
        self.helper.shutdown()
        self.reader.shutdown()
