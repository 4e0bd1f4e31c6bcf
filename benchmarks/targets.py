"""What spangraph costs on the host, against what people write by hand: a table of ratios, each with its target.

    python benchmarks/targets.py [--only cut,own] [--rounds 300]

What is compared runs in one process, in turn: medians, with the quartiles of the rounds' ratios. Everything is on the
CPU, with the inline backend and one thread. Exits with 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from verification import build

import spangraph
from spangraph import Compiled, Span, SpannedOutput, Step
from spangraph.kernels.stage import CONTROL_WORDS
from spangraph.passes.leaks import Source
from spangraph.passes.marks import MarkInfo
from spangraph.passes.prepare import prepare_graph


class Speech(nn.Module):
    """Two padded outputs with spans of their own: `spans[:, 0]` and `spans[:, 1]` of `[bs, 2, 2]`."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return "audio", "pitch"

    def forward(self, audio: Tensor, pitch: Tensor, spans: Tensor) -> SpannedOutput:
        outputs = {"audio": audio * 1.0, "pitch": pitch * 1.0}
        return SpannedOutput(outputs, {"audio": spans[:, 0], "pitch": spans[:, 1]})


class Upsample(nn.Module):
    """A small step, so that its own time does not drown the wrapper's; with parameters that it does not need."""

    def __init__(self, num_parameters: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(num_parameters)])

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        audio = mel.repeat_interleave(4, -1) * 0.5
        return SpannedOutput({"audio": audio}, {"audio": spangraph.from_lengths(frames * 4)})


class Plain(nn.Module):
    """The same without spans."""

    def forward(self, mel: Tensor, frames: Tensor) -> Tensor:
        return mel.repeat_interleave(4, -1) * 0.5


class Stack(nn.Module):
    """A model that exports, of as many convolutions as a small vocoder has."""

    def __init__(self, depth: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(8, 8, 3, padding=1) for _ in range(depth)])

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, x: Tensor, lengths: Tensor) -> SpannedOutput:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return SpannedOutput({"audio": x.sum(1)}, {"audio": spangraph.from_lengths(lengths)})


@dataclass
class Report:
    """Prints lines as they are measured, and remembers what was missed."""

    missed: list[str] = field(default_factory=list)

    def add(self, what: str, found: str, target: str = "", *, is_met: bool = True) -> None:
        if not is_met:
            self.missed.append(what)
        verdict = "MISSED" if not is_met else "ok" if target else ""
        print(f"{what:68} {found:32} {target:>6}  {verdict}", flush=True)

    def add_ratio(self, what: str, ratios: Sequence[float], least: float) -> None:
        """How many times faster; `ratios` are of rounds."""
        low, mid, high = statistics.quantiles(ratios, n=4)
        self.add(what, f"{mid:.2f}x faster ({low:.2f} - {high:.2f})", f"{least:g}x", is_met=mid >= least)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection and no autograd."""
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        gc.enable()


def timed(fn: Callable[[], object]) -> float:
    """Microseconds of one call, the end of its result included."""
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e6


Cut = Callable[[Step, Tensor, Tensor, Tensor], object]
"""What is done with a step: by hand from its outputs and their spans, or by its rows."""


def cut_by_tolist(step: Step, audio: Tensor, pitch: Tensor, spans: Tensor) -> object:
    table = spans.tolist()
    first = [audio[i, start:end] for i, ((start, end), _) in enumerate(table)]
    return first, [pitch[i, :, start:end] for i, (_, (start, end)) in enumerate(table)]


def cut_by_item(step: Step, audio: Tensor, pitch: Tensor, spans: Tensor) -> object:
    rows = range(len(spans))
    first = [audio[i, spans[i, 0, 0].item() : spans[i, 0, 1].item()] for i in rows]
    return first, [pitch[i, :, spans[i, 1, 0].item() : spans[i, 1, 1].item()] for i in rows]


def cut_all(step: Step, audio: Tensor, pitch: Tensor, spans: Tensor) -> object:
    return [row for _, row in step.rows("audio").items()], [row for _, row in step.rows("pitch").items()]


def cut_few(step: Step, audio: Tensor, pitch: Tensor, spans: Tensor) -> object:
    rows = step.rows("audio"), step.rows("pitch")
    return [each[i] for each in rows for i in range(4)]


def read_spans(step: Step, audio: Tensor, pitch: Tensor, spans: Tensor) -> object:
    rows = step.rows("audio"), step.rows("pitch")
    return [each.spans(i) for each in rows for i in range(len(spans))]


def measure_cut(report: Report, rounds: int) -> None:
    """Wait, spans and rows of a step that is done; the launch is not in it, nor are the model's outputs by hand."""
    for bs in (1, 8, 64, 256):
        audio, pitch, ends = torch.randn(bs, 2400), torch.randn(bs, 2, 2400), torch.randint(1, 2400, (bs, 2))
        spans = torch.stack([torch.zeros_like(ends), ends], -1)
        ways: dict[str, Cut] = {"tolist": cut_by_tolist, "item": cut_by_item, "all": cut_all, "spans": read_spans}
        if bs >= 4:
            ways["few"] = cut_few
        times: dict[str, list[float]] = {name: [] for name in ways}
        with spangraph.compile(Speech()) as compiled, quiet():
            for _ in range(rounds * 5 if bs == 1 else rounds):  # which is close
                for name, way in random.sample(
                    list(ways.items()), len(ways)
                ):  # each behind a launch of its own, with caches as that leaves them
                    with compiled.launch(audio, pitch, spans) as step:
                        times[name].append(timed(partial(way, step, audio, pitch, spans)))
        ratios = {
            f"{name} {base}": [b / t for b, t in zip(times[base], times[name], strict=True)][5:]
            for name in ways
            for base in ("tolist", "item")
        }
        report.add_ratio(f"cut, bs {bs}: all rows, against one tolist", ratios["all tolist"], 1.0)
        if bs >= 8:
            report.add_ratio(f"cut, bs {bs}: all rows, against items", ratios["all item"], 3.0 if bs == 8 else 4.0)
        if bs >= 64:
            report.add_ratio(f"cut, bs {bs}: 4 rows, against one tolist", ratios["few tolist"], 5.0)
            report.add_ratio(f"cut, bs {bs}: spans alone, against one tolist", ratios["spans tolist"], 5.0)


