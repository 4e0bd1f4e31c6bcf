"""What a worker that speculates may do, and when: the schedules that a `SpeculatingExecutor` plays."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from spangraph.pipeline import Edge, Pipeline


class State(NamedTuple):
    """Launches of every node so far, and every worker's uncut launches, oldest first. Nodes by position."""

    launched: tuple[int, ...]
    uncut: tuple[tuple[int, ...], ...]


class Action(NamedTuple):
    """`launch` a node on stored tokens, `start` it on padded ones, find the ring `full` instead, or `cut` a launch."""

    kind: str
    node: int


class Start(NamedTuple):
    """A speculative start: the node launched last, what is started on it, and the edges taken padded."""

    source: str
    target: str
    edges: frozenset[Edge]


class Schedule(NamedTuple):
    """Actions, up to a full ring or until every launch is cut."""

    actions: tuple[Action, ...]
    backlog: frozenset[Edge]  # streaming edges on which a source's first launch gives more than one token
    start: Start | None  # what it was made for; None: it never speculates
    full: bool = False

    @property
    def plain(self) -> Schedule:
        """The same launches in the same order, by workers that never speculate."""
        launches = [a for a in self.actions if a.kind in ("launch", "start")]
        actions = tuple(a for n in launches for a in (Action("launch", n.node), Action("cut", n.node)))
        return Schedule(actions, self.backlog, None)


