"""What it costs the host to get a step's rows: seven ways to do one job, from inputs to separate tensors on the host.

Prints, for batch sizes 1, 8, 64 and 256, the median time of a step with its quartiles, and the median of its ratio to
"tolist": one read of all lengths, then a slice a row. In each round every way runs one step on the same batch, in
random order; a ratio is taken within a round. Before anything is timed, the rows of all ways are compared.

    python benchmarks/lifetimes.py [--rounds 400] [--fill 0.5] [--width 4800] [--device cuda]

The model is tiny, so that the cut is what is measured; "bare" is its forward alone, and part of all other figures. Rows
of "item", "tolist" and "view" are parts of the padded output, those of "padded" parts of its copy; "nested" packs them
anew, "host" in a ring, "own" in memory of their own. On a GPU the ways without spangraph replay a captured forward,
too, and rows that are not on the host are copied there one by one.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import spangraph
from spangraph import Compiled, SpannedOutput

HOP, BINS = 240, 8
BATCH_SIZES = (1, 8, 64, 256)
BASE = "tolist"

Use = Callable[[Sequence[Tensor]], object]
"""What is done with the rows while they are valid: nothing where a step is timed."""

Way = Callable[[Tensor, Tensor, Use], object]
"""One step on `mel` and `frames`."""


class Vocoder(nn.Module):
    """From a spectrogram to samples, in one operator of any size."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(HOP))

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def synthesize(self, mel: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Padded samples `[bs, frames * HOP]`, and how many of each row are real."""
        return (mel.mean(1)[..., None] * self.window).flatten(1), frames * HOP

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        audio, samples = self.synthesize(mel, frames)
        return SpannedOutput({"audio": audio}, {"audio": spangraph.from_lengths(samples)})


def plain_forward(model: Vocoder, mel: Tensor, frames: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The forward as an engine runs it without spangraph: on a GPU, a captured graph with static inputs."""
    if mel.device.type == "cpu":
        return model.synthesize
    inputs = mel.clone(), frames.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model.synthesize(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = model.synthesize(*inputs)

    def replay(mel: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        inputs[0].copy_(mel)
        inputs[1].copy_(frames)
        graph.replay()
        return outputs

    return replay


def make_ways(model: Vocoder, views: Compiled, copied: Compiled, mel: Tensor, frames: Tensor) -> dict[str, Way]:
    """Every way to do the job, and the bare forward, for batches like this one."""
    on_gpu = mel.device.type != "cpu"
    forward = plain_forward(model, mel, frames)
    on_host = [torch.empty_like(out, device="cpu", pin_memory=on_gpu) for out in forward(mel, frames)]
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    def bare(mel: Tensor, frames: Tensor, use: Use) -> None:
        forward(mel, frames)
        synchronize()

    def item(mel: Tensor, frames: Tensor, use: Use) -> None:
        audio, samples = forward(mel, frames)
        use([audio[i, : samples[i].item()].cpu() for i in range(len(audio))])  # pyright: ignore[reportArgumentType]

    def tolist(mel: Tensor, frames: Tensor, use: Use) -> None:
        audio, samples = forward(mel, frames)
        use([audio[i, :end].cpu() for i, end in enumerate(samples.tolist())])

    def padded(mel: Tensor, frames: Tensor, use: Use) -> None:
        for mine, out in zip(on_host, forward(mel, frames), strict=True):
            mine.copy_(out, non_blocking=True)
        synchronize()
        use([on_host[0][i, :end] for i, end in enumerate(on_host[1].tolist())])

    def nested(mel: Tensor, frames: Tensor, use: Use) -> None:
        audio, samples = forward(mel, frames)
        rows = torch.nested.narrow(audio, 1, torch.zeros_like(samples), samples, layout=torch.jagged)
        use(rows.contiguous().cpu().unbind())

    def view(mel: Tensor, frames: Tensor, use: Use) -> None:
        with views.launch(mel, frames) as step:
            use([row.cpu() for row in step.rows("audio").values()])

    def host(mel: Tensor, frames: Tensor, use: Use) -> None:
        with copied.launch(mel, frames) as step:
            use(list(step.rows("audio").values()))

    def own(mel: Tensor, frames: Tensor, use: Use) -> None:
        with views.launch(mel, frames) as step:
            rows = step.rows("audio").own()
        use([row.cpu() for row in rows.values()])

    return {way.__name__: way for way in (bare, item, tolist, padded, nested, view, host, own)}


def check(ways: dict[str, Way], mel: Tensor, frames: Tensor) -> None:
    """Compare the rows of all ways."""
    found: dict[str, list[Tensor]] = {}
    for name, way in ways.items():
        way(mel, frames, lambda rows, name=name: found.update({name: [row.clone() for row in rows]}))
    for name, rows in found.items():
        same = len(rows) == len(mel) and all(map(torch.equal, rows, found[BASE]))
        if not same or any(row.device.type != "cpu" for row in rows):
            raise SystemExit(f"the rows of {name!r} are not those of {BASE!r}")


def make_batches(batch: int, width: int, fill: float, device: str) -> list[tuple[Tensor, Tensor]]:
    """A few batches to take turns, with row lengths spread evenly around the fill."""
    num_frames = width // HOP
    batches: list[tuple[Tensor, Tensor]] = []
    for _ in range(8):
        share = fill + min(fill, 1 - fill) * (2 * torch.rand(batch) - 1)
        frames = (share * num_frames).round().long().clamp(1, num_frames)
        batches.append((torch.randn(batch, BINS, num_frames, device=device), frames.to(device)))
    return batches


def measure(ways: dict[str, Way], batches: Sequence[tuple[Tensor, Tensor]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per step of every way, round by round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways.items())
    gc.disable()
    for i in range(-rounds // 10, rounds):  # warm-up first
        mel, frames = batches[i % len(batches)]
        random.shuffle(order)
        for name, way in order:
            if mel.device.type != "cpu":
                torch.cuda.synchronize()
            started = time.perf_counter()
            way(mel, frames, len)
            if i >= 0:
                times[name].append((time.perf_counter() - started) * 1e6)
    gc.enable()
    return times


def describe(device: str) -> str:
    """The processor's name, and the device's."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return cpu if device == "cpu" else f"{torch.cuda.get_device_name(device)}, {cpu}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--fill", type=float, default=0.5, help="mean share of a row that is real")
    parser.add_argument("--width", type=int, default=20 * HOP, help=f"samples of a padded row, a multiple of {HOP}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.width < HOP or args.width % HOP or not 0 < args.fill <= 1 or args.rounds < 2:
        parser.error(f"expected a width that is a multiple of {HOP}, a fill in (0, 1], and 2 rounds or more")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    print(f"{describe(args.device)}; torch {torch.__version__}, Python {platform.python_version()}, 1 thread")
    print(f"fill {args.fill}, {args.width} float32 samples a padded row, {args.rounds} rounds; 'x' is over {BASE!r}")
    print(f"{'bs':>4} {'way':8} {'median us':>10} {'quartiles':>20} {'x':>6} {'quartiles':>14}")
    model = Vocoder().eval().to(args.device)
    with torch.no_grad():
        for batch in BATCH_SIZES:
            batches = make_batches(batch, args.width, args.fill, args.device)
            with spangraph.compile(model) as views, spangraph.compile(model, copies={"audio": "host"}) as copied:
                ways = make_ways(model, views, copied, *batches[0])
                for mel, frames in batches:
                    check(ways, mel, frames)
                times = measure(ways, batches, args.rounds)
            for name, spent in times.items():
                low, mid, high = statistics.quantiles(spent, n=4)
                ratios = [a / b for a, b in zip(spent, times[BASE], strict=True)]
                below, ratio, above = statistics.quantiles(ratios, n=4)
                print(
                    f"{batch:>4} {name:8} {mid:>10.1f} {f'{low:.1f} - {high:.1f}':>20} {ratio:>6.2f}"
                    f" {f'{below:.2f} - {above:.2f}':>14}"
                )


if __name__ == "__main__":
    main()
