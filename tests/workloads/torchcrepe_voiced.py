"""torchcrepe: pitch of a padded batch of recordings, cut to each row's voiced region.

The package's "tiny" network with its shipped weights; output [bs, 2, frames]: pitch in Hz and periodicity. A row's span
is its first to its last voiced frame, so starts are above 0, and a row without one is withheld. Reference:
`torchcrepe.predict` of each recording alone, which zero-pads its ends as the batch does.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
import torchcrepe
from torch import Tensor, nn

import spangraph
from spangraph import Span

from .common import Workload, pad_rows, read_speech

RATE, HOP, WINDOW = 16_000, 160, 1024
LOWEST, HIGHEST = 50.0, 1000.0  # Hz
VOICED = 0.5  # periodicity


class Pitch(nn.Module):
    """torchcrepe's network with its framing and its argmax decoder, for a batch."""

    excluded: Tensor
    frequency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = torchcrepe.Crepe("tiny")
        weights = Path(torchcrepe.__file__).parent / "assets" / "tiny.pth"
        self.net.load_state_dict(torch.load(weights, map_location="cpu"))
        lowest = int(torchcrepe.convert.frequency_to_bins(torch.tensor(LOWEST)))
        highest = int(torchcrepe.convert.frequency_to_bins(torch.tensor(HIGHEST), torch.ceil))
        bins = torch.arange(360)
        self.register_buffer("excluded", (bins < lowest) | (bins >= highest))
        self.register_buffer("frequency", 10 * 2 ** ((20.0 * bins + 1997.3794084376191) / 1200))  # torchcrepe.convert

    def forward(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Pitch and periodicity [bs, 2, frames], and spans [bs, 2] of the voiced regions."""
        frames = F.pad(audio, (WINDOW // 2, WINDOW // 2)).unfold(1, WINDOW, HOP)
        x = frames.flatten(0, 1)
        x = x - x.mean(1, keepdim=True)
        x = x / x.std(1, keepdim=True).clamp(min=1e-10)
        probability = self.net(x).view(*frames.shape[:2], 360).masked_fill(self.excluded, float("-inf"))
        periodicity, bins = probability.max(-1)
        position = torch.arange(periodicity.shape[1], device=audio.device)
        is_voiced = (periodicity >= VOICED) & (position <= lengths[:, None] // HOP)
        first = is_voiced.int().argmax(1)
        end = position.numel() - is_voiced.flip(1).int().argmax(1)
        spans = torch.where(is_voiced.any(1, keepdim=True), torch.stack([first, end], 1), 0)
        return torch.stack([self.frequency[bins], periodicity], 1), spans


@functools.cache
def _pitch() -> Pitch:
    return Pitch().eval()


def build() -> Workload:
    (utterance,) = read_speech(3)
    noise = 0.001 * torch.randn(5000, generator=torch.Generator().manual_seed(0))  # nothing voiced
    recordings = [utterance, noise, utterance[1000:7000]]
    return Workload(
        model=spangraph.declare(_pitch(), {"0": lambda out, audio, lengths: out[1]}),
        inputs=(pad_rows(recordings, 12_000), torch.tensor([len(recording) for recording in recordings])),
        spans={"0": Span()},
        padded=lambda out, *inputs: {"0": out},
        atol=1e-2,  # Hz; the same bins, and periodicity to 1e-6
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor | None]]:
    rows: list[Tensor | None] = []
    for audio, length in zip(inputs[0], inputs[1].tolist(), strict=True):
        pitch, periodicity = torchcrepe.predict(
            audio[None, :length], RATE, HOP, LOWEST, HIGHEST, "tiny", _argmax, return_periodicity=True, device="cpu"
        )
        voiced = (periodicity[0] >= VOICED).nonzero().flatten().tolist()
        both = torch.cat([pitch, periodicity])
        rows.append(both[:, voiced[0] : voiced[-1] + 1] if voiced else None)
    return {"0": rows}


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """torchcrepe's argmax decoder without its random dither."""
    bins = logits.argmax(1)
    return bins, _pitch().frequency[bins]
