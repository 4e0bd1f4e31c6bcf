"""Cut speech out of a stream of padded batches: silero-vad, with its shipped weights, through `spangraph.compile`.

A step takes a bucket of recordings, padded to one width, and says on the device where speech is. Steps return at once
and two are in flight; when one is done, the host cuts its rows. Run it with `make demo`; results are in demo-output/.
"""

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path

import matplotlib.pyplot as plt
import soundfile
import torch
import torch.nn.functional as F
from silero_vad import get_speech_timestamps, load_silero_vad
from torch import Tensor, nn

import spangraph
from spangraph.testing import SimulatedDevice

DATA, OUTPUT = Path(__file__).parent / "data", Path("demo-output")
RATE, FRAME, CONTEXT = 16_000, 512, 64  # silero judges 512 samples at a time, and sees the 64 before them
THRESHOLD, MAX_SEGMENTS = 0.5, 8
BUCKET_ROWS, BUCKET_WIDTH = 2, 188 * FRAME
DEPTH = 2  # steps in flight
NO_SMOOTHING = {"min_speech_duration_ms": 0, "min_silence_duration_ms": 0, "speech_pad_ms": 0}


class SpeechSegments(nn.Module):
    """silero's network for a padded batch of whole recordings; the shipped one takes a frame of one recording."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        channels = [(129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1)]
        convs = [(nn.Conv1d(a, b, 3, stride, padding=1), nn.ReLU()) for a, b, stride in channels]
        self.encoder = nn.Sequential(*chain.from_iterable(convs))
        self.lstm = nn.LSTM(128, 128, batch_first=True)
        self.head = nn.Conv1d(128, 1, 1)
        shipped = [value for name, value in load_silero_vad().state_dict().items() if name.startswith("_model.")]
        self.load_state_dict(dict(zip(self.state_dict(), shipped, strict=True)))  # the same layers in the same order

    def spanned_outputs(self, walk: str) -> dict[str, spangraph.Span]:
        """The declaration: `speech` is cut along its last dim, up to `MAX_SEGMENTS` times a row."""
        return {"speech": spangraph.Span(dims=(-1,), max_spans=MAX_SEGMENTS)}

    def forward(self, audio: Tensor, lengths: Tensor) -> spangraph.SpannedOutput:
        """Find speech in `audio` [bs, samples], of which `lengths` [bs] are real. Nothing is read on the host."""
        probability = self.probability(audio)
        position = torch.arange(probability.shape[1], device=audio.device) * FRAME
        is_speech = (probability >= THRESHOLD) & (position < lengths[:, None])
        spans = spangraph.from_mask(is_speech, max_spans=MAX_SEGMENTS) * FRAME  # [bs, 8, 2]: frames -> samples
        spans = torch.minimum(spans, lengths[:, None, None])
        num_segments = (spans[..., 0] < spans[..., 1]).sum(1)
        return spangraph.SpannedOutput({"speech": audio}, {"speech": spans}, {"num_segments": num_segments})

    def probability(self, audio: Tensor) -> Tensor:
        """Probability of speech per frame, [bs, frames]."""
        frames = F.pad(audio, (CONTEXT, 0)).unfold(1, CONTEXT + FRAME, FRAME)
        x = self.stft(F.pad(frames.flatten(0, 1), (0, CONTEXT), "reflect").unsqueeze(1))
        x = (x[:, :129] ** 2 + x[:, 129:] ** 2).sqrt()
        x, _ = self.lstm(self.encoder(x).view(*frames.shape[:2], 128))
        return self.head(x.relu().mT).sigmoid().squeeze(1)


def pad(recordings: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One bucket: audio [BUCKET_ROWS, BUCKET_WIDTH] and lengths [BUCKET_ROWS]; rows left over are padding."""
    audio, lengths = torch.zeros(BUCKET_ROWS, BUCKET_WIDTH), torch.zeros(BUCKET_ROWS, dtype=torch.int64)
    for row, recording in enumerate(recordings):
        lengths[row] = recording.numel()
        audio[row, : recording.numel()] = recording
    return audio, lengths


def launch_all(detect: spangraph.Compiled, recordings: dict[str, Tensor]) -> Iterator[tuple[spangraph.Step, float]]:
    """Launch a step per bucket, with `DEPTH` in flight; yield the oldest step, and when it was launched."""
    in_flight: deque[tuple[spangraph.Step, float]] = deque()
    for i in range(0, len(recordings), BUCKET_ROWS):
        if len(in_flight) == DEPTH:
            yield in_flight.popleft()
        names = list(recordings)[i : i + BUCKET_ROWS]
        inputs = pad([recordings[name] for name in names])
        began = time.perf_counter()
        step = detect.launch(*inputs, rows=names, num_rows=len(names))  # rows beyond num_rows are padding
        print(f"  {' + '.join(names)}: launch() returned after {1e3 * (time.perf_counter() - began):.1f} ms")
        in_flight.append((step, began))
    yield from in_flight


