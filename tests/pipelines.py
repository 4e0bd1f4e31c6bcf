"""Random valid pipelines, and what the rules and the executor that defines them find in one."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from spangraph.pipeline import Edge, Node, Pipeline
from spangraph.testing import SimulatedDevice, SpeculatingExecutor


def _mostly(value: bool, times: int = 3) -> st.SearchStrategy[bool]:
    return st.sampled_from([*[value] * times, not value])


@st.composite
def pipelines(draw: Callable[[st.SearchStrategy[Any]], Any], max_nodes: int = 5, max_edges: int = 7) -> Pipeline:
    """Nodes on up to 3 workers, with edges of every kind; every cycle holds a loop-back edge."""
    walks = draw(st.sampled_from([("talk",), ("talk",), ("talk",), ("talk", "listen")]))
    workers = st.integers(0, draw(st.sampled_from([0, 0, 0, 1, 2])))
    nodes, sources = [], []
    for name in "abcde"[: draw(st.integers(1, max_nodes))]:
        spanned = draw(st.lists(_mostly(True), min_size=1, max_size=2))
        outputs = [f"x{i}" if is_spanned else f"y{i}" for i, is_spanned in enumerate(spanned)]
        sources += [f"{name}.{output}" for output in outputs]
        names = [output for output in outputs if output[0] == "x"]
        nodes.append(
            Node(
                name,
                spanned=names if draw(_mostly(True)) else {walks[0]: names},
                outputs=[output for output in outputs if output[0] == "y"],
                worker=str(draw(workers)),
                enable_async_scheduling=draw(_mostly(True, 12)),
                lockstep=draw(_mostly(False, 12)),
                where="nowhere",
            )
        )
    ends = st.tuples(st.sampled_from(sources), st.sampled_from([node.name for node in nodes]))
    size = draw(st.integers(0, min(max_edges, len(sources) * len(nodes))))
    edges = [
        Edge(
            source,
            target,
            streaming=draw(_mostly(False)),
            loop_back=source[0] >= target or draw(_mostly(False, 7)),
            takes_spans=draw(_mostly(False)),
            walks=draw(st.sampled_from([None, None, None, walks[:1], walks[-1:]])) if len(walks) > 1 else None,
            where="nowhere",
        )
        for source, target in draw(st.lists(ends, unique=True, min_size=size, max_size=size))
    ]
    return Pipeline(
        draw(st.permutations(nodes)),
        edges,
        walks,
        speculation_depth=draw(st.sampled_from([0, 1, 1, 1, 2, 2])),
        ring_depth=draw(st.sampled_from([None, None, None, 1, 2, 3])),
    )


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
    """The same from the executor, and how many schedules it played."""
    executor = SpeculatingExecutor(pipeline, walk, device=device)
    found = executor.conflicts(whole=False)
    return {edge if isinstance(edge, str) else " -> ".join(edge) for edge in found}, executor.plays
