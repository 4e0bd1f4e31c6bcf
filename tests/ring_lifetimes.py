"""Two more models of the ring protocol: what a step's rows live in until its release.

Both take from `Staging` that a launch finds its own record and staging slot, so that a step is known by its number
and its header either landed or did not. Launches are in one order on the device (`Ring._order` makes them so).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .ring_search import Move, put

FAULTS = ("raise", "lose staging", "fail wait", "drop")
OPEN, LEASED, OVER = "open", "leased", "over"
_WORDS, _HEADER, _FLAG = 3, 4, 8  # bits of what has landed


# ---- copy slots, leased until the release, and consumers on other streams --------------------------------------------


class LeaseState(NamedTuple):
    """A step is (status, copy slot, may it fail); it is known by its place in `steps`, from 1 on."""

    copies: tuple[tuple[int, int], ...]  # two words each, which hold a step's number
    faults: int
    launched: int = 0
    steps: tuple[tuple[str, int, bool], ...] = ()
    queue: tuple[tuple[int, int, bool, tuple[int, ...]], ...] = ()  # step, copy slot, staged?, consumers to wait for
    landed: int = 0
    headers: frozenset[int] = frozenset()  # of open steps
    consumers: tuple[tuple[int, int], ...] = ()  # of released steps, on other streams: step, copy slot
    retired: tuple[int, ...] = ()  # consumers of released steps that no launch waits for yet


@dataclass(frozen=True)
class Lease:
    """`depth` copy slots. A replay writes its rows there, then its header; the step reads them until its release.

    A step that failed or was dropped gives its copy slot back at once: the next replay into it comes later in the
    device's order, and nobody reads what the failed one writes.

    Overwritten rows stay so until a later step's come, which differ: so a reader looks when its wait ends and at its
    release, a consumer once, when it is done, and no more is needed to see each wrong write. A consumer that is done
    before the release is none.

    Args:
        without: "release" (header after rows), "lease" (copy slot back at the release only) or "consumer wait".
    """

    depth: int
    num_steps: int = 6
    faults: int = 1
    without: str = ""

    def start(self) -> LeaseState:
        return LeaseState(((0, 0),) * self.depth, self.faults)

    def canonical(self, state: LeaseState) -> LeaseState:
        """Steps and copy slots under names by use; what nobody can take for his own is forgotten."""
        queued = {item[0] for item in state.queue}
        reading = {i for i, _ in state.consumers}
        ranks = [
            (0 if step[0] == LEASED else 1 if i in reading else 2, i)
            for i, step in enumerate(state.steps, 1)
            if step[0] != OVER or i in queued or i in reading
        ]
        number = {i: at for at, (_, i) in enumerate(sorted(ranks), 1)}
        steps = [state.steps[i - 1] for i in number]
        consumers = sorted([(number[i], copy) for i, copy in state.consumers])
        used = [step[1] for step in steps] + [copy for _, copy in consumers] + [item[1] for item in state.queue]
        names = {-1: -1}
        for copy in (*used, *range(self.depth)):
            names.setdefault(copy, len(names) - 1)
        readers = {(step[1], i) for i, step in enumerate(steps, 1)} | {(copy, i) for i, copy in consumers}
        copies = list(state.copies)
        for copy, words in enumerate(state.copies):
            first, second = [number.get(i, 0) for i in words]
            copies[names[copy]] = (
                first if (copy, first) in readers else 0,
                second if (copy, second) in readers else 0,
            )
        queue = []
        for i, copy, is_staged, waits in state.queue:
            left = tuple(sorted([number[i] for i in waits if i in reading]))
            queue.append((number[i], names[copy], is_staged, left))
        return state._replace(
            copies=tuple(copies),
            steps=tuple([(status, names[copy], excused) for status, copy, excused in steps]),
            queue=tuple(queue),
            headers=frozenset([number[i] for i in state.headers if steps[number[i] - 1][0] == OPEN]),
            consumers=tuple([(i, names[copy]) for i, copy in consumers]),
            retired=tuple(sorted([number[i] for i in state.retired if i in reading])),
        )

    def is_end(self, state: LeaseState) -> bool:
        is_over = state.launched == self.num_steps and all(step[0] == OVER for step in state.steps)
        return is_over and not state.queue and not state.consumers

    def moves(self, state: LeaseState) -> Iterator[Move]:
        yield from self._device(state)
        for i, copy in state.consumers:
            after = state._replace(consumers=tuple([other for other in state.consumers if other[0] != i]))
            wrong = f"a consumer of step {i} reads rows of {state.copies[copy]}"
            yield f"consumer of step {i} is done", after if state.copies[copy] == (i, i) else wrong
        for i, step in enumerate(state.steps, 1):
            if step[0] == OPEN:
                yield from self._read(state, i, step)
            elif step[0] == LEASED:
                yield from self._release(state, i, step)
        taken = {step[1] for step in state.steps if step[0] != OVER and not (step[0] == LEASED and self._early)}
        if state.launched < self.num_steps and sum(step[0] != OVER for step in state.steps) < self.depth:
            for copy in sorted(set(range(self.depth)) - taken):
                yield from self._launch(state, copy)

    @property
    def _early(self) -> bool:
        return self.without == "lease"

    def _device(self, state: LeaseState) -> Iterator[Move]:
        if not state.queue:
            return
        i, copy, is_staged, waits = state.queue[0]
        if any(consumer[0] in waits for consumer in state.consumers):
            return  # the stream waits for their events
        if state.landed == _WORDS | _HEADER or not is_staged:
            yield f"device: replay of step {i} done", state._replace(queue=state.queue[1:], landed=0)
            return
        for bit in (1, 2):
            if not state.landed & bit:
                copies = put(state.copies, copy + 1, put(state.copies[copy], bit, i))
                after = state._replace(copies=copies, landed=state.landed | bit)
                yield f"device: word {bit} of step {i} lands in copy slot {copy}", after
        if not state.landed & _HEADER and (state.landed == _WORDS or self.without == "release"):
            headers = state.headers | {i} if state.steps[i - 1][0] == OPEN else state.headers
            yield f"device: header of step {i} lands", state._replace(headers=headers, landed=state.landed | _HEADER)

    def _launch(self, state: LeaseState, copy: int) -> Iterator[Move]:
        i = len(state.steps) + 1
        waits = () if self.without == "consumer wait" else state.retired

        def after(*, is_staged: bool = True, faults: int = 0) -> LeaseState:
            step, item = (OPEN, copy, faults > 0), (i, copy, is_staged, waits)
            return state._replace(
                launched=state.launched + 1,
                steps=(*state.steps, step),
                queue=(*state.queue, item),
                retired=(),
                faults=state.faults - faults,
            )

        yield f"host: launches step {i} into copy slot {copy}", after()
        if state.faults:
            yield f"FAULT: step {i} is replayed without its tail", after(is_staged=False, faults=1)
            if not state.queue:  # an abort drains
                over = state._replace(launched=state.launched + 1, steps=(*state.steps, _GONE), faults=state.faults - 1)
                yield f"FAULT: the replay of step {i} raises", over

    def _read(self, state: LeaseState, i: int, step: tuple[str, int, bool]) -> Iterator[Move]:
        _, copy, is_excused = step
        over = state._replace(steps=put(state.steps, i, _GONE), headers=state.headers - {i})
        if i in state.headers:
            leased = over._replace(steps=put(state.steps, i, (LEASED, copy, False)))
            found = state.copies[copy]
            yield f"reader: step {i} is there", leased if found == (i, i) else f"step {i} gets rows of {found}"
        elif all(item[0] != i for item in state.queue):
            yield f"reader: StagingError for step {i}", over if is_excused else f"step {i} was right, and fails"
        if state.faults:
            yield f"FAULT: the wait for step {i} raises", over._replace(faults=state.faults - 1)
            yield f"FAULT: step {i} is dropped unread", over._replace(faults=state.faults - 1)

    def _release(self, state: LeaseState, i: int, step: tuple[str, int, bool]) -> Iterator[Move]:
        copy = step[1]
        if state.copies[copy] != (i, i):
            yield f"step {i} is released", f"its rows have changed before: {state.copies[copy]}"
            return
        over = state._replace(steps=put(state.steps, i, _GONE))
        yield f"step {i} is released", over
        read = over._replace(consumers=(*state.consumers, (i, copy)), retired=(*state.retired, i))
        yield f"step {i} is released, a consumer on another stream has not read it yet", read


# ---- a copy ring that is too small -----------------------------------------------------------------------------------


class HoldState(NamedTuple):
    """A step is (status, graph, header landed?, what its flag says: fits?, may it fail)."""

    outputs: tuple[tuple[int, int], ...]  # each graph's static output: two words, which hold a step's number
    faults: int
    launched: int = 0
    steps: tuple[tuple[str, int, bool, bool, bool], ...] = ()
    queue: tuple[tuple[int, int, bool], ...] = ()  # step, graph, staged?
    landed: int = 0


@dataclass(frozen=True)
class HoldBack:
    """Steps that may not fit into the copy ring, and are then cut from the static output of their graph.

    The next launch of that graph is held back until its last step is over, or its header has landed and says that it
    fitted. Rows of steps that fitted lie in copy slots, which `Lease` covers. A flag that has not landed reads as what
    the slot held before: that the step fitted.

    Args:
        without: "release" (header after flag) or "hold-back".
    """

    depth: int
    graphs: int = 1
    num_steps: int = 6
    faults: int = 1
    without: str = ""

    def start(self) -> HoldState:
        return HoldState(((0, 0),) * self.graphs, self.faults)

    def canonical(self, state: HoldState) -> HoldState:
        queued = {item[0] for item in state.queue}
        named = [i for i, step in enumerate(state.steps, 1) if step[0] != OVER or i in queued]
        number = {i: at for at, i in enumerate(named, 1)}
        readers = {i: number[i] for i in named if state.steps[i - 1][0] != OVER}
        return state._replace(
            outputs=tuple([(readers.get(a, 0), readers.get(b, 0)) for a, b in state.outputs]),
            steps=tuple([state.steps[i - 1] for i in named]),
            queue=tuple([(number[i], *rest) for i, *rest in state.queue]),
        )

    def is_end(self, state: HoldState) -> bool:
        return state.launched == self.num_steps and not state.queue and all(step[0] == OVER for step in state.steps)

    def moves(self, state: HoldState) -> Iterator[Move]:
        if state.queue:
            yield from self._device(state)
        for i, step in enumerate(state.steps, 1):
            if step[0] == OPEN:
                yield from self._read(state, i, step)
            elif step[0] == LEASED:
                after: HoldState | str = state._replace(steps=put(state.steps, i, _END))
                if not step[3] and state.outputs[step[1]] != (i, i):
                    after = f"the rows of step {i} have changed before its release: {state.outputs[step[1]]}"
                yield f"step {i} is released", after
        if state.launched < self.num_steps and sum(step[0] != OVER for step in state.steps) < self.depth:
            for graph in range(self.graphs):
                last = next((step for step in reversed(state.steps) if step[1] == graph), _END)
                if last[0] == OVER or (last[2] and last[3]) or self.without == "hold-back":
                    yield from self._launch(state, graph)

    def _device(self, state: HoldState) -> Iterator[Move]:
        i, graph, is_staged = state.queue[0]
        landed = state.landed
        if landed & _WORDS != _WORDS:
            bit = 1 if not landed & 1 else 2  # device memory: who reads it waits for what comes later
            outputs = put(state.outputs, graph + 1, put(state.outputs[graph], bit, i))
            yield (
                f"device: step {i} writes word {bit} of output {graph}",
                state._replace(outputs=outputs, landed=landed | bit),
            )
            return
        if landed == _WORDS | _HEADER | _FLAG or not is_staged:
            yield f"device: replay of step {i} done", state._replace(queue=state.queue[1:], landed=0)
            return
        step = state.steps[i - 1]
        is_over = step[0] == OVER
        for fits in (True, False) if not landed & _FLAG else ():
            steps = state.steps if is_over else put(state.steps, i, (*step[:3], fits, step[4]))
            label = f"device: flag of step {i} lands: it {'fitted' if fits else 'did not fit'}"
            yield label, state._replace(steps=steps, landed=landed | _FLAG)
        if not landed & _HEADER and (landed & _FLAG or self.without == "release"):
            steps = state.steps if is_over else put(state.steps, i, (*step[:2], True, *step[3:]))
            yield f"device: header of step {i} lands", state._replace(steps=steps, landed=landed | _HEADER)

    def _launch(self, state: HoldState, graph: int) -> Iterator[Move]:
        i = len(state.steps) + 1
        right = state._replace(
            launched=state.launched + 1,
            steps=(*state.steps, (OPEN, graph, False, True, False)),
            queue=(*state.queue, (i, graph, True)),
        )
        yield f"host: launches step {i} on graph {graph}", right
        if state.faults:
            steps = (*state.steps, (OPEN, graph, False, True, True))
            queue = (*state.queue, (i, graph, False))
            lost = state._replace(launched=state.launched + 1, steps=steps, queue=queue, faults=state.faults - 1)
            yield f"FAULT: step {i} is replayed without its tail", lost
            if not state.queue:  # an abort drains
                over = state._replace(launched=state.launched + 1, steps=(*state.steps, _END), faults=state.faults - 1)
                yield f"FAULT: the replay of step {i} raises", over

    def _read(self, state: HoldState, i: int, step: tuple[str, int, bool, bool, bool]) -> Iterator[Move]:
        _, graph, has_header, says_fits, is_excused = step
        over = state._replace(steps=put(state.steps, i, _END))
        if has_header:
            after: HoldState | str = state._replace(steps=put(state.steps, i, (LEASED, *step[1:])))
            if state.queue and state.queue[0][0] == i and not state.landed & _FLAG:
                after = f"step {i} is cut by the flag of an earlier step"
            elif not says_fits and state.outputs[graph] != (i, i):
                after = f"step {i} gets rows of {state.outputs[graph]}"
            yield f"reader: step {i} is there", after
        elif all(item[0] != i for item in state.queue):
            yield f"reader: StagingError for step {i}", over if is_excused else f"step {i} was right, and fails"
        if state.faults:
            yield f"FAULT: the wait for step {i} raises", over._replace(faults=state.faults - 1)
            yield f"FAULT: step {i} is dropped unread", over._replace(faults=state.faults - 1)


_GONE = (OVER, -1, True)
_END = (OVER, -1, False, False, False)
