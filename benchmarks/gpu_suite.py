"""What spangraph does on a GPU: whether it is right there, and what it costs. Prints a table and writes a JSON file.

    python benchmarks/gpu_suite.py [--only staging,host] [--budget 220] [--out gpu-suite.json] [--device cpu]

It needs this checkout, torch with its Triton, and pytest; as a script it tests the checkout that it lies in. Each
section runs in a process of its own, as an error on the device, or a step that never ends, would take the others along.
The exit status is 1 if something was wrong or raised; a target that was missed is printed, and no more.

Times on the device are of whole replays, by events around a block of them that was enqueued before the first began.
Ways are measured in turn, block by block; a cost is the difference of two medians, with the quartiles of the
differences by block. Host times are medians, with the garbage collector off. With `--device cpu` all of it runs, small,
on the simulated device: what is right is checked there, too, and nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # what follows takes some seconds of the budget

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent


def import_checkout() -> None:
    """Let this process, and those that it starts, import the checkout as if it were installed: one folder spangraph,
    with passes and kernels inside."""
    folder = ROOT / "build" / "gpu_suite"
    package = folder / "spangraph"
    package.mkdir(parents=True, exist_ok=True)
    for item in (*(ROOT / "spangraph").iterdir(), ROOT / "passes", ROOT / "kernels"):
        link = package / item.name
        if item.name != "__pycache__" and not link.is_symlink():
            link.symlink_to(os.path.relpath(item, package))
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":
    import_checkout()

import spangraph
from spangraph import Backend, Copy, CudaBackend, SpannedOutput, SpanStager, Step, Tail
from spangraph.backends import Event, Graph, Pinned
from spangraph.kernels.gather import Crop, gather
from spangraph.kernels.stage import CONTROL_WORDS
from spangraph.testing import SimulatedDevice

OK, MISSED, NOT_MEASURED, FAILED = "ok", "MISSED", "not measured", "FAILED"

Samples = list[float] | None
"""What was measured; None without a GPU."""

# ---- the table -----------------------------------------------------------------------------------------------------


class NotMeasured(Exception):
    """Why something is left out."""


@dataclass
class Row:
    """A line of the table. `quartiles` and `count` are of the samples that `value` is the median of."""

    section: str
    what: str
    value: float | str | None = None
    unit: str = ""
    target: str = ""
    verdict: str = OK
    note: str = ""
    quartiles: list[float] | None = None
    count: int = 0

    def __str__(self) -> str:
        value = f"{self.value:,.2f}" if isinstance(self.value, float) else str(self.value or "")
        spread = f"{self.quartiles[0]:,.2f} .. {self.quartiles[1]:,.2f}" if self.quartiles else ""
        line = (
            f"{self.section:12} {self.what:52} {value:>12} {self.unit:6} {spread:>20}  {self.target:24} {self.verdict}"
        )
        return line + (f": {self.note}" if self.note else "")


@dataclass
class Table:
    """Rows, in a file as soon as they are there: who dies later has left them."""

    out: Path
    about: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    section: str = ""

    def add(self, what: str, value: float | str | None = None, **fields: Any) -> None:
        """A row, as it is."""
        self.rows.append(Row(self.section, what, value, **fields))
        self.save()

    def number(
        self,
        what: str,
        unit: str,
        samples: Samples,
        *,
        value: float | None = None,
        target: str = "",
        good: Callable[[float], bool] | None = None,
    ) -> None:
        """A row for what was measured: the median of `samples`, or `value` with their spread."""
        if samples is None:
            self.add(what, unit=unit, target=target, verdict=NOT_MEASURED)
            return
        found = statistics.median(samples) if value is None else value
        quartiles = statistics.quantiles(samples, n=4)[::2] if len(samples) > 1 else None
        verdict = OK if good is None or good(found) else MISSED
        spread = {"quartiles": quartiles, "count": len(samples)}
        self.add(what, found, unit=unit, target=target, verdict=verdict, **spread)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Whatever the block raises becomes a row, and what comes after goes on."""
        try:
            yield
        except NotMeasured as reason:
            self.add(what, verdict=NOT_MEASURED, note=str(reason))
        except Exception as error:  # noqa: BLE001 - that is its purpose
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            self.add(what, verdict=FAILED, note=f"{type(error).__name__}: {first}")

    def save(self) -> None:
        """Write the JSON file, whole."""
        rows = [asdict(row) for row in self.rows]
        part = self.out.with_name(f"{self.out.name}.part")
        part.write_text(json.dumps({**self.about, "seconds": self.seconds, "rows": rows}, indent=1) + "\n")
        part.replace(self.out)


