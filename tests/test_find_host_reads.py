"""All that a capture cannot hold is found in one eager run, each thing at its line, as often as it happens."""

from __future__ import annotations

import collections
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from spangraph.cut_hints import cut_hint
from spangraph.diagnostics import Diagnostic
from spangraph.hazards import _Hazards, find_capture_hazards

from . import read_corpus
from .toys import line_of, plain

aten = torch.ops.aten
RULES = {"READ": "SG401", "COPY": "SG402", "MIXED": "SG403", "WRITE": "SG405"}


def hazards(model: nn.Module, *inputs: Tensor) -> list[Diagnostic]:
    return find_capture_hazards(model, lambda *tensors: model(*tensors), inputs)


def test_the_corpus_has_exactly_the_hazards_that_its_comments_say() -> None:
    lines = Path(inspect.getfile(read_corpus)).read_text().splitlines()
    expected = {
        (RULES[found[1]], i): int(found[2])
        for i, line in enumerate(lines, 1)
        if (found := re.search(r"  # ([A-Z]+) (\d+)", line))
    }
    counted: collections.Counter[tuple[str, int]] = collections.Counter()
    for model, inputs in read_corpus.EXAMPLES:
        for diagnostic in hazards(model, *inputs):
            file, _, line = diagnostic.where.rpartition(":")
            assert file == inspect.getfile(read_corpus), diagnostic
            counted[diagnostic.rule, int(line)] += diagnostic.count
    differ = {key for key in expected.keys() | counted if expected.get(key, 0) != counted[key]}
    assert not differ, [(rule, line, counted[rule, line], lines[line - 1].strip()) for rule, line in sorted(differ)]
    assert len(expected) > 60


# ---- what a diagnostic says ------------------------------------------------------------------------------------------


def _helper(x: Tensor) -> float:
    return x.max().item()  # reads


def test_firings_are_counted_and_in_order_of_the_first() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        for i in range(3):
            x = x + x.sum().item()  # first
            if i == 1:
                x = x * x.min().item()  # second
        return x

    first, second = hazards(plain(forward), torch.ones(2))
    assert (first.where, first.count, first.related) == (line_of(forward, "# first"), 3, ())
    assert (second.where, second.count, second.severity) == (line_of(forward, "# second"), 1, "error")
    assert first.node.endswith("test_firings_are_counted_and_in_order_of_the_first.<locals>.forward")


def test_a_read_in_another_file_says_where_ones_own_code_enters() -> None:
    model = plain(lambda self, x: self.inner(x) + _helper(x), inner=read_corpus.Peak())
    other, own = hazards(model, torch.ones(2))
    assert other.where == line_of(read_corpus.Peak, "# READ")
    here = test_a_read_in_another_file_says_where_ones_own_code_enters
    assert other.related == (("called from", line_of(here, "inner(x)")),)
    assert (own.where, own.node, own.related) == (line_of(_helper, "# reads"), "_helper", ())


def test_reads_of_one_line_are_told_apart_by_what_they_read() -> None:
    model = plain(lambda self, x: (x[x > 0], x.sum().item(), x.tolist()))
    found = hazards(model, torch.ones(2))
    assert len({diagnostic.message for diagnostic in found}) == len(found) == 3
    assert len({diagnostic.where for diagnostic in found}) == 1


def test_host_state_is_named_and_nothing_is_left_behind() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.calls += 1
        self.seen.add_(x.sum())
        x.zero_()
        return x + torch.rand(1, device=x.device)

    model = plain(forward)
    model.calls = 0
    model.register_buffer("seen", torch.zeros(()))
    x, random = torch.ones(2), torch.get_rng_state()
    written, state = hazards(model, x)
    assert (written.rule, written.where) == ("SG405", line_of(forward, "x.zero_()"))
    assert (state.rule, state.node, state.where) == ("SG404", "calls", line_of(forward, "def forward"))
    assert (x.tolist(), model.calls, model.seen.item()) == ([1, 1], 0, 0)
    assert torch.get_rng_state().equal(random)


def test_a_table_that_is_built_on_first_use_is_no_state() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.ones_like(x)
        return x + self.table

    model = plain(forward)
    model.table = None
    assert not hazards(model, torch.ones(2))


def test_inference_tensors_and_code_without_source() -> None:
    source = "lambda self, x: self.gain * x[: x[0, 0].long()] + x.max().item()"
    forward = eval(compile(source, "<made>", "eval"))
    with torch.inference_mode():
        model = plain(forward)
        model.register_buffer("gain", torch.ones(2))
    (found,) = hazards(model, torch.ones(2, 2))
    assert (found.rule, found.count) == ("SG401", 2)


def test_torchscript_reads_are_those_of_its_call() -> None:
    model = plain(lambda self, x: _scripted()(x))
    (found,) = hazards(model, torch.ones(2))
    assert (found.rule, found.count) == ("SG401", 1)
    assert found.where == line_of(test_torchscript_reads_are_those_of_its_call, "_scripted()(x)")


