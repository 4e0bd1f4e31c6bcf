"""`spangraph.verify` on real networks: it says what a person finds by reading them. Host reads: see
test_find_host_reads_models.py."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from torch import nn

from spangraph import Report, verify

from .test_workloads import _workload

pytestmark = pytest.mark.usefixtures("one_thread")


def report_of(name: str, spans: dict[str, tuple[int, ...]]) -> Report:
    workload = _workload(name)
    return verify(workload.model, workload.inputs, input_spans=spans, padding="right")


def operators(report: Report, rule: str = "SG201") -> Counter[str]:
    """How often each operator was found to mix positions."""
    found: Counter[str] = Counter()
    for diagnostic in report.diagnostics:
        if diagnostic.rule == rule:
            found[diagnostic.message.split()[0]] += diagnostic.count
    return found


def count(model: nn.Module, *kinds: type[nn.Module]) -> int:
    """Modules of a kind, but windows of one position, which mix nothing."""
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    return sum(1 for module in modules if any(size > 1 for size in getattr(module, "kernel_size", (2,))))


def reaches(report: Report) -> set[str]:
    return {match[1] for d in report.diagnostics if (match := re.search(r"Padding reaches (.*)\.$", d.message))}


def test_mtcnn_looks_ahead_only() -> None:
    """All windows are "valid": cells whose windows lie inside the image see nothing else, along height and width."""
    report = report_of("mtcnn_pnet", {"images": (-2, -1)})
    assert operators(report) == {"conv2d": 3, "max_pool2d": 1}
    assert not report.errors
    assert reaches(report) == {
        "valid positions of a span, up to 2 at its end",
        "valid positions of a span, up to 1 at its end",
    }
    assert all("along dim -2 and positions of 'images' along dim -1" in d.message for d in report.warnings)


def test_silero_and_crepe_are_followed_to_where_frames_and_rows_merge() -> None:
    for name, line in (("silero_segments", "unfold(1, CONTEXT + FRAME"), ("torchcrepe_voiced", "unfold(1,")):
        report = report_of(name, {"audio": (-1,)})
        assert set(operators(report)) == {"unfold"}
        assert [d.rule for d in report.warnings if "flatten" in d.message] == ["SG203"]
        assert line in report.text()


@pytest.mark.slow
def test_encodec_is_exact_for_rows_longer_than_its_reflected_edge() -> None:
    """Its decoder is causal; the reflected copy in front of a row of 6 or fewer frames holds padding."""
    report = report_of("encodec_decode", {"codes": (-1,)})
    assert not report.errors
    assert all(d.message.endswith(", in rows of fewer than 7 positions.") for d in report.warnings), report.text()
    assert operators(report)["lstm"] == 1


@pytest.mark.slow
def test_hifigan_mixes_at_each_convolution() -> None:
    model = _workload("hifigan_mel").model
    found = operators(report_of("hifigan_mel", {"mel": (1,)}))
    assert found == {"conv1d": count(model, nn.Conv1d), "conv_transpose1d": count(model, nn.ConvTranspose1d)}


@pytest.mark.slow
def test_vae_mixes_everything_at_each_norm() -> None:
    workload = _workload("vae_decode")
    report = report_of("vae_decode", {"latents": (-2, -1)})
    found, decoder = operators(report), workload.model.vae.decoder
    in_attention = 1  # behind a view that merges height and width
    assert found["group_norm"] == count(decoder, nn.GroupNorm) - in_attention
    assert found["conv2d"] == count(decoder, nn.Conv2d)
    assert [d.message.split()[1] for d in report.warnings if d.rule == "SG203"] == ["view"]


@pytest.mark.slow
def test_wav2vec2_mixes_in_convolutions_and_attention() -> None:
    workload = _workload("wav2vec2_frames")
    report = report_of("wav2vec2_frames", {"input_values": (-1,)})
    convolutions = count(workload.model, nn.Conv1d)
    attentions = sum(type(module).__name__ == "Wav2Vec2Attention" for module in workload.model.modules())
    assert operators(report) == {"conv1d": convolutions, "scaled_dot_product_attention": attentions}
    # The mask's `.all()` is a branch of eager runs.
    assert [(d.rule, d.severity) for d in report.diagnostics if d.rule == "SG401"] == [("SG401", "warning")]


@pytest.mark.slow
def test_encodec_as_published_reads_buffers_that_compile_takes_for_numbers() -> None:
    report = report_of("encodec_published", {"codes": (-1,)})
    reads = [d for d in report.diagnostics if d.rule == "SG401"]
    assert sum(d.count for d in reads) == 56
    assert {d.severity for d in reads} == {"warning"}
    assert not report.errors


@pytest.mark.slow
def test_swin2sr_is_followed_to_its_windows() -> None:
    report = report_of("swin2sr_x2", {"images": (-2, -1)})
    assert not report.errors
    assert operators(report, "SG203").keys() == {"what"}
    assert "window_size, window_size" in report.text()  # window_partition
    assert operators(report)["conv2d"] >= 1


@pytest.mark.slow
def test_vits_reads_and_mixes() -> None:
    report = report_of("vits_tts", {"ids": (-1,)})
    found = operators(report)
    assert found["conv1d"] > 10
    assert found["softmax"] == found["bmm"] == 2  # two attention layers
    assert {d.rule for d in report.errors} == {"SG402"}  # randn(...).to(device)
    assert {d.severity for d in report.diagnostics if d.rule == "SG401"} == {"warning"}  # checks, which are erased
