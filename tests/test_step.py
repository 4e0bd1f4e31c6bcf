"""`Step`: the ticket. Row ids are frozen, leases end, and what was made one's own is kept."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import (
    Backend,
    InlineBackend,
    InputError,
    RingFullError,
    RowLookupError,
    Rows,
    Span,
    SpanError,
    SpannedOutput,
    SpanStager,
    StaleStepError,
    StepStateError,
    StepTimeoutError,
)
from spangraph.testing import SimulatedDevice

from .rig import Batch, Engine, assert_rows

pytestmark = pytest.mark.usefixtures("with_and_without_debugging")


class Twice(nn.Module):
    """Two spanned outputs, one that is not, and a row value."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio", "pitch")

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        spans = spangraph.from_lengths(n)
        outputs = {"audio": x * 2, "pitch": x + 1, "mean": x.mean(1)}
        return SpannedOutput(outputs, {"audio": spans, "pitch": spans}, {"frames": n})


# ---- row ids -------------------------------------------------------------------------------------------------------


def test_row_ids_are_frozen_at_launch() -> None:
    """K30: rows re-ordered or aborted between launch and read: launch [A, B, C], abort B, read."""
    engine = Engine(bs=3)
    batch = Batch.of([(0, 3), (1, 4), (2, 6)])
    requests = ["A", "B", "C"]
    step = engine.launch(batch, requests)
    requests.reverse()
    requests.append("D")
    step.withhold("B")
    assert step.row_ids == ("A", "B", "C")
    expected = batch.rows("ABC")
    del expected["B"]
    assert_rows(step.rows(), expected)
    assert step.row_values("token").tolist() == batch.token.tolist()


def test_a_stop_check_withholds_an_output_of_a_row() -> None:
    """As if its span were empty: for the named output alone, and for rows that were cut already."""
    x, n = torch.randn(3, 5), torch.tensor([5, 2, 3])
    with spangraph.compile(Twice(), backend=SimulatedDevice()).launch(x, n, rows=list("abc")) as step:
        audio, pitch = step.rows("audio"), step.rows("pitch")
        owned = audio.own()
        step.withhold("b", "audio")
        for rows in (audio, owned, step.rows("audio"), step.result().outputs["audio"]):
            assert list(rows) == ["a", "c"]
            assert rows.at(1) is None
            assert rows.spans("b") == ()
        assert list(pitch) == ["a", "b", "c"]
        step.withhold("c")
        assert list(pitch) == ["a", "b"]
        assert torch.equal(pitch["b"], x[1, :2] + 1)


def test_withholding_hides_a_bad_span_too() -> None:
    """An aborted request's garbage is nobody's error."""
    engine = Engine(bs=2)
    batch = Batch.of([(0, 4), (5, 3)])
    step = engine.launch(batch, list("ab"))
    step.withhold("b")
    assert_rows(step.rows(), {"a": batch.padded[0, :4]})


def test_withholding_what_is_not_there_is_refused_and_withholds_nothing() -> None:
    engine = Engine(bs=2)
    batch = Batch.of([(0, 4), (1, 3)])
    step = engine.launch(batch, list("ab"))
    with pytest.raises(RowLookupError, match=r"no row 'c' in this step; its rows are \['a', 'b'\]"):
        step.withhold("c")
    with pytest.raises(RowLookupError, match=r"no spanned output for 'video'"):
        step.withhold("a", "audio", "video")
    assert_rows(step.rows(), batch.rows("ab"))


def test_row_ids_must_fit_the_rows() -> None:
    engine = Engine(bs=3)
    cases: list[tuple[Any, int | None, str]] = [
        (["a", "a", "b"], None, r"row ids \['a', 'a', 'b'\] hold one id twice"),
        (["a", "b"], None, r"2 row ids for 3 real rows: give one id per real row\. num_rows= says"),
        (["a", "b", "c", "d"], None, r"4 row ids for 3 real rows"),
        (["a", "b", "c"], 2, r"3 row ids for 2 real rows"),
        ("abc", None, r"rows='abc' is one string: expected a sequence of row ids"),
        ([["a"], ["b"], ["c"]], None, r"row ids \[\['a'\], \['b'\], \['c'\]\] cannot be keys \(unhashable"),
        (None, 4, r"num_rows=4 of a batch of 3 rows"),
        (None, -1, r"num_rows=-1 of a batch of 3 rows"),
    ]
    for rows, num_rows, message in cases:
        with pytest.raises(InputError, match=message):
            engine.launch(Batch.random(3), rows, num_rows=num_rows)
    batch = Batch.random(3)
    with engine.launch(batch, list("ab"), num_rows=2) as step:
        assert step.generation == 1  # what was refused took nothing
        assert_rows(step.rows(), batch.rows("ab"))


# ---- after the wait, after the release -----------------------------------------------------------------------------


