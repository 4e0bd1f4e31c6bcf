"""silero-vad: a padded batch of recordings -> speech segments, several spans a row.

The network, with the shipped weights, is the demo's. Reference: the package's own model and state machine
(`get_speech_timestamps`, without smoothing), which reads a value on the host per 512 samples of one recording.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import ROOT, Workload, load_module, pad_rows, read_speech

_num_threads = torch.get_num_threads()
demo = load_module("spangraph_demo", ROOT / "examples" / "demo.py")
torch.set_num_threads(_num_threads)  # importing silero_vad sets it to 1 for the whole process


def build() -> Workload:
    recordings = read_speech(0, 1, 3)
    recordings.insert(2, 0.003 * torch.randn(40_000, generator=torch.Generator().manual_seed(0)))  # no speech
    model = demo.SpeechSegments().eval()
    return Workload(
        model=model,
        inputs=(pad_rows(recordings, 108 * demo.FRAME), torch.tensor([len(recording) for recording in recordings])),
        spans=model.spanned_outputs("forward"),
        padded=lambda out, audio, lengths: {"speech": (out.outputs["speech"], out.output_spans["speech"])},
        row_values=lambda out: out.row_values,
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[tuple[Tensor, ...] | None]]:
    audio, lengths = inputs
    rows: list[tuple[Tensor, ...] | None] = []
    silero = demo.load_silero_vad()
    for row, length in zip(audio, lengths.tolist(), strict=True):
        found = demo.get_speech_timestamps(
            row[:length], silero, demo.THRESHOLD, neg_threshold=demo.THRESHOLD, **demo.NO_SMOOTHING
        )
        rows.append(tuple(row[part["start"] : part["end"]] for part in found) or None)
    return {"speech": rows}
