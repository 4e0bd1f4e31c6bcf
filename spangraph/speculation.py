"""An executor that speculates: what starting a node on padded outputs can do, played on the simulated device.

It is the definition that `Pipeline.verify` is tested against, and shares nothing with it. Per worker there is one
in-order stream. After a launch, and before its cut, the worker may start one target of the node launched last on that
node's padded outputs; the cut replaces what is stored, not what was launched. Edges are FIFO queues and nodes are
functions, so an executor that never speculates delivers one thing in every order, and whatever a schedule delivers
instead is the fault of its starts.

    SpeculatingExecutor(pipeline).conflicts()     # {("talker.codes", "codec")}
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spangraph.declare import Span, SpannedOutput
from spangraph.errors import RingFullError
from spangraph.pipeline import Edge, Pipeline
from spangraph.simulated import SimulatedDevice, SimulatedGraph
from spangraph.stager import SpanStager, Tail
from spangraph.step import Step

_ROWS, _WIDTH, _GARBAGE, _PRIME = 2, 4, 1009, 1_000_003
_SPANS = {"full": [[0, 4], [0, 4]], "partial": [[0, 2], [1, 4]], "empty": [[0, 0], [0, 0]]}
Deliveries = dict[tuple[str, int], Any]


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
    """Actions until nothing is left to do, or until the ring is full."""

    actions: tuple[Action, ...]
    backlog: frozenset[Edge]  # streaming edges on which a source's first launch gives more than one token
    start: Start | None  # what it was made for; None: the plain schedule, which never speculates
    full: bool = False


class Conflict(NamedTuple):
    """A schedule that delivers something else than the plain one."""

    schedule: Schedule
    edge: Edge | None  # read padded; None: the ring was full
    spans: str  # of the edge's source output
    launch: tuple[str, int] | None  # the first one that computed something else


@dataclass
class _Instance:
    """A captured graph of a node, with static inputs and outputs of its own."""

    graph: SimulatedGraph
    tail: Tail
    inputs: Tensor
    masks: Tensor
    external: Tensor
    outputs: Tensor
    step: Step | None = None


@dataclass
class _Node:
    """What a captured node is made of."""

    stream: Any
    stager: SpanStager
    spans: Tensor  # of its outputs, on the device
    inside: Tensor  # the same as a mask
    instances: list[_Instance] = field(default_factory=list)


class SpeculatingExecutor:
    """Every schedule of a pipeline's walk, as far as they differ, and what each of them delivers.

    A node's launch takes one token of each edge into it. An edge gets one token per launch of its source, a streaming
    one more in the first launch, if the schedule's backlog says so; a loop-back edge holds one at the beginning. A node
    without other edges than loop-backs takes an input from outside. Tokens of an edge are taken in order: one of an
    uncut launch may only be taken if all before it were.

    Args:
        pipeline: nodes and edges.
        walk: the walk to run; default the first.
        iterations: launches of each node.
        device: share one between executors to save its threads.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        walk: str | None = None,
        *,
        iterations: int = 3,
        device: SimulatedDevice | None = None,
    ) -> None:
        walk = pipeline.walks[0] if walk is None else walk
        self.iterations, self.device = iterations, device or SimulatedDevice()
        self.depth, self.ring_depth = pipeline.speculation_depth, pipeline.ring_depth
        self.edges = [e for e in pipeline.edges if e.walks is None or walk in e.walks]
        touched = {name for e in self.edges for name in (e.node, e.target)}
        self.nodes = [n for n in pipeline.nodes if n.name in touched or not self.edges or n.spanned_outputs(walk)]
        self.spanned = {n.name: n.spanned_outputs(walk) for n in self.nodes}
        self.outputs = {n.name: [*self.spanned[n.name], *n.outputs] for n in self.nodes}
        self._index = {n.name: i for i, n in enumerate(self.nodes)}
        self._into = [[e for e in self.edges if e.target == n.name] for n in self.nodes]
        workers = list(dict.fromkeys(n.worker for n in self.nodes))
        self._worker = [workers.index(n.worker) for n in self.nodes]
        self._targets = [self._startable(i) for i in range(len(self.nodes))]  # what may start on a node's outputs
        involved = {t for ts in self._targets for t in ts} | {i for i, ts in enumerate(self._targets) if ts}
        self._inert = [i not in involved for i in range(len(self.nodes))]
        self._plain: dict[Any, Deliveries] = {}
        self.plays = 0

    def _startable(self, source: int) -> list[int]:
        if not self.depth or not self.nodes[source].speculates:
            return []
        targets = dict.fromkeys(self._index[e.target] for e in self.edges if e.node == self.nodes[source].name)
        return [t for t in targets if self.nodes[t].speculates and self._worker[t] == self._worker[source]]

    # ---- the scheduler -------------------------------------------------------------------------------------------

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

    def explore(self) -> Iterator[Schedule]:
        """One schedule for every distinct start, one for a full ring if there is any, and the plain one first.

        Orders that cannot matter are left out. Inputs from outside are there from the beginning: no start needs one to
        be missing, and a worker may be as slow as it likes to take one. What other workers do between a launch and its
        worker's next action could as well be done before the launch, as neither sees the other. And a node that no
        start involves is launched as soon as it can be: its tokens are for it alone, and nobody needs its output to be
        missing.
        """
        yield Schedule(self._finish((), frozenset()), frozenset(), None)
        seen: set[Start | str] = set()
        streaming = [e for e in self.edges if e.streaming]
        for chosen in itertools.product((False, True), repeat=len(streaming)) if any(self._targets) else ():
            backlog = frozenset(itertools.compress(streaming, chosen))
            for actions, state in self._reachable(backlog):
                action, before = actions[-1], state
                if action.kind == "full" and "ring" not in seen:
                    seen.add("ring")
                    yield Schedule(actions, backlog, self._start(before, action, backlog), full=True)
                elif action.kind == "start" and (start := self._start(before, action, backlog)) not in seen:
                    seen.add(start)
                    yield Schedule(self._finish(actions, backlog), backlog, start)

    def _start(self, state: State, action: Action, backlog: frozenset[Edge]) -> Start:
        source = state.uncut[self._worker[action.node]][-1]
        edges = self._taken(state, action.node, backlog)
        assert edges, "a start takes something padded"
        return Start(self.nodes[source].name, self.nodes[action.node].name, edges)

    def _reachable(self, backlog: frozenset[Edge]) -> Iterator[tuple[tuple[Action, ...], State]]:
        """Every start or full ring that can be reached: the actions up to it, and the state before it."""
        todo: list[tuple[State, tuple[Action, ...]]] = [(self.initial(), ())]
        visited = set()
        while todo:
            state, actions = todo.pop()
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

    def _finish(self, actions: tuple[Action, ...], backlog: frozenset[Edge]) -> tuple[Action, ...]:
        """The actions, and then plain ones until nothing is left to do."""
        state = self.initial()
        for action in actions:
            state = self.apply(state, action)
        while choices := {a.kind: a for a in self.actions(state, backlog) if a.kind in ("launch", "cut")}:
            action = choices.get("cut") or choices["launch"]
            actions, state = (*actions, action), self.apply(state, action)
        return actions

    # ---- the device ----------------------------------------------------------------------------------------------

    @cached_property
    def _built(self) -> list[_Node]:
        """A stream and a ring per worker, and what every node's graphs share."""
        depth = self.ring_depth or self.depth + 1
        streams, stagers = [], []
        for worker in range(max(self._worker) + 1):
            mine = [n.name for n, w in zip(self.nodes, self._worker, strict=True) if w == worker]
            spans = {f"{name}.{output}": Span() for name in mine for output in self.spanned[name]}
            streams.append(self.device.new_stream())
            stagers.append(
                SpanStager(spans, max_rows=_ROWS, row_values=["result"], depth=depth, device=self.device)
            )
        return [
            _Node(
                streams[worker],
                stagers[worker],
                torch.zeros(len(self.outputs[n.name]), _ROWS, 2, dtype=torch.int64),
                torch.zeros(len(self.outputs[n.name]), _ROWS, _WIDTH, dtype=torch.bool),
            )
            for n, worker in zip(self.nodes, self._worker, strict=True)
        ]

    def _instance(self, i: int) -> _Instance:
        """A graph of the node whose last step was cut; captured if there is none."""
        for instance in self._built[i].instances:
            if instance.step is None:
                return instance
        node, name, spanned = self._built[i], self.nodes[i].name, self.spanned[self.nodes[i].name]
        into, out = len(self._into[i]), len(self.outputs[name])
        inputs = torch.zeros(into, _ROWS, _WIDTH, dtype=torch.int64)
        masks, external = torch.zeros_like(inputs), torch.zeros(_ROWS, dtype=torch.int64)
        weights = torch.arange(3, 3 + into).view(-1, 1, 1)
        offsets = torch.arange(out * _WIDTH).view(out, 1, _WIDTH) + 10 * i
        graph = self.device.new_graph()
        with self.device.use_stream(node.stream), self.device.graph(graph):
            result = ((inputs * masks * weights).sum((0, 2)) + external) % _PRIME
            outputs = torch.where(node.inside, result.view(1, _ROWS, 1) + offsets, _GARBAGE)
            names = [f"{name}.{output}" for output in spanned]
            padded = dict(zip(names, outputs[: len(names)].unbind(), strict=True))
            spans = dict(zip(names, node.spans[: len(names)].unbind(), strict=True))
            tail = node.stager.stage(SpannedOutput(padded, spans, {"result": result}), names=names)
        node.instances.append(_Instance(graph, tail, inputs, masks, external, outputs))
        return node.instances[-1]

    def play(
        self, schedule: Schedule, spans: Mapping[str, str] | None = None, *, raw: Edge | None = None
    ) -> Deliveries:
        """Run a schedule on the device: (node, launch) -> what it computed, and its stored outputs.

        Args:
            schedule: from `explore`.
            spans: `"node.output"` -> `"full"`, `"partial"` or `"empty"`; default full.
            raw: mask what every other edge takes padded, so that only this one can make a difference.

        Raises:
            RingFullError: where the schedule finds the ring full.
        """
        self.plays += 1
        for node, built in zip(self.nodes, self._built, strict=True):
            for j, output in enumerate(self.outputs[node.name]):
                kind = (spans or {}).get(f"{node.name}.{output}", "full")
                built.spans[j], built.inside[j] = _TABLES[kind]
        play = _Play(schedule, {e: [(_FIRST, _FULL)] if e.loop_back else [] for e in self.edges}, raw)
        try:
            for kind, i in schedule.actions:
                if kind == "cut":
                    self._cut(play, i)
                else:
                    self._launch(play, i)
        finally:
            for i in [i for i, _, _ in play.uncut]:  # after an error
                self._cut(play, i)
        return play.deliveries

    def _launch(self, play: _Play, i: int) -> None:
        """Put a node on its worker's stream, its inputs copied there."""
        instance, k = self._instance(i), play.launched.get(i, 0)
        feed: list[tuple[Tensor, Tensor]] = []
        for j, edge in enumerate(self._into[i]):
            if k < len(play.stored[edge]):
                value, mask = play.stored[edge][k]
            else:
                source = next(s for n, _, s in reversed(play.uncut) if n == self._index[edge.node])
                output = self.outputs[edge.node].index(edge.output)
                masked = edge.takes_spans or play.raw not in (None, edge)
                value, mask = source.outputs[output], _FULL
                if masked:
                    mask = self._built[self._index[edge.node]].inside[output]
            feed += [(instance.inputs[j], value), (instance.masks[j], mask)]
        if all(edge.loop_back for edge in self._into[i]):
            feed.append((instance.external, torch.tensor([k + 1, 10 * (k + 1)])))
        with self.device.use_stream(self._built[i].stream), instance.tail.step() as step:
            self.device.launch(lambda: [static.copy_(value) for static, value in feed])
            instance.graph.replay()
        instance.step = step
        play.uncut.append((i, k, instance))
        play.launched[i] = k + 1

    def _cut(self, play: _Play, i: int) -> None:
        """Store what the oldest uncut launch of the node gave."""
        at, (_, k, instance) = next((at, launch) for at, launch in enumerate(play.uncut) if launch[0] == i)
        del play.uncut[at]
        name, step = self.nodes[i].name, instance.step
        assert step is not None, "launched"
        delivered = [step.row_values("result").tolist()]
        for j, output in enumerate(self.outputs[name]):
            if output in self.spanned[name]:
                value, mask = torch.zeros(_ROWS, _WIDTH, dtype=torch.int64), torch.zeros(_ROWS, _WIDTH, dtype=torch.bool)
                rows = step.rows(f"{name}.{output}")
                for row in rows:
                    ((start, end),) = rows.spans(row)[0]
                    value[row, start:end], mask[row, start:end] = rows[row], True
            else:
                value, mask = instance.outputs[j].clone(), _FULL
            delivered.append([value.tolist(), mask.tolist()])
            for edge in self.edges:
                if edge.source == f"{name}.{output}":
                    chunks = self._tokens(edge, k + 1, play.schedule.backlog) - len(play.stored[edge])
                    play.stored[edge] += [(value + chunk, mask) for chunk in range(chunks)]
        with self.device.use_stream(self._built[i].stream):
            step.release()
        instance.step = None
        play.deliveries[name, k] = delivered

    # ---- the verdict ---------------------------------------------------------------------------------------------

    def find_conflict(self) -> Conflict | None:
        """The first start, or full ring, that delivers something else than the plain schedule for some spans."""
        return next(self._conflicts(), None)

    def conflicts(self) -> set[tuple[str, str] | str]:
        """`("node.output", target)` of every edge that conflicts, and `"ring"` if the ring can be found full."""
        return {"ring" if c.edge is None else (c.edge.source, c.edge.target) for c in self._conflicts()}

    def _conflicts(self) -> Iterator[Conflict]:
        found: set[Edge] = set()
        for schedule in self.explore():
            if schedule.full:
                with contextlib.suppress(RingFullError):
                    self.play(schedule)
                    raise AssertionError("a ring that must be full was not")
                yield Conflict(schedule, None, "full", None)
            elif schedule.start is not None:
                for edge in sorted(schedule.start.edges - found, key=str):
                    for kind in ("partial", "empty") if edge.output in self.spanned[edge.node] else ("full",):
                        if (launch := self._differs(schedule, edge, kind)) is not None:
                            found.add(edge)
                            yield Conflict(schedule, edge, kind, launch)
                            break

    def _differs(self, schedule: Schedule, edge: Edge, kind: str) -> tuple[str, int] | None:
        """The first launch that delivers something else than in the plain schedule because of this edge."""
        world = schedule.backlog, edge.source, kind
        if world not in self._plain:
            plain = Schedule(self._finish((), schedule.backlog), schedule.backlog, None)
            self._plain[world] = self.play(plain, {edge.source: kind})
        plain, got = self._plain[world], self.play(schedule, {edge.source: kind}, raw=edge)
        return next((launch for launch in got if launch in plain and got[launch] != plain[launch]), None)


@dataclass
class _Play:
    schedule: Schedule
    stored: dict[Edge, list[tuple[Tensor, Tensor]]]  # every token ever: the k-th launch takes the k-th
    raw: Edge | None
    launched: dict[int, int] = field(default_factory=dict)
    uncut: list[tuple[int, int, _Instance]] = field(default_factory=list)
    deliveries: Deliveries = field(default_factory=dict)


_FULL = torch.ones(_ROWS, _WIDTH, dtype=torch.bool)
_FIRST = torch.full((_ROWS, _WIDTH), 5)


def _table(spans: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    position, pairs = torch.arange(_WIDTH), torch.tensor(spans)
    return pairs, (position >= pairs[:, :1]) & (position < pairs[:, 1:])


_TABLES = {kind: _table(spans) for kind, spans in _SPANS.items()}
