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
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spangraph.errors import RingFullError
from spangraph.pipeline import Edge, Pipeline
from spangraph.schedules import Schedule, Scheduler
from spangraph.simulated import SimulatedDevice, SimulatedGraph, SimulatedStream
from spangraph.spans import Span, SpannedOutput
from spangraph.stager import SpanStager
from spangraph.step import Step
from spangraph.tail import Tail

_ROWS, _WIDTH = 3, 4
_WHOLE_ROWS = torch.tensor([[0, 4], [0, 4], [0, 4]])
_CUT_ROWS = torch.tensor([[0, 4], [1, 3], [2, 2]])  # a full span, one inside, and an empty one
_CUT_INSIDE = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
_FULL = torch.ones(_ROWS, _WIDTH, dtype=torch.int64)
_GARBAGE = _FULL * 1009
_FIRST = _FULL * 5  # what a loop-back edge holds at the beginning
Deliveries = dict[tuple[str, int], Any]


class Conflict(NamedTuple):
    """A schedule that delivers something else than the plain one."""

    schedule: Schedule
    edge: Edge | None  # read padded; None: the ring was full
    launch: tuple[str, int] | None  # the first one that computed something else


@dataclass(eq=False)
class _Instance:
    """A captured graph of a node, with static inputs and outputs of its own."""

    graph: SimulatedGraph
    tail: Tail
    inputs: Tensor  # [rows, edges * width]; zero where a row is absent
    external: Tensor
    outputs: Tensor  # [outputs, rows, width], padded
    step: Step | None = None


@dataclass(eq=False)
class _Built:
    """What a node's graphs share."""

    stream: SimulatedStream
    stager: SpanStager
    spans: list[Tensor]  # of its outputs, on the device
    inside: Tensor  # the same as masks
    instances: list[_Instance] = field(default_factory=list)


@dataclass(eq=False)
class _Play:
    schedule: Schedule
    raw: Collection[Edge] | None
    stored: dict[Edge, list[Tensor]]  # every token ever: the k-th launch takes the k-th
    launched: dict[int, int] = field(default_factory=dict)
    uncut: list[tuple[int, int, _Instance]] = field(default_factory=list)
    deliveries: Deliveries = field(default_factory=dict)