def describe_machine(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    about: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "device": device}
    about |= {"Python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
    about["Triton"] = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    about["revision"] = ask("git", "-C", str(ROOT), "rev-parse", "HEAD")
    about["date"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    about["command"] = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {"GPU": properties.name, "SMs": properties.multi_processor_count, "bytes": properties.total_memory}
        wanted = "driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,clocks.max.mem"
        about["driver, PCIe, clocks"] = ask("nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader")
    return about


def ask(*command: str) -> str | None:
    """The first line of what a program says, if there is such a program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


# ---- the device ----------------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """A captured graph; with a stager, one that ends in its staging node."""

    graph: Graph
    stager: SpanStager | None = None
    tail: Tail | None = None

    def reserve(self, count: int) -> None:
        """Write records for the next replays, which then stage without a launch's work on the host. No more than the
        ring has records, and only while the device is idle. All of them use slot 0, and copy slot 0."""
        if self.stager is None or self.tail is None:
            return
        ring = self.stager._core.ring
        assert count <= ring.num_slots, "a record each"
        for generation in range(ring._next, ring._next + count):
            base = (generation - 1) % ring.num_slots * CONTROL_WORDS
            for i, word in enumerate((generation, 0, self.tail.num_rows, self.tail.graph, 0)):
                ring._control[base + i] = word
        ring._next += count

    def check(self) -> None:
        """All of these replays have staged."""
        if self.stager is not None:
            found, expected = self.stager._buffer.header(0), self.stager._core.ring._next - 1
            assert found == expected, f"the slot holds step {found}, expected {expected}"


class Rig:
    """A device, and how to run and time things on it: CUDA, or the simulated device, on which nothing is timed."""

    def __init__(self, device: str, deadline: float) -> None:
        self.is_gpu = device == "cuda"
        self.deadline = deadline
        self.backend = self.new_backend()
        self.device = self.backend.device
        if self.is_gpu:  # the clocks rise under load
            x = torch.randn(4096, 4096, device=self.device)
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                x = (x @ x).clamp_(-1, 1)
                torch.cuda.synchronize()

    def new_backend(self) -> Backend:
        """A further backend of the same device."""
        return CudaBackend() if self.is_gpu else SimulatedDevice()

    def size(self, on_gpu: Any, on_cpu: Any) -> Any:
        """How much of something: all of it, or enough to have run it."""
        return on_gpu if self.is_gpu else on_cpu

    def left(self) -> float:
        """Seconds that the section may still take."""
        return self.deadline - time.monotonic()

    def check_time(self) -> None:
        """Raises `NotMeasured` once there are none."""
        if self.left() < 0:
            raise NotMeasured("out of time")

    def sync(self) -> None:
        """Wait for all work."""
        self.backend.synchronize()

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in host memory that the device reaches."""
        return tensor.pin_memory() if self.is_gpu else tensor.clone()

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return tensor.to(self.device, copy=True)

    def new_stream(self) -> Any:
        """A further stream."""
        return self.backend.new_stream() if isinstance(self.backend, SimulatedDevice) else torch.cuda.Stream()

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make it the current one."""
        if isinstance(self.backend, SimulatedDevice):
            return self.backend.use_stream(stream)
        return torch.cuda.stream(stream)

    def enqueue(self, work: Callable[[], object]) -> None:
        """Run operators on the current stream."""
        if isinstance(self.backend, SimulatedDevice):
            self.backend.launch(work)
        else:
            work()

    def capture(self, fn: Callable[[], Any], stager: SpanStager | None = None) -> Captured:
        """Capture `fn`, which returns the tail if it stages."""
        graph, tail = self.backend.capture(fn)
        return Captured(graph, stager, tail if stager is not None else None)

    def time_gpu(self, ways: Sequence[Captured], *, rounds: int, replays: int) -> list[Samples]:
        """Microseconds that a replay of each takes on the device: a list of one figure a block. The first block warms
        up."""
        times: list[list[float]] = [[] for _ in ways]
        events: list[Any] = [torch.cuda.Event(enable_timing=True) if self.is_gpu else None for _ in range(2)]
        begin, end = events
        for number in range(self.size(1 + rounds, 1)):
            for way, own in zip(ways, times, strict=True):
                self.sync()
                way.reserve(replays)
                if self.is_gpu:
                    # Cycles, some 10 us a replay and 100 us at least: the device waits until all are enqueued.
                    torch.cuda._sleep(max(replays * 20_000, 200_000))
                    begin.record()
                for _ in range(replays):
                    way.graph.replay()
                if self.is_gpu:
                    end.record()
                self.sync()
                way.check()
                if self.is_gpu and number:
                    own.append(begin.elapsed_time(end) * 1e3 / replays)
        return [own if self.is_gpu else None for own in times]

    def time_host(self, fn: Callable[[], Sequence[int]], count: int) -> list[Samples]:
        """Microseconds between the marks (`time.perf_counter_ns`) that `fn` returns: a list for each pair of them."""
        gc.collect()
        gc.disable()
        try:
            marks = [fn() for _ in range(self.size(count + 20, 2))][self.size(20, 0) :]
        finally:
            gc.enable()
        if not self.is_gpu:
            return [None] * (len(marks[0]) - 1)
        return [[(own[i + 1] - own[i]) / 1e3 for own in marks] for i in range(len(marks[0]) - 1)]


now = time.perf_counter_ns


def median(samples: Samples) -> float:
    """NaN without samples, which nothing is above or below."""
    return statistics.median(samples) if samples else math.nan


def show(number: float, what: str, unit: str = "us") -> str:
    """`number` in a target; its name where it was not measured."""
    return what if math.isnan(number) else f"{number:.2f} {unit} ({what})"


def each(fn: Callable[..., float], *samples: Samples) -> Samples:
    """`fn` of the samples of a block."""
    known = [own for own in samples if own is not None]
    return [fn(*block) for block in zip(*known, strict=True)] if len(known) == len(samples) else None


# ---- 1. correctness ------------------------------------------------------------------------------------------------


def section_correctness(rig: Rig, table: Table) -> None:
    """The kernels against their references, canaries, many replays under load, and the backends' contract."""
    checks: list[tuple[str, str, Callable[[Rig], int]]] = [
        ("staging kernel, word by word", "cases", compare_staging),
        ("compaction kernel, byte by byte", "cases", compare_compaction),
        ("gather kernel, byte by byte", "cases", compare_gather),
        ("memory around slots, records and copies", "runs", check_canaries),
        ("replays at depth 4 under load, waits block", "steps", lambda rig: replay_many(rig, "block")),
        ("replays at depth 4 under load, waits poll the header", "steps", lambda rig: replay_many(rig, "header")),
        ("backend contract and other tests for a GPU", "tests", run_tests),
    ]
    for what, unit, check in checks:
        with table.attempt(what):
            rig.check_time()
            table.add(what, check(rig), unit=unit, target="none wrong")


def load_tests(name: str) -> Any:
    """A test file of the kernels' values: scenarios, and what must be where after each, from the contract alone."""
    spec = importlib.util.spec_from_file_location(f"gpu_suite_{name}", ROOT / "tests" / f"{name}.py")
    assert spec is not None, "a path has a spec"
    assert spec.loader is not None, "and a loader"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def memory_of(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def moved(tensor: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor that lies in a copy of that memory as `tensor` does in its own."""
    return move(memory_of(tensor)).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def compare_staging(rig: Rig) -> int:
    """The scenarios of the staging kernel: the ring's words, and those before and after it."""
    tests = load_tests("test_stage_kernel_values")

    def run(ring: Any, launch: Any, columns: list[Tensor]) -> None:
        cursor = rig.put(ring.cursor)
        slots, control = moved(ring.slots, rig.pin), moved(ring.control, rig.pin)
        own = [moved(column, rig.put) for column in columns]
        torch.ops.spangraph.stage.default(cursor, slots, control, own, ring.offsets, launch.graph, None, 0)
        rig.sync()
        pairs = (ring.cursor, cursor), (ring.slots, slots), (ring.control, control), *zip(columns, own, strict=True)
        for theirs, mine in pairs:
            memory_of(theirs).copy_(memory_of(mine))

    grid = [name for name in tests.SCENARIOS if name[0].isdigit()]
    names = [*(name for name in tests.SCENARIOS if not name[0].isdigit()), *grid[::3]]
    for name in (names := names[:: rig.size(1, 6)]):
        rig.check_time()
        with named(name):
            tests._check_scenario(name, run)
    return len(names)


def load_compaction() -> Any:
    """Those of compaction, without NumPy, which may be missing."""
    tests = load_tests("test_compact_kernel_values")
    tests._bytes = lambda tensor: bytes(
        tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()
    )
    return tests


# All sizes of items and ways to lie, several spans and dims, casts, bad spans, too little room, dry runs.
COMPACTIONS = (
    *("uint8-sliced-4d", "float8_e5m2-shifted-2d", "int16-expanded-3d", "bfloat16-transposed-2d", "float32-sliced-3d"),
    *("float32-transposed-3d", "float64-shifted-3d", "complex64-expanded-2d", "complex128-packed-1d"),
    *("pcm-torch.float16", "pcm-torch.float32", "pcm-of-spans", "outputs", "many-rows", "no-items", "one-row"),
    *("bad-0", "bad-1", "bad-2d-0", "one-unit-short", "pcm-one-unit-short", "no-rows", "dry-other-graph"),
    *("dry-slot-above", "generation-53"),
)


def compare_compaction(rig: Rig) -> int:
    """The scenarios of the compaction kernel, with rings in host memory and on the device."""
    tests = load_compaction()

    def run_in(move: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        def run(cursor: Tensor, control: Tensor, graph: int, **options: Any) -> None:
            given = {name: options.pop(name) for name in ("sources", "spans", "rings")}
            own = {name: [moved(x, move if name == "rings" else rig.put) for x in xs] for name, xs in given.items()}
            status = options.pop("status")
            own_cursor, own_control, own_status = rig.put(cursor), rig.pin(control), rig.put(status)
            arguments = own_cursor, own_control, *own.values(), own_status, graph, *options.values()
            torch.ops.spangraph.compact.default(*arguments)
            rig.sync()
            pairs = [(cursor, own_cursor), (control, own_control), (status, own_status)]
            for name in ("sources", "rings"):
                pairs += zip(given[name], own[name], strict=True)
            for theirs, mine in pairs:
                memory_of(theirs).copy_(memory_of(mine))

        tests.compact = run  # which may zero the counts of NaNs in a dry run
        return run

    for name in (names := COMPACTIONS[:: rig.size(1, 9)]):
        for place, move in (("host", rig.pin), ("device", rig.put)):
            rig.check_time()
            with named(f"{name}, {place}"):
                tests._check_scenario(name, run_in(move))
    return 2 * len(names)


def compare_gather(rig: Rig) -> int:
    """Crops of the sources of the first scenarios of compaction, as copies on the device."""
    tests = load_compaction()

    def run(source: Tensor, dims: Sequence[int], crops: Sequence[Crop]) -> list[Tensor]:
        return [copy.to("cpu", copy=True) for copy in gather(moved(source, rig.put), dims, crops)]

    seeds = [*range(0, 30, rig.size(4, 9)), 34]  # those between warn of complex halves
    for seed in seeds:
        rig.check_time()
        with named(f"gather {seed}"):
            tests._check_gather(seed, run)
    return len(seeds)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Let a failed assertion say which scenario it is of."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def fence(backend: Backend) -> list[tuple[Pinned, Tensor]]:
    """Let host memory have two rows of noise before and after; returns a list of all that will be made, and its noise.
    Two, for then alignment stays as it is."""
    allocate = backend.pinned
    made: list[tuple[Pinned, Tensor]] = []

    def fenced(*shape: int, writer: str) -> Pinned:
        whole = allocate(shape[0] + 4, *shape[1:], writer=writer)
        noise = torch.randint(1, 2**62, (4, *shape[1:]))
        for memory in (whole.host, whole.device):
            memory[:2], memory[-2:] = noise[:2], noise[2:]
        made.append((whole, noise))
        return Pinned(whole.host[2:-2], whole.device[2:-2])

    backend.pinned = fenced  # type: ignore[method-assign]
    return made


def check_canaries(rig: Rig) -> int:
    """Captures and dry runs write nothing, and steps nothing beside what is theirs."""
    backend = rig.new_backend()
    made = fence(backend)
    rows, width, num_dry = 5, 33, 20
    copies = {"audio": Copy("host", capacity=rows * 144)}
    with SpanStager(["audio"], max_rows=rows, row_values=["length"], copies=copies, depth=2, device=backend) as stager:
        audio = torch.randn(rows, width, device=rig.device)
        lengths = torch.tensor([33, 0, 7, 32, 1], device=rig.device)
        out = SpannedOutput({"audio": audio}, {"audio": spangraph.from_lengths(lengths)}, {"length": lengths})
        graph, tail = backend.capture(lambda: stager.stage(out))
        for _ in range(num_dry):
            graph.replay()
        backend.synchronize()
        for whole, _ in made:
            assert not whole.host[2:-2].any(), "a capture or a dry run wrote to the ring"
        for _ in range(5):
            with tail.step() as step:
                graph.replay()
            with step:
                assert {i: row.tolist() for i, row in step.rows().items()} == {
                    i: audio[i, :n].tolist() for i, n in enumerate(lengths.tolist()) if n
                }
        backend.synchronize()
        for whole, noise in made:
            assert torch.equal(torch.cat([whole.host[:2], whole.host[-2:]]), noise), "wrote outside of the ring"
    assert made, "the ring has host memory"
    return num_dry


def make_hammer(rig: Rig) -> Callable[[], None]:
    """What keeps a second stream busy with memory: allocations, fills, copies on the device and to the host. A call
    enqueues some more, if what was enqueued is done."""
    stream, host = rig.new_stream(), rig.pin(torch.zeros(rig.size(16 << 20, 64), dtype=torch.uint8))
    events: list[Event] = []
    sizes = itertools.cycle([len(host) // n for n in (16, 1, 5, 2, 4)])

    def work() -> None:
        scratch = torch.empty(next(sizes), dtype=torch.uint8, device=rig.device).fill_(255)
        host[: len(scratch)].copy_(scratch.clone(), non_blocking=True)

    def hammer() -> None:
        if not events or events[-1].query():
            with rig.use_stream(stream):
                rig.enqueue(work)
                events[:] = [rig.backend.record()]

    return hammer


ROWS, WIDTH = 8, 256


def replay_many(rig: Rig, wait: str) -> int:
    """Steps whose spans, row values and rows are functions of their number, four in flight, all checked."""
    count, backend, device = rig.size(50_000, 250), rig.backend, rig.device
    if wait == "header" and not backend.ordered_header:
        raise NotMeasured("the header is not ordered on this platform")
    stager = SpanStager(
        ["copied", "viewed"],
        max_rows=ROWS,
        row_values=["number"],
        copies={"copied": Copy("host", capacity=ROWS * WIDTH * 4)},
        depth=4,
        device=backend,
        wait=wait,
    )
    number = torch.zeros(1, dtype=torch.int64, device=device)
    row = torch.arange(ROWS, device=device)

    def forward() -> Tail:
        number.add_(1)
        start = (number * 7 + row * 3) % (WIDTH // 2)
        spans = torch.stack([start, start + 1 + (number + row) % (WIDTH // 2)], -1)
        audio = (number + row).to(torch.float32)[:, None].repeat(1, WIDTH)
        outputs = {"copied": audio, "viewed": -audio}
        return stager.stage(SpannedOutput(outputs, {"copied": spans, "viewed": spans}, {"number": number.repeat(ROWS)}))

    def check(step: Step, n: int) -> None:
        starts = [(n * 7 + i * 3) % (WIDTH // 2) for i in range(ROWS)]
        expected = [[start, start + 1 + (n + i) % (WIDTH // 2)] for i, start in enumerate(starts)]
        with step:
            assert step.row_values("number").tolist() == [n] * ROWS, f"step {n} holds {step.row_values('number')}"
            assert step.staged("viewed", (ROWS, 2)).tolist() == expected, f"step {n}: spans"
            copied, viewed = step.rows("copied"), step.rows("viewed")
            for i in range(ROWS) if n % 500 == 0 else (n % ROWS,):
                length = expected[i][1] - expected[i][0]
                assert copied[i].tolist() == [float(n + i)] * length, f"step {n}: row {i} of the copy"
                if n % 500 == 0:  # waits for the device
                    assert viewed[i].tolist() == [-float(n + i)] * length, f"step {n}: row {i} of the view"

    with stager:
        graphs = [backend.capture(forward) for _ in range(4)]
        rig.sync()
        backend.fill(number, 0)  # warm-ups have counted, too
        hammer = make_hammer(rig)
        steps: deque[tuple[Step, int]] = deque()
        for n in range(1, count + 1):
            if n % 100 == 0 and rig.left() < rig.size(45.0, 0.0):  # the tests come after this
                raise NotMeasured(f"out of time after {n} steps, none of them wrong")
            hammer()
            graph, tail = graphs[n % 4]
            with tail.step() as step:
                graph.replay()
            steps.append((step, n))
            if len(steps) == 4:
                check(*steps.popleft())
        while steps:
            check(*steps.popleft())
        rig.sync()
    return int(count)


def run_tests(rig: Rig) -> int:
    """The tests that are marked for a GPU; some of the simulated device's contract without one."""
    names = rig.size(["backend_contract", "compact_op", "stage_op"], ["backend_contract"])
    which = rig.size(["-m", "gpu"], ["-k", "TestSimulated and (steps_are_right or captures_of_one)"])
    # Without the project's options, for which some plugins would be needed.
    options = ["-q", "-rf", "-o", "addopts=", "--import-mode=importlib", "-p", "no:warnings", "-p", "no:cacheprovider"]
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in names]
    command = [sys.executable, "-P", "-m", "pytest", *options, f"--rootdir={ROOT}", *which, *files]
    timeout = max(rig.left(), 10)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"not done within {timeout:.0f} s: {' '.join(command[2:])}") from error
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or passed is None:
        print(done.stdout[-8000:], done.stderr[-4000:], file=sys.stderr)
        failed = re.search(r"^(FAILED|ERROR|E ) .*$", done.stdout, re.MULTILINE)
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise AssertionError(f"{last}, the first: {failed[0] if failed else 'none'}")
    return int(passed[1])


# ---- 2. staging ----------------------------------------------------------------------------------------------------


def section_staging(rig: Rig, table: Table) -> None:
    """What the staging node adds to a replay."""
    many = [(64, 1), (64, 2), (64, 4), (64, 8), *((bs, num) for bs in (1, 8, 256, 1024) for num in (1, 8))]
    for bs, num in rig.size(many, [(3, 2)]):
        with table.attempt(f"bs {bs}, {num} outputs"):
            rig.check_time()
            measure_staging(rig, table, bs, num)


def measure_staging(rig: Rig, table: Table, bs: int, num: int) -> None:
    """The kernel, the plain copy, and a pair of captured copies as one would write it by hand."""
    replays, width = rig.size(32, 2), 16
    names = [f"out{i}" for i in range(num)]
    lengths = torch.randint(0, width + 1, (num, bs), device=rig.device)
    spans = torch.stack([torch.zeros_like(lengths), lengths], -1)
    work = torch.ones(rig.size(1 << 24, 64), device=rig.device)  # 64 MiB: longer than a launch takes on the host
    on_host = [rig.backend.host_buffer(spans), rig.backend.host_buffer(lengths[0])]
    out = SpannedOutput(
        {name: torch.zeros(bs, width, device=rig.device) for name in names},
        dict(zip(names, spans.unbind(), strict=True)),
        {"length": lengths[0]},
    )

    def bare() -> None:
        work.mul_(1.0)

    def pair() -> None:
        work.mul_(1.0)
        on_host[0].copy_(spans, non_blocking=True)
        on_host[1].copy_(lengths[0], non_blocking=True)

    def staged(stager: SpanStager, slot: int | None = None) -> Captured:
        def step() -> Tail:
            work.mul_(1.0)
            return stager.stage(out, slot=slot)

        return rig.capture(step, stager)

    options: dict[str, Any] = {"max_rows": bs, "row_values": ["length"], "depth": replays, "device": rig.backend}
    with SpanStager(names, **options) as by_kernel, SpanStager(names, staging="copy", **options) as by_copy:
        ways = [rig.capture(bare), staged(by_kernel), staged(by_copy, 0), rig.capture(pair)]
        times = rig.time_gpu(ways, rounds=15, replays=replays)
    base, kernel, copy, by_hand = times
    limit = median(by_hand) - median(base)
    target, most = f"<= {show(limit, 'pair')}", limit
    if bs == 64:
        target, most = f"{target}, < 4", min(limit, 4.0)
    for name, own in (("kernel", kernel), ("plain copy", copy), ("pair of copies by hand", by_hand)):
        added = each(lambda mine, bare: mine - bare, own, base)
        goal: dict[str, Any] = {"target": target, "good": lambda us: us <= most} if name == "kernel" else {}
        table.number(f"bs {bs}, {num} outputs: {name}", "us", added, value=median(own) - median(base), **goal)


# ---- 3. host -------------------------------------------------------------------------------------------------------


class Upsample(nn.Module):
    """A small step, so that its own time does not hide the host's."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        return SpannedOutput({"audio": mel.repeat_interleave(4, -1)}, {"audio": spangraph.from_lengths(frames * 4)})


def section_host(rig: Rig, table: Table) -> None:
    """What a step costs the host: the launch, the wait once the device is done, and the cut. The engine that this was
    made for reports 50 to 60 us for its cut, and 60 us for its staging at batch 1."""
    many = [(64, "block"), (64, "spin"), (64, "header"), (1, "block"), (256, "block")]
    for bs, wait in rig.size(many, [(2, "block"), (2, "header")]):
        with table.attempt(f"bs {bs}, wait {wait}"):
            rig.check_time()
            measure_host(rig, table, bs, wait)


def measure_host(rig: Rig, table: Table, bs: int, wait: str) -> None:
    """All parts of a step, one after the other, each when the device is idle."""
    mel = torch.randn(bs, 50, device=rig.device)
    frames = torch.randint(1, 51, (bs,), device=rig.device)
    with spangraph.compile(Upsample(), backend=rig.backend, wait=wait) as compiled:

        def step() -> list[int]:
            marks = [now()]
            ticket = compiled.launch(mel, frames)
            marks.append(now())
            rig.sync()
            marks.append(now())
            ticket.wait()
            marks.append(now())
            rows = ticket.rows("audio")
            marks.append(now())
            tensors = list(rows.values())
            marks.append(now())
            del tensors, rows
            ticket.release()
            marks.append(now())
            rig.sync()
            return marks

        launch, _, waited, cut, tensors, release = rig.time_host(step, 500)
    of, both = f"bs {bs}, wait {wait}", each(lambda a, b: a + b, waited, cut)
    goal: dict[str, Any] = {"target": "< 10 (engine: 50-60)", "good": lambda us: us < 10} if bs == 64 else {}
    table.number(f"{of}: launch", "us", launch)
    table.number(f"{of}: wait when done", "us", waited)
    table.number(f"{of}: cut, lazily", "us", cut)
    table.number(f"{of}: wait and cut", "us", both, **goal)
    table.number(f"{of}: all rows as tensors", "us", tensors)
    table.number(f"{of}: release", "us", release)


# ---- 4. copies -----------------------------------------------------------------------------------------------------


def section_copies(rig: Rig, table: Table) -> None:
    """Rows that a node brings to pinned memory against a padded copy. The link bounds both, so caches play no part."""
    block = torch.ones(rig.size(64 << 20, 64), dtype=torch.uint8, device=rig.device)
    on_host = rig.backend.host_buffer(block)
    whole = rig.capture(lambda: on_host.copy_(block, non_blocking=True))
    [times] = rig.time_gpu([whole], rounds=10, replays=4)
    ceiling = each(lambda us: len(block) / us / 1e3, times)
    table.number("ceiling: a pinned copy of 64 MiB to the host", "GB/s", ceiling)
    for row_bytes in rig.size([512 << 10, 64 << 10, 16 << 10], [1 << 10]):
        with table.attempt(f"rows of {row_bytes >> 10} KiB"):
            rig.check_time()
            measure_copies(rig, table, row_bytes, median(ceiling))


def measure_copies(rig: Rig, table: Table, row_bytes: int, ceiling: float) -> None:
    """All fills of one size of rows, by one graph."""
    bs, width, replays = rig.size(64, 3), row_bytes // 4, 4
    padded = torch.randn(bs, width, device=rig.device)
    spans = torch.zeros(bs, 2, dtype=torch.int64, device=rig.device)
    rows_host, spans_host = rig.backend.host_buffer(padded), rig.backend.host_buffer(spans)

    def copy_padded() -> None:
        rows_host.copy_(padded, non_blocking=True)
        spans_host.copy_(spans, non_blocking=True)

    copies = {"audio": Copy("host", capacity=bs * row_bytes)}
    with SpanStager(["audio"], max_rows=bs, copies=copies, depth=replays, device=rig.backend) as stager:
        out = SpannedOutput({"audio": padded}, {"audio": spans})
        compact = rig.capture(lambda: stager.stage(out), stager)
        whole = rig.capture(copy_padded)
        tail = compact.tail
        assert tail is not None, "it stages"

        def by_node() -> list[int]:
            began = now()
            with tail.step() as step:
                compact.graph.replay()
            with step:
                list(step.rows().values())
                return [began, now()]

        def by_slices() -> list[int]:
            began = now()
            whole.graph.replay()
            rig.backend.record().synchronize()
            list(map(lambda row, ends: row[ends[0] : ends[1]], rows_host, spans_host.tolist()))
            return [began, now()]

        for fill in (10, 25, 50, 75, 100):
            rig.check_time()
            rig.sync()
            lengths = [max(1, width * fill // 100 - (i % 4 if fill < 100 else 0)) for i in range(bs)]
            spans.copy_(torch.tensor([[0, length] for length in lengths]))
            rig.sync()
            with tail.step() as step:
                compact.graph.replay()
            with step:
                for i, length in enumerate(lengths):
                    assert torch.equal(step.rows()[i], padded[i, :length].cpu()), f"row {i} at {fill} %"
            times = rig.time_gpu([compact, whole], rounds=10, replays=replays)
            times += [rig.time_host(way, 40)[0] for way in (by_node, by_slices)]
            add_fill(table, row_bytes, fill, sum(lengths) * 4, times, ceiling)


def add_fill(table: Table, row_bytes: int, fill: int, num_bytes: int, times: list[Samples], ceiling: float) -> None:
    """The rows of one fill: of the node and the padded copy on the device, and of whole steps on the host."""
    node, copy, node_host, copy_host = times
    of, least, most = f"{row_bytes >> 10} KiB, {fill} %", 0.85 * ceiling, median(copy)
    fast: dict[str, Any] = {}
    if row_bytes >= 64 << 10:
        fast = {"target": f">= {show(least, '85 %', 'GB/s')}", "good": lambda speed: speed >= least}
    faster: dict[str, Any] = {}
    if fill < 80:
        faster = {"target": f"< {show(most, 'padded')}", "good": lambda us: us < most}
    table.number(f"{of}: valid bytes", "GB/s", each(lambda us: num_bytes / us / 1e3, node), **fast)
    table.number(f"{of}: copied at the tail", "us", node, **faster)
    table.number(f"{of}: padded copy", "us", copy)
    table.number(f"{of}: step until rows are on the host", "us", node_host)
    table.number(f"{of}: the same, padded copy and slices", "us", copy_host)


# ---- 5. end to end -------------------------------------------------------------------------------------------------

HOP = 256


class Vocoder(nn.Module):
    """Convolutions over frames, and a last one that makes `HOP` samples of each."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        body: list[nn.Module] = []
        for _ in range(layers):
            body += [nn.Conv1d(channels, channels, 7, padding=3), nn.LeakyReLU(0.1)]
        self.body = nn.Sequential(*body)
        self.head = nn.Conv1d(channels, HOP, 1)

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def synthesize(self, mel: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Padded samples `[bs, frames * HOP]`, and how many of each row are real."""
        return self.head(self.body(mel)).transpose(1, 2).flatten(1), frames * HOP

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        audio, samples = self.synthesize(mel, frames)
        return SpannedOutput({"audio": audio}, {"audio": spangraph.from_lengths(samples)})


@dataclass
class Way:
    """A way to run the step: `launch` is what the launching thread does before it may go on, `read` makes the rows of
    a launch, on the host, and returns how many samples they have."""

    name: str
    launch: Callable[[], Any]
    read: Callable[[Any], int]
    depth: int = 1
    step_ms: list[float] = field(default_factory=list)
    launch_us: list[float] = field(default_factory=list)

    def run(self, steps: int) -> int:
        """Run steps, `depth` of them in flight; returns how many samples they made."""
        pending: deque[Any] = deque()
        samples, began = 0, now()
        for _ in range(steps):
            launched = now()
            pending.append(self.launch())
            self.launch_us.append((now() - launched) / 1e3)
            if len(pending) == self.depth:
                samples += self.read(pending.popleft())
        while pending:
            samples += self.read(pending.popleft())
        self.step_ms.append((now() - began) / 1e6 / steps)
        return samples


@torch.no_grad()
def section_end_to_end(rig: Rig, table: Table) -> None:
    """A vocoder's step of about 10 ms, from inputs on the device to rows on the host, in seven ways."""
    bs, channels, width = rig.size((64, 256, 400), (2, 4, 6))
    mel = torch.randn(bs, channels, width, device=rig.device)
    lengths = [1 + (width - 1) * (25 + 75 * i // bs) // 100 for i in range(bs)]
    frames = torch.tensor(lengths, device=rig.device)
    few = Vocoder(channels, 8).to(rig.device).eval()
    [times] = rig.time_gpu([rig.capture(lambda: few.synthesize(mel, frames))], rounds=5, replays=4)
    layers = max(1, min(200, round(8 * 10_000 / times[0]))) if times else 1
    model = Vocoder(channels, layers).to(rig.device).eval().requires_grad_(False)
    steps, rounds = rig.size(20, 1), rig.size(5, 1)
    with contextlib.ExitStack() as stack:
        ways = make_ways(rig, stack, model, mel, frames)
        for way in ways:
            found = way.run(rig.size(3, 1))
            assert found == rig.size(3, 1) * sum(lengths) * HOP, f"{way.name}: {found} samples"
            way.step_ms.clear()
            way.launch_us.clear()
        gc.collect()
        gc.disable()
        try:
            for number in range(rounds):
                if number and rig.left() < 0:
                    break
                for way in ways:
                    rig.sync()
                    way.run(steps)
        finally:
            gc.enable()
    table.number(f"layers of {channels} channels", "", [float(layers)] if rig.is_gpu else None)
    for way in ways:
        times = way.step_ms if rig.is_gpu else None
        table.number(f"{way.name}: step", "ms", times)
        table.number(f"{way.name}: launch", "us", way.launch_us if rig.is_gpu else None)
        table.number(f"{way.name}: samples", "M/s", each(lambda ms: sum(lengths) * HOP / ms / 1e3, times))
    for depth in (1, 2):
        view, host = (way.step_ms if rig.is_gpu else None for way in ways[2 * depth + 1 : 2 * depth + 3])
        less = each(lambda a, b: a - b, view, host)
        table.number(f"depth {depth}: what a host copy saves", "ms", less, target="> 0", good=lambda ms: ms > 0)


def make_ways(rig: Rig, stack: contextlib.ExitStack, model: Vocoder, mel: Tensor, frames: Tensor) -> list[Way]:
    """All of them, for one batch; `stack` closes what they hold."""
    static = mel.clone(), frames.clone()
    graph, (padded, samples) = rig.backend.capture(lambda: model.synthesize(*static))
    rows_host, samples_host = rig.backend.host_buffer(padded), rig.backend.host_buffer(samples)
    side = rig.new_stream()

    def eager_with_items() -> list[Tensor]:
        audio, samples = model.synthesize(mel, frames)
        return [audio[i, : int(samples[i].item())] for i in range(len(audio))]

    def to_host(rows: list[Tensor]) -> int:
        return sum(len(row.cpu()) for row in rows)

    def read_list(out: tuple[Tensor, Tensor]) -> int:
        return to_host([out[0][i, :end] for i, end in enumerate(out[1].tolist())])

    def launch_graph() -> Event:
        for own, given in zip(static, (mel, frames), strict=True):
            rig.backend.copy_in(own, given)
        graph.replay()
        rig.enqueue(lambda: rows_host.copy_(padded, non_blocking=True))
        rig.enqueue(lambda: samples_host.copy_(samples, non_blocking=True))
        return rig.backend.record()

    def read_graph(done: Event) -> int:
        done.synchronize()
        return sum(len(rows_host[i, :end]) for i, end in enumerate(samples_host.tolist()))

    def read_copied(step: Step) -> int:
        with step:
            return sum(len(row) for row in step.rows("audio").values())

    def read_views(step: Step) -> int:
        step.wait()
        with rig.use_stream(side), step:
            rows = [
                own[: len(row)].copy_(row, non_blocking=True)
                for own, row in zip(rows_host, step.rows("audio").values(), strict=True)
            ]
            rig.backend.record().synchronize()
            return sum(map(len, rows))

    ways = [
        Way("(a) eager, item() in forward", eager_with_items, to_host),
        Way("(b) eager, tolist() after", lambda: model.synthesize(mel, frames), read_list),
        Way("(c) graph, padded copy", launch_graph, read_graph),
    ]
    for depth in (1, 2):
        for name, copies, read in (("view, copy on a stream", "view", read_views), ("host copy", "host", read_copied)):
            options: dict[str, Any] = {"depth": depth, "copies": {"audio": copies}}
            run = stack.enter_context(spangraph.compile(model, backend=rig.backend, **options))
            launch = lambda run=run: run.launch(mel, frames)
            ways.append(Way(f"(d) {name}, depth {depth}", launch, read, depth))
    return ways


# ---- the whole -----------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Rig, Table], None]] = {
    "correctness": section_correctness,
    "staging": section_staging,
    "host": section_host,
    "copies": section_copies,
    "end-to-end": section_end_to_end,
}
# The part of the budget that is over when a section has to end; what one leaves is the next ones'.
ENDS = {"correctness": 0.62, "staging": 0.72, "host": 0.78, "copies": 0.87, "end-to-end": 1.0}
# Seconds from the end of a section's time until its process is ended.
GRACE = 12.0


def run_isolated(name: str, args: argparse.Namespace, table: Table, seconds: float) -> None:
    """Run a section in a process of its own, and take over its rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        options = ["--device", args.device, "--only", name, "--budget", f"{seconds:.1f}", "--out", str(out)]
        command = [sys.executable, str(Path(__file__).resolve()), "--no-isolate", *options]
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False, timeout=seconds + GRACE)
            code: int | str = done.returncode
        except subprocess.TimeoutExpired:
            code = f"none within {seconds + GRACE:.0f} s"
        rows = [Row(**row) for row in json.loads(out.read_text())["rows"]] if out.exists() else []
    table.rows += rows
    if code not in (0, 1) or not rows:
        raise RuntimeError(f"the section's process ended early, with exit status {code}, after {len(rows)} rows")


def names_of(text: str) -> list[str]:
    """The sections that `--only` names."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(SECTIONS)):
        raise argparse.ArgumentTypeError(f"{unknown}: expected some of {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=names_of, default=list(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=Path("gpu-suite.json"))
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, help="a process a section; default on CUDA")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is available to torch; --device cpu runs everything, but measures nothing")
    isolate = args.device == "cuda" if args.isolate is None else args.isolate
    table = Table(args.out, describe_machine(args.device))
    print(", ".join(f"{name} {value}" for name, value in table.about.items()))
    print(Row("section", "what", "median", "unit", "target", "verdict"))
    for name in args.only:
        table.section, printed, started = name, len(table.rows), time.monotonic()
        deadline = STARTED + args.budget * ENDS[name] / ENDS[args.only[-1]]
        with table.attempt("the whole section"):
            if deadline - started < 3:
                raise NotMeasured("out of time")
            if isolate:
                run_isolated(name, args, table, deadline - started)
            else:
                SECTIONS[name](Rig(args.device, deadline), table)
        table.seconds[name] = round(time.monotonic() - started, 1)
        print(*table.rows[printed:], sep="\n", flush=True)
    table.save()
    counts = {
        verdict: sum(row.verdict == verdict for row in table.rows) for verdict in (OK, MISSED, NOT_MEASURED, FAILED)
    }
    print(
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items()), f"in {time.monotonic() - STARTED:.0f} s"
    )
    return int(counts[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
