"""What a step costs on the host beyond the bare call of the staged graph.

Prints, for batch sizes 1, 8 and 64, the median of (launch + result) minus the bare call, both measured in one run and
interleaved, with the quartiles of the difference; and the same for a model without spans, against the bare graph.

    python benchmarks/overhead.py [--rounds 400]
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time

import torch
from torch import Tensor, nn

import spangraph
from spangraph import SpannedOutput
from spangraph.kernels.stage import CONTROL_WORDS


class Upsample(nn.Module):
    """A small step, so that its own time does not drown the wrapper's."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        audio = mel.repeat_interleave(4, -1) * 0.5
        return SpannedOutput({"audio": audio}, {"audio": spangraph.from_lengths(frames * 4)})


class Plain(nn.Module):
    """The same without spans."""

    def forward(self, mel: Tensor, frames: Tensor) -> Tensor:
        return mel.repeat_interleave(4, -1) * 0.5


def measure(model: nn.Module, batch: int, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds per call of the wrapper and of the bare graph, interleaved in blocks of 20 calls."""
    mel, frames = torch.randn(batch, 2, 50), torch.full((batch,), 50)
    compiled = spangraph.compile(model.eval())
    compiled(mel, frames)
    signature = next(iter(compiled._by_key.values()))
    gm, tail, ring = signature.instances[0].gm, signature.tails[0], compiled._ring

    def wrapped() -> None:
        with compiled.launch(mel, frames) as step:
            step.result()

    def bare() -> None:
        if tail.columns:  # a control record, so that the staging node stages: a dry run would be cheaper
            record = (ring._next - 1) % ring.num_slots * CONTROL_WORDS
            ring._control[record : record + CONTROL_WORDS] = (ring._next, 0, batch, tail.graph, -1)
            ring._next += 1
        gm(mel, frames)

    times: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    with torch.no_grad():
        for _ in range(rounds):
            for fn, record in zip((wrapped, bare), times, strict=True):
                started = time.perf_counter()
                for _ in range(20):
                    fn()
                record.append((time.perf_counter() - started) / 20 * 1e6)
    gc.enable()
    compiled.close()
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads, inline")
    print(f"{'model':8} {'bs':>4} {'wrapped us':>11} {'bare us':>9} {'overhead us':>12} {'quartiles':>16}")
    for name, model in (("spans", Upsample()), ("none", Plain())):
        for batch in (1, 8, 64):
            wrapped, bare = measure(model, batch, rounds)
            over = [w - b for w, b in zip(wrapped, bare, strict=True)]
            low, mid, high = statistics.quantiles(over, n=4)
            print(
                f"{name:8} {batch:>4} {statistics.median(wrapped):>11.1f} {statistics.median(bare):>9.1f}"
                f" {mid:>12.1f} {f'{low:.1f} - {high:.1f}':>16}"
            )


if __name__ == "__main__":
    main()
