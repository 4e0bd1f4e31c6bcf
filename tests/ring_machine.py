"""A machine of random operations on a ring over a simulated device, judged by `ring_oracle`.

`World` is one example. Its rules take their choices from a `random.Random`, so that hypothesis (`RingMachine`) and
`benchmarks/ring_machine.py` drive the same code.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor

from spangraph import StaleStepError

from .ring_engines import Flight, Inputs
from .ring_oracle import FAULTS, LONG, Oracle


class World(Oracle):
    """One example, and the rules that are applied to it."""

    RULES: ClassVar[Mapping[str, int]] = {
        "launch": 12,
        "read": 10,
        "read_on_another_thread": 2,
        "release": 8,
        "cancel": 2,
        "drop": 2,
        "keep": 3,
        "withhold": 1,
        "consume": 3,
        "hold": 2,
        "let": 1,
        "hold_copies": 1,
        "resume": 3,
        "fail": 3,
        "burst": 1,
        "launch_and_raise": 1,
        "launch_without_a_replay": 1,
        "replay_without_a_launch": 1,
        "launch_when_there_is_room": 1,
        "read_what_has_ended": 2,
        "close": 1,
    }

    def run(self, name: str, seed: int) -> None:
        """One step of the machine."""
        rng = random.Random(seed)
        self.figures["steps"] += 1
        if name == "close" and rng.random() < 0.93:
            name = "read"  # little comes after a close
        getattr(self, name)(rng)
        self.check_slots()

    def hold(self, rng: random.Random) -> None:
        self.device.hold()
        self.is_held = True

    def hold_copies(self, rng: random.Random) -> None:
        self.device.hold_copies()
        self.is_held = True

    def let(self, rng: random.Random) -> None:
        self.device.let(rng.randint(1, 3))

    def resume(self, rng: random.Random) -> None:
        self.unblock()
        self.device.synchronize()
        if self.ring.cursor.item() == self.ring._next - 1:
            self.is_behind = False  # nothing was lost, so nobody will notice

    def fail(self, rng: random.Random) -> None:
        kind = rng.choice(FAULTS)
        if self.device._faults[kind]:
            return
        if kind in ("kernel", "copy", "late"):  # strikes what runs or lands next
            for flight in self.flights:
                if not flight.is_read and not flight.is_done():
                    flight.is_excused = True
                    if kind == "kernel":
                        flight.may_be_lost = self.is_behind = True
        self.device.fail_next(kind)
        self.figures[f"fault {kind}"] += 1

    def launch(self, rng: random.Random) -> None:
        self._launch(rng, "")

    def burst(self, rng: random.Random) -> None:
        """More launches than there are slots, of steps that nobody waits for, while the device is held."""
        self.hold(rng)
        lane = rng.choice(self.lanes)
        for _ in range(self.depth + 4):
            if rng.random() < 0.2 and not self.device._faults["wait"]:
                self.device.fail_next("wait")
            flight = self._launch(rng, "", lane if rng.random() < 0.7 else None)
            if flight is not None and rng.random() < 0.7:
                if rng.random() < 0.3 and not self.wait(flight) and flight.end:
                    continue  # its wait failed
                self._end(flight, rng.choice(["released", "cancelled", "dropped"]))

    def launch_and_raise(self, rng: random.Random) -> None:
        self._launch(rng, rng.choice(["raise", "raise late"]))

    def launch_without_a_replay(self, rng: random.Random) -> None:
        self._launch(rng, "forget")

    def replay_without_a_launch(self, rng: random.Random) -> None:
        """A warm-up: of a graph that has no step, and synchronised."""
        lane = rng.choice(self.lanes)
        if lane.replay is None or any(flight.lane is lane and not flight.end for flight in self.flights):
            return
        self.unblock()
        self.figures["dry runs"] += 1
        try:
            self.device.synchronize()
            lane.replay()
            self.device.synchronize()
        except RuntimeError as error:
            assert "simulated" in str(error)  # noqa: PT017

    def launch_when_there_is_room(self, rng: random.Random) -> None:
        """A thread waits for room, and another makes it."""
        lane = rng.choice(self.lanes)
        live = [flight for flight in self.flights if flight.is_live]
        if self.is_closed or len(live) != self.depth or any(flight.is_excused for flight in live):
            return
        mine = [flight for flight in live if flight.lane is lane]
        if any(self.device._faults.values()) or (mine and (lane.may_overflow or lane.holds)):
            return
        self.unblock()
        flight = rng.choice(live)
        inputs = Inputs.draw(rng, lane.bs, lane.width)
        waiting = self.reader.submit(lambda: lane.start(inputs, None, lane.bs, True, LONG, ""))
        self._end(flight, rng.choice(["released", "cancelled"]))
        step = waiting.result()
        self.is_behind &= not self.is_noticed
        self.is_noticed = False
        self.flights.append(Flight.of(lane, inputs, list(range(lane.bs)), step, self.is_behind, False))
        self.figures["launches"] += 1

    def close(self, rng: random.Random) -> None:
        self.unblock()
        self.engine.close()
        self.is_closed = True
        self.figures["closed"] += 1

    def pick(self, rng: random.Random) -> Flight | None:
        """A step that has not ended."""
        open_ = [flight for flight in self.flights if not flight.end and flight.step is not None]
        return rng.choice(open_) if open_ else None

    def read(self, rng: random.Random) -> None:
        if (flight := self.pick(rng)) is not None:
            self.anywhere(rng, lambda: self.wait(flight) and self.check(flight))

    def keep(self, rng: random.Random) -> None:
        """Owned rows, to be read again at the end."""
        if (flight := self.pick(rng)) is None or not self.wait(flight) or flight.step is None:
            return
        step = flight.step
        if flight.lane.replay is None and rng.random() < 0.5:
            result = step._result(own=True)
            self.owned += [(result.outputs[name], flight, name) for name in flight.lane.names]
        else:
            self.owned += [(step.rows(name).own(), flight, name) for name in flight.lane.names]

    def withhold(self, rng: random.Random) -> None:
        flight = self.pick(rng)
        if flight is None or flight.step is None or not flight.ids:
            return
        row_id = rng.choice(flight.ids)
        names = [name for name in flight.lane.names if rng.random() < 0.4]
        flight.step.withhold(row_id, *names)
        flight.withheld |= {(row_id, name) for name in names or flight.lane.names}

    def consume(self, rng: random.Random) -> None:
        """A kernel on a stream of its own reads rows late; the step may end before."""
        flight = self.pick(rng)
        if flight is None or flight.step is None or not flight.lane.names or not self.wait(flight):
            return
        name = rng.choice(flight.lane.names)
        values = [part for parts in flight.expected(name)[0].values() for part in parts]
        gate, is_read, copies = threading.Event(), threading.Event(), list[Tensor]()
        with self.device.use_stream(self.consumer):
            rows = flight.step.rows(name)
            entries = [rows[row_id] for row_id in flight.expected(name)[0]]
            views = [part for entry in entries for part in (entry if name == "turns" else [entry])]

            def kernel() -> None:
                gate.wait(LONG)
                copies.extend(view.clone() for view in views)
                is_read.set()

            self.device.launch(kernel)
        del rows
        self.gates.append(gate)
        self.seen.append((copies, values, is_read))
        self.figures["late readers"] += 1
        if rng.random() < 0.8:
            self._end(flight, rng.choice(["released", "released", "cancelled", "dropped"]))

    def read_on_another_thread(self, rng: random.Random) -> None:
        """While this one cancels the step, or launches."""
        if (flight := self.pick(rng)) is None:
            return
        waiting = self.reader.submit(flight.step.wait, LONG)  # type: ignore[union-attr]
        is_cancelled, launched = rng.random() < 0.4, None
        if is_cancelled:
            self._end(flight, "cancelled")
        else:
            self.racing = flight
            launched = self._launch(rng, "")
            self.racing = None
        self.unblock()
        try:
            waiting.result()
        except Exception as error:
            if is_cancelled and isinstance(error, StaleStepError):
                return
            if not flight.is_excused:
                raise
            flight.end, flight.error = flight.end or "failed", type(error)
            if launched is not None:  # which may have settled what this has noticed, and be lost itself
                flight.may_be_lost = False
        else:
            flight.is_read = True
        del waiting
        if not flight.end:
            self.check(flight)

    def release(self, rng: random.Random) -> None:
        if (flight := self.pick(rng)) is not None:
            self.anywhere(rng, lambda: self._end(flight, "released"))

    def cancel(self, rng: random.Random) -> None:
        if (flight := self.pick(rng)) is not None:
            self.anywhere(rng, lambda: self._end(flight, "cancelled"))

    def drop(self, rng: random.Random) -> None:
        if (flight := self.pick(rng)) is not None:
            self._end(flight, "dropped")

    def read_what_has_ended(self, rng: random.Random) -> None:
        ended = [flight for flight in self.flights if flight.end and flight.step is not None]
        if not ended:
            return
        flight = rng.choice(ended)
        try:
            rng.choice([flight.step.wait, lambda: flight.step.row_values("token")])()  # type: ignore[union-attr]
        except StaleStepError:
            assert flight.error is None or flight.end == "cancelled"
        except Exception as error:
            if not flight.is_excused or flight.error not in (None, type(error)):
                raise
        else:
            raise AssertionError(f"{flight.launch} was {flight.end}, and can be read")


WEIGHTED = [name for name, weight in World.RULES.items() for _ in range(weight)]


class RingMachine(RuleBasedStateMachine):
    """`World` under hypothesis, which chooses and shrinks the rules and their seeds."""

    figures: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.has_failed = False

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.world = World(random.Random(seed), self.figures)

    @rule(name=st.sampled_from(WEIGHTED), seed=st.integers(0, 2**32 - 1))
    def act(self, name: str, seed: int) -> None:
        assert self.world is not None
        try:
            self.world.run(name, seed)
        except BaseException:
            self.has_failed = True
            raise

    def teardown(self) -> None:
        if self.world is not None:
            self.world.stop() if self.has_failed else self.world.finish()
