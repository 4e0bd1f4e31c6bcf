"""Random valid pipelines, and what the rules say about one in the words of the executor that defines them."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from spangraph.pipeline import Edge, Node, Pipeline

MAX_NODES, MAX_EDGES = 5, 7


def _mostly(value: bool, times: int = 3) -> st.SearchStrategy[bool]:
    return st.sampled_from([*[value] * times, not value])


@st.composite
def pipelines(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Pipeline:
    """Up to 5 nodes on up to 3 workers, with up to 7 edges; every cycle holds a loop-back edge."""
    walks = draw(st.sampled_from([("talk",), ("talk",), ("talk",), ("talk", "listen")]))
    workers = st.integers(0, draw(st.sampled_from([0, 0, 1, 2])))
    nodes, sources = [], []
    for name in "abcde"[: draw(st.integers(1, MAX_NODES))]:
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
            )
        )
    ends = st.tuples(st.sampled_from(sources), st.sampled_from([node.name for node in nodes]))
    size = draw(st.integers(0, min(MAX_EDGES, len(sources) * len(nodes))))
    edges = [
        Edge(
            source,
            target,
            streaming=draw(_mostly(False)),
            loop_back=source[0] >= target or draw(_mostly(False, 7)),
            takes_spans=draw(_mostly(False)),
            walks=draw(st.sampled_from([None, None, None, walks[:1], walks[-1:]])) if len(walks) > 1 else None,
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
