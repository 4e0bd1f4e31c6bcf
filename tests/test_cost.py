"""What a step costs on the host, counted in calls, which repeat exactly where seconds do not.

`benchmarks/targets.py` measures the time; the limits here are what was counted when it was last looked at, and a few
more.
"""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import SpannedOutput, Step

from .call_counts import count_calls


class Two(nn.Module):
    """Two spanned outputs, and parameters that are not used."""

    def __init__(self, num_parameters: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(num_parameters)])

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return "audio", "pitch"

    def forward(self, audio: Tensor, pitch: Tensor, ends: Tensor) -> SpannedOutput:
        spans = spangraph.from_lengths(ends)
        return SpannedOutput({"audio": audio + 1, "pitch": pitch + 1}, {"audio": spans, "pitch": spans})


@pytest.fixture(autouse=True)
def _not_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAPH_DEBUG", "0")


def _compiled(bs: int, num_parameters: int = 0, depth: int = 1) -> tuple[spangraph.Compiled, tuple[Tensor, ...]]:
    inputs = torch.randn(bs, 20), torch.randn(bs, 3, 20), torch.full((bs,), 10)
    compiled = spangraph.compile(Two(num_parameters).eval(), depth=depth)
    with torch.no_grad():
        for _ in range(3):  # what is looked up once is there
            with compiled.launch(*inputs) as step:
                step.result()
                for name in ("audio", "pitch"):
                    list(step.rows(name).values())
    return compiled, inputs


def _step_calls(bs: int, num_parameters: int = 0) -> int:
    compiled, inputs = _compiled(bs, num_parameters)

    def step() -> None:
        with compiled.launch(*inputs) as step:
            step.result()

    with torch.no_grad():
        return min(count_calls(step) for _ in range(3))


def test_a_step_makes_few_calls() -> None:
    assert _step_calls(8) <= 54
    compiled, inputs = _compiled(1)

    def read_all() -> None:
        with compiled.launch(*inputs) as step:
            for name in ("audio", "pitch"):
                list(step.rows(name).items())

    with torch.no_grad():
        assert min(count_calls(read_all) for _ in range(3)) <= 88


def test_a_step_makes_as_many_calls_whatever_the_batch_and_the_model() -> None:
    assert _step_calls(256) == _step_calls(1)
    assert abs(_step_calls(8, num_parameters=1000) - _step_calls(8, num_parameters=8)) <= 4  # other weights are probed


class Stack(nn.Module):
    """A model that exports."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(8, 8, 3, padding=1) for _ in range(20)])

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, x: Tensor, lengths: Tensor) -> SpannedOutput:
        for layer in self.layers:
            x = x + layer(x)
        return SpannedOutput({"audio": x}, {"audio": spangraph.from_lengths(lengths)})


def test_a_compile_makes_few_calls_beside_those_of_export() -> None:
    model, inputs = Stack().eval(), (torch.randn(2, 8, 40), torch.tensor([40, 20]))

    def export() -> None:
        torch.export.export(model, inputs, strict=False)

    def launch() -> None:
        with spangraph.compile(model, trace="export") as compiled:
            compiled.launch(*inputs)

    exports, launches = (min(count_calls(fn) for _ in range(2)) for fn in (export, launch))  # the first call imports
    assert launches / exports <= 1.33


def _cut_calls(bs: int, cut: Callable[[Step], object]) -> int:
    compiled, inputs = _compiled(bs)
    with torch.no_grad(), compiled.launch(*inputs) as step:
        return count_calls(lambda: cut(step))


def test_a_row_is_one_operator() -> None:
    def all_rows(step: Step) -> object:
        return [row for name in ("audio", "pitch") for row in step.rows(name).values()]

    few, many = _cut_calls(8, all_rows), _cut_calls(264, all_rows)
    # Per row: the operator, and the generator.
    assert (many - few) / (2 * 256) <= 2.05
    assert few <= 56


def test_spans_alone_make_no_tensors() -> None:
    def spans(step: Step) -> object:
        rows = step.rows("audio")
        return [rows.spans(i) for i in range(len(rows))]

    assert (_cut_calls(264, spans) - _cut_calls(8, spans)) / 256 <= 1.05


def test_an_owned_row_in_one_piece_is_a_copy_of_bytes() -> None:
    few, many = (_cut_calls(bs, lambda step: step.rows("audio").own()) for bs in (8, 264))
    # Per row: the copy, its bytes, and the tensor of them.
    assert (many - few) / 256 <= 3.05


def test_an_owned_row_with_gaps_is_an_operator_and_a_clone() -> None:
    few, many = (_cut_calls(bs, lambda step: step.rows("pitch").own()) for bs in (8, 264))
    # torch 2.13 has one operator that clones all.
    assert (many - few) / 256 <= (1.05 if hasattr(torch, "_foreach_clone") else 2.05)


def test_padding_rows_make_no_objects() -> None:
    blocks = {}
    for bs in (8, 256):
        compiled, inputs = _compiled(bs)
        with torch.no_grad():
            with compiled.launch(*inputs, num_rows=4) as step:
                list(step.rows("audio").values())
            before = sys.getallocatedblocks()
            with compiled.launch(*inputs, num_rows=4) as step:
                rows = list(step.rows("audio").values())
                blocks[bs] = sys.getallocatedblocks() - before
            del rows, step
    assert abs(blocks[256] - blocks[8]) <= 10


def test_steps_leave_nothing_behind() -> None:
    compiled, inputs = _compiled(8, depth=4)

    def run(steps: int) -> None:
        open_steps = [compiled.launch(*inputs) for _ in range(3)]
        for _ in range(steps):
            open_steps.append(compiled.launch(*inputs))
            with open_steps.pop(0) as step:
                list(step.rows("audio").values())
        for step in open_steps:
            step.release()

    with torch.no_grad():
        run(50)
        before = sys.getallocatedblocks()
        run(2000)
        assert sys.getallocatedblocks() - before < 100
