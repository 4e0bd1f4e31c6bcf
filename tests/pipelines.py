"""Random valid pipelines, and what the rules and the executor that defines them find in one."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from hypothesis import strategies as st

from spangraph.pipeline import Edge, Node, Pipeline
from spangraph.testing import SimulatedDevice, SpeculatingExecutor

# Few draws, each of many: drawing costs as much as running. The first of each is the simplest.
_OUTPUTS = [["x0"], ["x0"], ["x0", "x1"], ["x0", "y1"], ["y0", "x1"], ["y0"]]  # x: spanned
_FLAGS = list(product([True] * 12 + [False], [False] * 12 + [True]))  # async, lockstep
_KINDS = list(product([False] * 3 + [True], [False] * 7 + [True], [False] * 3 + [True]))  # streaming, loop-back, masks
_WORKERS = [["0"], ["0"], ["0"], ["0", "0", "1"], ["0", "1"], ["0", "1", "2"]]


@st.composite
def pipelines(
    draw: Callable[[st.SearchStrategy[Any]], Any], max_nodes: int = 5, max_edges: int = 7, *, deep: bool = False
) -> Pipeline:
    """Nodes on up to 3 workers, with edges of every kind; every cycle holds a loop-back edge.

    Args:
        deep: of those in which long chains are started: one output a node, much looping back, rings almost deep enough.
    """
    walks = draw(st.sampled_from([("talk",), ("talk",), ("talk",), ("talk", "listen")]))
    workers = st.sampled_from(draw(st.sampled_from(_WORKERS)))
    nodes, ends = [], []
    names = "abcde"[: draw(st.integers(1, max_nodes))]
    for name in names:
        outputs = ["y0"] if deep else draw(st.sampled_from(_OUTPUTS))
        ends += [(f"{name}.{output}", target) for output in outputs for target in names]
        spanned = [output for output in outputs if output[0] == "x"]
        is_async, lockstep = (True, False) if deep else draw(st.sampled_from(_FLAGS))
        nodes.append(
            Node(
                name,
                spanned=spanned if len(walks) == 1 or draw(st.booleans()) else {walks[0]: spanned},
                outputs=[output for output in outputs if output[0] == "y"],
                worker=draw(workers),
                enable_async_scheduling=is_async,
                lockstep=lockstep,
                where="nowhere",
            )
        )
    edges = []
    size = draw(st.integers(0, min(max_edges, len(ends))))
    for source, target in draw(st.lists(st.sampled_from(ends), unique=True, min_size=size, max_size=size)):
        streaming, loop_back, masks = draw(st.sampled_from(_KINDS))
        loop_back |= source[0] >= target or (deep and draw(st.booleans()))  # or a cycle could not start
        on = draw(st.sampled_from([None, None, walks[:1], walks[1:]])) if len(walks) > 1 else None
        edges.append(Edge(source, target, streaming, loop_back, masks, walks=on, where="nowhere"))
    joined = {name for edge in edges for name in (edge.node, edge.target)}
    nodes = [node for node in nodes if node.name in joined or not edges]
    nodes = nodes[::-1] if draw(st.booleans()) else nodes
    depth = draw(st.sampled_from([2, 2, 3] if deep else [1, 1, 1, 2, 2, 0]))
    ring = draw(st.sampled_from(range(2, depth + 1) if deep else [None, None, None, 1, 2, 3]))
    return Pipeline(nodes, edges, walks, speculation_depth=depth, ring_depth=ring)


def found_by_rules(pipeline: Pipeline, walk: str) -> set[str]:
    """What `verify` finds: `"a.x -> b"` per edge, and `"ring"`."""
    found = set()
    for diagnostic in pipeline.verify(walk).diagnostics:
        if diagnostic.rule in ("SG301", "SG302", "SG303"):
            found.add(diagnostic.node)
        elif diagnostic.rule == "SG304":
            found.add("ring")
    return found


def found_by_executor(pipeline: Pipeline, walk: str, device: SimulatedDevice) -> tuple[set[str], int]:
    """The same from the executor, and how many schedules it played.

    In a ring of one step every start fails, and shows nothing else: the edges are those of a ring with room.
    """
    executor = SpeculatingExecutor(pipeline, walk, device=device)
    found, plays = executor.conflicts(whole=False), executor.plays
    if pipeline.ring_depth == 1:
        executor = SpeculatingExecutor(replace(pipeline, ring_depth=None), walk, device=device)
        found, plays = found | executor.conflicts(whole=False), plays + executor.plays
    return {edge if isinstance(edge, str) else " -> ".join(edge) for edge in found}, plays
