"""What the interpreter cannot show of the staging kernel: barriers, the release's scope, and spills.

Compiles for GPUs that need not be there. One process can interpret Triton kernels or compile them, not both, so this
file is also the script that compiles, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from spangraph.kernels.stage import CONTROL_WORDS, HEADER_WORDS, _kernel_options, _load_kernel

CUDA_TARGETS = ("80", "90", "100")
HIP_TARGETS = ("gfx942",)

# The smallest and the largest: one row value of a few rows (stores of single words, most of the tile masked off), one
# span of a small bucket (paired stores), 1024 rows x 8 outputs (one tile a column), the same with four spans a row
# (loops, which ptxas unrolls), and no rows at all (no store between the record and the header).
SHAPES = {
    "7x1-tokens": (7, (1,)),
    "4x1": (4, (2,)),
    "1024x8": (1024, (2,) * 8),
    "1024x8-4-spans": (1024, (8,) * 8),
    "0x1": (0, (2,)),
}

# Ids that Triton specialises by default (multiples of 16; the 1, which it makes a constant), and one that it does not.
GRAPHS = (0, 1, 16, 7)

Compiled = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Assembly, warps and resource usage by `"target shape"`; hashes of the kernels by `"target graphs"`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: Compiled = json.loads(done.stdout)
    return result


def _instructions(assembly: str, pattern: str) -> list[str]:
    """The instructions that match, in the order of the text, without operands."""
    return re.findall(rf"^\s*(?:@!?%p\d+\s+)?({pattern})(?=\s|;)", assembly, re.MULTILINE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_a_barrier_stands_between_the_spans_and_what_announces_them(
    target: str, shape: str, compiled: Compiled
) -> None:
    """Without it the header overtakes the spans of a slow warp, and a slow warp reads the advanced cursor.

    Triton puts no barrier before an atomic, and the interpreter runs one thread, so neither ever shows in a value.
    """
    memory = _instructions(compiled[f"{target} {shape}"]["assembly"], r"(?:ld|st|atom|red|bar|membar|fence)\.[\w.]+")
    memory = [instruction for instruction in memory if not instruction.startswith("ld.param")]
    assert memory.count("bar.sync") == 1
    barrier = memory.index("bar.sync")
    before, after = memory[:barrier], memory[barrier + 1 :]
    # One cursor word, then the header: the cursor is not read again, and nothing comes after the release.
    assert after == ["st.global.b64", "atom.global.sys.release.exch.b64"]
    assert all(re.match(r"(ld(\.volatile)?|st)\.global\.", instruction) for instruction in before)
    rows, widths = SHAPES[shape]
    num_stores = sum(instruction.startswith("st.global.") for instruction in before)
    assert num_stores >= len(widths) if rows else num_stores == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", HIP_TARGETS)
def test_the_release_waits_for_the_only_wave_s_stores(target: str, shape: str, compiled: Compiled) -> None:
    """gfx942 does not order another wave's stores by a barrier, so there is one wave, which waits for its own."""
    kernel = compiled[f"{target} {shape}"]
    assert kernel["num_warps"] == "1"
    lines = [line.strip() for line in kernel["assembly"].splitlines()]
    memory = [line for line in lines if re.match(r"(global|buffer|flat)_(store|atomic|wbl2)|s_waitcnt", line)]
    stores = [i for i, line in enumerate(memory) if re.match(r"(global|buffer|flat)_store", line)]
    atomics = [i for i, line in enumerate(memory) if "_atomic_" in line]
    assert len(atomics) == 1
    tail = memory[stores[-1] :]
    # The last store is the cursor's word. Write back to system scope, wait for every store, then release at that scope.
    assert [line.split()[0] for line in tail[:4]] == [
        "global_store_dwordx2",
        "buffer_wbl2",
        "s_waitcnt",
        "global_atomic_swap_x2",
    ]
    assert tail[1].split()[1:] == ["sc0", "sc1"]
    assert tail[2].split()[1] == "vmcnt(0)"
    assert tail[3].endswith("sc1")
    rows, widths = SHAPES[shape]
    assert len(stores) > len(widths) if rows else len(stores) == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", CUDA_TARGETS + HIP_TARGETS)
