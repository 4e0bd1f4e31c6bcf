"""The implementations of compaction and of `gather` against what their contracts say, byte by byte over whole rings.

`compact_ref` and `gather_ref` run in the test's process. The Triton kernels run under Triton's interpreter, which has
to be switched on before Triton is imported, so this file is also the script that runs them over all scenarios in a
process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import spangraph.kernels.gather as gathering
from spangraph.kernels.compact import COPY_WORDS, compact, compact_ref
from spangraph.kernels.gather import Crop, gather_ref
from spangraph.kernels.stage import CONTROL_WORDS

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

GRAPH = 7
NUM_SLOTS = 3
INT64 = torch.iinfo(torch.int64)
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128),
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# What a span may hold besides good numbers: all of these make its row bad.
WILD = [INT64.min, INT64.min + 1, -(2**32), -1, 2**31, 2**32, 2**62, INT64.max]
# Samples that round to even, saturate, vanish or are no numbers; the third group meets a fused multiply-add.
SAMPLES = [
    *(0.0, -0.0, 1.0, -1.0, 1.5, -7.0, 1e-40, 1e30, 3e38, -3e38, math.inf, -math.inf, math.nan, math.nan),
    *((n + 0.5) / 32767 for n in range(-4, 4)),
    *((n + 0.5) / 32767 for n in range(9000, 9100, 7)),
]


@dataclass(frozen=True)
class Source:
    """One output: its trailing shape, spanned dims, and how it lies in memory.

    Attributes:
        layout: "packed", "transposed" (its last dim lies outermost), "sliced" (every other item of the last dim, from
            the second on), "shifted" (by one item), "expanded" (one row for all), "flat" (one item for all of a dim),
            "conj" or "neg" (lazily so).
        room: units more than it needs.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...] = (1,)
    dtype: torch.dtype = torch.float32
    layout: str = "packed"
    max_spans: int = 1
    cast: int = 0
    ring: int = 0
    room: int = 5


@dataclass(frozen=True)
class Scenario:
    """One launch.

    Attributes:
        spans: "random"; "full" and "empty" rows; "bad", where about every second row is.
        record: changes to (generation, num_rows, graph, copy_slot).
        patch: constants of the kernels' module.
    """

    sources: tuple[Source, ...]
    rows: int = 4
    num_rows: int = 3
    spans: str = "random"
    cursor: int = 0
    num_records: int = 4
    generation_error: int = 0
    graph: int = GRAPH
    slot: int = 1
    is_dry: bool = False
    patch: dict[str, int] = field(default_factory=dict)


AUDIO = Source((40,))
PCM = Source((45,), cast=1)
PAIR = (AUDIO, PCM)
SMALL = {"_TILE_BYTES": 64, "_CHUNK_BYTES": 128}


def _grid() -> Iterator[tuple[str, Scenario]]:
    # All item types, each with another layout, batch, number of spans and dims; chunks so small that a crop has some.
    layouts = ("packed", "transposed", "sliced", "shifted", "expanded", "flat")
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((37,), (1,)),
        ((11, 4), (1,)),
        ((3, 13), (2,)),
        ((2, 5, 7), (2, 3)),
        ((6, 7, 2), (2, 1)),
        ((1, 9, 1, 3), (4, 2)),
        ((3, 3, 3), (3, 1, 2)),
    ]
    for i, dtype in enumerate(DTYPES):
        for k in range(2):
            shape, dims = shapes[(i + 4 * k) % len(shapes)]
            layout = layouts[(i + k) % len(layouts)]
            source = Source(shape, dims, dtype, layout, 1 + (i + k) % 3 * k)
            name = f"{str(dtype).removeprefix('torch.')}-{layout}-{len(shape)}d"
            yield name, Scenario((source,), rows=2 + k, num_rows=2, patch=SMALL)