def draw(recordings: dict[str, Tensor], spans: dict[str, list[tuple[int, int]]]) -> plt.Figure:
    """The padded batches: each row's waveform, its padding, and what is cut from it."""
    num_steps = -(-len(recordings) // BUCKET_ROWS)
    figure, axes = plt.subplots(num_steps * BUCKET_ROWS, sharex=True, figsize=(11, 7), layout="constrained")
    for i, (ax, name) in enumerate(zip_longest(axes, recordings, fillvalue="")):
        length = len(recordings.get(name, ""))
        ax.plot(torch.arange(length) / RATE, recordings.get(name, []), color="0.3", linewidth=0.4)
        ax.axvspan(length / RATE, BUCKET_WIDTH / RATE, fc="0.95", ec="0.8", hatch="///", lw=0, label="padding")
        for start, end in spans.get(name, []):
            ax.axvspan(start / RATE, end / RATE, color="tab:green", alpha=0.35, label="span: delivered")
        if name not in spans:
            note = "no speech: the row is withheld" if name else "a row of padding: never delivered"
            ax.text(0.05, 0.75, note, transform=ax.transAxes, color="firebrick")
        ax.set(xlim=(0, BUCKET_WIDTH / RATE), ylim=(-1, 1), yticks=[])
        ax.set_ylabel(f"step {i // BUCKET_ROWS + 1}\n{name}", rotation=0, ha="right", va="center")
    figure.legend(handles=axes[1].patches[:2], loc="outside upper right", ncols=2, frameon=False)
    axes[-1].set_xlabel("seconds")
    return figure


def main() -> None:
    """Run the stream, compare with silero-vad's own segments, and write the segments and a picture."""
    recordings = {"noise": 0.003 * torch.randn(3 * RATE, generator=torch.Generator().manual_seed(0))}
    for path in sorted(DATA.glob("*.wav")):
        recordings[path.stem] = torch.from_numpy(soundfile.read(path, dtype="float32")[0])
    cuda = torch.cuda.is_available()
    backend = "cuda" if cuda else SimulatedDevice()  # captures, replays and runs ahead, as a GPU does
    detect = spangraph.compile(SpeechSegments().eval().to("cuda" if cuda else "cpu"), depth=DEPTH, backend=backend)
    detect(*pad([]))  # the first call traces and captures

    print(f"{len(recordings)} recordings, {BUCKET_ROWS} a step, on {'CUDA' if cuda else 'a simulated device'}")
    speech, spans = {}, {}
    for step, began in launch_all(detect, recordings):
        with step:  # a lease: in this block, rows are views of the step's output
            rows = step.rows("speech").own()  # waits, then cuts; own() keeps the rows after the block
        print(f"  {' + '.join(step.row_ids)}: rows cut after {1e3 * (time.perf_counter() - began):.1f} ms")
        speech |= rows  # rows without speech are absent
        spans |= {name: [span for (span,) in rows.spans(name)] for name in rows}

    silero = load_silero_vad()
    for name, audio in recordings.items():
        seconds = [f"{start / RATE:.2f}-{end / RATE:.2f}" for start, end in spans.get(name, [])]
        print(f"  {name}:", ", ".join(seconds) + " s" if seconds else "no speech, so no entry")
        own = get_speech_timestamps(audio, silero, THRESHOLD, neg_threshold=THRESHOLD, **NO_SMOOTHING)
        if [(part["start"], part["end"]) for part in own] != spans.get(name, []):
            raise SystemExit(f"{name}: silero-vad's own get_speech_timestamps finds {own}")
    print("  the same segments as silero-vad's own get_speech_timestamps, which takes one recording at a time")

    OUTPUT.mkdir(exist_ok=True)
    for name, parts in speech.items():
        for i, samples in enumerate(parts):
            soundfile.write(OUTPUT / f"{name}-{i}.wav", samples.cpu().numpy(), RATE)
    draw(recordings, spans).savefig(OUTPUT / "batches.png", dpi=150)
    print(f"  wrote {sum(map(len, speech.values()))} segments and batches.png to {OUTPUT}/", detect.explain(), sep="\n")


if __name__ == "__main__":
    main()
