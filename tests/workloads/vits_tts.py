"""VITS of Hugging Face transformers: a masked batch of text -> predicted durations -> waveforms.

A static restatement of `VitsModel.forward` by the model's own submodules: the frame axis is a bucket instead of the
longest predicted length, and the spline picks by `where` instead of by boolean masks. What host reads stay feed
assertions only, and one asks whether the mask is all ones. Reference: the model's own batched forward, cut by its own
`sequence_lengths`, where the bucket is the longest predicted length (the vocoder is not padding-invariant).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import VitsConfig, VitsModel
from transformers.models.vits import modeling_vits
from transformers.models.vits.modeling_vits import VitsModelOutput

import spangraph
from spangraph import Span

from .common import Workload, pad_rows

LENGTHS = (12, 7, 10)  # characters


class Speak(nn.Module):
    """Waveforms [bs, bucket * hop], and their lengths [bs], as a `VitsModelOutput`."""

    def __init__(self, vits: Any, bucket: int) -> None:
        super().__init__()
        self.vits = vits
        self.bucket = bucket
        self.hop = math.prod(vits.config.upsample_rates)

    def forward(self, ids: Tensor, mask: Tensor) -> VitsModelOutput:
        vits = self.vits
        text_mask = mask.unsqueeze(-1).float()
        text = vits.text_encoder(input_ids=ids, padding_mask=text_mask, attention_mask=mask, return_dict=True)
        text_mask = text_mask.transpose(1, 2)
        hidden = text.last_hidden_state.transpose(1, 2)
        with _static_spline():
            log_duration = vits.duration_predictor(hidden, text_mask, None, reverse=True, noise_scale=0.0)
        duration = torch.ceil(torch.exp(log_duration) * text_mask)
        num_frames = duration.sum([1, 2]).clamp(1, self.bucket).long()
        position = torch.arange(self.bucket, dtype=duration.dtype, device=duration.device)
        frame_mask = (position < num_frames[:, None]).unsqueeze(1).to(duration.dtype)
        # Which character each frame belongs to: one-hot [bs, frames, characters].
        begun = (position < duration.cumsum(-1).squeeze(1)[..., None]).to(duration.dtype)
        path = (begun - F.pad(begun, [0, 0, 1, 0])[:, :-1]).transpose(1, 2) * (text_mask * frame_mask.transpose(1, 2))
        prior = torch.matmul(path, text.prior_means).transpose(1, 2)
        latents = vits.flow(prior, frame_mask, None, reverse=True)
        waveform = vits.decoder(latents * frame_mask, None).squeeze(1)
        return VitsModelOutput(waveform=waveform, sequence_lengths=num_frames * self.hop)


@contextlib.contextmanager
def _static_spline() -> Iterator[None]:
    original = modeling_vits._unconstrained_rational_quadratic_spline
    modeling_vits._unconstrained_rational_quadratic_spline = _spline
    try:
        yield
    finally:
        modeling_vits._unconstrained_rational_quadratic_spline = original


def _spline(
    inputs: Tensor,
    widths: Tensor,
    heights: Tensor,
    derivatives: Tensor,
    reverse: bool = False,
    tail_bound: float = 5.0,
    min_bin_width: float = 1e-3,
    min_bin_height: float = 1e-3,
    min_derivative: float = 1e-3,
) -> tuple[Tensor, Tensor]:
    """The same values as the original, which picks the positions inside the bounds by a boolean mask."""
    is_inside = (inputs >= -tail_bound) & (inputs <= tail_bound)
    derivatives = F.pad(derivatives, (1, 1), value=math.log(math.exp(1 - min_derivative) - 1))
    bounds = (reverse, tail_bound, min_bin_width, min_bin_height, min_derivative)
    clamped = inputs.clamp(-tail_bound, tail_bound)
    outputs, log_det = modeling_vits._rational_quadratic_spline(clamped, widths, heights, derivatives, *bounds)
    return torch.where(is_inside, outputs, inputs), torch.where(is_inside, log_det, 0.0)


@functools.cache
def _vits() -> Any:
    config = VitsConfig(
        vocab_size=40,
        hidden_size=64,
        num_hidden_layers=2,
        ffn_dim=128,
        flow_size=64,
        upsample_initial_channel=64,
        wavenet_dilation_rate=1,
        spectrogram_bins=65,
        prior_encoder_num_flows=2,
        posterior_encoder_num_wavenet_layers=2,
        prior_encoder_num_wavenet_layers=2,
        noise_scale=0.0,
        noise_scale_duration=0.0,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        vits: Any = VitsModel(config).eval()
        for weight in vits.decoder.parameters():
            if weight.ndim > 1:
                weight.mul_(4)  # else nearly silent
        for name, weight in vits.duration_predictor.flows.named_parameters():
            if any(part in name for part in ("conv_proj", "translate", "log_scale")):
                weight.normal_(std=0.4)  # these start at zero, which makes all durations alike
    vits.noise_scale = vits.noise_scale_duration = 0.0
    return vits


def _spans(out: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return spangraph.from_lengths(out.sequence_lengths)


def build() -> Workload:
    generator = torch.Generator().manual_seed(1)
    ids = pad_rows([torch.randint(1, 40, (length,), generator=generator) for length in LENGTHS], max(LENGTHS))
    mask = (ids > 0).long()
    with torch.no_grad():
        bucket = _vits()(input_ids=ids, attention_mask=mask).spectrogram.shape[-1]
    model = Speak(_vits(), bucket).eval()
    return Workload(
        model=spangraph.declare(model, waveform=_spans),
        inputs=(ids, mask),
        spans={"waveform": Span()},
        padded=lambda out, *inputs: {"waveform": (out.waveform, _spans(out, *inputs))},
        atol=1e-4,
        reads=True,
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    out = _vits()(input_ids=inputs[0], attention_mask=inputs[1])
    lengths = out.sequence_lengths.tolist()
    return {"waveform": [row[:length] for row, length in zip(out.waveform, lengths, strict=True)]}
