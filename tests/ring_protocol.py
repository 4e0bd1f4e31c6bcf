"""The ring protocol as three small models, for an explicit-state search over all their interleavings.

`ring_search.search` visits every state that host, device and readers can reach together. The whole product is too
large, so there are three models, each searched exhaustively; `Lease` and `HoldBack` are in `ring_lifetimes`:

* `Staging`: slots, control records, cursor, headers, quarantine, drops, aborts: what `spangraph.ring` does.
* `Lease`: copy slots that a step leases until its release, and consumers on other streams that read on after it.
* `HoldBack`: a copy ring that is too small, so that a step may leave its rows in its graph's static output.

The last two take from the first that a launch finds its own record and its own staging slot.

What is atomic, and why:

* The ring's lock is held from a launch's reservation to its event, and for a read. So a launch and a read exclude each
  other, and only the device interleaves with their parts. That an event is recorded after its replay is hidden by it.
* The host writes a control record's words, then its generation; the device reads the generation, then the words. Both
  are two actions here. It is enough that the generation is written last: a record is only ever rewritten when the
  launch that it was for is done, and whoever sees the new generation sees the new words.
* A slot has two words besides its header, which land in any order; with the release, the header lands after both. The
  cursor is seen by the device alone, in order, so it moves together with the header.
* A wait ends when the event is done or, for a polling reader, once the header has landed; both never become untrue, so
  that a reader looks at them once, under the lock, is no loss. A slow reader is one that is not scheduled.
* Slots that differ only in their number are one state (`canonical`), as the free list goes by position, never by
  number, and so are graphs. Words that nobody can take for his own, generations at or below the cursor in records (the
  cursor never goes back) and steps that are over are forgotten.
* A step may end in an error if it is the one with the fault. So may steps launched behind a lost staging node until
  that is noticed and the cursor is set (`is_behind`): the cursor does not reach their records.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .ring_search import Move, put

OPEN, DYING, OVER = "open", "dying", "over"
IDLE, RECORDING, RECORDED, ABORTING, SYNCING = range(5)
_NO_WORDS = (0, 0, 0)
_NO_RECORD = (0, -1, -1)


class Step(NamedTuple):
    """One launch. It is known by its place in `State.steps`, from 1 on: an abort gives generations out again."""

    status: str
    generation: int
    slot: int
    graph: int
    is_excused: bool  # may end in an error


_OVER = Step(OVER, 0, -1, -1, False)


class State(NamedTuple):
    """Everything that host, device and reader know."""

    free: tuple[int, ...]
    records: tuple[tuple[int, int, int], ...]  # generation, slot, graph
    slots: tuple[tuple[int, int, int], ...]  # two words, which hold a step's number, and the header
    faults: int
    next: int = 1
    done: int = 0
    host: int = IDLE
    launched: int = 0
    steps: tuple[Step, ...] = ()
    leases: tuple[int, ...] = ()  # graphs of steps that were read and are not released
    dying: tuple[int, ...] = ()
    quarantine: tuple[tuple[int, int], ...] = ()  # slot, generation
    queue: tuple[
        tuple[int, int, bool, int], ...
    ] = ()  # step or 0, graph, staging node?, what to set the cursor to or -1
    device: tuple[int, ...] = ()  # of the replay at the queue's head: generation, slot, what has landed
    cursor: int = 0
    reader: tuple[int, ...] = ()  # step, next word, slot; holds the lock
    in_doubt: bool = False
    is_behind: bool = False  # the cursor, by a replay without its staging node


@dataclass(frozen=True)
class Staging:
    """The ring of `depth`, under `num_steps` launches and `faults` faults, injected anywhere.

    Args:
        shared: one graph for all launches, whose steps end when they are read; otherwise `depth` graphs in turn,
            each leased by its step until the release.
        without: what is left out of the protocol; see the tests.
        num_slots: by default two more than `depth`; as many as `depth` is the ring of the plain copy.
        num_records: control records, by default as many as slots.
        injected: the kinds of fault.
    """

    depth: int
    num_steps: int = 6
    faults: int = 1
    shared: bool = False
    without: str = ""
    num_slots: int = 0
    num_records: int = 0
    injected: tuple[str, ...] = ("raise", "raise late", "lose staging", "fail wait", "drop", "dry run")

    def start(self) -> State:
        num_slots = self.num_slots or self.depth + 2
        records = (_NO_RECORD,) * (self.num_records or num_slots)
        return State(tuple(range(num_slots)), records, (_NO_WORDS,) * num_slots, self.faults)

    def canonical(self, state: State) -> State:
        cursor, reader, device = state.cursor, state.reader, state.device
        named = {item[0] for item in state.queue} | set(reader[:1])
        named |= {i for i, step in enumerate(state.steps, 1) if step.slot >= 0}
        number = {i: at for at, i in enumerate(sorted(named - {0}), 1)}
        number[0] = 0
        steps = [state.steps[i - 1] for i in sorted(named - {0})]
        open_steps = [step for step in steps if step.slot >= 0]
        held = [step.slot for step in open_steps]
        if reader:
            held.append(reader[2])
        slot_of = {-1: -1}
        for slot in (*held, *state.free, *[slot for slot, _ in state.quarantine]):
            slot_of.setdefault(slot, len(slot_of) - 1)
        records = [record if record[0] > cursor else _NO_RECORD for record in state.records]
        if state.host == RECORDING:  # half of it is in use already
            at = (state.next - 2) % len(records)
            n, slot, graph = state.records[at]
            records[at] = (n if n > cursor else 0, slot, graph)
        graph_of = {-1: -1}
        graphs = [step.graph for step in open_steps] + [item[1] for item in state.queue] + [r[2] for r in records]
        for graph in (*graphs, *state.leases):
            graph_of.setdefault(graph, len(graph_of) - 1)
        slots = [_NO_WORDS] * len(state.slots)
        for slot in held:
            first, second, header = state.slots[slot]
            first, second = number.get(first, 0), number.get(second, 0)
            owners = [i for i, step in enumerate(steps, 1) if step.slot == slot and step.status == OPEN]
            if reader and reader[2] == slot:
                owners.append(number[reader[0]])
            slots[slot_of[slot]] = (first if first in owners else 0, second if second in owners else 0, header)
        return state._replace(
            free=tuple([slot_of[slot] for slot in state.free]),
            records=tuple([(n, slot_of[slot], graph_of[graph]) for n, slot, graph in records]),
            slots=tuple(slots),
            leases=tuple(sorted([graph_of[graph] for graph in state.leases])),
            steps=tuple([Step(s[0], s[1], slot_of[s[2]], graph_of[s[3]], s[4]) if s[2] >= 0 else _OVER for s in steps]),
            quarantine=tuple([(slot_of[slot], n) for slot, n in state.quarantine]),
            queue=tuple([(number[i], graph_of[graph], *rest) for i, graph, *rest in state.queue]),
            dying=tuple([number[i] for i in state.dying]),
            device=device and (device[0], slot_of[device[1]], device[2]),
            reader=reader and (number[reader[0]], reader[1], slot_of[reader[2]]),
        )

    def is_end(self, state: State) -> bool:
        if state.launched < self.num_steps or state.queue or state.host or state.reader:
            return False
        if state.leases or any(step.status == OPEN for step in state.steps):
            return False
        state = self._reap(state)
        if state.quarantine:
            state = self._rebase(state)
        return sorted(state.free) == list(range(len(state.slots)))

    def moves(self, state: State) -> Iterator[Move]:
        if state.queue:
            yield from self._device(state)
        if state.reader:
            yield from self._copy(state)
        if not state.reader or self.without in ("lock", "copy before free"):
            yield from self._launch(state) if state.host else self._choose(state)

    def _device(self, state: State) -> Iterator[Move]:
        number, graph, has_node, settle = state.queue[0]
        name = f"replay of step {number}" if number else "dry run"
        if settle >= 0:
            yield f"device: cursor set to {settle}", state._replace(cursor=settle, queue=state.queue[1:])
            return
        done = state._replace(queue=state.queue[1:], device=())
        if not has_node:
            yield f"device: {name} done, without its staging node", done
            return
        if not state.device:
            n, _, _ = state.records[state.cursor % len(state.records)]
            if n != state.cursor + 1:
                yield f"device: {name} finds no record, done", done
            else:
                yield f"device: {name} reads generation {n}", state._replace(device=(n, -1, 0))
            return
        n, slot, landed = state.device
        if slot < 0:
            _, slot, owner = state.records[state.cursor % len(state.records)]
            if owner != graph:
                yield f"device: {name} finds a record of graph {owner}, done", done
            else:
                yield f"device: {name} takes slot {slot}", state._replace(device=(n, slot, 0))
            return
        if landed == 7:
            yield f"device: {name} done", done
        holder = next((q[1] for q in state.quarantine if q[0] == slot), 0)
        holder = next((step.generation for step in state.steps if step.slot == slot), holder)
        for bit, what in ((1, "first word"), (2, "second word"), (4, "header")):
            if landed & bit or (bit == 4 and landed != 3 and self.without != "release"):
                continue
            label = f"device: {what} of the {name} lands in slot {slot}"
            if holder != n:
                yield (
                    label,
                    f"generation {n} is written to slot {slot}, which "
                    + (f"belongs to generation {holder}" if holder else "is free"),
                )
            words = list(state.slots[slot])
            words[bit // 2] = n if bit == 4 else number
            slots = (*state.slots[:slot], tuple(words), *state.slots[slot + 1 :])
            cursor = n if bit == 4 else state.cursor
            yield label, state._replace(slots=slots, cursor=cursor, device=(n, slot, landed | bit))

    def _choose(self, state: State) -> Iterator[Move]:
        for graph in state.leases:
            leases = tuple([other for other in state.leases if other != graph])
            yield f"the step that leases graph {graph} is released", state._replace(leases=leases)
        for i, step in enumerate(state.steps, 1):
            if step.status == OPEN:
                if not state.reader:
                    yield from self._read(state, i, step)
                if state.faults and "drop" in self.injected:
                    gone = step._replace(status=DYING, graph=-1, is_excused=True)
                    yield (
                        f"FAULT: step {i} is dropped unread",
                        self._hit(state, steps=put(state.steps, i, gone), dying=(*state.dying, i)),
                    )
                if state.faults and "fail wait" in self.injected:
                    yield f"FAULT: the wait for step {i} raises", self._fail(self._hit(state), i)
        if state.faults and "dry run" in self.injected:
            host = IDLE if self.without == "synchronize" else SYNCING
            for graph in self._free_graphs(state):
                dry = self._hit(state, queue=(*state.queue, (0, graph, True, -1)), host=host)
                yield f"FAULT: a replay of graph {graph} that nobody reserved", dry
        if state.launched < self.num_steps:
            yield from self._reserve(self._reap(state))

    def _hit(self, state: State, **changes: Any) -> State:
        return state._replace(faults=state.faults - 1, **changes)

    def _free_graphs(self, state: State) -> list[int]:
        """Free graphs: all that a record or replay names, and one of the others."""
        if self.shared:
            return [0]
        taken = {step.graph for step in state.steps} | set(state.leases)
        named = {item[1] for item in state.queue} | {record[2] for record in state.records}
        fresh = [graph for graph in range(2 * self.depth + 2) if graph not in taken | named]
        return sorted(named - taken - {-1}) + fresh[:1]

    def _reserve(self, state: State) -> Iterator[Move]:
        number, n = len(state.steps) + 1, state.next
        if sum(step.status == OPEN for step in state.steps) + len(state.leases) >= self.depth:
            return
        slots: tuple[int, ...] = state.free[:1]
        if self.without == "reservation":
            slots = tuple(range(len(state.slots)))
        elif not slots and state.quarantine and not state.queue:
            yield "host: drains and re-bases, for want of a slot", self._rebase(state)
        at = (n - 1) % len(state.records)
        queue, is_behind = state.queue, state.is_behind
        in_flight = self.shared and state.done < n - 1 and self.without != "settling"
        if state.in_doubt or in_flight:
            queue, is_behind = (*queue, (0, -1, False, n - 1)), False
        for slot, graph in itertools.product(slots, self._free_graphs(state)):
            after = state._replace(
                free=tuple([other for other in state.free if other != slot]),
                records=put(state.records, at + 1, (state.records[at][0], slot, graph)),
                launched=state.launched + 1,
                steps=(*state.steps, Step(OPEN, n, slot, graph, is_behind)),
                host=RECORDING,
                next=n + 1,
                queue=queue,
                in_doubt=False,
                is_behind=is_behind,
            )
            yield f"host: step {number} of graph {graph} takes slot {slot}, the words of record {at} are written", after

    def _launch(self, state: State) -> Iterator[Move]:
        number = len(state.steps)
        if state.host == RECORDING:
            step = state.steps[-1]
            at = (step.generation - 1) % len(state.records)
            records = put(state.records, at + 1, (step.generation, *state.records[at][1:]))
            yield f"host: writes generation {step.generation}", state._replace(records=records, host=RECORDED)
        elif state.host == RECORDED:
            step = state.steps[-1]
            replay = (number, step.graph, True, -1)
            sent = state._replace(queue=(*state.queue, replay), host=IDLE)
            yield f"host: enqueues the replay of step {number}", sent
            excused = put(state.steps, number, step._replace(is_excused=True))
            if state.faults and "lose staging" in self.injected:
                queue = (*state.queue, (number, step.graph, False, -1))
                yield (
                    f"FAULT: step {number} is replayed without its staging node",
                    self._hit(state, queue=queue, host=IDLE, steps=excused, is_behind=True),
                )
            if state.faults and "raise" in self.injected:
                yield f"FAULT: the replay of step {number} raises", self._hit(state, steps=excused, host=ABORTING)
            if state.faults and "raise late" in self.injected:
                yield (
                    f"FAULT: the block of step {number} raises after its replay",
                    self._hit(sent, steps=excused, host=ABORTING),
                )
        elif not state.queue and state.host == ABORTING:
            yield (
                f"host: aborts step {number}: drains and re-bases",
                self._rebase(self._fail(state._replace(host=IDLE), number)),
            )
        elif not state.queue:
            yield "host: synchronised", state._replace(host=IDLE)

    def _rebase(self, state: State) -> Any:
        staged = state.cursor
        live = [i for i, step in enumerate(state.steps, 1) if step.status == OPEN]
        for i in (*live, *state.dying):
            if state.steps[i - 1].generation > staged:
                if not state.steps[i - 1].is_excused:
                    return f"step {i} was launched rightly, and is given up in a re-base"
                state = self._fail(state, i)
        records = tuple([_NO_RECORD if record[0] > staged else record for record in state.records])
        free = (*state.free, *(slot for slot, _ in state.quarantine))
        return state._replace(
            next=staged + 1, done=staged, free=free, quarantine=(), records=records, in_doubt=False, is_behind=False
        )

    def _reap(self, state: State) -> State:
        for i in state.dying:
            if _is_done(state, i):
                step = state.steps[i - 1]
                state = state._replace(
                    dying=tuple(other for other in state.dying if other != i),
                    free=(*state.free, step.slot),
                    done=max(state.done, step.generation),
                    in_doubt=state.in_doubt or state.slots[step.slot][2] != step.generation,
                    steps=put(state.steps, i, _OVER),
                )
        if state.quarantine:
            back = [slot for slot, n in state.quarantine if n <= state.done]
            state = state._replace(
                free=(*state.free, *back), quarantine=tuple(q for q in state.quarantine if q[1] > state.done)
            )
        return state

    def _fail(self, state: State, i: int) -> State:
        step = state.steps[i - 1]
        state = state._replace(
            dying=tuple(other for other in state.dying if other != i),
            steps=put(state.steps, i, _OVER),
            in_doubt=True,
        )
        if self.without == "quarantine":
            return state._replace(free=(*state.free, step.slot))
        return state._replace(quarantine=(*state.quarantine, (step.slot, step.generation)))

    def _read(self, state: State, i: int, step: Step) -> Iterator[Move]:
        header = state.slots[step.slot][2]
        if header != step.generation and not _is_done(state, i):
            return
        if header != step.generation and self.without != "header check":
            label = f"reader: step {i} is done, but its header is {header}: StagingError"
            yield label, self._fail(state, i) if step.is_excused else f"step {i} was launched rightly, and fails"
            return
        after = state._replace(reader=(i, 0, step.slot))
        label = f"reader: step {i} is there, in slot {step.slot}"
        yield label, self._free(after, i) if self.without == "copy before free" else after

    def _copy(self, state: State) -> Iterator[Move]:
        i, word, slot = state.reader
        label = f"reader: copies word {word + 1} of step {i}"
        if (found := state.slots[slot][word]) != i:
            yield label, f"the reader of step {i} gets words of " + (f"step {found}" if found else "another launch")
        elif not word:
            yield label, state._replace(reader=(i, 1, slot))
        else:
            state = state._replace(reader=())
            yield label, self._free(state, i) if state.steps[i - 1].status == OPEN else state

    def _free(self, state: State, i: int) -> State:
        step = state.steps[i - 1]
        return state._replace(
            steps=put(state.steps, i, _OVER),
            leases=state.leases if self.shared else (*state.leases, step.graph),
            free=(*state.free, step.slot),
            done=max(state.done, step.generation),
        )


def _is_done(state: State, i: int) -> bool:
    """Whether the event of step `i` is."""
    return all(item[0] != i for item in state.queue) and not (
        state.host in (RECORDING, RECORDED) and i == len(state.steps)
    )
