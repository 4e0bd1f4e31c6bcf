"""Which graphs there are, and when: warm-up, eviction, recapture."""

import gc
import linecache
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.graph_module import _loader

import spangraph
from spangraph import CaptureError, ClosedError, InputError, StaleGraphError
from spangraph.testing import SimulatedDevice

from .toys import Toy, backend, batch, cut, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
SIZES = {"batch": (1, 2, 4), "width": (5, 9)}
DIMS = {"x": {0: "batch", 1: "width"}, "lengths": {0: "batch"}}


def bucketed(on: Any = "inline", **options: Any) -> spangraph.Compiled:
    device = backend(on) if isinstance(on, str) else on
    return spangraph.compile(Toy(), backend=device, buckets=SIZES, dims=DIMS, **options)


def labels(run: spangraph.Compiled) -> list[str]:
    """Shapes of `x` of the graphs that are there, the least recently used first."""
    return [signature.label.partition(", int64")[0] for signature in run._by_key.values()]


# ---- warm-up ---------------------------------------------------------------------------------------------------------


@BACKENDS
def test_warmup_captures_all_the_largest_first(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = bucketed(on)
    with run.counts.expect(captures=6, launches=0, misses=0):
        run.warmup(batch((3, 5, 1)))
    assert labels(run) == [f"float32[{b}, {w}]" for b, w in [(4, 9), (4, 5), (2, 9), (2, 5), (1, 9), (1, 5)]]
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 6
    assert shown[0].startswith("spangraph: captured 1 of 6: forward, batch=4, width=9 (")
    with run.counts.expect(captures=0, hits=2, misses=0):
        run(*batch((3,), 3))
        run(*batch((3, 1, 2), 9))
    run.warmup(batch((1,)), progress=False)
    assert not capsys.readouterr().err
    assert run.counts.captures == 6


@pytest.mark.parametrize("failing", [1, 3, 6])
def test_a_warmup_that_fails_leaves_nothing_behind(failing: int) -> None:
    """All or none; pool, stream and ring stay usable, and what was captured before stays."""
    device = SimulatedDevice()
    run = bucketed(device, copies={"audio": "host"})
    run(*batch((5, 3), 5))  # one of the six buckets
    fault = CaptureError("the device refuses")
    captures = []
    graph = device.graph

    def fail_one(*args: Any, **kwargs: Any) -> Any:
        captures.append(1)
        if len(captures) == min(failing, 5):
            device.fail_next("capture", fault)
        return graph(*args, **kwargs)

    device.graph = fail_one  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="the device refuses"):
        run.warmup(batch((1,)), progress=False)
    assert labels(run) == ["float32[2, 5]"]
    device.graph = graph  # type: ignore[method-assign]
    run.warmup(batch((1,)), progress=False)
    x, n = batch((7, 9, 2), 9)
    with run.counts.expect(hits=1, captures=0):
        assert values(run(x, n).outputs["audio"]) == cut(x * 2 + 1, [7, 9, 2])


def test_a_warmup_that_fails_evicts_nothing() -> None:
    """Graphs in use gave way to captures that were not kept."""
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, walks=("a", "b"), buckets={"batch": (1, 2)}, max_graphs=2)
    run.warmup(batch((1,)), walk="a", progress=False)
    graph, captures = device.graph, []

    def fail_second(*args: Any, **kwargs: Any) -> Any:
        captures.append(1)
        if len(captures) == 2:
            device.fail_next("capture", CaptureError("the device refuses"))
        return graph(*args, **kwargs)

    device.graph = fail_second  # type: ignore[method-assign]
    with run.counts.expect(evictions=0), pytest.raises(CaptureError, match="the device refuses"):
        run.warmup(batch((1,)), walk="b", progress=False)
    with run.counts.expect(hits=2, captures=0):
        run(*batch((1,)), walk="a")
        run(*batch((1, 2)), walk="a")
    with run.counts.expect(evictions=2, captures=2):
        run.warmup(batch((1,)), walk="b", progress=False)


@BACKENDS
def test_a_warmup_looks_at_the_weights(on: str) -> None:
    refusing, recapturing = bucketed(on), bucketed(on, on_stale="recapture")
    for run in (refusing, recapturing):
        run.warmup(batch((1,)), progress=False)
        replace_gain(run._model, 7.0)
    with recapturing.counts.expect(captures=6, evictions=6):
        recapturing.warmup(batch((1,)), progress=False)
    x, n = batch((3, 5))
    with recapturing.counts.expect(hits=1):
        assert values(recapturing(x, n).outputs["audio"]) == cut(x * 7 + 1, [3, 5])
    with pytest.raises(StaleGraphError, match="gain was replaced"):
        refusing.warmup(batch((1,)), progress=False)


