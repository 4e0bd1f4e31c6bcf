"""`spangraph.verify`: all findings of a model in one report, and the model as it was."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spangraph
from spangraph import (
    DeclarationError,
    Edge,
    HostReadError,
    InputError,
    Node,
    Pipeline,
    Report,
    SpannedOutput,
    VerificationError,
    from_lengths,
    verify,
)

from .toys import Spanned, Toy, batch, line_of, plain, spanned

MEL = torch.randn(3, 4, 20)
FRAMES = torch.tensor([20, 5, 7])


def rules(report: Report) -> list[tuple[str, int]]:
    return sorted((found.rule, found.count) for found in report.diagnostics)


class Vocoder(nn.Module):
    """Everything that can be wrong, bar what would keep it from exporting."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 7, padding=3)
        self.register_buffer("spans", torch.zeros(3, 2, dtype=torch.int64))

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        x = self.conv(mel)  # SG201 few
        x = x / x.amax(-1, keepdim=True)  # SG201 all
        x = x / x.amax(0)  # SG202
        self.spans[:2, 1] = frames[:2]
        return SpannedOutput({"audio": x[..., 2:]}, {"audio": self.spans})


def test_one_report_holds_all_that_is_found() -> None:
    """K1: a span that was computed from what was asked for. K6: padding rows. K8: spans that a buffer keeps."""
    report = verify(Vocoder().eval(), (MEL, FRAMES), input_spans={"mel": -1}, padding="right")
    assert rules(report) == [("SG201", 1), ("SG201", 1), ("SG202", 1), ("SG205", 1), ("SG206", 1)]
    assert [found.rule for found in report.errors] == ["SG205"]
    places = {found.where for found in report.diagnostics if found.rule.startswith("SG20") and found.rule < "SG203"}
    assert places == {line_of(Vocoder, f"# {what}") for what in ("SG201 few", "SG201 all", "SG202")}
    (bad,) = report.errors
    assert "row 0: span [0, 20) does not fit 0 <= start <= end <= 18" in bad.message
    with pytest.raises(VerificationError, match=r"SG205[\s\S]*1 error, 4 warnings") as caught:
        report.raise_for_errors()
    assert caught.value.diagnostics == report.diagnostics


def test_strict_makes_leaks_errors() -> None:
    report = verify(Vocoder().eval(), (MEL, FRAMES), input_spans={"mel": -1}, strict=True)
    assert not report.warnings
    assert {found.rule for found in report.errors} == {"SG201", "SG202", "SG205", "SG206"}


def test_padding_is_followed_from_inputs_only_where_it_is_said() -> None:
    quiet = verify(Vocoder().eval(), (MEL, FRAMES))
    assert [found.rule for found in quiet.warnings] == ["SG206"]
    rows = verify(Vocoder().eval(), (MEL, FRAMES), input_spans={"mel": ()})
    assert [found.rule for found in rows.warnings] == ["SG206", "SG202"]


def test_padding_is_followed_from_marks() -> None:
    """K10: what comes after the mark takes padding in."""

    def forward(self: Spanned, x: Tensor, lengths: Tensor) -> Any:
        audio = x * 2
        level = audio.mean(-1)  # leaks
        return self.spanned(audio, lengths, level=level)

    report = verify(spanned(forward), batch())
    assert [(found.rule, found.where) for found in report.diagnostics] == [
        ("SG201", line_of(forward, "# leaks")),
        ("SG203", line_of(forward, "# leaks")),  # the mean has no span any more, and is delivered whole
    ]
    assert not report.errors


def test_a_line_that_calls_the_model_is_not_taken_for_one_of_its() -> None:
    def forward() -> Any:  # export keeps frames of this name
        return verify(nn.Sequential(nn.Softmax(-1)), (torch.rand(4, 6),), input_spans={"input": -1})

    (found,) = forward().warnings
    assert (found.rule, found.where) == ("SG201", "")


