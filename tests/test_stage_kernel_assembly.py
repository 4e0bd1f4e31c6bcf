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

Compiled = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Assembly, warps and resource usage by `"target shape"`."""
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
    assert len(reads) == CONTROL_WORDS


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


def _compile(target_name: str, rows: int, widths: tuple[int, ...]) -> dict[str, str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hip = target_name.startswith("gfx")
    target = GPUTarget("hip", target_name, 64) if hip else GPUTarget("cuda", int(target_name), 32)
    columns = [torch.empty(rows, width, dtype=torch.int64, device="meta") for width in widths]
    offsets = [HEADER_WORDS + sum(column.numel() for column in columns[:i]) for i in range(len(columns))]
    words = HEADER_WORDS + sum(column.numel() for column in columns) + 1
    slots = torch.empty(4, words + words % 2, dtype=torch.int64, device="meta")
    control = torch.empty(8, CONTROL_WORDS, dtype=torch.int64, device="meta")

    options = _kernel_options(slots, control, columns, offsets, hip=hip)
    num_warps = options.pop("num_warps")
    signature = dict.fromkeys(("cursor_ptr", "slots_ptr", "control_ptr"), "*i64")
    signature |= {"column_ptrs": ("*i64",) * len(columns), "graph": "i32"} | dict.fromkeys(options, "constexpr")
    kernel = _load_kernel()
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in options.items()},
        attrs={(0,): aligned, (1,): aligned, (2,): aligned} | {(3, i): aligned for i in range(len(columns))},
    )
    result = triton.compile(source, target=target, options={"num_warps": num_warps})
    assembly = result.asm["amdgcn" if hip else "ptx"]
    usage = "" if hip else _resource_usage(result.asm["cubin"])
    return {"assembly": assembly, "usage": usage, "num_warps": str(result.metadata.num_warps)}


def _resource_usage(cubin: bytes) -> str:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stage.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    kernels = {
        f"{target} {name}": _compile(target, *shape)
        for target in CUDA_TARGETS + HIP_TARGETS
        for name, shape in SHAPES.items()
    }
    json.dump(kernels, sys.stdout)