def test_a_warmup_of_what_is_closed_meanwhile_keeps_nothing() -> None:
    run = bucketed("simulated")
    build, built = run._core.new_tail, []

    def close_at_the_last(*args: Any, **kwargs: Any) -> Any:
        built.append(1)
        if len(built) == 6:
            run._ring.is_closed = True
        return build(*args, **kwargs)

    run._core.new_tail = close_at_the_last  # type: ignore[method-assign]
    with pytest.raises(ClosedError, match="closed meanwhile"):
        run.warmup(batch((1,)), progress=False)
    assert labels(run) == []


def test_warmup_without_buckets_captures_one_signature() -> None:
    run = spangraph.compile(Toy(), backend=SimulatedDevice())
    run.warmup(batch((3, 5)), progress=False)
    with run.counts.expect(hits=1, captures=0):
        run(*batch((1, 2)))


def test_others_launch_while_one_warms_up() -> None:
    """And a bucket that a launch captures meanwhile is captured once."""
    device = SimulatedDevice()
    run = bucketed(device)
    entered, go_on = threading.Event(), threading.Event()
    graph = device.graph

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is warming and not entered.is_set():
            entered.set()
        elif threading.current_thread() is warming:
            go_on.wait(60)
        return graph(*args, **kwargs)

    device.graph = slow  # type: ignore[method-assign]
    warming = threading.Thread(target=run.warmup, args=(batch((1,)),), kwargs={"progress": False})
    warming.start()
    assert entered.wait(60)
    go_on.set()
    x, n = batch((3, 2), 5)
    assert values(run(x, n).outputs["audio"]) == cut(x * 2 + 1, [3, 2])
    warming.join()
    assert sorted(labels(run)) == sorted(set(labels(run)))
    assert len(labels(run)) == 6


def test_warmup_needs_room_and_an_open_object() -> None:
    run = bucketed("simulated", max_graphs=5)
    with pytest.raises(InputError, match="max_graphs=5, but 6 graphs are needed at once: one per bucket"):
        run.warmup(batch((1,)), progress=False)
    assert labels(run) == []
    with pytest.raises(InputError, match="args is a Tensor: expected a tuple"):
        run.warmup(torch.randn(2, 3))
    run.close()
    with pytest.raises(ClosedError, match="compile the model again"):
        run.warmup(batch((1,)), progress=False)


# ---- eviction --------------------------------------------------------------------------------------------------------


@BACKENDS
def test_the_least_recently_used_goes_first(on: str) -> None:
    run = spangraph.compile(Toy(), backend=backend(on), max_graphs=3)
    for bs in (1, 2, 3):
        run(*batch([1] * bs))
    run(*batch([1]))  # used again
    with run.counts.expect(evictions=1, captures=1):
        run(*batch([1] * 4))
    assert labels(run) == [f"float32[{bs}, 5]" for bs in (3, 1, 4)]
    with run.counts.expect(evictions=1, captures=1, misses=1):
        run(*batch([1] * 2))
    assert labels(run) == [f"float32[{bs}, 5]" for bs in (1, 4, 2)]


@pytest.mark.parametrize("copies", ["view", "host"])
def test_eviction_drains_and_leaves_rows_alone(copies: str) -> None:
    """Steps of an evicted graph in flight, or leased: their rows are right."""
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, depth=3, copies={"audio": copies}, max_graphs=3)
    x, n = batch((3, 5))
    run(x, n)
    leased, open_step = run.launch(x, n), run.launch(x + 1, n)
    rows = leased.rows()
    for bs in (3, 4, 5):
        run(*batch([1] * bs))
    assert run.counts.evictions >= 1
    assert "float32[2, 5]" not in labels(run)
    assert values(rows) == cut(x * 2 + 1, [3, 5])
    assert values(open_step.rows()) == cut((x + 1) * 2 + 1, [3, 5])
    x2, n2 = batch((2, 2))
    leased.release()
    open_step.release()
    assert values(run(x2, n2).outputs["audio"]) == cut(x2 * 2 + 1, [2, 2])


def test_graphs_of_all_walks_count() -> None:
    run = spangraph.compile(Toy(), backend=SimulatedDevice(), walks=("a", "b"), max_graphs=2)
    for walk in ("a", "b", "a"):
        run(*batch([1]), walk=walk)
    run(*batch([1, 2]), walk="a")
    assert [signature.place.key[0] for signature in run._by_key.values()] == ["a", "a"]
    assert run.statistics()["b", ""].evictions == 1


def test_a_limit_below_the_depth_is_refused() -> None:
    """Each step in flight needs a graph of its own where rows are views."""
    run = spangraph.compile(Toy(), backend=SimulatedDevice(), depth=2, max_graphs=1)
    with pytest.raises(InputError, match="max_graphs=1, but 2 graphs are needed at once"):
        run(*batch([1]))
    run = spangraph.compile(Toy(), backend=SimulatedDevice(), depth=2, max_graphs=1, copies={"audio": "host"})
    run(*batch([1]))


