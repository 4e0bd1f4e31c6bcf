"""What the interpreter cannot show of the compaction and gather kernels: wide stores, fused arithmetic, and spills.

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
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spangraph.kernels.gather as gathering
from spangraph.kernels.compact import COPY_WORDS, _kernel_arguments, _load_kernel
from spangraph.kernels.gather import NUM_THREADS, as_ints, lay_out
from spangraph.kernels.stage import CONTROL_WORDS

CUDA_TARGETS = ("80", "90", "100")
HIP_TARGETS = ("gfx942",)


@dataclass(frozen=True)
class Output:
    """An output of the compaction: its shape, spanned dims and dtype; it may lie transposed, and be cast."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype
    cast: int = 0
    max_spans: int = 1
    transposed: bool = False


AUDIO = Output((64, 240_000), (1,), torch.float32)

# Rows of audio and, with divisions, transposed images of items of every size; casts from every type; one row; the most
# outputs and rows; and a cast of several spans with divisions, which has most of everything.
ITEMS = {
    **{
        f"items-{dtype.itemsize}": Output((64, 240_000), (1,), dtype)
        for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
    },
    **{
        f"images-{dtype.itemsize}": Output((8, 3, 512, 512), (2, 3), dtype, transposed=True)
        for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128)
    },
}
CASTS = {
    f"pcm-{str(dtype).removeprefix('torch.')}": Output((64, 240_000), (1,), dtype, cast=1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
CASES = {name: (output,) for name, output in (ITEMS | CASTS).items()} | {
    "one-row": (Output((1, 80), (1,), torch.float32),),
    "1024x8": (Output((1024, 4000), (1,), torch.float32),) * 8,
    "pcm-spans": (Output((64, 6, 50, 70), (3, 1), torch.float32, cast=1, max_spans=4, transposed=True),),
}
# One kernel with all of that, for the targets where single ones would only take time.
MIXED = tuple(
    replace((ITEMS | CASTS)[name], shape=(8, *(ITEMS | CASTS)[name].shape[1:]))
    for name in ("items-1", "images-2", "images-16", "pcm-float32")
)
GATHERS = ("items-2", "images-1")


def _make(output: Output) -> Tensor:
    if output.transposed:
        *outer, last = output.shape
        return torch.empty(last, *outer, dtype=output.dtype, device="meta").movedim(0, -1)
    return torch.empty(output.shape, dtype=output.dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


Compiled = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Assembly, machine code and resource usage by `"target case"`; hashes of the kernels by graph."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: Compiled = json.loads(done.stdout)
    return result


def _count(pattern: str, text: str) -> Counter[str]:
    return Counter(re.findall(pattern, text, re.MULTILINE))


@pytest.mark.parametrize("case", CASES)
def test_rows_are_stored_16_bytes_at_a_time(case: str, compiled: Compiled) -> None:
    """Whatever the items, and wherever a row starts in the source."""
    stores = _count(r"st\.global\.[\w.]+", compiled[f"90 {case}"]["assembly"])
    outputs = CASES[case]
    # A lead CTA's generation, offset and, where no atomic counts them, NaNs.
    assert stores.pop("st.global.b64") == sum(2 if output.cast else 3 for output in outputs)
    is_wide = not outputs[0].cast and outputs[0].dtype.itemsize >= 8
    assert set(stores) == {"st.global.v2.b64" if is_wide else "st.global.v4.b32"}


@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_all_cuda_targets_store_16_bytes_at_a_time(target: str, compiled: Compiled) -> None:
    names = [name for name in compiled if name.startswith(f"{target} ") and "assembly" in compiled[name]]
    assert len(names) > len(GATHERS)
    for name in names:
        stores = _count(r"st\.global\.[\w.]+", compiled[name]["assembly"])
        stores.pop("st.global.b64", None)
        assert stores, name
        assert set(stores) <= {"st.global.v4.b32", "st.global.v2.b64"}, name


@pytest.mark.parametrize("target", HIP_TARGETS)
def test_hip_stores_16_bytes_at_a_time(target: str, compiled: Compiled) -> None:
    stores = _count(r"(?:global|buffer|flat)_store_\w+", compiled[f"{target} mixed"]["assembly"])
    # The lead CTA of an output stores its generation and offset at once; and, where no atomic counts NaNs, one word.
    narrow = stores.pop("global_store_dwordx2", 0)
    assert narrow == sum(not output.cast for output in MIXED)
    assert set(stores) == {"global_store_dwordx4", "buffer_store_dwordx4"}
    assert sum(stores.values()) >= 2 * len(MIXED)
    for name in GATHERS:
        stores = _count(r"(?:global|buffer|flat)_store_\w+", compiled[f"{target} gather-{name}"]["assembly"])
        assert len(stores) == 1
        assert set(stores) <= {"global_store_dwordx4", "buffer_store_dwordx4"}


@pytest.mark.parametrize("case", CASTS)
def test_a_cast_rounds_its_product(case: str, compiled: Compiled) -> None:
    """A fused multiply-add would round product and sum at once, and differ from torch in some last bits."""
    code = compiled[f"90 {case}"]["machine code"]
    counts = _count(r"\b(FFMA|FMUL|FADD)\b", code)
    assert counts["FMUL"] >= 16
    assert counts["FADD"] >= 32
    assert counts["FFMA"] == 0


@pytest.mark.parametrize("case", CASTS)
def test_a_cast_silences_nans_by_selection(case: str, compiled: Compiled) -> None:
    """The minimum and maximum of a GPU drop a NaN, so that it would become -32767; interpreted ones keep it."""
    selections = _count(r"selp\.\w+", compiled[f"90 {case}"]["assembly"])
    assert selections["selp.b16"] >= 16
    assert selections["selp.b32"] >= 16  # what counts them


@pytest.mark.parametrize("target", CUDA_TARGETS + HIP_TARGETS)
def test_the_record_is_read_once_and_at_system_scope(target: str, compiled: Compiled) -> None:
    """One request over the link for a CTA: the words of a record in as many lanes, masked off in all other warps."""
    assembly = compiled[f"{target} {'1024x8' if target == '90' else 'mixed'}"]["assembly"]
    if target in CUDA_TARGETS:
        assert _count(r"ld\.volatile[\w.]+", assembly) == {"ld.volatile.global.b64": 1}
    else:
        assert len(re.findall(r"^\s*(?:global|buffer)_load_dwordx2 .* sc0 sc1$", assembly, re.MULTILINE)) == 1


@pytest.mark.parametrize("target", CUDA_TARGETS + HIP_TARGETS)
def test_nothing_spills(target: str, compiled: Compiled) -> None:
    """With 32 items of one byte a thread, an image took 255 registers; hence the limit of items in a tile."""
    for name, kernel in compiled.items():
        if not name.startswith(f"{target} "):
            continue
        if target in HIP_TARGETS:
            pattern = r"\.(vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size): +(\d+)"
            assert {count for _, count in re.findall(pattern, kernel["assembly"])} == {"0"}, name
            continue
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", kernel["usage"]))
        assert (usage["STACK"], usage["LOCAL"]) == ("0", "0"), name
        assert int(usage["REG"]) <= 168, name


def test_graphs_share_one_kernel(compiled: Compiled) -> None:
    """A kernel for each id would be loaded at its first launch, and that fails while the stream captures."""
    assert len(compiled["graphs"]) == 4
    assert len(set(compiled["graphs"].values())) == 1


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


def _compile(outputs: tuple[Output, ...], graph: int = 7, *, is_hip: bool) -> Any:
    """The kernel as `compact` would launch it on the active driver."""
    sources = [_make(output) for output in outputs]
    bs = sources[0].size(0)
    spans = [_ints(bs, output.max_spans, len(output.dims), 2) for output in outputs]
    arguments, options = _kernel_arguments(
        sources,
        spans,
        [_ints(4, 1 << 24)],
        [0] * len(outputs),
        [j * 2**20 for j in range(len(outputs))],
        [2**20] * len(outputs),
        [dim for output in outputs for dim in output.dims],
        [output.max_spans for output in outputs],
        [output.cast for output in outputs],
        hip=is_hip,
    )
    options |= {"NUM_RECORDS": 8, "RECORD_WORDS": CONTROL_WORDS}
    status = _ints(bs, len(outputs), COPY_WORDS)
    return _load_kernel().warmup(_ints(1), _ints(8, CONTROL_WORDS), *arguments, status, graph, grid=(1,), **options)


def _compile_gather(output: Output, *, is_hip: bool) -> Any:
    items = as_ints(_make(output))
    layout = lay_out(items, output.dims, 8)
    target = torch.empty(0, dtype=items.dtype, device="meta")
    options = {"LAYOUT": layout, "num_warps": NUM_THREADS // (64 if is_hip else 32)}
    return gathering._load_kernel().warmup(items, target, _ints(9, 4), grid=(1, 1), **options)


def _describe(kernel: Any, target: str, *, machine_code: bool = False) -> dict[str, str]:
    is_hip = target in HIP_TARGETS
    return {
        "assembly": kernel.asm["amdgcn" if is_hip else "ptx"],
        "usage": "" if is_hip else _dump(kernel.asm["cubin"], "--dump-resource-usage"),
        "machine code": _dump(kernel.asm["cubin"], "--dump-sass") if machine_code else "",
    }


def _dump(cubin: bytes, what: str) -> str:
    from triton.knobs import nvidia

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "compact.cubin")
        path.write_bytes(cubin)
        command = [nvidia.cuobjdump.path, what, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _main() -> None:
    from triton.runtime import driver

    compiled: dict[str, dict[str, str]] = {}
    for target in CUDA_TARGETS + HIP_TARGETS:
        stand_in: Any = _Driver(target)
        driver.set_active(stand_in)
        is_hip = target in HIP_TARGETS
        for name, outputs in (CASES if target == "90" else {"mixed": MIXED}).items():
            compiled[f"{target} {name}"] = _describe(
                _compile(outputs, is_hip=is_hip), target, machine_code=name in CASTS and target == "90"
            )
        for name in GATHERS:
            compiled[f"{target} gather-{name}"] = _describe(_compile_gather(ITEMS[name], is_hip=is_hip), target)
    compiled["graphs"] = {str(graph): _compile((AUDIO,), graph, is_hip=True).hash for graph in (0, 1, 16, 7)}
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    _main()