def test_the_record_is_read_at_system_scope(target: str, shape: str, compiled: Compiled) -> None:
    """The host writes the records while kernels run, so no cache may answer for it."""
    assembly = compiled[f"{target} {shape}"]["assembly"]
    if target in CUDA_TARGETS:
        reads = _instructions(assembly, r"ld\.volatile\.global\.b64")
    else:
        reads = re.findall(r"^\s*global_load_dwordx2 .* sc0 sc1$", assembly, re.MULTILINE)
    assert len(reads) == 4  # generation, slot, num_rows, graph


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_nothing_spills_on_cuda(target: str, shape: str, compiled: Compiled) -> None:
    """One block over 1024 rows x 8 outputs took all 255 registers and spilled; hence the tiles."""
    kernel = compiled[f"{target} {shape}"]
    assert ".local" not in kernel["assembly"]
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", kernel["usage"]))
    assert (usage["STACK"], usage["LOCAL"]) == ("0", "0")
    assert int(usage["REG"]) <= 128


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", HIP_TARGETS)
def test_nothing_spills_on_hip(target: str, shape: str, compiled: Compiled) -> None:
    assembly = compiled[f"{target} {shape}"]["assembly"]
    counts = dict(re.findall(r"\.(vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size): +(\d+)", assembly))
    assert set(counts.values()) == {"0"}
    assert len(counts) == 3


@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_spans_are_stored_in_pairs(target: str, compiled: Compiled) -> None:
    """16 bytes a store, which needs the header's second word: with one, every column is 8 bytes off."""
    assembly = compiled[f"{target} 1024x8"]["assembly"]
    barrier = assembly.index("bar.sync")
    assert set(_instructions(assembly[:barrier], r"st\.global\.[\w.]+")) == {"st.global.v2.b64"}


@pytest.mark.parametrize("target", CUDA_TARGETS + HIP_TARGETS)
def test_graphs_share_one_kernel(target: str, compiled: Compiled) -> None:
    """A kernel for each id would be loaded at its first launch, and that fails while the stream captures."""
    assert len(set(compiled[f"{target} graphs"].values())) == 1


class _Driver:
    """Stands in for a GPU's driver, so that Triton's own launcher compiles; nothing is launched."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return (
            GPUTarget("hip", self.target, 64) if self.target in HIP_TARGETS else GPUTarget("cuda", int(self.target), 32)
        )

    def get_current_device(self) -> int:
        return (CUDA_TARGETS + HIP_TARGETS).index(self.target)  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(target: str, rows: int, widths: tuple[int, ...], graph: int) -> Any:
    """The kernel as `stage` would launch it on `target`."""
    from triton.runtime import driver

    stand_in: Any = _Driver(target)
    driver.set_active(stand_in)
    columns = tuple(_ints(rows, width) for width in widths)
    offsets = [HEADER_WORDS + sum(column.numel() for column in columns[:i]) for i in range(len(columns))]
    words = HEADER_WORDS + sum(column.numel() for column in columns) + 1
    cursor, slots, control = _ints(1), _ints(4, words + words % 2), _ints(8, CONTROL_WORDS)
    options = _kernel_options(slots, control, columns, offsets, hip=target in HIP_TARGETS)
    return _load_kernel().warmup(cursor, slots, control, columns, graph, grid=(1,), **options)


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


def _describe(target: str, rows: int, widths: tuple[int, ...]) -> dict[str, str]:
    kernel = _compile(target, rows, widths, graph=7)
    is_hip = target in HIP_TARGETS
    return {
        "assembly": kernel.asm["amdgcn" if is_hip else "ptx"],
        "usage": "" if is_hip else _resource_usage(kernel.asm["cubin"]),
        "num_warps": str(kernel.metadata.num_warps),
    }


def _resource_usage(cubin: bytes) -> str:
    from triton.knobs import nvidia

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stage.cubin")
        path.write_bytes(cubin)
        command = [nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _main() -> None:
    compiled = {
        f"{target} {name}": _describe(target, *shape)
        for target in CUDA_TARGETS + HIP_TARGETS
        for name, shape in SHAPES.items()
    }
    for target in CUDA_TARGETS + HIP_TARGETS:
        compiled[f"{target} graphs"] = {str(graph): _compile(target, 4, (2,), graph).hash for graph in GRAPHS}
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    _main()