def test_memory_of_evicted_graphs_is_given_back() -> None:
    """K35: exact shapes, each another one: pinned and pool bytes stay flat."""
    run = spangraph.compile(Toy(), backend=SimulatedDevice(), max_graphs=4)
    sizes = []
    for width in range(1, 60):
        run(torch.randn(2, width), torch.tensor([1, 1]))
        sizes.append((run.memory().pinned, len(run._by_key.values())))
    assert {number for _, number in sizes[4:]} == {4}
    assert max(pinned for pinned, _ in sizes[4:]) <= sizes[4][0] + 4 * 4 * 60 * 2


@BACKENDS
def test_graphs_leave_no_source_texts_behind(on: str) -> None:
    """torch.fx keeps the text of every graph that was ever compiled; those of graphs that are there are of use."""
    run = spangraph.compile(Toy(), backend=backend(on), max_graphs=2)
    for width in range(1, 5):
        run(torch.randn(2, width), torch.tensor([1, 1]))
    before = len(_loader.eval_cache)
    for width in range(5, 15):
        run(torch.randn(2, width), torch.tensor([1, 1]))
    gc.collect()
    assert len(_loader.eval_cache) <= before
    (name,) = {i.forward.__code__.co_filename for i in run._by_key.values()[-1].instances}
    assert ("spangraph_stage" if on == "inline" else "spangraph.stage") in "".join(linecache.getlines(name))


# ---- recapture -------------------------------------------------------------------------------------------------------


def replace_gain(model: nn.Module, value: float) -> None:
    model.gain = nn.Parameter(torch.tensor(value))


@BACKENDS
def test_replaced_weights_are_recaptured_where_that_is_asked_for(on: str) -> None:
    """K28: and refused where it is not. The mirrored case: an in-place update is followed, without a recapture."""
    model = Toy()
    run = spangraph.compile(model, backend=backend(on), depth=2, on_stale="recapture")
    refusing = spangraph.compile(model, backend=backend(on))
    x, n = batch((3, 5))
    for compiled in (run, refusing):
        compiled(x, n)
        with torch.no_grad():
            model.gain.copy_(torch.tensor(3.0))
        with compiled.counts.expect(captures=0, hits=1):
            assert values(compiled(x, n).outputs["audio"]) == cut(x * 3 + 1, [3, 5])
    replace_gain(model, 4.0)
    with run.counts.expect(captures=1, evictions=1, misses=1):
        assert values(run(x, n).outputs["audio"]) == cut(x * 4 + 1, [3, 5])
    assert run.counts.reasons == {"not captured": 1, "weights replaced": 1}
    with run.counts.expect(hits=1):
        run(x, n)
    for _ in range(2):
        with pytest.raises(StaleGraphError, match="gain was replaced after the trace"):
            refusing(x, n)


def test_a_recapture_leaves_steps_of_the_old_graph_alone() -> None:
    device = SimulatedDevice()
    model = Toy()
    run = spangraph.compile(model, backend=device, depth=2, on_stale="recapture")
    x, n = batch((3, 5))
    run(x, n)
    old = run.launch(x, n)
    replace_gain(model, 5.0)
    new = run.launch(x, n)
    assert values(old.rows()) == cut(x * 2 + 1, [3, 5])
    assert values(new.rows()) == cut(x * 5 + 1, [3, 5])


def test_a_recapture_that_fails_is_done_at_the_next_launch() -> None:
    device = SimulatedDevice()
    model = Toy()
    run = spangraph.compile(model, backend=device, on_stale="recapture")
    x, n = batch((3, 5))
    run(x, n)
    replace_gain(model, 5.0)
    device.fail_next("capture", CaptureError("not now"))
    with pytest.raises(CaptureError, match="not now"):
        run(x, n)
    assert values(run(x, n).outputs["audio"]) == cut(x * 5 + 1, [3, 5])


def test_each_bucket_is_recaptured_when_it_is_launched() -> None:
    def expected(x: Tensor, n: Tensor) -> Any:
        return cut(x * 7 + 1, n.tolist())

    run = bucketed("simulated", on_stale="recapture")
    run.warmup(batch((1,)), progress=False)
    replace_gain(run._model, 7.0)
    for lengths, width in [((3,), 5), ((9, 2), 9), ((3,), 4)]:
        x, n = batch(lengths, width)
        assert values(run(x, n).outputs["audio"]) == expected(x, n)
    assert run.counts.reasons == {"weights replaced": 2}
    assert run.counts.evictions == 2


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(InputError, match=r"on_stale='ignore': expected one of \['error', 'recapture'\]"):
        bucketed(on_stale="ignore")