def test_host_reads_are_found_with_lines_and_counts_and_what_to_declare() -> None:
    """K26: a boolean mask and a comparison of a tensor, before any capture."""

    def forward(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        for _ in range(3):
            if x.max() > 0:  # thrice
                x = x + 1
        x = x[:, : lengths.max().item()]  # a cut
        return x[x > 0]  # a mask

    report = verify(plain(forward), batch())
    assert [(found.rule, found.where, found.count) for found in report.errors] == [
        ("SG401", line_of(forward, "# thrice"), 3),
        ("SG401", line_of(forward, "# a cut"), 1),
        ("SG401", line_of(forward, "# a mask"), 1),
    ]
    fixes = [found.fix for found in report.errors]
    assert "declare" not in fixes[0].replace("declare the extent as a span", "")
    assert "from_lengths(lengths)" in fixes[1]
    assert "from_mask(x > 0)" in fixes[2]


def test_a_masked_fill_is_no_read() -> None:
    def forward(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(5, device=x.device) < lengths[:, None]
        x = x.clone()
        x[~mask] = 0
        return torch.where(mask, x, 1.0).masked_fill(~mask, 2.0)

    assert not verify(plain(forward), batch()).diagnostics


def test_what_does_not_export_is_said_and_the_rest_is_checked() -> None:
    def forward(self: Spanned, x: Tensor, lengths: Tensor) -> SpannedOutput:
        if lengths.max() > 100:
            x = x + 1
        return self.spanned(x, lengths + 1)

    report = verify(spanned(forward), batch())
    assert rules(report) == [("SG204", 1), ("SG205", 1), ("SG401", 1)]
    (not_followed,) = report.warnings
    assert "does not export" in not_followed.message
    assert not_followed.fix.startswith("mend the host reads first")


def test_without_spans_there_is_nothing_to_follow() -> None:
    def forward(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return x[: int(lengths.max())]

    assert rules(verify(plain(forward), batch())) == [("SG401", 1)]


class Broken(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",) if walk == "decode" else ()

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        spans = from_lengths(lengths)
        if self.kind == "shape":
            return SpannedOutput({"audio": x}, {"audio": spans[:, :1]})
        if self.kind == "dtype":
            return SpannedOutput({"audio": x}, {"audio": spans.int()})
        return SpannedOutput({"audio": x, "text": x}, {"audio": spans, "text": spans})


def test_every_declaration_that_does_not_fit_is_found_in_one_run() -> None:
    """What one submodule returns does not hide what the next does, nor the host read between them."""

    def forward(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        outs = [child(x, lengths) for child in self.children()]
        assert x.max() < 1e9
        return outs[0].outputs["audio"]

    model = plain(forward, a=Broken("shape"), b=Broken("dtype"), c=Broken("undeclared"))
    report = verify(model, batch(), walk="decode")
    assert sorted(found.rule for found in report.errors) == ["SG102", "SG103", "SG104", "SG401"]
    declared = {found.where for found in report.errors if found.rule != "SG401"}
    assert declared == {f"{__file__}:{Broken.forward.__code__.co_firstlineno}"}
    with pytest.raises(DeclarationError, match="SG103"):
        spangraph.compile(model, walk="decode").launch(*batch())


def test_an_undeclared_walk_and_a_module_that_is_not_called() -> None:
    report = verify(Broken("dtype"), batch(), walk="prefill")
    assert [found.rule for found in report.errors] == ["SG102"]

    def forward(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return self.get_submodule("part").forward(x, lengths).outputs["audio"]

    report = verify(plain(forward, part=Toy()), batch())
    assert [found.rule for found in report.errors] == ["SG107"]


def test_a_value_that_is_overwritten_is_found_once() -> None:
    def forward(self: Spanned, x: Tensor, lengths: Tensor) -> SpannedOutput:
        return self.spanned(x * 2, lengths)

    def outer(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        audio = self.get_submodule("part")(x, lengths).outputs["audio"]
        return audio.add_(1)

    assert [found.rule for found in verify(plain(outer, part=spanned(forward)), batch()).errors] == ["SG109"]


def test_host_state_and_written_inputs() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return x.mul_(2)

    model, x = plain(forward), torch.ones(2, 3)
    assert [found.rule for found in verify(model, (x,)).errors] == ["SG404", "SG405"]
    assert torch.equal(x, torch.ones(2, 3))
    assert getattr(model, "count", 0) == 0


def test_the_model_is_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    report = verify(model, (MEL,), input_spans={"input": -1})
    assert {found.rule for found in report.warnings} == {"SG201", "SG202"}
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_mode_will_do(mode: Any) -> None:
    with mode():
        assert not verify(Toy(), batch()).diagnostics
        assert verify(Vocoder(), (MEL, FRAMES)).errors


def test_inputs_may_be_named_inside_structures() -> None:
    def forward(self: nn.Module, batch: dict[str, Any], *rest: Tensor, scale: float = 1.0) -> Tensor:
        return batch["mel"].mean(-1) + batch["more"][0].amax(-1) + rest[1].sum(-1) * scale

    args = ({"mel": torch.randn(3, 8), "more": [torch.randn(3, 8)], "n": 3}, torch.randn(3, 8), torch.randn(3, 8))
    for name in ("batch.mel", "batch.more[0]", "rest[1]"):
        report = verify(plain(forward), args, {"scale": 2.0}, input_spans={name: spangraph.Span()})
        assert [found.rule for found in report.warnings] == ["SG201"]
        assert name in report.warnings[0].message
    with pytest.raises(
        InputError, match=re.escape("the forward was given the tensors ['batch.mel', 'batch.more[0]', 'rest[0]'")
    ):
        verify(plain(forward), args, input_spans={"mel": -1})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: verify(F.relu, (MEL,)), "expected an nn.Module"),
        (lambda: verify(nn.ReLU(), MEL), r"args is a Tensor: expected a tuple.*such as \(x,\)"),
        (lambda: verify(nn.ReLU(), (MEL,), padding="end"), "padding='end': expected 'both', 'left' or 'right'"),
        (lambda: verify(nn.ReLU(), (MEL,), input_spans={"input": 0}), "but not dim 0, the rows"),
        (lambda: verify(nn.ReLU(), (MEL,), input_spans={"input": 3}), "or dims of a tensor of 3 dims"),
        (lambda: verify(nn.ReLU(), (MEL,), input_spans={"input": (1, "x")}), "or dims of a tensor of 3 dims"),
        (lambda: verify(nn.ReLU(), (object(),)), "an input of type object can be neither"),
    ],
)
def test_what_cannot_be_verified(call: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        call()


def test_what_the_forward_raises_comes_through() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        verify(plain(forward), (MEL,))
    with pytest.raises(TypeError, match="cannot be called like this"):
        verify(nn.ReLU(), (MEL, MEL))


def test_a_comment_allows_a_finding_on_its_line() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)  # spangraph: allow SG201 attention over zeros
        return y.softmax(-1)

    report = verify(plain(forward), (MEL,), input_spans={"x": -1})
    assert [(found.rule, found.allowed) for found in report.allowed] == [("SG201", "attention over zeros")]
    assert [found.rule for found in report.warnings] == ["SG201"]


def test_reads_that_an_export_leaves_out_are_warnings_unless_strict() -> None:
    """What compile traces around: branches of eager runs, assertions, buffers that are numbers."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.max() > 1e9:
            return x
        return F.pad(x, (int(self.amount), 0))

    model = plain(forward)
    model.register_buffer("amount", torch.tensor(2))
    report = verify(model, (MEL,))
    assert [(found.rule, found.severity) for found in report.diagnostics] == [("SG401", "warning")] * 2
    assert report.warnings[0].fix.startswith("spangraph.compile traces around it")
    assert [found.rule for found in verify(model, (MEL,), strict=True).errors] == ["SG401", "SG401"]
    with spangraph.compile(model) as compiled:
        assert torch.equal(compiled(MEL), F.pad(MEL, (2, 0)))


def test_spans_that_are_made_on_the_host() -> None:
    def forward(self: Spanned, x: Tensor, lengths: Tensor) -> SpannedOutput:
        return self.spanned(x, torch.tensor([3, 5]))

    def on_device(self: Spanned, x: Tensor, lengths: Tensor) -> SpannedOutput:
        return self.spanned(x, torch.full((2,), 3, device=x.device))

    assert [found.rule for found in verify(spanned(forward), batch()).errors] == ["SG105"]
    assert not verify(spanned(on_device), batch()).errors


def test_a_comment_where_the_users_code_enters_a_library_allows_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_library.py").write_text("def peak(x):\n    return x.max().item()\n")
    (tmp_path / "an_engine.py").write_text(
        "import a_library\nfrom torch import nn\nclass M(nn.Module):\n    def forward(self, x):\n"
        "        return x * a_library.peak(x)  # spangraph: allow SG401 once, at start-up\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("an_engine").M()
    (found,) = verify(model, (MEL,)).diagnostics
    assert found.where == f"{tmp_path / 'a_library.py'}:2"
    assert found.allowed == "once, at start-up"


# ---- compile runs the checks -----------------------------------------------------------------------------------------


def test_compile_refuses_a_pipeline_with_conflicts() -> None:
    bad = Pipeline([Node("a", spanned=("audio",)), Node("b")], [Edge("a.audio", "b")])
    with pytest.raises(VerificationError, match="SG301"):
        spangraph.compile(Toy(), pipeline=bad)
    with pytest.warns(UserWarning, match="the pipeline has conflicts:[\\s\\S]*SG301"):
        spangraph.compile(Toy(), pipeline=bad, verify="warn").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spangraph.compile(Toy(), pipeline=bad, verify="off").close()
        good = Pipeline([Node("a", spanned=("audio",)), Node("b", worker="1")], [Edge("a.audio", "b")])
        spangraph.compile(Toy(), pipeline=good).close()
        model = Toy()
        spangraph.compile(model, pipeline=Pipeline([Node("a", module=model)])).close()
    with pytest.raises(InputError, match=r"no node of the pipeline is this model.*\['audio'\]"):
        spangraph.compile(Toy(), pipeline=Pipeline([Node("a", spanned=("codes",))]))
    with pytest.raises(InputError, match="pipeline is a str"):
        spangraph.compile(Toy(), pipeline="pipeline.toml")


def test_compile_refuses_with_all_that_cannot_be_captured() -> None:
    def forward(self: Spanned, x: Tensor, lengths: Tensor) -> SpannedOutput:
        shift = torch.tensor([1, 2], device=x.device)  # a copy
        for _ in range(2):
            x = x + int(lengths.max())  # a read
        return self.spanned(x + shift[0], lengths)

    with spangraph.compile(spanned(forward)) as compiled, pytest.raises(HostReadError) as caught:
        compiled.launch(*batch())
    assert {(found.rule, found.where, found.count) for found in caught.value.diagnostics} == {
        ("SG402", line_of(forward, "# a copy"), 1),
        ("SG401", line_of(forward, "# a read"), 2),
    }


def test_explain_lists_leaks() -> None:
    def forward(self: Spanned, x: Tensor, lengths: Tensor) -> Any:
        audio = x * 2
        return self.spanned(audio, lengths, chances=audio.softmax(-1))

    with spangraph.compile(spanned(forward)) as compiled:
        compiled(*batch())
        assert "SG201 softmax mixes positions of 'audio' along dim -1" in compiled.explain()


def test_a_width_that_the_forward_computes_is_reported_and_not_followed() -> None:
    """As of a text to speech model that predicts durations; the verification broke off."""

    def forward(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return x[:, torch.arange(lengths.max()) % x.shape[1]]

    model = spangraph.declare(plain(forward), wave=lambda out, x, lengths: from_lengths(lengths))
    report = verify(model, (torch.rand(2, 10), torch.tensor([3, 10])))
    assert [found.rule for found in report.errors] == ["SG401"]
    assert "the width of 'wave'" in next(found.message for found in report.warnings if found.rule == "SG204")
