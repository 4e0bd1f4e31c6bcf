"""The speculating executor on pipelines whose verdict is known by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings

from spangraph import RingFullError
from spangraph.pipeline import Edge, Node, Pipeline
from spangraph.schedules import Scheduler, Start
from spangraph.testing import SimulatedDevice, SpeculatingExecutor

from .pipelines import pipelines

DEVICE = SimulatedDevice()
A, B, C = Node("a", spanned=["x"]), Node("b", spanned=["x"]), Node("c", spanned=["x"])
FAR_C = Node("c", outputs=["y"], worker="1")  # gives no spanned output, and cannot start on a's padded one
AB, BC, AC = Edge("a.x", "b"), Edge("b.x", "c"), Edge("a.x", "c")
SELF = Edge("a.x", "a", loop_back=True)
BACK = Edge("b.x", "a", loop_back=True)
MASKING = Edge("a.x", "b", takes_spans=True)


def verdict(nodes: Sequence[Node], edges: Sequence[Edge], **options: int) -> set[tuple[str, str] | str]:
    """What the executor finds; whole schedules and short ones must agree."""
    executor = SpeculatingExecutor(Pipeline(nodes, edges, **options), device=DEVICE)
    found = executor.conflicts()
    assert executor.conflicts(whole=False) == found
    assert (executor.find_conflict() is None) == (not found)
    return found


DIRECT = {
    "started on padded rows": ([A, B], [AB], {("a.x", "b")}),
    "only cut tokens cross workers": ([A, Node("b", worker="1")], [AB], set()),
    "a source in lockstep is cut first": ([Node("a", spanned=["x"], lockstep=True), B], [AB], set()),
    "a target in lockstep is not started early": ([A, Node("b", lockstep=True)], [AB], set()),
    "a source that is not async": ([Node("a", spanned=["x"], enable_async_scheduling=False), B], [AB], set()),
    "a target that is not async": ([A, Node("b", enable_async_scheduling=False)], [AB], set()),
    "the target masks": ([A, B], [MASKING], set()),
    "padded and cut are the same": ([Node("a", outputs=["x"]), B], [AB], set()),
    "the first chunk may be taken padded": ([A, B], [Edge("a.x", "b", streaming=True)], {("a.x", "b")}),
    "both edges of a chain": ([A, B, C], [AB, BC], {("a.x", "b"), ("b.x", "c")}),
}


@pytest.mark.parametrize("case", DIRECT)
def test_direct_edges(case: str) -> None:
    nodes, edges, expected = DIRECT[case]
    assert verdict(nodes, edges) == expected


OTHER_INPUT = {
    "it needs this step's cut": ([A, B, FAR_C], [AB, AC, Edge("c.y", "b")], set()),
    "chunks may be left over": ([A, B, FAR_C], [AB, AC, Edge("c.y", "b", streaming=True)], {("a.x", "b")}),
    "left over further up": ([A, B, FAR_C], [AB, Edge("a.x", "c", streaming=True), Edge("c.y", "b")], {("a.x", "b")}),
    "the last step's is enough": ([A, B, FAR_C], [AB, AC, Edge("c.y", "b", loop_back=True)], {("a.x", "b")}),
    "it does not depend on a": ([A, B, FAR_C], [AB, Edge("c.y", "b")], {("a.x", "b")}),
    # c starts on a; once a is cut and c is not, b takes a's rows stored and c's padded.
    "the slower path is on the worker": ([A, B, C], [AB, AC, Edge("c.x", "b")], {("a.x", "c"), ("c.x", "b")}),
    "and masks": ([A, B, C], [AB, AC, Edge("c.x", "b", takes_spans=True)], {("a.x", "c")}),
}


@pytest.mark.parametrize("case", OTHER_INPUT)
def test_targets_with_another_input(case: str) -> None:
    nodes, edges, expected = OTHER_INPUT[case]
    assert verdict(nodes, edges) == expected


LOOPS = {
    "the next iteration of another node": ([A, B], [MASKING, BACK], {("b.x", "a")}),
    "both ways": ([A, B], [AB, BACK], {("a.x", "b"), ("b.x", "a")}),
    "the loop crosses workers": ([A, Node("b", spanned=["x"], worker="1")], [AB, BACK], set()),
    "a node's own next iteration": ([A], [SELF], {("a.x", "a")}),
    "which masks": ([A], [Edge("a.x", "a", loop_back=True, takes_spans=True)], set()),
    # The first value of the other loop-back goes into the first launch; the second launch waits for c, so for the cut.
    "which waits for c": ([A, FAR_C], [SELF, AC, Edge("c.y", "a", loop_back=True)], set()),
    "or for chunks of c": (
        [A, FAR_C],
        [SELF, AC, Edge("c.y", "a", loop_back=True, streaming=True)],
        {("a.x", "a")},
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loops(case: str) -> None:
    nodes, edges, expected = LOOPS[case]
    assert verdict(nodes, edges) == expected


def test_only_the_edges_that_differ() -> None:
    """Two outputs into one target, and one output into two, of which one masks."""
    both = Node("a", spanned=["x", "z"])
    assert verdict([both, B], [AB, Edge("a.z", "b")]) == {("a.x", "b"), ("a.z", "b")}
    assert verdict([both, B], [AB, Edge("a.z", "b", takes_spans=True)]) == {("a.x", "b")}
    assert verdict([Node("a", spanned=["x"], outputs=["z"]), B], [AB, Edge("a.z", "b")]) == {("a.x", "b")}
    assert verdict([A, B, C], [MASKING, AC], speculation_depth=2) == {("a.x", "c")}


def test_depth() -> None:
    """Without speculation nothing is started early; one on top of the other needs two."""
    assert verdict([A, B], [AB], speculation_depth=0, ring_depth=1) == set()
    assert verdict([A], [SELF], speculation_depth=0) == set()
    for depth in (1, 2):
        executor = SpeculatingExecutor(Pipeline([A, B, C], [AB, BC], speculation_depth=depth), device=DEVICE)
        deepest = 0
        for schedule in executor.explore():
            state = executor.initial()
            for action in schedule.actions:
                state = executor.apply(state, action)
                deepest = max(deepest, *map(len, state.uncut))
        assert deepest == depth + 1


def test_ring() -> None:
    """A start beyond the ring's depth is refused; it does not happen, so its edges do not conflict."""
    assert verdict([A, B], [AB], ring_depth=1) == {"ring"}
    assert verdict([A, B], [MASKING], ring_depth=1) == {"ring"}
    assert verdict([A, Node("b", worker="1")], [AB], ring_depth=1) == set()
    # c is refused while a is uncut, and starts on b once it is cut.
    chain = {("a.x", "b"), ("b.x", "c")}
    assert verdict([A, B, C], [AB, BC], speculation_depth=2, ring_depth=2) == chain | {"ring"}
    assert verdict([A, B, C], [AB, BC], speculation_depth=2, ring_depth=3) == chain
    assert verdict([A, B, C], [AB, BC], speculation_depth=1, ring_depth=2) == chain