class SpeculatingExecutor(Scheduler):
    """Plays the schedules of a pipeline's walk, and says which of them deliver something else than the plain one.

    Every node is a captured graph that sums what it is given, row by row, and puts garbage where its outputs hold
    nothing. Steps are staged and cut by a real `SpanStager` per worker.

    Args:
        pipeline, walk: see `Scheduler`.
        device: share one between executors to save its threads.
    """

    def __init__(self, pipeline: Pipeline, walk: str | None = None, *, device: SimulatedDevice | None = None) -> None:
        super().__init__(pipeline, walk)
        self.device = device or SimulatedDevice()
        self.plays = 0
        self._plain: dict[frozenset[Edge], Deliveries] = {}  # by backlog; the same in every order

    @cached_property
    def _built(self) -> list[_Built]:
        streams, stagers = [], []
        for worker in range(max(self._worker) + 1):
            mine = [n.name for n, w in zip(self.nodes, self._worker, strict=True) if w == worker]
            columns = {f"{name}.{output}": Span() for name in mine for output in self.spanned[name]}
            depth = self.ring_depth or self.depth + 1
            streams.append(self.device.new_stream())
            stagers.append(SpanStager(columns, max_rows=_ROWS, row_values=["sum"], depth=depth, device=self.device))
        built = []
        for node, worker in zip(self.nodes, self._worker, strict=True):
            count = len(self.outputs[node.name])
            spans = [torch.zeros(_ROWS, 2, dtype=torch.int64) for _ in range(count)]
            inside = torch.zeros(count, _ROWS, _WIDTH, dtype=torch.bool)
            built.append(_Built(streams[worker], stagers[worker], spans, inside))
        return built

    def _instance(self, i: int) -> _Instance:
        """A graph of the node that no uncut launch holds; captured if there is none."""
        node, name = self._built[i], self.nodes[i].name
        for instance in node.instances:
            if instance.step is None:
                return instance
        into, out = len(self._into[i]), len(self.outputs[name])
        inputs = torch.zeros(_ROWS, into * _WIDTH, dtype=torch.int64)
        external = torch.zeros(_ROWS, 1, dtype=torch.int64)
        weights = torch.arange(into).repeat_interleave(_WIDTH).view(-1, 1) * 2 + 3  # odd: no difference is lost
        offsets = torch.arange(1, 1 + out * _WIDTH).view(out, 1, _WIDTH) + 10 * i
        graph = self.device.new_graph()
        with self.device.graph(graph):
            total = torch.addmm(external, inputs, weights)
            outputs = torch.where(node.inside, total + offsets, _GARBAGE)
            names = [f"{name}.{output}" for output in self.spanned[name]]
            padded = dict(zip(names, outputs.unbind(), strict=False))
            spans = dict(zip(names, node.spans, strict=False))
            tail = node.stager.stage(SpannedOutput(padded, spans, {"sum": total}), names=names)
        node.instances.append(_Instance(graph, tail, inputs, external, outputs))
        return node.instances[-1]

    def play(self, schedule: Schedule, cut: Collection[str] = (), *, raw: Collection[Edge] | None = None) -> Deliveries:
        """Run a schedule on the device: (node, launch) -> what it computed, and its stored outputs.

        Args:
            schedule: from `explore`.
            cut: every `"node.output"` with a full, a partial and an empty span; those of the others are full.
            raw: mask what all other edges take padded, so that only these can make a difference; default none.

        Raises:
            RingFullError: where the schedule finds the ring full.
        """
        self.plays += 1
        for node, built in zip(self.nodes, self._built, strict=True):
            for j, output in enumerate(self.outputs[node.name]):
                is_cut = f"{node.name}.{output}" in cut
                built.spans[j].copy_(_CUT_ROWS if is_cut else _WHOLE_ROWS)
                built.inside[j].copy_(_CUT_INSIDE if is_cut else _FULL)
        play = _Play(schedule, raw, {e: [_FIRST] if e.loop_back else [] for e in self.edges})
        try:
            for kind, i in schedule.actions:
                (self._cut if kind == "cut" else self._launch)(play, i)
        finally:
            for i in [i for i, _, _ in play.uncut]:  # after an error
                self._cut(play, i)
        return play.deliveries

    def _launch(self, play: _Play, i: int) -> None:
        """Put a node on its worker's stream, behind copies of its inputs."""
        instance, k = self._instance(i), play.launched.get(i, 0)
        feed: list[tuple[Tensor, Tensor, Tensor]] = []
        for static, edge in zip(instance.inputs.split(_WIDTH, 1), self._into[i], strict=False):
            if k < len(play.stored[edge]):
                feed.append((static, play.stored[edge][k], _FULL))
                continue
            source, output = self._index[edge.node], self.outputs[edge.node].index(edge.output)
            padded = next(launch for n, _, launch in reversed(play.uncut) if n == source).outputs[output]
            masks = edge.takes_spans or (play.raw is not None and edge not in play.raw)
            feed.append((static, padded, self._built[source].inside[output] if masks else _FULL))
        if all(edge.loop_back for edge in self._into[i]):
            feed.append((instance.external, torch.tensor([[k + 1], [10 * k + 10], [100 * k + 100]]), _FULL[:, :1]))
        with self.device.use_stream(self._built[i].stream), instance.tail.step() as step:
            self.device.launch(lambda: [torch.mul(value, mask, out=static) for static, value, mask in feed])
            instance.graph.replay()
        instance.step = step
        play.uncut.append((i, k, instance))
        play.launched[i] = k + 1

    def _cut(self, play: _Play, i: int) -> None:
        """Store what the oldest uncut launch of the node gave."""
        launch = next(launch for launch in play.uncut if launch[0] == i)
        play.uncut.remove(launch)
        (_, k, instance), name = launch, self.nodes[i].name
        assert instance.step is not None, "launched"
        delivered = [instance.step.row_values("sum").tolist()]
        for j, output in enumerate(self.outputs[name]):
            source = f"{name}.{output}"
            if output in self.spanned[name]:
                rows, value = instance.step.rows(source), torch.zeros_like(_FULL)
                for row in range(_ROWS):
                    if (entry := rows.at(row)) is not None:
                        ((start, end),) = rows.spans(row)[0]
                        value[row, start:end] = entry
            else:
                value = instance.outputs[j].clone()
            delivered.append(value.tolist())
            for edge in self.edges:
                if edge.source == source:
                    chunks = self._tokens(edge, k + 1, play.schedule.backlog) - len(play.stored[edge])
                    play.stored[edge] += [value * (2 * chunk + 1) for chunk in range(chunks)]
        with self.device.use_stream(self._built[i].stream):
            instance.step.release()
        instance.step = None
        play.deliveries[name, k] = delivered

    # ---- the verdict ---------------------------------------------------------------------------------------------

    def find_conflict(self) -> Conflict | None:
        """The first start, or full ring, that delivers something else than the plain schedule for some spans."""
        return next(self._conflicts(whole=True), None)

    def conflicts(self, *, whole: bool = True) -> set[tuple[str, str] | str]:
        """`("node.output", target)` of every edge that conflicts, and `"ring"` if the ring can be found full.

        An edge conflicts if a start that takes it padded delivers something else because of this edge: with everything
        else that is taken padded masked.

        Args:
            whole: see `explore`; much faster without.
        """
        conflicts = self._conflicts(whole=whole)
        return {"ring" if c.edge is None else (c.edge.source, c.edge.target) for c in conflicts}

    def _conflicts(self, *, whole: bool) -> Iterator[Conflict]:
        found: set[Edge] = set()
        for schedule in self.explore(whole=whole):
            if schedule.full:
                with contextlib.suppress(RingFullError):
                    self.play(schedule)
                    raise AssertionError("a ring that must be full was not")
                yield Conflict(schedule, None, None)
            elif schedule.start is not None:
                edges = schedule.start.edges - found
                launch = self._differs(schedule, edges)
                if launch is not None:  # what garbage adds, no other garbage takes away
                    for edge in sorted(edges, key=str):
                        if len(edges) == 1 or (launch := self._differs(schedule, [edge])) is not None:
                            found.add(edge)
                            yield Conflict(schedule, edge, launch)

    def _differs(self, schedule: Schedule, raw: Collection[Edge]) -> tuple[str, int] | None:
        """The first launch that delivers something else than in the plain schedule because of these edges."""
        if not raw:
            return None
        cut = {f"{name}.{output}" for name, outputs in self.spanned.items() for output in outputs}
        plain, got = self._plain.setdefault(schedule.backlog, {}), self.play(schedule, cut, raw=raw)
        if not got.keys() <= plain.keys():
            plain |= self.play(schedule.plain, cut)
        return next((launch for launch in got if got[launch] != plain[launch]), None)
