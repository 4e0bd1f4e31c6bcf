"""HiFi-GAN of Hugging Face transformers inside a larger model: padded mel spectrograms -> waveforms -> 16 bit PCM.

The vocoder, a submodule, declares `audio`, which the model does not return; what it returns derives from it. The
vocoder is not padding-invariant: the reference is plain indexing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

import spangraph
from spangraph import Span, SpannedOutput

from .common import Workload, pad_rows

LENGTHS = (32, 20, 25)  # frames


class Vocoder(nn.Module):
    """A vocoder whose code one can edit: it declares its output itself."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.hop = math.prod(net.config.upsample_rates)

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        audio = self.net(mel)
        return SpannedOutput({"audio": audio}, {"audio": spangraph.from_lengths(frames * self.hop)})


class Speech(nn.Module):
    """The model around it: a dict of PCM samples [bs, samples] and a constant."""

    def __init__(self, vocoder: Vocoder) -> None:
        super().__init__()
        self.vocoder = vocoder

    def forward(self, mel: Tensor, frames: Tensor) -> dict[str, Tensor | int]:
        audio = self.vocoder(mel, frames)["audio"]
        return {"pcm": (audio * 32767).round().to(torch.int16), "rate": 16_000}


@functools.cache
def _vocoder() -> Vocoder:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        net = SpeechT5HifiGan(SpeechT5HifiGanConfig(upsample_initial_channel=128)).eval()
        for weight in net.parameters():
            if weight.ndim > 1:
                weight.mul_(8)  # else nearly silent
    return Vocoder(net).eval()


def build() -> Workload:
    generator = torch.Generator().manual_seed(1)
    mel = [torch.randn(length, 80, generator=generator) for length in LENGTHS]

    def padded(out: dict[str, Tensor], mel: Tensor, frames: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        spanned = _vocoder()(mel, frames)
        return {"audio": (spanned.outputs["audio"], spanned.output_spans["audio"])}

    return Workload(
        model=Speech(_vocoder()).eval(),
        inputs=(pad_rows(mel, 32, 80), torch.tensor(LENGTHS)),
        spans={"audio": Span()},
        padded=padded,
        derived={"pcm": "audio"},
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    mel, frames = inputs
    audio = _vocoder().net(mel)
    return {"audio": [row[: n * 256] for row, n in zip(audio, frames.tolist(), strict=True)]}
