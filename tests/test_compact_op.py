"""`torch.ops.spangraph.compact`, `gather` and `pcm16` as callers meet them; and the checks at build time."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph.kernels.compact as compact_module
import spangraph.kernels.gather as gather_module
from spangraph.errors import InputError
from spangraph.kernels.compact import COPY_WORDS, NO_CAST, PCM16, check_source, compact_ref, pcm16
from spangraph.kernels.gather import gather
from spangraph.kernels.stage import CONTROL_WORDS

ops = torch.ops.spangraph


def _ints(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=device)


def _arguments() -> dict[str, Any]:
    """Two outputs of three rows in slots of 256 bytes: audio at byte 0, PCM with a bad row 1 at byte 128."""
    control = _ints(4, CONTROL_WORDS)
    control[0] = torch.tensor([1, 9, 3, 5, 1])
    return {
        "cursor": _ints(1),
        "control": control,
        "sources": [torch.arange(24.0).view(3, 8), torch.arange(24.0).view(3, 8) / 24],
        "spans": [torch.tensor([[0, 3], [2, 7], [8, 8]]), torch.tensor([[7, 8], [0, 9], [0, 8]])],
        "rings": [torch.full((2, 32), -1)],
        "status": torch.full((3, 2, COPY_WORDS), -7),
        "ring_of": [0, 0],
        "firsts": [0, 128],
        "capacities": [96, 64],
        "dims": [1, 1],
        "max_spans": [1, 1],
        "casts": [NO_CAST, PCM16],
    }


def _run(arguments: dict[str, Any], graph: int = 5) -> None:
    order = ["cursor", "control", "sources", "spans", "rings", "status"]
    rest = ["ring_of", "firsts", "capacities", "dims", "max_spans", "casts"]
    ops.compact(*(arguments[name] for name in order), graph, *(arguments[name] for name in rest))


def _check_compacted(arguments: dict[str, Any]) -> None:
    ring = arguments["rings"][0]
    assert (ring[0] == -1).all()
    audio = ring[1].view(torch.float32)[:12].tolist()
    assert audio == [0, 1, 2, 0, 10, 11, 12, 13, 14, 0, 0, 0]
    assert (ring[1, 6:16] == -1).all()
    samples = ring[1].view(torch.int16)[64:80].tolist()
    expected = arguments["sources"][1].mul(32767).round().to(torch.int16).tolist()
    assert samples == [expected[0][7], 0, 0, 0, 0, 0, 0, 0, *expected[2]]
    assert (ring[1, 20:] == -1).all()
    assert arguments["status"].tolist() == [[[1, 0, 0], [1, 0, 0]], [[1, 1, 0], [1, 1, 0]], [[1, 3, 0], [1, 1, 0]]]


def test_the_compact_operator_copies_valid_rows() -> None:
    arguments = _arguments()
    _run(arguments)
    _check_compacted(arguments)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compaction_works_in_every_grad_mode(context: Callable[[], torch.no_grad]) -> None:
    """K29: the ring is allocated outside inference mode and written inside, and the reverse is the next launch."""
    arguments = _arguments()
    with context():
        arguments["sources"] = [source.clone().requires_grad_() for source in arguments["sources"]]
        arguments["spans"] = [spans.clone() for spans in arguments["spans"]]
        _run(arguments)
    _check_compacted(arguments)
    arguments["rings"][0].fill_(-1)
    arguments["control"][0, 4] = 1
    _run(arguments)
    _check_compacted(arguments)


def test_compaction_under_fake_tensors_touches_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = _arguments()
    with FakeTensorMode() as mode:
        fakes = {
            name: [mode.from_tensor(item) if isinstance(item, Tensor) else item for item in value]
            if isinstance(value, list)
            else mode.from_tensor(value)
            for name, value in arguments.items()
        }
        _run(fakes)
    assert (arguments["rings"][0] == -1).all()
    assert (arguments["status"] == -7).all()


def test_torch_accepts_the_compact_operator() -> None:
    """A schema that tells the truth about what is written, and a fake that agrees."""
    values = list(_arguments().values())
    torch.library.opcheck(ops.compact.default, (*values[:6], 5, *values[6:]))


def test_compaction_survives_dead_code_elimination_and_runs_once_per_call() -> None:
    arguments = _arguments()

    class Tail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _run(arguments | {"sources": [x, arguments["sources"][1]]})
            return x * 2

    graph_module = torch.fx.symbolic_trace(Tail())
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    graph_module(arguments["sources"][0])
    _check_compacted(arguments)


def test_a_row_of_ten_million_does_not_hide_another() -> None:
    """Offsets are far beyond 32 bits of any unit; the rest of the long row stays where it is."""
    width = 10_000_000
    source = torch.zeros(1, dtype=torch.int8).expand(3, width).clone()
    source[2, -5:] = torch.tensor([1, 2, 3, 4, 5])
    arguments = _arguments() | {
        "sources": [source],
        "spans": [torch.tensor([[0, width], [0, width + 1], [width - 5, width]])],
        "rings": [_ints(2, 1_250_004)],
        "status": _ints(3, 1, COPY_WORDS),
        "ring_of": [0],
        "firsts": [16],
        "capacities": [width + 16],
        "dims": [1],
        "max_spans": [1],
        "casts": [NO_CAST],
    }
    _run(arguments)
    assert arguments["rings"][0][1].view(torch.int8)[16 + width :].tolist() == [1, 2, 3, 4, 5] + [0] * 11
    assert arguments["status"][:, 0].tolist() == [[1, 0, 0], [1, width // 16, 0], [1, width // 16, 0]]


def test_nans_are_counted_for_each_row_that_is_cast() -> None:
    arguments = _arguments()
    arguments["sources"] = [torch.full((3, 8), math.nan) for _ in range(2)]
    _run(arguments)
    assert arguments["status"][:, :, 2].tolist() == [[0, 1], [0, 0], [0, 8]]
    assert not arguments["rings"][0][1, 16:20].any()


def test_pcm_rounds_halves_to_even_and_saturates() -> None:
    samples = [0.0, -0.0, 1.0, -1.0, 1.1, -9.0, math.inf, -math.inf, math.nan, 0.5 / 32767, 1.5 / 32767, -2.5 / 32767]
    expected = [0, 0, 32767, -32767, 32767, -32767, 32767, -32767, 0, 0, 2, -2]
    for dtype in (torch.float32, torch.float64):
        before = torch.tensor(samples, dtype=dtype)
        found = pcm16(before)
        assert found.dtype == torch.int16
        assert found.tolist() == expected
        assert torch.equal(before, torch.tensor(samples, dtype=dtype).nan_to_num(nan=7.0)) or before[8].isnan()
    assert pcm16(torch.tensor([0.25, 2.0], dtype=torch.bfloat16)).tolist() == [8192, 32767]


def test_gathered_crops_keep_nothing_alive_and_can_be_changed() -> None:
    """A view made without gradients could not: `_foreach_copy_` and the kernel write into memory of its own."""
    source = torch.randn(4, 6, 5, requires_grad=True)
    crops = [(2, ((1, 4), (0, 2))), (0, ((6, 6), (0, 5))), (2, ((0, 6), (4, 5)))]
    with torch.inference_mode():
        copies = gather(source, (1, 2), crops)
    assert [tuple(copy.shape) for copy in copies] == [(3, 2), (0, 5), (6, 1)]
    assert torch.equal(copies[0], source[2, 1:4, 0:2])
    assert torch.equal(copies[2], source[2, :, 4:5])
    for copy in copies:
        assert not copy.requires_grad
        assert not copy.is_inference()
        copy.mul_(torch.ones((), requires_grad=True))
    assert gather(source, (1, 2), []) == []


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((8,), torch.uint4, "output 'x' is torch.uint4: expected whole bytes an item"),
        ((8,), torch.float4_e2m1fn_x2, "output 'x' is torch.float4_e2m1fn_x2"),
        ((8,), torch.qint8, "output 'x' is torch.qint8.* Dequantize"),
        ((2, 2**30), torch.uint8, "output 'x' has 2147483648 items a row, at most 2147483647"),
        ((2**30,), torch.complex128, "output 'x' has 2147483648 items a row"),
    ],
)
def test_rows_that_cannot_be_copied_are_refused(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_source("output 'x'", shape, dtype)


def test_rows_that_can_be_copied() -> None:
    for dtype in (torch.bool, torch.float8_e8m0fnu, torch.uint16, torch.bfloat16, torch.complex128):
        check_source("output 'x'", (2**20, 3), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_kernel_compacts_and_gathers_on_a_gpu(place: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    arguments = _arguments()
    for name in ("cursor", "status"):
        arguments[name] = arguments[name].cuda()
    for name in ("sources", "spans"):
        arguments[name] = [tensor.cuda() for tensor in arguments[name]]
    arguments["control"] = arguments["control"].pin_memory()
    arguments["rings"] = [ring.cuda() if place == "device" else ring.pin_memory() for ring in arguments["rings"]]
    _run(arguments, graph=6)  # a dry run, which loads the module
    _run(arguments)
    torch.cuda.synchronize()
    host = {name: [item.cpu() for item in arguments[name]] for name in ("sources", "rings")}
    _check_compacted(arguments | host | {"status": arguments["status"].cpu()})
    source = arguments["sources"][0]
    for row, copy in enumerate(gather(source, (1,), [(row, ((row, 8 - row),)) for row in range(3)])):
        assert torch.equal(copy, source[row, row : 8 - row])


def test_importing_leaves_triton_alone_and_works_without_it(tmp_path: Path) -> None:
    code = """if True:
        import sys, torch
        import spangraph.kernels
        from spangraph.errors import StagingError
        from spangraph.kernels.compact import compact
        from spangraph.kernels.gather import gather
        from spangraph.kernels.stage import has_triton
        assert not any(name.split(".")[0] == "triton" for name in sys.modules), "imported"

        sys.modules["triton"] = None
        has_triton.cache_clear()
        assert gather(torch.ones(2, 3), (1,), [(1, ((0, 2),))])[0].tolist() == [1, 1]
        zeros = torch.zeros(2, 6, dtype=torch.int64)
        control = zeros[:, :5]
        tensors = [zeros[0, :1], control, [zeros], [zeros[:, :2]], [zeros], zeros[:, :3]]
        arguments = [*tensors, 0, [0], [0], [0], [1], [1], [0]]
        torch.ops.spangraph.compact(*arguments)
        try:
            compact(*arguments)
        except StagingError as error:
            assert "pip install spangraph[triton]" in str(error), error
        else:
            raise AssertionError("no error")
    """
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_reference_is_what_runs_on_the_cpu() -> None:
    by_operator, by_reference = _arguments(), _arguments()
    _run(by_operator)
    compact_ref(**by_reference, graph=5)
    assert torch.equal(by_operator["rings"][0], by_reference["rings"][0])
    assert torch.equal(by_operator["status"], by_reference["status"])


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """K25: Triton launches on the current device, whatever its tensors are on."""
    elsewhere = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    guard = gather_module.on_device_of(elsewhere)  # type: ignore[arg-type]
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1
    log: list[str] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **options: log.append("launch")

    @contextlib.contextmanager
    def on_device_of(tensor: Tensor) -> Iterator[None]:
        log.append("enter")
        yield
        log.append("leave")

    for module in (compact_module, gather_module):
        monkeypatch.setattr(module, "on_device_of", on_device_of)
        monkeypatch.setattr(module, "_load_kernel", Kernel)
    arguments = _arguments()
    compact_module.compact(**arguments, graph=5)
    gather_module._gather(arguments["sources"][0], (1,), [(0, ((0, 3),))])
    assert log == ["enter", "launch", "leave"] * 2
