"""The rules: one text per code that the sources know, and each text's programs break it, or do not."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import spangraph
from spangraph import Compiled, DeclarationError, HostReadError, rules
from spangraph.rules import RULES

_SOURCES = [Path(str(package.__file__)).parent for package in (spangraph, spangraph.passes)]


def test_every_code_of_the_sources_has_a_text_and_the_other_way_round() -> None:
    text = "".join(path.read_text(encoding="utf-8") for folder in _SOURCES for path in folder.glob("*.py"))
    used = set(re.findall(r"""(?<!`)"(SG\d{3})[" ]""", text))
    assert "SG109" in used
    assert used == set(RULES)


def test_every_section_is_read() -> None:
    """One that the parser does not understand would be missing without a word."""
    text = Path(rules.__file__).with_name("rules.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+) ", text, re.MULTILINE) == list(RULES) == sorted(RULES)
    assert text.count("\n## ") == len(RULES)
    assert text.count("```python\n") == 2 * len(RULES)


@pytest.mark.parametrize("code", RULES)
def test_a_rule_says_what_and_what_to_do(code: str) -> None:
    rule = rules.rule(code)
    assert rule.code == code
    assert rule.title[0].isupper()
    assert rule.title[-1].isalnum()
    assert len(rule.title) < 85
    assert 2 <= len(rule.text.split("\n\n")) <= 3
    assert "```" not in rule.text
    for block in (rule.wrong, rule.right):
        assert re.match(r"report = (spangraph|pipeline)\.verify\(", block.splitlines()[-1])
        assert block.strip() in rule.markdown


def test_an_unknown_code_and_an_unknown_name() -> None:
    with pytest.raises(KeyError, match="SG999"):
        rules.rule("SG999")
    with pytest.raises(AttributeError, match="no attribute 'RULE'"):
        rules.RULE  # noqa: B018


def report_of(block: str, path: Path) -> Any:
    """What the program calls `report`. It is a file, as findings have a place."""
    path.write_text(block, encoding="utf-8")
    return runpy.run_path(str(path))["report"]


PROGRAMS = pytest.mark.parametrize(
    ("code", "kind"), [pytest.param(code, kind, id=f"{code}-{kind}") for code in RULES for kind in ("wrong", "right")]
)


@PROGRAMS
def test_wrong_programs_break_their_rule_and_right_ones_break_none(code: str, kind: str, tmp_path: Path) -> None:
    block = getattr(RULES[code], kind)
    report = report_of(block, tmp_path / "program.py")
    broken = {found.severity for found in report.diagnostics if found.rule == code}
    assert broken == ({RULES[code].severity} if kind == "wrong" else set()), report.text()
    if kind == "right":
        assert report.errors == (), report.text()


@pytest.mark.parametrize("code", [code for code in RULES if code.startswith("SG1") or code == "SG401"])
def test_a_launch_refuses_what_breaks_a_contract(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` and `verify` know one set of rules."""

    def launch(model: nn.Module, args: tuple[Any, ...], walk: str = "forward") -> Compiled:
        compiled = spangraph.compile(model, walk=walk)
        compiled.launch(*args).release()
        return compiled

    monkeypatch.setattr(spangraph, "verify", launch, raising=False)
    with pytest.raises((DeclarationError, HostReadError), match=code):
        report_of(RULES[code].wrong, tmp_path / "wrong.py")
    assert code not in report_of(RULES[code].right, tmp_path / "right.py").explain()
