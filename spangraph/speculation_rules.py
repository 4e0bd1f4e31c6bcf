"""Rules SG3xx and SG5xx: which starts a speculating worker could make before a cut, read off a pipeline.

Launch k of a node takes the tokens that launches k of its sources made, over loop-back edges those of launches k - 1.
So what launch i of a node must come before is a matter of distance: launch j of another depends on it if a path leads
there with at most j - i loop-back edges. Over a streaming edge chunks may be left over from long ago: it binds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from spangraph.declare import find_declarations
from spangraph.diagnostics import Diagnostic
from spangraph.pipeline import Edge, Node, Pipeline

_Launch = tuple[str, int]  # node, and which launch of it


def find_conflicts(pipeline: Pipeline, walk: str) -> list[Diagnostic]:
    """Every conflict on one walk: SG301-SG304 and SG501."""
    speculation = _Speculation(pipeline, walk)
    found = [
        _conflict(pipeline, walk, edge)
        for edge in speculation.edges
        if edge.output in speculation.spanned[edge.node]
        and not edge.takes_spans
        and pipeline.speculation_depth > 0
        and speculation.can_start([(edge.node, 0)], edge)
    ]
    if pipeline.ring_depth is not None:
        found += _full_rings(pipeline, walk, speculation)
    return found + list(_different_ranks(pipeline, walk))


class _Speculation:
    """What a worker may start on launches that are not cut, on one walk."""

    def __init__(self, pipeline: Pipeline, walk: str) -> None:
        self.edges = pipeline.edges_on(walk)
        self.nodes = {node.name: node for node in pipeline.nodes}
        self.spanned = {name: set(node.spanned_outputs(walk)) for name, node in self.nodes.items()}
        self.inputs = {name: [edge for edge in self.edges if edge.target == name] for name in self.nodes}
        self._distances = {name: self._distances_from(name) for name in self.nodes}

    def _distances_from(self, name: str) -> Mapping[str, float]:
        """Least number of loop-back edges on the way to each node, not over streaming edges."""
        distances = dict.fromkeys(self.nodes, inf)
        distances[name] = 0
        changed = True
        while changed:
            changed = False
            for edge in self.edges:
                by = distances[edge.node] + edge.loop_back
                if not edge.streaming and by < distances[edge.target]:
                    distances[edge.target], changed = by, True
        return distances

    def can_start(self, chain: Sequence[_Launch], edge: Edge) -> bool:
        """Whether the target of `edge` may start on the last of `chain`, a chain of launches none of which is cut."""
        source, at = chain[-1]
        node, target = self.nodes[source], self.nodes[edge.target]
        if not (node.speculates and target.speculates and node.worker == target.worker):
            return False
        launch = at + edge.loop_back
        earlier = [when for name, when in chain[:-1] if name == source]
        if edge.streaming and any((target.name, when + edge.loop_back) not in chain for when in earlier):
            return False  # chunks are taken in order, and those of an earlier launch of the source are not cut
        before = (target.name, launch - 1)
        if before not in chain and self._waits_for(chain, before):
            return False  # an earlier launch of the target must wait for a cut, and so must this one
        for other in self.inputs[target.name]:
            needed = (other.node, launch - other.loop_back)
            if not other.streaming and needed != chain[-1] and self._waits_for(chain, needed):
                return False
        return True

    def _waits_for(self, chain: Sequence[_Launch], launch: _Launch) -> bool:
        """Whether a launch is one of the chain, or comes after the cut of one of them."""
        name, at = launch
        return any(self._distances[uncut][name] <= at - when for uncut, when in chain)


def _conflict(pipeline: Pipeline, walk: str, edge: Edge) -> Diagnostic:
    source, target = pipeline.node(edge.node), pipeline.node(edge.target)
    own = edge.node == edge.target
    rule = "SG303" if own else "SG302" if edge.loop_back else "SG301"
    taker = repr(target.name)
    if edge.loop_back:
        taker = f"the next iteration of {taker} itself" if own else f"the next iteration of {taker}"
    ends = repr(source.name) if own else f"{source.name!r} or {target.name!r}"
    elsewhere = "" if own else f", put {target.name!r} on another worker than {source.worker!r}"
    return Diagnostic(
        rule,
        f"{taker} may start on {edge.source!r} before its rows are cut, and would read padding.",
        edge.where,
        str(edge),
        f"set enable_async_scheduling = false or lockstep = true for {ends}{elsewhere}, or, if {target.name!r} takes"
        " the spans too and masks padding itself, takes_spans = true on this edge.",
        related=(
            (f"node {source.name!r}", source.where),
            *(() if own else ((f"node {target.name!r}", target.where),)),
            *_declared_at(source, edge.output, walk),
        ),
    )


def _declared_at(node: Node, output: str, walk: str) -> Iterator[tuple[str, str]]:
    if node.module is not None:
        for declaration in find_declarations(node.module, walk):
            if output in declaration.spans:
                yield f"{output!r} is declared", declaration.where


def _full_rings(pipeline: Pipeline, walk: str, speculation: _Speculation) -> Iterator[Diagnostic]:
    """SG304, once per worker: more launches may be open at once than its ring has room for."""
    depth = pipeline.ring_depth
    assert depth is not None, "checked by the caller"
    found: set[str] = set()
    for node in pipeline.nodes:
        if node.worker in found or depth > pipeline.speculation_depth:
            continue
        if chain := _chain([(node.name, 0)], depth + 1, speculation):
            found.add(node.worker)
            launches = " -> ".join(name for name, _ in chain)
            yield Diagnostic(
                "SG304",
                f"worker {node.worker!r} may have {depth + 1} steps open at once ({launches}), but its ring has room"
                f" for {depth}.",
                node.where,
                f"worker {node.worker}",
                f"make ring_depth speculation_depth + 1 = {pipeline.speculation_depth + 1}, or speculate less deep.",
                related=tuple((f"node {n!r}", speculation.nodes[n].where) for n in dict.fromkeys(n for n, _ in chain)),
            )


def _chain(chain: list[_Launch], length: int, speculation: _Speculation) -> list[_Launch] | None:
    """A chain of launches that may all be open, that begins like `chain` and is that long."""
    if len(chain) == length:
        return chain
    name, at = chain[-1]
    for edge in speculation.edges:
        if edge.node != name or not speculation.can_start(chain, edge):
            continue
        if longer := _chain([*chain, (edge.target, at + edge.loop_back)], length, speculation):
            return longer
    return None


def _different_ranks(pipeline: Pipeline, walk: str) -> Iterator[Diagnostic]:
    """SG501: ranks of one group that declare different spanned outputs."""
    first: dict[str, Node] = {}
    for node in pipeline.nodes:
        if not node.group:
            continue
        other = first.setdefault(node.group, node)
        mine, theirs = sorted(node.spanned_outputs(walk)), sorted(other.spanned_outputs(walk))
        if mine != theirs:
            yield Diagnostic(
                "SG501",
                f"ranks of group {node.group!r} declare different spanned outputs: {node.name!r} {mine},"
                f" {other.name!r} {theirs}.",
                node.where,
                node.name,
                "declare the same outputs on every rank: a step returns spans on all of them or on none.",
                related=((f"node {other.name!r}", other.where),),
            )