def test_tokens_are_taken_in_order() -> None:
    """b may not take what a's second uncut launch gave before what the first gave."""
    loop = [Node("a", outputs=["x"]), Node("b")]
    assert verdict(loop, [AB, SELF], speculation_depth=2) == set()
    executor = SpeculatingExecutor(Pipeline(loop, [AB, SELF], speculation_depth=2), device=DEVICE)
    assert {schedule.start and schedule.start.target for schedule in executor.explore()} == {None, "a", "b"}


def test_one_walk_at_a_time() -> None:
    talker = Node("a", spanned={"talk": ["x"]})
    pipeline = Pipeline([talker, B, C], [AB, Edge("b.x", "c", walks=["listen"])], ["talk", "listen"])
    assert SpeculatingExecutor(pipeline, device=DEVICE).conflicts() == {("a.x", "b")}
    assert SpeculatingExecutor(pipeline, "listen", device=DEVICE).conflicts() == {("b.x", "c")}
    assert SpeculatingExecutor(Pipeline([B]), device=DEVICE).conflicts() == set()


def test_a_conflict_says_how() -> None:
    executor = SpeculatingExecutor(Pipeline([A, B], [AB]), device=DEVICE)
    conflict = executor.find_conflict()
    assert conflict is not None
    assert (conflict.edge, conflict.launch) == (AB, ("b", 0))
    assert conflict.schedule.start == Start("a", "b", frozenset([AB]))
    assert [kind for kind, _ in conflict.schedule.actions[:3]] == ["launch", "start", "cut"]


def test_deliveries() -> None:
    """What is delivered by hand: a's sum is its input, and b's three times the rows of a, or of what is around them."""
    executor = SpeculatingExecutor(Pipeline([A, B], [AB]), device=DEVICE)
    plain, schedule = executor.explore()
    whole, rows = executor.play(plain), executor.play(plain, ["a.x"])
    assert rows.keys() == {(name, k) for name in "ab" for k in range(3)}
    assert rows["a", 0] == [[[1], [10], [100]], [[2, 3, 4, 5], [0, 12, 13, 0], [0, 0, 0, 0]]]
    assert rows["b", 0][0] == [[3 * (2 + 3 + 4 + 5)], [3 * (12 + 13)], [0]]
    assert executor.play(schedule) == whole  # full spans: padded and cut are the same
    padded = executor.play(schedule, ["a.x"])
    assert padded["b", 0][0] == [[3 * (2 + 3 + 4 + 5)], [3 * (12 + 13 + 2 * 1009)], [3 * 4 * 1009]]
    assert {launch for launch in rows if padded[launch] != rows[launch]} == {("b", 0)}
    assert executor.play(schedule, ["a.x"], raw=[AB]) == padded
    assert executor.play(schedule, ["a.x"], raw=[]) == rows  # masked


def test_a_full_ring_is_a_real_one() -> None:
    executor = SpeculatingExecutor(Pipeline([A, B], [AB], ring_depth=1), device=DEVICE)
    plain, schedule = executor.explore()
    assert schedule.full
    with pytest.raises(RingFullError):
        executor.play(schedule)
    assert len(executor.play(plain)) == 6  # and the executor goes on


@settings(max_examples=150, deadline=None, derandomize=True)
@given(pipelines(max_nodes=3, max_edges=4))
def test_exploration_leaves_nothing_out(pipeline: Pipeline) -> None:
    """Every start of every reachable state, against the starts that are explored."""
    scheduler = Scheduler(pipeline)
    explored = {"ring" if schedule.full else schedule.start for schedule in scheduler.explore(whole=False)} - {None}
    streaming = [edge for edge in scheduler.edges if edge.streaming]
    every: set[Start | str | None] = set()
    for bits in range(2 ** len(streaming)):
        backlog = frozenset(edge for i, edge in enumerate(streaming) if bits >> i & 1)
        visited, todo = set(), [scheduler.initial()]
        while todo:
            state = todo.pop()
            if state in visited:
                continue
            visited.add(state)
            for action in scheduler.actions(state, backlog):
                if action.kind == "start":
                    every.add(scheduler.start(state, action, backlog))
                elif action.kind == "full":
                    every.add("ring")
                todo.append(scheduler.apply(state, action))
    assert explored == every
