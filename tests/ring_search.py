"""An explicit-state search: every state that a model can reach, and the shortest way to one that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

Move = tuple[str, Any]  # what happens, and the state after it or, as a string, what is wrong with it


class Model(Protocol):
    """A protocol: where it starts, what can happen, and when it is over."""

    def start(self) -> Any: ...
    def moves(self, state: Any) -> Iterator[Move]: ...
    def canonical(self, state: Any) -> Any: ...
    def is_end(self, state: Any) -> bool: ...


@dataclass(frozen=True)
class Result:
    """What a search found: how many states there are, or what is wrong and the shortest way there."""

    num_states: int
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "".join(f"\n  {i + 1:2}. {label}" for i, label in enumerate(self.trace))
        return f"{self.num_states} states; {self.violation or 'no violation'}{steps}"


def search(model: Model) -> Result:
    """All reachable states, breadth first; stops at the first violation."""
    start = model.canonical(model.start())
    index, states = {start: 0}, [start]
    before: list[list[int]] = [[]]  # from where each was reached, the shortest way first
    ends: list[int] = []

    def trace(at: int, *, is_wrong: bool = False) -> tuple[str, ...]:
        path = []
        while at:
            path.insert(0, at)
            at = before[at][0]
        labels, state = [], model.start()
        for at in path:  # again, under the names of the start
            label, state = next(
                m for m in model.moves(state) if not isinstance(m[1], str) and model.canonical(m[1]) == states[at]
            )
            labels.append(label)
        wrong = [label for label, after in model.moves(state) if isinstance(after, str)]
        return (*labels, *(wrong[:1] if is_wrong else ()))

    for at, state in enumerate(states):  # grows meanwhile
        if model.is_end(state):
            ends.append(at)
        for _, after in model.moves(state):
            if isinstance(after, str):
                return Result(len(states), after, trace(at, is_wrong=True))
            found = index.get(after, -1)  # it is often canonical as it is
            if found < 0:
                after = model.canonical(after)
                found = index.setdefault(after, len(states))
            if found == len(states):
                states.append(after)
                before.append([])
            before[found].append(at)
    alive = set(ends)
    while ends:
        new = {at for at in before[ends.pop()] if at not in alive}
        alive |= new
        ends += new
    for at in range(len(states)):
        if at not in alive:
            return Result(
                len(states), "from here on, some step can never be read or some slot never be freed", trace(at)
            )
    return Result(len(states))


def put(items: tuple[Any, ...], number: int, item: Any) -> Any:
    """`items` with `item` as number `number`, from 1 on."""
    return (*items[: number - 1], item, *items[number:])
