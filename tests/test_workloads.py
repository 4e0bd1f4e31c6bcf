"""Real networks through `spangraph.compile`: rows equal plain indexing of the padded output, and meet the reference."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from torch import Tensor

import spangraph
from spangraph.testing import SimulatedDevice

from .workloads.common import Row, Workload, cut_by_hand

# Name -> module and the function that builds it. Modules are imported when they are used: their packages are large.
WORKLOADS = {
    "silero_segments": ("silero_segments", "build"),
    "torchcrepe_voiced": ("torchcrepe_voiced", "build"),
    "mtcnn_pnet": ("mtcnn_pnet", "build"),
    "encodec_decode": ("encodec_decode", "build"),
    "encodec_published": ("encodec_decode", "build_published"),
    "wav2vec2_frames": ("wav2vec2_frames", "build"),
    "vits_tts": ("vits_tts", "build"),
    "hifigan_mel": ("hifigan_mel", "build"),
    "vae_decode": ("vae_decode", "build"),
    "swin2sr_x2": ("swin2sr_x2", "build"),
}
SHIPPED = ("silero_segments", "torchcrepe_voiced", "mtcnn_pnet")  # with their weights; the others are slow

# Each pair of (workload, trace, backend, depth) values occurs, and each workload is exported once: per workload one
# export and one opaque case that differ in everything, and the four ways to choose these go round the workloads.
PAIRS = (
    (("export", "inline", 1), ("opaque", "simulated", 2)),
    (("export", "simulated", 2), ("opaque", "inline", 1)),
    (("export", "inline", 2), ("opaque", "simulated", 1)),
    (("export", "simulated", 1), ("opaque", "inline", 2)),
)
CASES = [(name, *how) for i, name in enumerate(WORKLOADS) for how in PAIRS[i % len(PAIRS)]]


def _param(*values: Any) -> Any:
    marks = () if values[0] in SHIPPED else (pytest.mark.slow,)
    return pytest.param(values, marks=marks, id="-".join(map(str, values)))


@dataclass(frozen=True)
class Case:
    """A compiled workload, warmed up."""

    name: str
    trace: str
    depth: int
    workload: Workload
    compiled: spangraph.Compiled
    result: Any  # of the first call, owned


pytestmark = pytest.mark.usefixtures("one_thread")


def _module(name: str) -> Any:
    return importlib.import_module(f".workloads.{WORKLOADS[name][0]}", __package__)


@functools.cache
def _workload(name: str) -> Workload:
    return getattr(_module(name), WORKLOADS[name][1])()  # type: ignore[no-any-return]


@functools.cache
def _batches(name: str) -> list[tuple[Tensor, ...]]:
    """Two batches of different content: the rows, and the rows the other way round."""
    inputs = _workload(name).inputs
    return [inputs, tuple(tensor.flip(0) for tensor in inputs)]


@functools.cache
def _eager(name: str, batch: int) -> Any:
    """What the model itself returns for a batch."""
    with torch.inference_mode():
        return _workload(name).model(*_batches(name)[batch])


@functools.cache
def _expected(name: str, batch: int) -> dict[str, list[Row]]:
    """Its rows, by plain indexing."""
    workload, inputs = _workload(name), _batches(name)[batch]
    with torch.inference_mode():
        padded = workload.padded(_eager(name, batch), *inputs)
        return {n: cut_by_hand(*padded[n], span) for n, span in workload.spans.items()}


@pytest.fixture(scope="module", params=[_param(*case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, trace, backend, depth = request.param
    workload = _workload(name)
    uncaptured = workload.reads and trace == "opaque"
    with spangraph.compile(
        workload.model,
        trace=trace,
        backend=SimulatedDevice() if backend == "simulated" else "cpu",
        depth=depth,
        verify="warn" if uncaptured else "error",
    ) as compiled:
        with pytest.warns(UserWarning, match="running uncaptured") if uncaptured else contextlib.nullcontext():
            result = compiled(*workload.inputs)
        assert f"trace: {trace}" in compiled.explain()
        yield Case(name, trace, depth, workload, compiled, result)


def _ids(batch: tuple[Tensor, ...]) -> list[str]:
    return [f"request-{i}" for i in range(len(batch[0]))]


def _assert_same(row: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert isinstance(row, tuple)
        assert len(row) == len(expected)
        for part, expected_part in zip(row, expected, strict=True):
            _assert_same(part, expected_part)
    else:
        assert torch.equal(row, expected)


def _assert_rows(rows: spangraph.Rows, ids: Sequence[Hashable], expected: Sequence[Row]) -> None:
    """Delivered rows in launch order, bit for bit, and nothing for withheld ones."""
    assert list(rows) == [row_id for row_id, row in zip(ids, expected, strict=True) if row is not None]
    for position, (row_id, row) in enumerate(zip(ids, expected, strict=True)):
        if row is None:
            assert row_id not in rows
            assert rows.at(position) is None
        else:
            _assert_same(rows[row_id], row)
            _assert_same(rows.at(position), row)


def test_cases_cover_each_pair() -> None:
    """Of values of two factors; and no workload is exported twice."""
    for first, second in itertools.combinations(range(4), 2):
        pairs = {(case[first], case[second]) for case in CASES}
        assert pairs == set(itertools.product({case[first] for case in CASES}, {case[second] for case in CASES}))
    assert [case[0] for case in CASES if case[1] == "export"] == list(WORKLOADS)


def test_rows_equal_plain_indexing(case: Case) -> None:
    """Of `depth` steps that are open at once, with different inputs; read last first."""
    batches = _batches(case.name)
    ids = _ids(batches[0])
    for first in range(0, len(batches), case.depth):
        open_steps = [(b, case.compiled.launch(*batches[b], rows=ids)) for b in range(first, first + case.depth)]
        for batch, step in reversed(open_steps):
            with step:
                for name, expected in _expected(case.name, batch).items():
                    _assert_rows(step.rows(name), ids, expected)
                for name, values in case.workload.row_values(_eager(case.name, batch)).items():
                    assert torch.equal(step.row_values(name), values)


def test_padding_rows_never_surface(case: Case) -> None:
    """The last row is said to be padding, whatever it holds."""
    inputs = case.workload.inputs
    ids = _ids(inputs)[:-1]
    with case.compiled.launch(*inputs, rows=ids, num_rows=len(ids)) as step:
        for name, expected in _expected(case.name, 0).items():
            _assert_rows(step.rows(name), ids, expected[:-1])


def test_the_result_has_the_models_own_structure(case: Case) -> None:
    own = _eager(case.name, 0)
    assert type(case.result) is {Tensor: spangraph.Rows}.get(type(own), type(own))


def test_outputs_that_derive_are_cut_where_the_tracer_sees_it(case: Case) -> None:
    out = _eager(case.name, 0)
    for key, name in case.workload.derived.items():
        _, spans = case.workload.padded(out, *case.workload.inputs)[name]
        if case.trace == "export":
            by_hand = cut_by_hand(out[key], spans, case.workload.spans[name])
            _assert_rows(case.result[key], range(len(spans)), by_hand)
        else:  # nothing is seen inside an opaque model, and nothing is guessed: delivered whole
            assert torch.equal(case.result[key], out[key])


@pytest.mark.parametrize("case", [_param(*case) for case in CASES if case[1] == "export"], indirect=True)
def test_rows_meet_the_reference(case: Case) -> None:
    with torch.inference_mode():
        reference = _module(case.name).reference(case.workload.inputs)
    assert set(reference) == set(case.workload.spans)
    with case.compiled.launch(*case.workload.inputs) as step:
        for name, rows in reference.items():
            cut = step.rows(name)
            for position, row in enumerate(rows):
                torch.testing.assert_close(cut.at(position), row, atol=case.workload.atol, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encodec_published", "wav2vec2_frames", "vits_tts"])
def test_host_reads_of_an_opaque_forward_are_refused(name: str) -> None:
    workload = _workload(name)
    with (
        spangraph.compile(workload.model, trace="opaque") as compiled,
        pytest.raises(spangraph.HostReadError, match="SG401") as raised,
    ):
        compiled(*workload.inputs)
    assert all("transformers" in diagnostic.where for diagnostic in raised.value.diagnostics)


def test_demo_writes_the_segments_that_silero_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = _module("silero_segments").demo
    monkeypatch.chdir(tmp_path)
    demo.main()
    assert "same segments as silero-vad's own" in capsys.readouterr().out
    recordings = {path.stem: path for path in demo.DATA.glob("*.wav")}
    assert len(recordings) == 4
    for name, path in recordings.items():
        samples, rate = soundfile.read(path)
        segments = sorted(tmp_path.glob(f"demo-output/{name}-*.wav"))
        assert segments, name
        for segment in segments:
            part, part_rate = soundfile.read(segment)
            assert part_rate == rate
            assert 0 < len(part) < len(samples)
    assert not list(tmp_path.glob("demo-output/noise*"))
    assert (tmp_path / "demo-output" / "batches.png").stat().st_size > 10_000