def test_a_result_waits() -> None:
    device = SimulatedDevice()
    x, n = torch.randn(3, 5), torch.tensor([5, 0, 3])
    compiled = spangraph.compile(Twice(), backend=device)
    compiled(x, n)
    device.hold()
    step = compiled.launch(x, n)
    assert not step.is_done
    with pytest.raises(StepTimeoutError, match="was not done within"):
        step.wait(timeout=0.01)
    device.resume()
    result = step.result()
    assert list(result.outputs["audio"]) == [0, 2]
    assert torch.equal(result.outputs["audio"][2], x[2, :3] * 2)
    assert torch.equal(result.outputs["mean"], x.mean(1))
    assert torch.equal(step.row_values("frames"), n)


def test_whole_outputs_end_with_the_lease() -> None:
    """Outputs without spans live as long as view rows do."""
    step = spangraph.compile(Twice(), backend=SimulatedDevice()).launch(torch.randn(2, 5), torch.tensor([1, 2]))
    result = step.result()
    step.release()
    for read in (step.result, lambda: step.output(0), lambda: result.outputs["audio"][0]):
        with pytest.raises(StaleStepError, match="was released"):
            read()


@pytest.mark.parametrize("backend", [InlineBackend, SimulatedDevice])
def test_a_release_ends_an_iteration(backend: type[Backend]) -> None:
    compiled = spangraph.compile(Twice(), backend=backend())
    x, n = torch.randn(3, 5), torch.tensor([5, 0, 3])
    for view in (Rows.items, Rows.values):
        step = compiled.launch(x, n)
        rows = step.rows("audio")
        asked = view(rows)
        assert len(list(asked)) == len(list(asked)) == len(asked) == 2
        begun = iter(asked)
        next(begun)
        step.release()
        for iterator in (begun, iter(asked), iter(view(rows))):
            with pytest.raises(StaleStepError, match="was released"):
                next(iterator)


@pytest.mark.parametrize("backend", [InlineBackend, SimulatedDevice])
def test_a_row_that_is_withheld_in_the_middle_of_an_iteration_is_left_out(backend: type[Backend]) -> None:
    with spangraph.compile(Twice(), backend=backend()).launch(torch.randn(3, 5), torch.tensor([5, 1, 3])) as step:
        seen = {}
        for row_id, row in step.rows("audio").items():
            step.withhold(1)
            seen[row_id] = row
        assert list(seen) == [0, 2]


@pytest.mark.parametrize("backend", [InlineBackend, SimulatedDevice])
def test_who_iterates_keeps_the_lease(backend: type[Backend]) -> None:
    compiled = spangraph.compile(Twice(), backend=backend())
    x, n = torch.randn(3, 5), torch.tensor([5, 0, 3])
    for view in (Rows.items, Rows.values):
        seen = 0
        for _ in view(compiled.launch(x, n).rows("audio")):
            seen += 1
            with pytest.raises(RingFullError, match="depth=1 and 1 steps are open or leased"):
                compiled.launch(x, n)
        assert seen == 2
    compiled.launch(x, n).release()


def _all(rows: Rows) -> object:
    return list(rows.values())


@pytest.mark.parametrize("backend", [InlineBackend, SimulatedDevice])
@pytest.mark.parametrize("copy", ["view", "host"])
@pytest.mark.parametrize("read", [list, _all, dict, Rows.own, len])
def test_a_bad_row_keeps_no_step_alive(backend: type[Backend], copy: str, read: Callable[[Rows], object]) -> None:
    """Not until the next collection of garbage, either: the next launch needs the room."""
    compiled = spangraph.compile(Twice(), backend=backend(), copies={"audio": copy})
    x, n = torch.randn(3, 5), torch.tensor([5, 9, 3])
    compiled.launch(x, n).wait().release()
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(SpanError):
            read(compiled.launch(x, n).rows("audio"))
        compiled.launch(x, n).release()
    finally:
        gc.enable()


