"""The rules against the executor that defines them: on every random pipeline they find exactly the same edges."""

import pytest
from hypothesis import given, seed, settings

from spangraph.pipeline import Edge, Node, Pipeline
from spangraph.testing import SimulatedDevice

from .pipelines import found_by_executor, found_by_rules, pipelines

DEVICE = SimulatedDevice()


@pytest.mark.parametrize("number", range(4))
def test_the_rules_find_what_the_executor_finds(number: int) -> None:
    @seed(number)
    @settings(max_examples=500, deadline=None, database=None)
    @given(pipelines())
    def check(pipeline: Pipeline) -> None:
        for walk in pipeline.walks:
            assert found_by_rules(pipeline, walk) == found_by_executor(pipeline, walk, DEVICE)[0], walk

    check()


def test_the_rules_find_the_rings_that_the_executor_fills() -> None:
    """Chains of starts decide that: in few random pipelines there are long ones, so these are made for it."""

    @seed(5)
    @settings(max_examples=300, deadline=None, database=None)
    @given(pipelines(deep=True))
    def check(pipeline: Pipeline) -> None:
        for walk in pipeline.walks:
            assert found_by_rules(pipeline, walk) == found_by_executor(pipeline, walk, DEVICE)[0], walk

    check()


def chain(edges: str, depth: int, ring: int, **workers: str) -> Pipeline:
    """Nodes without spans and edges such as "a>b", "a>b L" (loop-back), "a>b S" (streaming)."""
    made = [Edge(f"{edge[0]}.x", edge[2], streaming="S" in edge, loop_back="L" in edge) for edge in edges.split(", ")]
    names = sorted({name for edge in made for name in (edge.node, edge.target)})
    nodes = [Node(name, outputs=["x"], worker=workers.get(name, "0")) for name in names]
    return Pipeline(nodes, made, speculation_depth=depth, ring_depth=ring)


# Each told the rules apart from what they were once, or from a rule with one condition less.
@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(chain("b>b L, b>c L, c>b L, b>a S", 2, 2, c="1"), id="chunks-of-an-uncut-launch"),
        pytest.param(chain("b>c, c>b L, c>c L, b>a S", 3, 3), id="chunks-in-order"),
        pytest.param(chain("s>s L, s>b, s>c L, c>s L", 2, 2, c="1"), id="earlier-launch-waits"),
        pytest.param(chain("a>b, a>a L, b>a L, b>b L", 3, 2), id="input-is-in-the-chain"),
        pytest.param(chain("a>a L, c>a L, b>c LS, a>c", 4, 4), id="waits-for-any-of-the-chain"),
    ],
)
def test_chains_that_were_hard(pipeline: Pipeline) -> None:
    assert found_by_rules(pipeline, "forward") == found_by_executor(pipeline, "forward", DEVICE)[0]
