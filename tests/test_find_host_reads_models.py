"""Host reads of published forwards, as their authors wrote them: each table was checked by reading the code."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spangraph.hazards import find_capture_hazards

Table = list[tuple[str, str, str, int]]  # rule, file, source line, count

_MASK_CHECK = ("SG401", "masking_utils.py", "and (padding_mask is None or padding_mask.all())", 1)


def table(model: nn.Module, run: Callable[..., Any], *inputs: Tensor) -> Table:
    found = []
    for diagnostic in find_capture_hazards(model, run, inputs):
        file, _, line = diagnostic.where.rpartition(":")
        found.append((diagnostic.rule, Path(file).name, linecache.getline(file, int(line)).strip(), diagnostic.count))
    return found


def encodec() -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], Table]:
    """14 convolutions, each of which reads its int buffers 4 times: two truths and two amounts of padding."""
    from .workloads import encodec_decode

    codec, codes = encodec_decode._codec(), encodec_decode.build_published().inputs[0]
    file = "modeling_encodec.py"
    expected = [
        ("SG401", file, "max_pad = max(padding_left, padding_right)", 14),
        ("SG401", file, "if length <= max_pad:", 14),
        ("SG401", file, "padded = nn.functional.pad(hidden_states, paddings, mode, value)", 28),
    ]
    return codec, lambda codes: codec.decode(codes[None], [None]), (codes,), expected


def vits() -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], Table]:
    """3 flows with 8 boolean masks each; 2 checks a flow, one with a message that prints a tensor; one length. The
    IntTensor that says where to slice is on the host, and so is what `randn` draws."""
    from .workloads import vits_tts

    model, inputs = vits_tts._vits(), vits_tts.build().inputs
    file, outside = "modeling_vits.py", "outputs[outside_interval_mask] = inputs[outside_interval_mask]"
    both = "outputs[inside_interval_mask], log_abs_det[inside_interval_mask] = _rational_quadratic_spline("
    amounts = ("unnormalized_widths", "unnormalized_heights", "unnormalized_derivatives")
    randn = "torch.randn(inputs.size(0), 2, inputs.size(2)).to(device=inputs.device, dtype=inputs.dtype)"
    arange = "torch.arange(predicted_lengths.max(), dtype=predicted_lengths.dtype, device=predicted_lengths.device)"
    expected = [
        _MASK_CHECK,
        ("SG402", file, randn, 1),
        ("SG401", file, outside, 3),  # x[mask]
        ("SG401", file, outside, 3),  # x[mask] = y
        ("SG401", file, "inputs=inputs[inside_interval_mask],", 3),
        *[("SG401", file, f"{name}={name}[inside_interval_mask, :],", 3) for name in amounts],
        ("SG401", "import_utils.py", "torch._check_tensor_all_with(error_type, cond, msg_callable)", 6),
        ("SG401", file, 'f"Discriminant has negative values {discriminant}",', 3),
        ("SG401", file, both, 6),
        ("SG401", file, f"indices = {arange}", 1),
    ]
    return model, lambda ids, mask: model(input_ids=ids, attention_mask=mask), inputs, expected


def wav2vec2() -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], Table]:
    """`hidden_states[~mask] = 0` fills, and reads nothing."""
    from .workloads import wav2vec2_frames

    workload = wav2vec2_frames.build()
    return workload.model, workload.model, workload.inputs, [_MASK_CHECK]


def silero() -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], Table]:
    """One read per 512 samples. The network makes its context without a device, once: TorchScript then copies it."""
    import silero_vad

    from .workloads import silero_segments
    from .workloads.common import read_speech

    class Timestamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vad = silero_segments.demo.load_silero_vad()

        def forward(self, audio: Tensor) -> Any:
            return silero_vad.get_speech_timestamps(audio, self.vad)

    (audio,) = read_speech(0)
    model, read = Timestamps(), "speech_prob = model(chunk, sampling_rate).item()"
    expected = [
        ("SG403", "utils_vad.py", read, 1),
        ("SG401", "utils_vad.py", read, -(-audio.shape[0] // 512)),
    ]
    return model, model, (audio,), expected


def crepe() -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], Table]:
    """Its bounds of bins are indexed with tensors, but of the host: `torch.tensor(fmin)`."""
    import torchcrepe

    class Predict(nn.Module):
        def forward(self, audio: Tensor) -> Any:
            decoder = torchcrepe.decode.argmax
            return torchcrepe.predict(audio, 16000, 160, 50.0, 550.0, "tiny", decoder=decoder, return_periodicity=True)

    torchcrepe.load.model("cpu", "tiny")
    expected = [
        ("SG402", "convert.py", "return cents + cents.new_tensor(noise)", 1),
        ("SG402", "core.py", "frames /= torch.max(torch.tensor(1e-10, device=frames.device),", 1),
    ]
    model = Predict()
    return model, model, (torch.randn(1, 4000),), sorted(expected, reverse=True)


def hifigan() -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], Table]:
    from .workloads import hifigan_mel

    model = hifigan_mel._vocoder().net
    return model, model, hifigan_mel.build().inputs[:1], []


def vae() -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], Table]:
    from .workloads import vae_decode

    workload, model = vae_decode.build(), vae_decode._vae()
    return model, lambda latents: model.decode(latents).sample, workload.inputs, []


def swin2sr() -> tuple[nn.Module, Callable[..., Any], tuple[Tensor, ...], Table]:
    from .workloads import swin2sr_x2

    workload = swin2sr_x2.build()
    return workload.model, workload.model, workload.inputs, []


MODELS = [
    silero,
    crepe,
    *(pytest.param(m, marks=pytest.mark.slow) for m in (encodec, vits, wav2vec2, hifigan, vae, swin2sr)),
]


@pytest.mark.parametrize("build", MODELS)
def test_all_of_a_published_forward_is_found(build: Callable[[], Any]) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, run, inputs, expected = build()
        assert table(model, run, *inputs) == expected
    finally:
        torch.set_num_threads(num_threads)