def test_an_output_without_a_name_has_to_be_named() -> None:
    class Nameless(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("", "b")

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            spans = spangraph.from_lengths(n)
            return SpannedOutput({"": x * 2, "b": x + 1}, {"": spans, "b": spans})

    x, n = torch.randn(2, 5), torch.tensor([5, 3])
    with spangraph.compile(Nameless()).launch(x, n) as step:
        with pytest.raises(RowLookupError, match="several spanned outputs"):
            step.rows()
        assert torch.equal(step.rows("")[1], x[1, :3] * 2)


def test_rows_of_a_graph_that_runs_again_are_of_its_new_step() -> None:
    """How rows are made is remembered for a captured graph; where they begin and end is not."""
    compiled = spangraph.compile(Twice(), backend=SimulatedDevice())
    for lengths in ([5, 0, 3], [1, 2, 0], [4, 4, 4]):
        x, n = torch.randn(3, 5), torch.tensor(lengths)
        with compiled.launch(x, n) as step:
            expected = {i: x[i, :length] * 2 for i, length in enumerate(lengths) if length}
            assert_rows(step.rows("audio"), expected)
            assert all(torch.equal(row, expected[i]) for i, row in step.rows("audio").items())


def test_a_stager_s_step_has_no_result() -> None:
    step = Engine().launch(Batch.random())
    with pytest.raises(StepStateError, match=r"SpanStager has no result\(\): use rows\(name\)"):
        step.result()


def test_a_with_block_ends_the_lease_also_where_it_raises() -> None:
    engine = Engine()
    step = engine.launch(Batch.random())
    with pytest.raises(ZeroDivisionError), step:
        raise ZeroDivisionError
    assert step.is_released
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


def test_a_step_tells_who_it_is() -> None:
    engine = Engine(bs=2)
    step = engine.launch(Batch.random(2), ["a", "b"])
    assert repr(step) == "<step 1 (open, graph 1, rows ['a', 'b'])>"
    step.wait()
    assert repr(step) == "<step 1 (leased, graph 1, rows ['a', 'b'])>"
    step.release()
    assert repr(step) == "<step 1 (released, graph 1, rows ['a', 'b'])>"


# ---- own -----------------------------------------------------------------------------------------------------------


BACKENDS = [InlineBackend, SimulatedDevice]


@pytest.mark.parametrize("backend", BACKENDS)
def test_owned_rows_are_the_caller_s_for_ever(backend: type[Backend]) -> None:
    compiled = spangraph.compile(Twice(), backend=backend())
    kept: list[tuple[Any, Tensor, Tensor]] = []
    for _ in range(9):
        x, n = torch.randn(3, 5), torch.randint(0, 6, (3,))
        with compiled.launch(x, n) as step:
            rows = step.rows("audio")
            owned = rows.own()
            assert owned.own() is owned
        with pytest.raises(StaleStepError, match="was released"):
            rows.own()
        kept.append((owned, x, n))
    compiled.close()
    for owned, x, n in kept:
        assert_rows(owned, {i: x[i, :length] * 2 for i, length in enumerate(n.tolist()) if length})


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_calls_are_safe(backend: type[Backend]) -> None:
    """K39: plain calls look safe on CPU and are wrong on CUDA: read all results at the end."""
    compiled = spangraph.compile(Twice(), backend=backend())
    inputs = [(torch.randn(2, 5), torch.randint(1, 6, (2,))) for _ in range(7)]
    results = [compiled(x, n) for x, n in inputs]
    for (x, n), result in zip(inputs, results, strict=True):
        assert_rows(result.outputs["pitch"], {i: x[i, :length] + 1 for i, length in enumerate(n.tolist())})
        assert torch.equal(result.outputs["mean"], x.mean(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kept_crop_keeps_nothing_else_alive(backend: type[Backend]) -> None:
    """K19: crops of one sample, of rows of 1 MB, kept over many steps: memory grows by the crops alone, and by none of
    the other rows' bytes."""
    compiled = spangraph.compile(Twice(), backend=backend())
    x, n = torch.randn(2, 2**18), torch.tensor([1, 2**18])
    kept, result = [], None
    for _ in range(20):
        result = compiled(x, n)
        kept.append(result.outputs["audio"][0])
    del result
    gc.collect()
    assert all(crop.untyped_storage().nbytes() == 4 for crop in kept)
    assert torch.equal(torch.stack(kept), (x[0, :1] * 2).expand(20, 1))


def test_a_released_step_keeps_no_outputs_alive() -> None:
    """K19: tickets are kept for their row ids, owned rows for their values; neither for the padded batch."""
    compiled = spangraph.compile(Twice(), backend=InlineBackend())
    step = compiled.launch(torch.randn(2, 5), torch.tensor([1, 5]))
    owned, padded = step.rows("audio").own(), weakref.ref(step.output(0))
    assert padded() is not None
    step.release()
    assert padded() is None
    assert list(owned) == list(step.row_ids)


def test_owned_rows_are_ordinary_tensors() -> None:
    """Made under whatever mode the reader is in, they can be written to and take part in autograd."""
    engine = Engine()
    batch = Batch.of([(0, 3)] * 4)
    with torch.inference_mode():
        owned = engine.launch(batch).rows().own()[0]
    assert isinstance(owned, Tensor)
    assert not owned.is_inference()
    owned.requires_grad_()
    owned.sum().backward()
    assert torch.equal(owned.grad, torch.ones(3))  # type: ignore[arg-type]


def test_row_values_are_a_copy() -> None:
    device = SimulatedDevice()
    stager = SpanStager({"audio": Span()}, max_rows=3, row_values={"top": 2, "stop": 1}, device=device)
    top, stop = torch.randint(-9, 9, (3, 2)), torch.tensor([0, 1, 0])
    graph = device.new_graph()
    with device.graph(graph):
        tail = stager.stage(SpannedOutput(row_values={"top": top * 1, "stop": stop}))
    with tail.step() as step:
        graph.replay()
    values = step.row_values("top")
    assert values.shape == (3, 2)
    assert torch.equal(values, top)
    values.zero_()
    assert torch.equal(step.row_values("top"), top)
    assert torch.equal(step.row_values("stop"), stop)
    with pytest.raises(RowLookupError, match=r"no row value 'audio'; this step has \['stop', 'top'\]"):
        step.row_values("audio")
    with pytest.raises(RowLookupError, match=r"no spanned output; this step has \[\]"):
        step.rows()
