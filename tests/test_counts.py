"""What a compiled object and a stager count, per walk and bucket; and profiler ranges."""

import json
import threading
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import spangraph
from spangraph import Copy, Counts, CudaBackend, SpannedOutput, Statistics
from spangraph.counts import WAIT_BOUNDS
from spangraph.testing import SimulatedDevice

from .fake_cuda import FakeCuda
from .rig import Batch, Engine
from .toys import Toy, backend, batch, spanned

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])


def spans_as_given(**options: Any) -> spangraph.Compiled:
    """`audio` under the spans of the input."""
    module = spanned(lambda self, x, spans: SpannedOutput({"audio": x}, {"audio": spans}, {"first": spans[:, 0]}))
    return spangraph.compile(module, **options)


@BACKENDS
def test_rows_elements_and_bytes_of_each_bucket(on: str) -> None:
    run = spangraph.compile(
        Toy(),
        backend=backend(on),
        buckets={"batch": (2, 4), "width": (4, 8)},
        dims={"x": {0: "batch", 1: "width"}, "lengths": {0: "batch"}},
        copies={"audio": "host"},
    )
    for lengths, width in [((3, 4, 1), 4), ((2, 2, 2), 3), ((8,), 8)]:
        run(*batch(lengths, width))
    small, large = (run.statistics()["forward", f"batch={b}, width={w}"] for b, w in ((4, 4), (2, 8)))
    assert (small.launches, small.hits, small.misses, small.captures) == (2, 1, 1, 1)
    assert (small.rows, small.padding_rows) == (6, 2)
    assert (small.elements, small.padding_elements) == (15 + 12, 5 + 8)
    assert (large.rows, large.padding_rows, large.elements, large.padding_elements) == (1, 1, 9, 9)
    # Each row begins at 16 bytes: 3, 4 and 1 floats, then three times 2, are 3 times 16 bytes each.
    assert (small.host_bytes, large.host_bytes, small.device_bytes) == (96, 32, 0)
    # A slot: two header words, spans [bs, 2] and three words a row of what was copied.
    assert (small.staged_bytes, large.staged_bytes) == (2 * 8 * (2 + 4 * 5), 8 * (2 + 2 * 5))
    total = run.counts
    for field in fields(Counts):
        if isinstance(getattr(total, field.name), int):
            assert getattr(total, field.name) == getattr(small, field.name) + getattr(large, field.name)
    assert total.reasons == {"not captured": 2}


@BACKENDS
def test_withheld_rows_and_bad_spans_count_once_each(on: str) -> None:
    """However often, by whichever reader and under whichever name somebody looks at them."""
    run = spans_as_given(backend=backend(on), depth=2)
    spans = torch.tensor([[0, 2], [1, 1], [2, 9], [0, 1], [3, 2]])
    with run.launch(torch.randn(5, 4), spans) as step:
        step.wait()
        assert (run.counts.withheld, run.counts.bad_spans) == (0, 0)  # nobody has looked yet
        rows = step.rows()
        for _ in range(2):
            assert rows.at(1) is None
            with pytest.raises(spangraph.SpanError):
                rows[2]
        assert (run.counts.withheld, run.counts.bad_spans) == (1, 1)
        for mapping in (rows, step.rows(), step.result().outputs["audio"]):
            with pytest.raises(spangraph.SpanError):
                list(mapping.items())
        owned = rows.own()
        with pytest.raises(spangraph.SpanError):
            list(owned)
        assert (run.counts.withheld, run.counts.bad_spans) == (1, 2)
        step.withhold(3)
        step.withhold(3, "audio")
        step.withhold(1)
        assert (run.counts.withheld, run.counts.bad_spans) == (2, 2)


def test_withheld_rows_are_counted_by_threads_that_race() -> None:
    run = spans_as_given(depth=4)
    steps = [run.launch(torch.randn(64, 2), torch.zeros(64, 2, dtype=torch.int64)) for _ in range(4)]
    readers = [threading.Thread(target=lambda s=step: len(s.rows())) for step in steps for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert run.counts.withheld == 256


def test_waits_are_counted_by_their_length() -> None:
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, depth=2)
    x, n = batch()
    run(x, n)
    before = list(run.counts.wait_times)
    device.hold()
    step = run.launch(x, n)
    timer = threading.Timer(0.15, device.resume)
    timer.start()
    with run.counts.expect(waits=1):
        step.wait()
        step.wait()  # it is read: no wait
    added = [now - then for now, then in zip(run.counts.wait_times, before, strict=True)]
    assert added == [0] * 5 + [1, 0]  # between 0.1 and 1 s
    assert WAIT_BOUNDS[4:] == (0.1, 1.0)
    run.launch(x, n).release()  # not read, so not waited for
    assert run.counts.waits == 2


def test_overflows_belong_to_their_bucket() -> None:
    run = spangraph.compile(Toy(), buckets={"batch": (1, 2)}, copies={"audio": Copy("host", capacity=32)})
    run(*batch((5,)))
    run(*batch((5, 5)))
    assert run.statistics()["forward", "batch=1"].overflows == 0
    assert run.statistics()["forward", "batch=2"].overflows == 1


