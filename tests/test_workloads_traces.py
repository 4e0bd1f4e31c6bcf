"""Real networks traced by dynamo, and compiled: the rows that every other way to trace them gives."""

from __future__ import annotations

import pytest
import torch

import spangraph
from spangraph import HostReadError, TraceError
from spangraph.testing import SimulatedDevice

from .test_workloads import SHIPPED, WORKLOADS, _assert_rows, _batches, _eager, _expected, _ids, _workload
from .workloads.common import cut_by_hand

pytestmark = pytest.mark.usefixtures("one_thread")

# What dynamo cannot have in one graph, with the line at which it breaks.
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "vits_tts": (TraceError, r"modeling_vits\.py:\d+: .*data-dependent"),  # a number that numpy draws
    "wav2vec2_frames": (TraceError, r"wav2vec2_frames\.py:\d+: .*Wav2Vec2Config"),  # built in the function declared
    "encodec_decode": (HostReadError, r"SG401(.|\n)*configuration_encodec\.py:\d+"),  # computed by numpy
    "encodec_published": (
        HostReadError,
        r"SG401(.|\n)*modeling_encodec\.py:\d+",
    ),  # sizes in buffers
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in SHIPPED else (pytest.mark.slow,)) for n in WORKLOADS if n not in REFUSED],
)
def test_traced_by_dynamo(name: str) -> None:
    workload = _workload(name)
    with spangraph.compile(workload.model, trace="dynamo", backend=SimulatedDevice(), depth=2) as run:
        ids = _ids(workload.inputs)
        steps = [(b, run.launch(*_batches(name)[b], rows=ids)) for b in range(2)]
        for batch, step in reversed(steps):
            with step:
                for output, expected in _expected(name, batch).items():
                    _assert_rows(step.rows(output), ids, expected)
                for value, numbers in workload.row_values(_eager(name, batch)).items():
                    assert torch.equal(step.row_values(value), numbers)
        assert "trace: dynamo" in run.explain()


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_the_graph_is_named_with_its_line(name: str) -> None:
    workload, (error, message) = _workload(name), REFUSED[name]
    with spangraph.compile(workload.model, trace="dynamo") as run, pytest.raises(error, match=message):
        run(*workload.inputs)


@pytest.mark.parametrize("name", ["mtcnn_pnet", pytest.param("hifigan_mel", marks=pytest.mark.slow)])
def test_compiled_by_inductor(name: str) -> None:
    """Rows equal the compiled code's own padded output, sliced; and that is close to the model's."""
    workload = _workload(name)
    with spangraph.compile(workload.model, backend="inductor") as run:
        ids = _ids(workload.inputs)
        with run.launch(*workload.inputs, rows=ids) as step:
            step.wait()
            for output, span in workload.spans.items():
                cut = step._launch.tail.cut(output)
                spans = step._launch.tail.column(step._launch, cut.column).tolist()
                padded = step.output(cut.output)
                by_hand = cut_by_hand(padded, torch.tensor(spans).view(len(ids), *span.shape(len(ids))[1:]), span)
                _assert_rows(step.rows(output), ids, by_hand)
                for row, expected in zip(by_hand, _expected(name, 0)[output], strict=True):
                    torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-3)
        assert "compiled by inductor" in run.explain()