class Scheduler:
    """Every schedule of a pipeline's walk, as far as they differ in what is started on what.

    A node's launch takes one token of each edge into it. An edge gets one token per launch of its source, a streaming
    one more in the first launch, if the schedule's backlog says so; a loop-back edge holds one at the beginning. A node
    without other edges than loop-backs takes an input from outside. Tokens of an edge are taken in order: one of an
    uncut launch may only be taken if all before it were.

    Args:
        pipeline: nodes and edges.
        walk: the walk to run; default the first.
    """

    def __init__(self, pipeline: Pipeline, walk: str | None = None) -> None:
        walk = pipeline.walks[0] if walk is None else walk
        self.depth, self.ring_depth = pipeline.speculation_depth, pipeline.ring_depth
        self.iterations = self.depth + 2  # of each node: one that leaves chunks over, and then as many as can be uncut
        self.edges = [replace(e, walks=None) for e in pipeline.edges_on(walk)]  # can be hashed, whatever walks are
        touched = {name for e in self.edges for name in (e.node, e.target)}
        self.nodes = [n for n in pipeline.nodes if n.name in touched or not self.edges or n.spanned_outputs(walk)]
        self.spanned = {n.name: n.spanned_outputs(walk) for n in self.nodes}
        self.outputs = {n.name: [*dict.fromkeys([*self.spanned[n.name], *n.outputs])] for n in self.nodes}
        for edge in self.edges:
            if edge.output not in self.outputs[edge.node]:  # spanned on another walk only
                self.outputs[edge.node].append(edge.output)
        self._index = {n.name: i for i, n in enumerate(self.nodes)}
        self._into = [[e for e in self.edges if e.target == n.name] for n in self.nodes]
        workers = list(dict.fromkeys(n.worker for n in self.nodes))
        self._worker = [workers.index(n.worker) for n in self.nodes]
        self._targets = [self._startable(i) for i in range(len(self.nodes))]  # what may start on a node's outputs
        involved = {t for ts in self._targets for t in ts} | {i for i, ts in enumerate(self._targets) if ts}
        self._inert = [i not in involved for i in range(len(self.nodes))]
        between = Counter((self._index[e.node], self._index[e.target]) for e in self.edges)
        kinds = sum(2 ** between[i, t] - 1 for i, targets in enumerate(self._targets) for t in targets)
        can_fill = self.ring_depth is not None and self.ring_depth <= self.depth
        self._num_starts = kinds + can_fill if kinds else 0  # at most: with any of the edges taken padded

    def _startable(self, source: int) -> list[int]:
        if not self.depth or not self.nodes[source].speculates:
            return []
        targets = dict.fromkeys(self._index[e.target] for e in self.edges if e.node == self.nodes[source].name)
        return [t for t in targets if self.nodes[t].speculates and self._worker[t] == self._worker[source]]

    def initial(self) -> State:
        """Nothing launched."""
        return State((0,) * len(self.nodes), ((),) * (max(self._worker, default=-1) + 1))

    def _tokens(self, edge: Edge, launches: int, backlog: frozenset[Edge]) -> int:
        """Tokens that an edge was given once its source was launched so often."""
        return edge.loop_back + launches + (self.iterations if launches and edge in backlog else 0)

    def _taken(self, state: State, node: int, backlog: frozenset[Edge]) -> frozenset[Edge] | None:
        """Edges whose token the node's next launch would take padded, the others having stored ones; None: it cannot.

        Only of the launch before: a token of an older uncut launch, or one behind it, is not to be had yet.
        """
        if state.launched[node] == self.iterations:
            return None
        uncut = state.uncut[self._worker[node]]
        padded = set()
        for edge in self._into[node]:
            source = self._index[edge.node]
            cut = state.launched[source] - state.uncut[self._worker[source]].count(source)
            if state.launched[node] < self._tokens(edge, cut, backlog):
                continue
            before = self._tokens(edge, state.launched[source] - 1, backlog)
            if not uncut or source != uncut[-1] or state.launched[node] != before:
                return None
            padded.add(edge)
        return frozenset(padded)

    def actions(self, state: State, backlog: frozenset[Edge] = frozenset()) -> Iterator[Action]:
        """Everything that some worker may do next."""
        for i, worker in enumerate(self._worker):
            if not state.uncut[worker] and self._taken(state, i, backlog) is not None:
                yield Action("launch", i)
        for uncut in filter(None, state.uncut):
            for target in self._targets[uncut[-1]] if len(uncut) <= self.depth else ():
                if self._taken(state, target, backlog):
                    yield Action("full" if len(uncut) == self.ring_depth else "start", target)
            yield Action("cut", uncut[0])

    def apply(self, state: State, action: Action) -> State:
        """The state after an action."""
        launched, uncut = list(state.launched), list(state.uncut)
        worker = self._worker[action.node]
        if action.kind == "cut":
            uncut[worker] = uncut[worker][1:]
        elif action.kind != "full":
            launched[action.node] += 1
            uncut[worker] += (action.node,)
        return State(tuple(launched), tuple(uncut))

    def explore(self, *, whole: bool = True) -> Iterator[Schedule]:
        """One schedule for every distinct start, one for a full ring if there is any, and a plain one first.

        Orders that cannot matter are left out. Inputs from outside are there from the beginning: no start needs one to
        be missing, and a worker may be as slow as it likes to take one. What other workers do between a launch and its
        worker's next action could as well be done before the launch, as neither sees the other. And a node that no
        start involves is launched as soon as it can be: its tokens are for it alone, and nobody needs its output to be
        missing.

        Args:
            whole: whether schedules go on until nothing is left to do, or only until what is launched is cut. What
                comes later takes what was delivered before, so it cannot be the first to differ.
        """
        yield Schedule(self._finish((), frozenset(), whole=whole), frozenset(), None)
        seen: set[Start | str] = set()
        streaming = [e for e in self.edges if e.streaming]
        for chosen in itertools.product((False, True), repeat=len(streaming)):
            backlog = frozenset(itertools.compress(streaming, chosen))
            found = self._reachable(backlog)
            while len(seen) < self._num_starts and (reached := next(found, None)) is not None:
                actions, state = reached
                start = self.start(state, actions[-1], backlog)
                if actions[-1].kind == "full":
                    if "ring" not in seen:
                        yield Schedule(actions, backlog, start, full=True)
                    seen.add("ring")
                elif start not in seen:
                    seen.add(start)
                    yield Schedule(self._finish(actions, backlog, whole=whole), backlog, start)

    def start(self, state: State, action: Action, backlog: frozenset[Edge]) -> Start:
        """What a start, or one that finds the ring full, would take."""
        source = state.uncut[self._worker[action.node]][-1]
        edges = self._taken(state, action.node, backlog)
        assert edges, "a start takes something padded"
        return Start(self.nodes[source].name, self.nodes[action.node].name, edges)

    def _reachable(self, backlog: frozenset[Edge]) -> Iterator[tuple[tuple[Action, ...], State]]:
        """Every start or full ring that can be reached: the actions up to it, and the state before it."""
        todo: deque[tuple[State, tuple[Action, ...]]] = deque([(self.initial(), ())])
        visited = set()
        while todo:
            state, actions = todo.popleft()
            last = actions[-1] if actions else None
            busy = None if last is None or last.kind == "cut" else self._worker[last.node]
            if (state, busy) in visited:
                continue
            visited.add((state, busy))
            choices = list(self.actions(state, backlog))
            if busy is not None:
                choices = [a for a in choices if self._worker[a.node] == busy]
            elif inert := [a for a in choices if a.kind == "launch" and self._inert[a.node]]:
                choices = inert[:1]
            for action in choices:
                if action.kind in ("start", "full"):
                    yield (*actions, action), state
                if action.kind != "full":
                    todo.append((self.apply(state, action), (*actions, action)))

    def _finish(
        self, actions: tuple[Action, ...], backlog: frozenset[Edge], *, whole: bool = True
    ) -> tuple[Action, ...]:
        """The actions, then cuts, and if the schedule is to be whole plain launches until nothing is left to do."""
        state = self.initial()
        for action in actions:
            state = self.apply(state, action)
        kinds = {"cut", "launch"} if whole else {"cut"}
        while choices := {a.kind: a for a in self.actions(state, backlog) if a.kind in kinds}:
            action = choices.get("cut") or choices["launch"]
            actions, state = (*actions, action), self.apply(state, action)
        return actions
