"""A serving loop under random arrivals at full depth, for as long as asked: are all rows right, and is memory flat?

    python benchmarks/soak.py --seconds 600 --seed 1

One thread launches batches of random rows and lengths as they arrive, on two walks and through buckets; some fit none
and run eagerly, some evict the graph of another. Two threads read them: at once or late, as views, copies or owned
rows; rows are withheld in flight or by a stop check, steps cancelled, or dropped unread. Every row that is delivered is
compared with what must come of it, element by element. Prints what happened and what memory did, and exits with 1 if a
row was wrong, a slot was lost or memory grew.

It runs on the simulated device, or with --device cuda on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import spangraph
from spangraph import Compiled, SpannedOutput, Step, StopCheck, Walk
from spangraph.testing import SimulatedDevice

HOP = 16
BATCHES, FRAMES = (1, 2, 4, 8), (8, 24)
EOS = 7  # a row whose token is this stops, and its chunk is withheld
# Shares of what happens to a step.
CANCELLED, DROPPED, OWNED, LATE = 0.03, 0.03, 0.4, 0.3
# Share of the batches that are small, and of those that fit no bucket: each of these is slow.
RARE = 0.02
# Above this, memory that is still growing after the first quarter of the run is a leak: a tenth of what leaking one
# output a step would take in a minute.
MAX_GROWTH = 24 << 20


class Vocoder(nn.Module):
    """`chunk` cuts by lengths that the caller knows; `voiced` by what the model finds; both have a token a row."""

    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.tensor(0.5))

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, mel: Tensor, frames: Tensor, walk: str) -> SpannedOutput:
        audio = (mel * self.gain).repeat_interleave(HOP, -1)
        spans = spangraph.from_lengths(frames * HOP) if walk == "chunk" else spangraph.from_mask(audio > 0)
        return SpannedOutput({"audio": audio}, {"audio": spans}, {"token": mel[:, 0].to(torch.int64) % 16})


@dataclass
class Arrival:
    """A batch, and what must come of it."""

    walk: str
    mel: Tensor
    frames: Tensor
    ids: list[str]
    withheld: set[str] = field(default_factory=set)

    @staticmethod
    def random(chance: random.Random, number: int) -> Arrival:
        """1 to 10 rows of 0 to 24 frames: mostly 3 to 8; more fit no bucket, and for fewer a graph must give way."""
        few, many = chance.randrange(1, 3), chance.randrange(9, 11)
        num_rows = chance.choices((few, chance.randrange(3, 9), many), (RARE, 1 - 2 * RARE, RARE))[0]
        longest = chance.randrange(1, FRAMES[-1] + 1)
        frames = torch.tensor([chance.randrange(longest + 1) for _ in range(num_rows)])
        seeds = torch.tensor([chance.randrange(1, 1 << 20) for _ in range(num_rows)], dtype=torch.float32)
        # Positive up to the row's length, negative behind: so both walks find the same rows.
        position = torch.arange(longest)
        mel = torch.where(position < frames[:, None], seeds[:, None] + position, -1.0)
        return Arrival(chance.choice(("chunk", "voiced")), mel, frames, [f"{number}.{i}" for i in range(num_rows)])

    def row(self, position: int) -> Tensor | None:
        """What must be delivered of a row, by plain arithmetic."""
        mel, n = self.mel[position], int(self.frames[position])
        if n == 0 or self.ids[position] in self.withheld or int(mel[0]) % 16 == EOS:
            return None
        return (mel[:n] * 0.5).repeat_interleave(HOP)


def stop_at_eos(values: Any) -> StopCheck:
    """Rows whose token says so end here, and what they have made of it is no audio."""
    stops = {row_id for row_id, row in values.items() if row["token"] == EOS}
    return StopCheck(stops=stops, withheld=stops)


class Soak:
    """The loop.

    Attributes:
        figures: what happened.
        errors: what must not have happened.
    """

    def __init__(self, seed: int, depth: int, device: str) -> None:
        self.chance = random.Random(seed)
        self.figures: Counter[str] = Counter()
        self.errors: list[str] = []
        self.run: Compiled = spangraph.compile(
            Vocoder().to("cpu" if device == "simulated" else device),
            walk="chunk",
            walks={"chunk": Walk(copies={"audio": "host"}), "voiced": Walk()},
            backend=SimulatedDevice() if device == "simulated" else None,
            depth=depth,
            buckets={"batch": BATCHES, "frames": FRAMES},
            dims={"mel": {0: "batch", 1: "frames"}, "frames": {0: "batch"}},
            pad_values={"mel": -1.0},
            max_graphs=len(BATCHES) * len(FRAMES) * (1 + depth) - depth,  # one signature less than all
            stop_check=stop_at_eos,
        )
        self._steps: queue.Queue[tuple[Arrival, Step, float] | None] = queue.Queue()
        self._lock = threading.Lock()

    def go(self, seconds: float) -> Iterator[float]:
        """Run; yields every second, with how much of the time is over."""
        readers = [threading.Thread(target=self._read, args=(self.chance.getrandbits(32),)) for _ in range(2)]
        for reader in readers:
            reader.start()
        began = last = time.monotonic()
        number = 0
        try:
            while (now := time.monotonic()) < began + seconds and not self.errors:
                number += 1
                self._launch(number)
                if self.chance.random() < 0.05:
                    time.sleep(self.chance.expovariate(1 / 0.005))  # nothing arrives for a while
                if now - last > 1:
                    last = now
                    yield (now - began) / seconds
        finally:
            for _ in readers:
                self._steps.put(None)
            for reader in readers:
                reader.join()
        yield 1.0

    def _launch(self, number: int) -> None:
        arrival = Arrival.random(self.chance, number)
        step = self.run.launch(arrival.mel, arrival.frames, walk=arrival.walk, rows=arrival.ids, wait=True, timeout=60)
        for row_id in arrival.ids:
            if self.chance.random() < 0.05:
                arrival.withheld.add(row_id)
                step.withhold(row_id)
        fate = self.chance.random()
        if fate < CANCELLED:
            step.cancel()
        elif fate > CANCELLED + DROPPED:  # else the only reference is dropped here
            delay = self.chance.expovariate(1 / 0.002) if self.chance.random() < LATE else 0.0
            self._steps.put((arrival, step, time.monotonic() + delay))
        self.figures["launches"] += 1
        self.figures["cancelled"] += fate < CANCELLED
        self.figures["dropped"] += CANCELLED < fate <= CANCELLED + DROPPED

    def _read(self, seed: int) -> None:
        chance = random.Random(seed)
        while (item := self._steps.get()) is not None:
            arrival, step, due = item
            del item
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                self._compare(arrival, step, is_owned=chance.random() < OWNED)
            except Exception as error:  # noqa: BLE001 - whatever it is, the run ends and says so
                self.errors.append(f"{arrival.walk} {arrival.ids}: {type(error).__name__}: {error}")
            del step

    def _compare(self, arrival: Arrival, step: Step, *, is_owned: bool) -> None:
        with contextlib.ExitStack() as stack:
            rows = step.rows("audio").own() if is_owned else step.rows("audio")
            if is_owned:
                step.release()
            else:
                stack.enter_context(step)
            found = dict(rows.items())
            expected = {i: row for p, i in enumerate(arrival.ids) if (row := arrival.row(p)) is not None}
            wrong = [i for i in arrival.ids if not _is_same(found.get(i), expected.get(i))]
        if wrong or list(found) != list(expected):
            self.errors.append(f"step {step.generation}, {arrival.walk}: rows {wrong or list(found)} are wrong")
        with self._lock:
            self.figures["rows compared"] += len(expected)
            self.figures["owned"] += is_owned

    def lost_slots(self) -> int:
        """Slots that nobody has given back, once all is done."""
        gc.collect()
        self.run.close()
        ring = self.run._ring
        return ring.num_slots - len(ring._free) + ring.depth - len(ring._free_copies) + len(ring._live)


def _is_same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.equal(found.cpu(), expected)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--device", default="simulated")
    parser.add_argument("--verbose", action="store_true", help="print memory, second by second")
    args = parser.parse_args(argv)
    soak = Soak(args.seed, args.depth, args.device)
    memory: list[tuple[float, int, int]] = []
    began = time.perf_counter()
    for share in soak.go(args.seconds):
        memory.append((share, resident(), soak.run.memory().pinned))
    settled = [entry for entry in memory if entry[0] >= 0.25] or memory
    growth = settled[-1][1] - settled[0][1]
    pinned = [entry[2] for entry in settled]
    counts = soak.run.counts
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {args.device}, depth {args.depth}")
    print(soak.run.statistics())
    figures = {
        **soak.figures,
        "rows withheld": counts.withheld,
        "evictions": counts.evictions,
        "wrong": len(soak.errors),
        "slots lost": soak.lost_slots(),
        "resident at a quarter, MB": settled[0][1] >> 20,
        "resident at the end, MB": settled[-1][1] >> 20,
        "growth, KB": growth >> 10,
        "pinned, least, KB": min(pinned) >> 10,
        "pinned, most, KB": max(pinned) >> 10,
        "seconds": round(time.perf_counter() - began),
    }
    if args.verbose:
        for share, rss, pinned_bytes in memory:
            print(f"{share:5.0%} {rss >> 10:>10,} KB resident {pinned_bytes >> 10:>8,} KB pinned")
    for name, figure in figures.items():
        print(f"{name:28} {figure:>12,}")
    for error in soak.errors[:5]:
        print(error)
    return int(bool(soak.errors) or figures["slots lost"] > 0 or growth > MAX_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