@functools.cache
def _scripted() -> Any:
    code = """
        def read(x: Tensor):
            if bool(x.sum() > 0):
                x = x + torch.ones(2).sum()
            return x
    """
    return torch.jit.CompilationUnit(textwrap.dedent(code)).read


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_model_that_is_torchscript_or_torch_s_own_has_no_line_of_its_own() -> None:
    unit = torch.jit.trace(plain(lambda self, x: x + 1), torch.ones(2))
    assert not hazards(unit, torch.ones(2))
    (found,) = hazards(nn.Sequential(read_corpus.Peak()), torch.ones(2))
    assert (found.where, found.related) == (line_of(read_corpus.Peak, "# READ"), ())


def test_what_a_forward_raises_is_raised_and_nothing_is_left_on() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x.add_(1)
        raise KeyError("mine")

    x = torch.ones(2)
    with pytest.raises(KeyError, match="mine"):
        hazards(plain(forward), x)
    assert x.tolist() == [1, 1]
    assert not torch.overrides._get_current_function_mode_stack()


# ---- tensors on a device ---------------------------------------------------------------------------------------------


# What an operator call is found to be, where `x` is on a device and `h` is not.
ON_DEVICE: list[tuple[Callable[[Tensor, Tensor], tuple[Any, ...]], str]] = [
    (lambda x, h: (aten._to_copy.default, (h,), {"device": x.device}), "SG402"),
    (lambda x, h: (aten._to_copy.default, (h,), {"device": x.device, "non_blocking": True}), "SG402"),
    (lambda x, h: (aten._to_copy.default, (x,), {"device": torch.device("cpu")}), "SG401"),
    (lambda x, h: (aten._to_copy.default, (x,), {"dtype": torch.float64}), ""),
    (lambda x, h: (aten._to_copy.default, (h,), {"device": torch.device("cpu"), "dtype": torch.float64}), ""),
    (lambda x, h: (aten.copy_.default, (x, h), {}), "SG402"),
    (lambda x, h: (aten.copy_.default, (x, h[0]), {}), ""),
    (lambda x, h: (aten.copy_.default, (h, x), {}), "SG401"),
    (lambda x, h: (aten.copy_.default, (h, x, True), {}), "SG402"),  # K20: it lands at any time, or never
    (lambda x, h: (aten.copy_.default, (h, h, True), {}), ""),
    (lambda x, h: (aten.add.Tensor, (x, h), {}), "SG403"),
    (lambda x, h: (aten.add.Tensor, (x, h[0]), {}), ""),
    (lambda x, h: (aten._local_scalar_dense.default, (x,), {}), "SG401"),
    (lambda x, h: (aten._local_scalar_dense.default, (h[0],), {}), ""),
    (lambda x, h: (aten.nonzero.default, (h,), {}), ""),
    (lambda x, h: (aten.index.Tensor, (x, [x > 0]), {}), "SG401"),
]


@pytest.mark.parametrize(("call", "rule"), ON_DEVICE, ids=range(len(ON_DEVICE)))
def test_tensors_on_a_device_are_what_they_are(call: Callable[[Tensor, Tensor], tuple[Any, ...]], rule: str) -> None:
    with FakeTensorMode():
        x, h = torch.empty(3, device="cuda"), torch.empty(3)
        watch = _Hazards(plain(lambda self, x: x), [torch.empty(1, device="cuda")])
        watch._check(*call(x, h))
    assert [diagnostic.rule for diagnostic in watch.found.values()] == ([rule] if rule else [])


# ---- what to do instead ----------------------------------------------------------------------------------------------


class Cuts(nn.Module):
    """Each cuts rows by what it reads."""

    hop = 2

    def per_row(self, audio: Tensor, n: Tensor) -> Any:
        return [audio[i, : int(n[i])] for i in range(len(n))]

    def zipped(self, audio: Tensor, n: Tensor) -> Any:
        rows = []
        for row, length in zip(audio, n.tolist(), strict=False):
            rows.append(row[..., :length])
        return rows

    def scaled(self, audio: Tensor, n: Tensor) -> Any:
        frames = n.cpu().numpy()
        ends = [int(k) * self.hop for k in frames]
        return [audio[i, :end] for i, end in enumerate(ends)]

    def narrowed(self, audio: Tensor, n: Tensor) -> Any:
        return audio.narrow(-1, 0, n[0].item()), torch.narrow(audio, 1, 0, 2)

    def split(self, audio: Tensor, n: Tensor) -> Any:
        return torch.split(audio, n.tolist(), 1)

    def pair(self, audio: Tensor, n: Tensor) -> Any:
        start, end = n[0].item(), n[1].item()
        return audio[:, start:end]

    def pairs(self, audio: Tensor, n: Tensor) -> Any:
        spans = torch.stack([n, n + 1], 1)
        return [audio[i, s:e] for i, (s, e) in enumerate(spans.tolist())]

    def implicit(self, audio: Tensor, n: Tensor) -> Any:
        return audio[:, : n[0]]

    def iterated(self, audio: Tensor, n: Tensor) -> Any:
        return [self.audio(audio)[:, :k] for k in n]

    def audio(self, audio: Tensor) -> Tensor:
        return audio

    def trimmed(self, audio: Tensor, n: Tensor) -> Any:
        return audio[:, : -n[0].item()]

    def late(self, audio: Tensor, n: Tensor) -> Any:
        return audio[:, n[0].item() :]

    def computed(self, audio: Tensor, n: Tensor) -> Any:
        length = int(n[0])
        end = length * self.hop
        return audio[..., :end]

    def longest(self, audio: Tensor, n: Tensor) -> Any:
        return audio[:, : n.max().item()]

    def masked(self, audio: Tensor, n: Tensor) -> Any:
        return audio[audio > 0]