def measure_own(report: Report, rounds: int) -> None:
    """Copies of 64 rows of 24,000 floats, half filled."""
    bs, width = 64, 24_000
    padded, pitch = torch.randn(bs, width), torch.randn(bs, 2, 1)
    spans = torch.tensor([[[0, width // 2], [0, 1]]]).expand(bs, 2, 2)
    per_row, batch = [], []
    with spangraph.compile(Speech()) as compiled, quiet():
        for number in range(rounds):
            with compiled.launch(padded, pitch, spans) as step:
                ways: list[tuple[str, Callable[[], object]]] = [
                    ("own", step.rows("audio").own),
                    ("row", lambda: [padded[i, : width // 2].clone() for i in range(bs)]),
                    ("batch", padded.clone),
                ]
                random.shuffle(ways)  # the first finds cold caches
                times = {name: timed(way) for name, way in ways}
            if number >= 5:
                per_row.append(times["row"] / times["own"])
                batch.append(times["batch"] / times["own"])
    report.add_ratio("own, 64 x 24,000 floats, half full: a clone per row", per_row, 1.0)
    report.add_ratio("own, 64 x 24,000 floats, half full: a clone of the batch", batch, 1.5)


def measure_wrapper(report: Report, rounds: int) -> None:
    """Launch, result and release, minus the bare call of the staged graph; and minus that of the method that runs it
    inline, in which staging is no operator."""
    for name, model in (("spans", Upsample()), ("spans, 1,000 parameters", Upsample(1000)), ("no spans", Plain())):
        for bs in (1, 256):
            mel, frames = torch.randn(bs, 2, 50), torch.full((bs,), 50)
            with spangraph.compile(model.eval()) as compiled, quiet():
                of_graph, of_method = zip(*overheads(compiled, mel, frames, rounds), strict=True)
            what = f"wrapper, {name}, bs {bs}: launch + result - bare"
            low, mid, high = statistics.quantiles(of_graph, n=4)
            report.add(f"{what} graph", f"{mid:.1f} us ({low:.1f} - {high:.1f})", "15 us", is_met=mid <= 15)
            low, mid, high = statistics.quantiles(of_method, n=4)
            report.add(f"{what} method", f"{mid:.1f} us ({low:.1f} - {high:.1f})")


def overheads(compiled: Compiled, mel: Tensor, frames: Tensor, rounds: int) -> Iterator[tuple[float, float]]:
    """Microseconds over the graph, and over the method that runs it, in turns of 20 calls."""
    compiled(mel, frames)
    signature = next(iter(compiled._by_key.values()))
    instance, tail, ring = signature.instances[0], signature.tails[0], compiled._ring

    def wrapped() -> None:
        for _ in range(20):
            with compiled.launch(mel, frames) as step:
                step.result()

    def bare(run: Callable[..., object]) -> None:
        for _ in range(20):
            if tail.columns:  # a control record, so that the staging node stages: a dry run would be cheaper
                first = (ring._next - 1) % ring.num_slots * CONTROL_WORDS
                for i, word in enumerate((ring._next, 0, len(mel), tail.graph, -1)):
                    ring._control[first + i] = word
                ring._next += 1
            run(mel, frames)

    for _ in range(rounds):
        step = timed(wrapped)
        yield (step - timed(partial(bare, instance.gm))) / 20, (step - timed(partial(bare, instance.forward))) / 20


def measure_passes(report: Report, rounds: int) -> None:
    """The passes of a graph by CPU time, alone, and with its verification: leaks of padding from its input."""
    infos = {("", "audio"): MarkInfo("", "", "audio", Span(), "model.py:1")}
    seconds: dict[int, list[float]] = {}
    alone: list[float] = []
    for _ in range(max(3, rounds // 100)):
        for num_nodes in (1_000, 10_000, 50_000):
            for verifies in (False, True):
                gm, x = build(num_nodes)
                sources = [Source(x, "x", (-1,), "right")] if verifies else []
                gc.collect()
                start = time.process_time()
                prepare_graph(gm, infos, ["audio"], sources=sources, padding="right")
                took = time.process_time() - start
                if verifies:
                    seconds.setdefault(num_nodes, []).append(took)
                elif num_nodes == 10_000:
                    alone.append(took)
    ratio = statistics.median(seconds[50_000]) / 50 / statistics.median(seconds[1_000])
    what = "passes and verification: time per node at 50k, against 1k"
    report.add(what, f"{ratio:.2f}x", "1.5x", is_met=ratio <= 1.5)
    mid = statistics.median(alone)
    report.add("passes: 10k nodes", f"{mid:.2f} s ({min(alone):.2f} - {max(alone):.2f})", "1 s", is_met=mid < 1)


def measure_compile(report: Report, rounds: int) -> None:
    """The first launch of a model that exports, against torch.export alone, by CPU time."""
    x, lengths = torch.randn(2, 8, 400), torch.tensor([400, 200])

    def export() -> None:
        torch.export.export(Stack().eval(), (x, lengths), strict=False)

    def launch() -> None:
        with spangraph.compile(Stack().eval(), trace="export") as compiled:
            compiled.launch(x, lengths)

    ratios = []
    for number in range(max(7, rounds // 15)):
        times = {}
        for fn in random.sample([export, launch], 2):
            gc.collect()  # of what the one before has left
            start = time.process_time()
            fn()
            times[fn] = time.process_time() - start
        if number:
            ratios.append(times[launch] / times[export])
    low, mid, high = statistics.quantiles(ratios, n=4)
    what = "compile: trace and first launch, against torch.export"
    report.add(what, f"{mid:.2f}x ({low:.2f} - {high:.2f})", "1.3x", is_met=mid <= 1.3)


def measure_memory(report: Report, rounds: int) -> None:
    """Python's memory blocks and the process's, over 10,000 steps at depth 4, with few real rows in a large batch."""
    steps, depth = 10_000, 4
    growth = {}
    for bs in (8, 256):
        mel, frames = torch.randn(bs, 2, 50), torch.full((bs,), 50)
        with spangraph.compile(Upsample().eval(), depth=depth) as compiled, torch.no_grad():
            open_steps: list[Step] = []
            blocks: list[int] = []
            sizes: list[int] = []
            for number in range(steps):
                open_steps.append(compiled.launch(mel, frames, num_rows=4))
                if len(open_steps) == depth:
                    with open_steps.pop(0) as step:
                        list(step.rows().values())
                if number % 1000 == 999:
                    gc.collect()
                    blocks.append(sys.getallocatedblocks())
                    sizes.append(resident())
            open_steps.pop(0).release()
            gc.collect()
            before = sys.getallocatedblocks()
            held = compiled.launch(mel, frames, num_rows=4)
            rows = held.rows()
            growth[bs] = sys.getallocatedblocks() - before
            del rows, held
            for step in open_steps:
                step.release()
        # What is counted at one moment is up to a hundred more or less, without a trend over 16,000 steps.
        more = round(statistics.median(blocks[6:]) - statistics.median(blocks[1:5]))
        what = f"memory, bs {bs}: Python's blocks after 7,000 to 10,000 and 2,000 to 5,000 steps"
        report.add(what, f"{more:+,} ({(sizes[-1] - sizes[1]) >> 10:+,} KB resident)", "flat", is_met=more < 100)
    what = "memory: blocks of one step more, batch of 8 and of 256, 4 real rows"
    report.add(what, f"{growth[8]} and {growth[256]}", "equal", is_met=abs(growth[8] - growth[256]) <= 2)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_import(report: Report, rounds: int) -> None:
    """`import torch, spangraph` against `import torch`, in new processes, by CPU time."""
    times = "print(time.process_time())"
    code = f"import time; {times}; import torch; {times}; import spangraph; {times}"
    ratios = []
    with tempfile.TemporaryDirectory() as folder:  # compiled before, as installed packages are
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        for _ in range(max(7, rounds // 30) + 1):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
            began, torch_done, all_done = map(float, done.stdout.split())
            ratios.append((all_done - began) / (torch_done - began))
    del ratios[0]
    low, mid, high = statistics.quantiles(ratios, n=4)
    what = "import: spangraph with torch, against torch"
    report.add(what, f"{mid:.3f}x ({low:.3f} - {high:.3f})", "1.05x", is_met=mid <= 1.05)


SECTIONS = {
    "cut": measure_cut,
    "own": measure_own,
    "wrapper": measure_wrapper,
    "passes": measure_passes,
    "compile": measure_compile,
    "memory": measure_memory,
    "import": measure_import,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="some of " + ",".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, inline, one thread")
    report = Report()
    for name in args.only.split(","):
        SECTIONS[name](report, args.rounds)
    print(f"missed: {len(report.missed)}")
    return int(bool(report.missed))


if __name__ == "__main__":
    sys.exit(main())