SCENARIOS = (
    dict(_grid())
    | {f"pcm-{dtype}": Scenario((replace(PCM, dtype=dtype),), patch=SMALL) for dtype in FLOATS}
    | {
        # Several outputs, in two rings, with and without casts.
        "outputs": Scenario((AUDIO, PCM, Source((6, 5), (1, 2), torch.int8, max_spans=2), replace(AUDIO, ring=1))),
        "pcm-of-spans": Scenario((Source((3, 30), (2,), torch.float16, "transposed", 3, 1), PCM), patch=SMALL),
        "conj": Scenario((Source((9,), dtype=torch.complex64, layout="conj"),)),
        "conj-128": Scenario((Source((9,), dtype=torch.complex128, layout="conj"),)),
        "neg": Scenario((Source((9,), layout="neg"),)),
        "pcm-neg": Scenario((replace(PCM, layout="neg"),)),
        # Bounds of shapes.
        "last-dim-of-1": Scenario((Source((7, 1), (2,)), Source((1,), (1,), torch.uint8))),
        "no-items": Scenario((Source((0, 5), (2,)), Source((5, 0), (2,)), Source((0,), cast=1))),
        "ten-million": Scenario(
            (Source((10_000_000,), dtype=torch.int8, layout="shifted"),),
            rows=1,
            num_rows=1,
            spans="full",
            patch={"_TILE_BYTES": 2**20, "_CHUNK_BYTES": 2**20},
        ),
        # Chunks grow where there would be too many CTAs.
        "long-rows": Scenario((Source((600,)),), patch={"_TILE_BYTES": 64, "_CHUNK_BYTES": 64, "_MAX_CTAS": 16}),
        # More rows than a vector of them, and a number of them that is no power of two.
        "many-rows": Scenario((replace(AUDIO, max_spans=2),), rows=19, num_rows=18, patch={"_ROW_LANES": 8}),
        "one-row": Scenario(PAIR, rows=1, num_rows=1),
        "empty-batch": Scenario(PAIR, rows=0, num_rows=0),
        # Real rows: none, all, more than there are, fewer than none.
        "no-rows": Scenario(PAIR, num_rows=0),
        "all-rows": Scenario(PAIR, num_rows=4),
        "more-rows-than-the-batch": Scenario(PAIR, num_rows=9),
        "huge-number-of-rows": Scenario(PAIR, num_rows=INT64.max),
        "negative-number-of-rows": Scenario(PAIR, num_rows=INT64.min),
        # Spans.
        "full": Scenario(PAIR, spans="full"),
        "empty": Scenario(PAIR, spans="empty"),
        **{f"bad-{i}": Scenario((replace(AUDIO, max_spans=1 + i % 2), PCM), spans="bad", rows=5) for i in range(6)},
        **{
            f"bad-2d-{i}": Scenario((Source((6, 7), (2, 1), torch.int16, max_spans=2),), spans="bad", rows=5)
            for i in range(6)
        },
        # Room: just enough, one unit short (alone among others), none.
        "just-fits": Scenario((replace(AUDIO, room=0), replace(PCM, room=0)), rows=5, num_rows=4),
        "one-unit-short": Scenario((AUDIO, replace(AUDIO, room=-1), PCM), rows=5, num_rows=4),
        "pcm-one-unit-short": Scenario((replace(PCM, room=-1), AUDIO), rows=5, num_rows=4),
        "no-room": Scenario((replace(AUDIO, room=-(10**6)),)),
        "no-room-for-nothing": Scenario((replace(AUDIO, room=0),), spans="empty"),
        "bad-rows-take-no-room": Scenario((replace(AUDIO, room=0),), spans="bad", rows=7, num_rows=7),
        # Dry runs.
        "dry-old-generation": Scenario(PAIR, generation_error=-1, is_dry=True),
        "dry-future-generation": Scenario(PAIR, generation_error=1, is_dry=True),
        "dry-other-graph": Scenario(PAIR, graph=GRAPH + 1, is_dry=True),
        "dry-graph-of-the-same-low-half": Scenario(PAIR, graph=GRAPH + 2**32, is_dry=True),
        "dry-slot-below": Scenario(PAIR, slot=-1, is_dry=True),
        "dry-slot-above": Scenario(PAIR, slot=NUM_SLOTS, is_dry=True),
    }
    | {f"generation-{n}": Scenario(PAIR, cursor=2**n - 1, num_records=3, slot=2) for n in (31, 32, 53, 62)}
)