HINTS = {
    "per_row": "instead of 'audio[i, :int(n[i])]', declare 'audio' as spanned: return the padded tensor with"
    " output_spans={'audio': spangraph.from_lengths(n)} and cut after the step.",
    "zipped": "instead of 'row[..., :length]', declare 'audio' as spanned: return the padded tensor with"
    " output_spans={'audio': spangraph.from_lengths(n)} and",
    "scaled": "instead of 'audio[i, :end]', declare 'audio' as spanned",
    "narrowed": "output_spans={'audio': spangraph.from_lengths(n)}",
    "split": "output_spans={'audio': spangraph.from_lengths(n)}",
    "pair": "output_spans={'audio': spangraph.from_lengths(n[1] - n[0], start=n[0])}",
    "pairs": "output_spans={'audio': spangraph.from_lengths(spans[..., 1] - spans[..., 0], start=spans[..., 0])}",
    "implicit": "output_spans={'audio': spangraph.from_lengths(n)}",
    "iterated": "spangraph.from_lengths(n)}",
    "trimmed": "output_spans={'audio': spangraph.from_lengths(width - n)}",
    "late": "output_spans={'audio': spangraph.from_lengths(width - n[0], start=n[0])}",
    "computed": "output_spans={'audio': spangraph.from_lengths(n * self.hop)}",
    "longest": "output_spans={'audio': spangraph.from_lengths(n)}",
    "masked": "output_spans={'audio': spangraph.from_mask(audio > 0)}; else use torch.where.",
}


@pytest.mark.parametrize("name", HINTS)
def test_a_read_that_cuts_is_answered_with_the_declaration(name: str) -> None:
    model = Cuts()
    found = find_capture_hazards(model, getattr(model, name), (torch.ones(2, 3), torch.tensor([1, 2])))
    assert {diagnostic.rule for diagnostic in found} == {"SG401"}
    assert HINTS[name] in found[0].fix


def _scale(audio: Tensor, n: Tensor) -> Any:
    width = audio.shape[1]
    return audio[:, :width] * n.max().item()


def _branch(audio: Tensor, n: Tensor) -> Any:
    return audio if n.any() else audio[:, : len(n)]


def _pad(audio: Tensor, n: Tensor) -> Any:
    amounts = (0, n[0])
    padded = torch.nn.functional.pad(audio, amounts)
    return padded[:, : padded.shape[1] - 1]


def _range(audio: Tensor, n: Tensor) -> Any:
    return [audio[:, t] for _ in range(1) for t in range(n[0].item())]


def _index(audio: Tensor, n: Tensor) -> Any:
    return audio[n[0]]


def _constant(audio: Tensor, n: Tensor) -> Any:
    big = n.max().item()
    return audio[:, :2] * big


_cut, _other = (lambda audio, n: audio[:, : n[0].item()]), (lambda audio, n: audio[:, :2] * n[0].item())


@pytest.mark.parametrize("forward", [_scale, _branch, _pad, _range, _index, _constant, _other])
def test_other_reads_have_no_such_hint(forward: Callable[..., Any]) -> None:
    (found,) = hazards(plain(lambda self, *args: forward(*args)), torch.ones(2, 3), torch.tensor([1, 2]))
    assert found.fix.startswith("keep the value on the device")


def test_of_two_lambdas_on_a_line_the_one_that_cuts_is_meant() -> None:
    (found,) = hazards(plain(lambda self, *args: _cut(*args)), torch.ones(2, 3), torch.tensor([1, 2]))
    assert "instead of 'audio[:, :n[0].item()]'" in found.fix


def test_a_hint_can_be_had_of_a_line_alone_and_never_raises(tmp_path: Path) -> None:
    assert "from_lengths(n)" in str(cut_hint(line_of(Cuts.per_row, "audio[i")))
    assert cut_hint(line_of(_scale, "width = ")) is None
    (tmp_path / "broken.py").write_text("def f(:\n")
    for where in ("", "nowhere", "nowhere.py:3", "<string>:1", f"{tmp_path}/broken.py:1", f"{__file__}:999999", "a:b"):
        assert cut_hint(where) is None
        assert cut_hint(where, (1, 1, 0, 5)) is None