def test_a_launch_that_raises_is_no_launch() -> None:
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device)
    run(*batch())
    device.fail_next("replay")
    with run.counts.expect(launches=0, hits=0, rows=0), pytest.raises(RuntimeError, match="simulated replay"):
        run(*batch())
    held = run.launch(*batch())
    with run.counts.expect(launches=0, hits=0, rows=0), pytest.raises(spangraph.RingFullError):
        run.launch(*batch())
    held.release()


def test_a_stager_counts_too() -> None:
    engine = Engine(depth=2)
    for _ in range(3):
        engine.launch(Batch.of([[0, 2], [1, 1], [0, 6], [2, 3]]), num_rows=3).rows().own()
    counts = engine.stager.counts
    assert (counts.launches, counts.rows, counts.padding_rows, counts.waits, counts.withheld) == (3, 9, 3, 3, 3)
    assert (counts.hits, counts.misses, counts.elements) == (0, 0, 0)
    assert counts.staged_bytes > 0


# ---- expect, dict, table ---------------------------------------------------------------------------------------------


def test_expect_names_what_was_otherwise() -> None:
    counts = Counts()
    with counts.expect(launches=2, misses=0):
        counts.launches += 2
    wrong = counts.expect(launches=2, misses=0, hits=0)
    wrong.__enter__()
    counts.launches += 1
    counts.misses += 1
    with pytest.raises(AssertionError, match="launches changed by 1, expected 2; misses changed by 1, expected 0"):
        wrong.__exit__(None, None, None)
    with pytest.raises(TypeError, match=r"expect\(\) got \['lunches'\]: expected some of"):
        counts.expect(lunches=1).__enter__()
    with pytest.raises(ZeroDivisionError), counts.expect(launches=1):  # what the block raises comes first
        raise ZeroDivisionError


def test_as_a_dict_and_as_a_table() -> None:
    run = spangraph.compile(Toy(), buckets={"batch": (4,)})
    run(*batch((3, 0, 5)))
    run(*batch((1,) * 5))
    found = json.loads(json.dumps(run.statistics().as_dict()))
    assert found["walks"]["forward"]["batch=4"]["padding_rows"] == 1
    assert found["walks"]["forward"]["(eager)"]["reasons"] == {"batch above 4": 1}
    assert found["total"]["launches"] == 2
    assert found["total"] == run.counts.as_dict()
    lines = str(run.statistics()).splitlines()
    assert lines[0].split()[:4] == ["walk", "bucket", "launches", "hits"]
    assert lines[1].split()[:8] == ["forward", "batch=4", "1", "0%", "3", "25%", "18", "25%"]
    assert lines[2].split()[:3] == ["forward", "(eager)", "1"]
    assert lines[3].split()[:2] == ["total", "2"]
    assert lines[4:] == ["misses, not captured: 1", "misses, batch above 4: 1"]
    assert len({len(line) for line in lines[:4]}) == 1
    assert str(Statistics()).count("\n") == 1


def test_a_snapshot_is_no_part_of_what_goes_on() -> None:
    run = spangraph.compile(Toy())
    before = run.counts.as_dict()
    run(*batch())
    assert before["launches"] == before["waits"] == sum(before["wait_times"]) == 0
    assert before["reasons"] == {}


# ---- ranges ----------------------------------------------------------------------------------------------------------


def test_nvtx_ranges_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch, wait and cut, each closed again, also where they raise."""
    cuda = FakeCuda()
    cuda.patch_tensors(monkeypatch)
    run = spangraph.compile(Toy(), backend=CudaBackend("cpu", cuda=cuda), copies={"audio": "host"})
    x, n = batch()
    run(x, n)
    assert cuda.nvtx.ranges == [("spangraph.launch", 0), ("spangraph.wait", 0), ("spangraph.cut", 0)]
    with pytest.raises(spangraph.InputError):
        run.launch(x, n, num_rows=9)
    assert cuda.nvtx.ranges[-1] == ("spangraph.launch", 0)
    assert cuda.nvtx.depth == 0


def test_a_torch_without_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.patch_tensors(monkeypatch)

    def refuse(name: str) -> None:
        raise RuntimeError("NVTX functions not installed.")

    monkeypatch.setattr(cuda.nvtx, "mark", refuse)
    run = spangraph.compile(Toy(), backend=CudaBackend("cpu", cuda=cuda))
    x, n = batch()
    assert isinstance(run(x, n).outputs["audio"][0], Tensor)
    assert cuda.nvtx.ranges == []


def test_a_total_is_as_any_counts() -> None:
    run = spans_as_given()
    with run.counts.expect(launches=1):
        run(torch.randn(2, 2), torch.tensor([[0, 1], [0, 2]]))
    total = run.counts
    assert total == replace(total) == run.statistics()["forward", ""]
    assert total.now() == total