@dataclass
class Case:
    """A scenario's tensors, with random content in every byte that the launch should not touch."""

    scenario: Scenario
    rng: random.Random

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        self.sources = [self._source(source) for source in scenario.sources]
        self.spans = [self._spans(source) for source in scenario.sources]
        self.ring_of = [source.ring for source in scenario.sources]
        ends = [16 * self.rng.randrange(3) for _ in range(max(self.ring_of) + 1)]
        self.firsts: list[int] = []
        self.capacities: list[int] = []
        for j, source in enumerate(scenario.sources):
            self.firsts.append(ends[source.ring])
            self.capacities.append(max(0, sum(map(len, self._row_bytes(j))) + 16 * source.room))
            ends[source.ring] += self.capacities[-1] + 16 * self.rng.randrange(2)
        self.rings = [self._random(torch.int64, (NUM_SLOTS + 2, end // 8 + 2)) for end in ends]
        self.status = self._random(torch.int64, (scenario.rows, len(self.sources), COPY_WORDS))
        self.cursor = torch.tensor([scenario.cursor])
        self.control = torch.zeros(scenario.num_records, CONTROL_WORDS, dtype=torch.int64)
        record = [scenario.cursor + 1 + scenario.generation_error, -5, scenario.num_rows, GRAPH, scenario.slot]
        self.control[scenario.cursor % scenario.num_records] = torch.tensor(record)

    def arguments(self) -> dict[str, Any]:
        sources = self.scenario.sources
        return {
            "cursor": self.cursor,
            "control": self.control,
            "sources": self.sources,
            "spans": self.spans,
            "rings": [ring[1:-1] for ring in self.rings],
            "status": self.status,
            "ring_of": self.ring_of,
            "firsts": self.firsts,
            "capacities": self.capacities,
            "dims": [dim for source in sources for dim in source.dims],
            "max_spans": [source.max_spans for source in sources],
            "casts": [source.cast for source in sources],
        }

    def _random(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Any bytes, so also NaNs of all kinds; for casts see `_samples`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        limit = 2 if dtype == torch.bool else 256
        return torch.randint(limit, (num_bytes,), dtype=torch.uint8, generator=self.generator).view(dtype).view(shape)

    def _samples(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        spread = torch.rand(math.prod(shape), generator=self.generator).mul_(2.2).sub_(1.1).tolist()
        values = [self.rng.choice(SAMPLES) if self.rng.random() < 0.5 else value for value in spread]
        return torch.tensor(values, dtype=torch.float64).to(dtype).view(shape)

    def _source(self, source: Source) -> Tensor:
        make = self._samples if source.cast else self._random
        shape = (self.scenario.rows, *source.shape)
        *outer, last = shape
        if source.layout == "transposed":
            return make(source.dtype, (last, *outer)).movedim(0, -1)
        if source.layout == "sliced":
            return make(source.dtype, (*outer, 2 * last + 1))[..., 1::2]
        if source.layout == "shifted":
            return make(source.dtype, (math.prod(shape) + 1,))[1:].view(shape)
        if source.layout == "expanded":
            return make(source.dtype, (1, *source.shape)).expand(shape)
        if source.layout == "flat":
            return make(source.dtype, (*outer, 1)).expand(shape)
        packed = make(source.dtype, shape)
        return {"packed": packed, "conj": packed.conj(), "neg": torch._neg_view(packed)}[source.layout]  # pyright: ignore

    def _spans(self, source: Source) -> Tensor:
        kind, rng = self.scenario.spans, self.rng
        words: list[int] = []
        for row in range(self.scenario.rows):
            own: list[int] = []
            for _ in range(source.max_spans):
                for dim in source.dims:
                    size = source.shape[dim - 1]
                    ends = {"full": [0, size], "empty": [size, size]}.get(kind)
                    own += ends or sorted(rng.choices(range(size + 1), k=2))
            if row >= self.scenario.num_rows and rng.random() < 0.5:  # else stale ones, as good as any
                own = rng.choices(WILD, k=len(own))
            elif kind == "bad" and rng.random() < 0.5:
                i = rng.randrange(len(own))
                size = source.shape[source.dims[i // 2 % len(source.dims)] - 1]
                own[i] = rng.choice(WILD)
                if rng.random() < 0.4:
                    own[i - i % 2 : i - i % 2 + 2] = rng.choice(
                        [
                            *((size, size + 1), (-1, 0), (1, 0), (INT64.min, INT64.max), (INT64.max, INT64.min)),
                            *((INT64.max - size, INT64.max), (-(2**32), size - 2**32), (2**32, 2**32 + 1)),
                        ]
                    )
            words += own
        many = (source.max_spans,) if source.max_spans > 1 else ()
        several = (len(source.dims),) if len(source.dims) > 1 else ()
        return torch.tensor(words, dtype=torch.int64).view(self.scenario.rows, *many, *several, 2)

    def crops(self, j: int) -> list[list[Tensor]]:
        """The crops of each real row, none for a bad one."""
        source = self.scenario.sources[j]
        rows: list[list[Tensor]] = []
        for row in range(max(0, min(self.scenario.num_rows, self.scenario.rows))):
            numbers = self.spans[j][row].flatten().tolist()
            crops: list[Tensor] = []
            for i in range(0, len(numbers), 2 * len(source.dims)):
                crop = self.sources[j][row]
                for k, dim in enumerate(source.dims):
                    start, end = numbers[i + 2 * k : i + 2 * k + 2]
                    if not 0 <= start <= end <= source.shape[dim - 1]:
                        break
                    crop = crop.narrow(dim - 1, start, end - start)
                else:
                    crops.append(crop.resolve_conj().resolve_neg().contiguous())
            rows.append(crops if len(crops) == source.max_spans else [])
        return rows

    def _row_bytes(self, j: int) -> list[bytes]:
        rows: list[bytes] = []
        for crops in self.crops(j):
            text = b""
            for crop in crops:
                own = _pcm(crop) if self.scenario.sources[j].cast else _bytes(crop)
                text += own + bytes(-len(own) % 16)
            rows.append(text)
        return rows

    def expect(self) -> tuple[list[bytes], list[list[list[int]]]]:
        """The rings and the status of the real rows afterwards, from the contract alone."""
        rings = [bytearray(_bytes(ring)) for ring in self.rings]
        num_rows = max(0, min(self.scenario.num_rows, self.scenario.rows))
        status = self.status[:num_rows].tolist()
        if self.scenario.is_dry:
            return list(map(bytes, rings)), status
        for j, source in enumerate(self.scenario.sources):
            rows = self._row_bytes(j)
            fits = sum(map(len, rows)) <= self.capacities[j]
            slot_bytes = self.rings[source.ring].size(1) * 8
            at = (1 + self.scenario.slot) * slot_bytes + self.firsts[j]
            offset = 0
            for row, text in enumerate(rows):
                nans = sum(int(crop.isnan().sum()) for crop in self.crops(j)[row]) if source.cast and fits else 0
                status[row][j] = [self.scenario.cursor + 1, offset // 16 if fits else -1, nans]
                if fits:
                    rings[source.ring][at + offset : at + offset + len(text)] = text
                offset += len(text)
        return list(map(bytes, rings)), status


def _bytes(tensor: Tensor) -> bytes:
    packed = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return packed.flatten().view(torch.uint8).numpy().tobytes()


def _pcm(crop: Tensor) -> bytes:
    """The definition, sample by sample: every product of two such floats is exact in Python's, and rounded once."""
    samples: list[int] = []
    for value in crop.to(torch.float32).flatten().tolist():
        clamped = 0.0 if math.isnan(value) else min(max(value, -1.0), 1.0)
        samples.append(round(struct.unpack("f", struct.pack("f", clamped * 32767))[0]))
    return struct.pack(f"{len(samples)}h", *samples)


def _check_scenario(name: str, run: Callable[..., None]) -> None:
    scenario = SCENARIOS[name]
    case = Case(scenario, random.Random(name))
    rings, status = case.expect()
    before = case.status.clone(), case.control.clone(), [_bytes(source) for source in case.sources]
    arguments = case.arguments()
    run(**arguments, graph=scenario.graph)
    for i, ring in enumerate(rings):
        found = _bytes(case.rings[i])
        wrong = [k for k in range(len(ring)) if ring[k] != found[k]] if ring != found else []
        assert not wrong, (
            f"ring {i} of {case.rings[i].size(1) * 8} bytes a slot: bytes {wrong[:8]}, {len(wrong)} in all"
        )
    found_status = case.status[: len(status)].tolist()
    if scenario.is_dry and run is compact:
        counts = [[own.pop() for own in row] for row in found_status]
        assert all(
            count in (0, own.pop())
            for row, old in zip(counts, status, strict=True)
            for count, own in zip(row, old, strict=True)
        )
    assert found_status == status, f"status {found_status}, expected {status}"
    if scenario.is_dry and run is compact_ref:
        assert torch.equal(case.status, before[0]), "a dry run wrote status"
    assert case.cursor.tolist() == [scenario.cursor], "wrote the cursor"
    assert torch.equal(case.control, before[1]), "wrote the records"
    assert [_bytes(source) for source in case.sources] == before[2], "wrote a source"


def _check_gather(seed: int, run: Callable[..., list[Tensor]]) -> None:
    """Crops of one source, in any order, some twice, some empty."""
    rng = random.Random(seed)
    case = Case(list(SCENARIOS.values())[seed], rng)
    source, padded = case.scenario.sources[0], case.sources[0]
    sizes = [source.shape[dim - 1] for dim in source.dims]
    crops: list[Crop] = [(1, tuple((size, size) for size in sizes)), (1, tuple((0, size) for size in sizes))]
    for _ in range(rng.randrange(1, 5)):
        extents = [tuple(sorted(rng.choices(range(size + 1), k=2))) for size in sizes]
        crops.append((rng.randrange(len(padded)), tuple((start, end) for start, end in extents)))
    for (row, extents), copy in zip(crops, run(padded, source.dims, crops), strict=True):
        crop = padded[row]
        for dim, (start, end) in zip(source.dims, extents, strict=True):
            crop = crop.narrow(dim - 1, start, end - start)
        assert copy.shape == crop.shape
        assert copy.dtype == crop.dtype
        assert copy.is_contiguous()
        assert copy.storage_offset() == 0
        assert not copy._is_view()
        assert not copy.is_inference()
        assert _bytes(copy) == _bytes(crop.resolve_conj().resolve_neg())
        memory = torch.empty(0, dtype=torch.uint8).set_(copy.untyped_storage())
        assert len(memory) - copy.numel() * copy.element_size() <= 16
        if run is gathering._gather and copy.numel():
            assert not memory[copy.numel() * copy.element_size() :].any()


NUM_GATHERS = len(list(_grid()))


def _failures() -> dict[str, str]:
    """Each kernel scenario's failure, or an empty text."""
    failures: dict[str, str] = {}
    defaults = {name: getattr(gathering, name) for name in ("_TILE_BYTES", "_CHUNK_BYTES", "_MAX_CTAS")}
    lanes = compact.__globals__["_ROW_LANES"]
    checks: dict[str, Callable[[], None]] = {
        name: lambda name=name: _check_scenario(name, compact) for name in SCENARIOS
    }
    for seed in range(NUM_GATHERS):
        checks[f"gather-{seed}"] = lambda seed=seed: _check_gather(seed, gathering._gather)
    for name, check in checks.items():
        constants = defaults | (SCENARIOS[name].patch if name in SCENARIOS else SMALL)
        compact.__globals__["_ROW_LANES"] = constants.pop("_ROW_LANES", lanes)
        vars(gathering).update(constants)
        gathering._lay_out.cache_clear()
        try:
            check()
            failures[name] = ""
        except AssertionError as error:
            failures[name] = str(error) or repr(error)
    return failures


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    # numpy warns of overflow, in products of spans that are bad and of samples that saturate.
    quiet = ["-W", "error", "-W", "ignore:ComplexHalf support is experimental", "-W", "ignore:overflow encountered"]
    command = [sys.executable, *quiet, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout)
    return failures


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_kernel_follows_the_contract(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_reference_follows_the_contract(name: str) -> None:
    _check_scenario(name, compact_ref)


@pytest.mark.parametrize("seed", range(NUM_GATHERS))
def test_the_gather_kernel_copies_crops(seed: int, interpreted: dict[str, str]) -> None:
    assert interpreted[f"gather-{seed}"] == ""


@pytest.mark.parametrize("seed", range(NUM_GATHERS))
def test_the_reference_of_gather_copies_crops(seed: int) -> None:
    _check_gather(seed, gather_ref)


if __name__ == "__main__":
    json.dump(_failures(), sys.stdout)
