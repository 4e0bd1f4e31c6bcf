"""Reports: what is merged, in which order, what a comment allows, and what people and programs get to read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangraph import Diagnostic, Report, VerificationError


def found(rule: str = "SG301", where: str = "", **fields: Any) -> Diagnostic:
    return Diagnostic(rule, fields.pop("message", "something is wrong"), where, **fields)


def warned(rule: str = "SG201", where: str = "", **fields: Any) -> Diagnostic:
    return found(rule, where, severity="warning", **fields)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes a file into the current directory and returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# ---- what a report holds ---------------------------------------------------------------------------------------------


def test_an_empty_report() -> None:
    report = Report()
    assert (report.diagnostics, report.errors, report.warnings, report.allowed, report.exit_code) == ((), (), (), (), 0)
    assert report.text() == report.text(color=True) == str(report) == "no findings"
    report.raise_for_errors()


def test_identical_findings_are_one_with_their_counts() -> None:
    one = found(where="a.py:3", node="conv", fix="mask first", related=(("the mark", "a.py:1"),))
    again = found(where="a.py:3", node="conv", count=4, related=(("another mark", "a.py:2"),))
    (merged,) = Report([one, again, one]).diagnostics
    assert merged.count == 6
    assert merged.fix == "mask first"
    assert merged.related == (("the mark", "a.py:1"), ("another mark", "a.py:2"))


# Each differs from the first in one of the fields that make a finding what it is.
@pytest.mark.parametrize(
    "other",
    [
        found("SG302", "a.py:3", node="n"),
        found(where="a.py:4", node="n"),
        found(where="a.py:3"),
        found(where="a.py:3", node="n", message="other"),
    ],
)
def test_different_findings_stay_two(other: Diagnostic) -> None:
    assert len(Report([found(where="a.py:3", node="n"), other]).diagnostics) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_an_error_and_a_warning_of_one_text_are_an_error(order: int) -> None:
    report = Report([warned("SG203"), found("SG203")][::order])
    assert (len(report.errors), len(report.warnings)) == (1, 0)


def test_the_order_is_file_line_rule_with_lines_as_numbers_and_the_placeless_last() -> None:
    ordered = [("a.py:9", "SG202"), ("a.py:10", "SG101"), ("a.py:10", "SG301"), ("b.py:1", "SG101"), ("", "SG101")]
    report = Report([found(rule, where) for where, rule in ordered[::-1]])
    assert [(d.where, d.rule) for d in report.diagnostics] == ordered


def test_only_errors_fail() -> None:
    warning = Report([warned()])
    assert (warning.exit_code, len(warning.warnings)) == (0, 1)
    warning.raise_for_errors()
    both = warning + Report([found(where="a.py:3")])
    assert both.exit_code == 1
    with pytest.raises(VerificationError, match="1 error, 1 warning") as caught:
        both.raise_for_errors()
    assert str(caught.value) == both.text()
    assert caught.value.diagnostics == both.diagnostics
    assert isinstance(caught.value, ValueError)


findings = st.lists(
    st.builds(
        found,
        st.sampled_from(["SG101", "SG201"]),
        st.sampled_from(["", "a.py:1", "a.py:2", "b.py:1"]),
        node=st.sampled_from(["", "n"]),
        severity=st.sampled_from(["error", "warning"]),
        count=st.integers(1, 5),
    )
)


@given(one=findings, other=findings)
def test_adding_reports_is_reporting_all_and_loses_no_count(one: Any, other: Any) -> None:
    added = Report(one) + Report(other)
    assert added.json() == Report([*one, *other]).json()
    assert sum(d.count for d in added.diagnostics) == sum(d.count for d in [*one, *other])
    assert (added + Report()).json() == added.json()
    split = sorted([*added.errors, *added.warnings, *added.allowed], key=str)
    assert split == sorted(added.diagnostics, key=str)


# ---- comments --------------------------------------------------------------------------------------------------------

# The forms that a person would try, each with the reason it gives.
ALLOWS = [
    ("# spangraph: allow SG201 padding is zero here", "padding is zero here"),
    ("#spangraph:allow SG201 why", "why"),
    ("# noqa: E501  # spangraph: allow SG201 why", "why"),
    ("# spangraph: allow SG203, SG201 both are masked", "both are masked"),
    ("# spangraph: allow SG203,SG201: both", "both"),
    ("# spangraph: allow SG201 - x2 is known, SG is not", "x2 is known, SG is not"),
    ("# spangraph: allow SG201, as the kernel is 1 wide", "as the kernel is 1 wide"),
]


@pytest.mark.parametrize(("comment", "reason"), ALLOWS)
@pytest.mark.parametrize("name", ["model.py", "pipeline.toml"])
def test_a_comment_allows_its_rules_on_its_line(source: Any, name: str, comment: str, reason: str) -> None:
    file = source(f"x = 1\ny = 2  {comment}\nz = 3\n", name)
    report = Report([found("SG201", f"{file}:{line}") for line in (1, 2, 3)] + [found("SG301", f"{file}:2")])
    assert [(d.rule, d.where, d.allowed) for d in report.allowed] == [("SG201", f"{file}:2", reason)]
    assert len(report.errors) == 3
    assert not any(d.related for d in report.diagnostics)
    allowed = Report(report.allowed)
    assert (allowed.exit_code, allowed.summary) == (0, "1 allowed")
    assert (report + allowed).allowed[0].count == 2


# Comments that allow nothing, and what the finding then says about it; None: they are about something else.
REFUSED = [
    ("# spangraph: allow SG201", "gives no reason"),
    ("# spangraph: allow SG201  ", "gives no reason"),
    ("# spangraph: allow SG203, SG201,", "gives no reason"),
    ("# spangraph: allow SG999 padding is zero", "names SG999, which is no rule"),
    ("# spangraph: allow sg201 padding is zero", "names sg201, which is no rule"),
    ("# spangraph: allow", "names no rule"),
    ("# spangraph: allow padding here", "names no rule"),
    ("# spangraph: allow SG203 another rule", None),
    ("# spangraph: allow SG203", None),
    ("# spangraph: allowed SG201 why", None),
    ("# see spangraph: allow SG201 why", None),
    ("# unrelated", None),
]


@pytest.mark.parametrize(("comment", "note"), REFUSED)
def test_a_comment_that_does_not_count_says_why(source: Any, comment: str, note: str | None) -> None:
    file = source(f"y = 2  {comment}\n")
    report = Report([found("SG201", f"{file}:1")])
    assert report.exit_code == 1
    notes = report.errors[0].related
    assert [where for _, where in notes] == [f"{file}:1"] * (note is not None)
    if note is not None:
        assert notes[0][0].startswith(f"the comment on this line {note}")
        assert note in report.text()
    assert (report + report).errors[0].related == notes


def test_an_unknown_code_is_named_beside_one_that_counts(source: Any) -> None:
    file = source("y = 2  # spangraph: allow SG201, SG999 zero\n")
    (allowed,) = Report([found("SG201", f"{file}:1")]).allowed
    assert allowed.related == (("the comment on this line names SG999, which is no rule", f"{file}:1"),)


def test_only_comments_count_not_strings_that_hold_one(source: Any) -> None:
    text = "# spangraph: allow SG201 why"
    file = source(f'a = "{text}"\nb = """\n{text}\n"""\nc = f"{text}"\nd = "#"  {text}\n')
    report = Report([found("SG201", f"{file}:{line}") for line in range(1, 7)])
    assert [d.where for d in report.allowed] == [f"{file}:6"]
    toml = source(f'a = "{text}"\nb = \'{text}\'\nc = "\\"#"  {text}\n', "pipeline.toml")
    report = Report([found("SG201", f"{toml}:{line}") for line in (1, 2, 3)])
    assert [d.where for d in report.allowed] == [f"{toml}:3"]


def test_in_a_statement_of_several_lines_the_line_that_is_named_counts(source: Any) -> None:
    file = source("y = f(  # spangraph: allow SG201 first\n    1,\n)  # spangraph: allow SG203 last\n")
    report = Report([found(rule, f"{file}:{line}") for rule, line in [("SG201", 1), ("SG203", 1), ("SG203", 3)]])
    assert [(d.rule, d.where) for d in report.errors] == [("SG203", f"{file}:1")]


def test_a_file_that_does_not_parse_is_read_up_to_there(source: Any) -> None:
    file = source("x = 1  # spangraph: allow SG201 why\ny = (\n")
    assert len(Report([found("SG201", f"{file}:1"), found("SG201", f"{file}:2")]).allowed) == 1


def test_a_file_that_changed_is_read_again(source: Any) -> None:
    file = source("x = 1\n")
    assert Report([found("SG201", f"{file}:1")]).exit_code == 1
    source("x = 1  # spangraph: allow SG201 why\n")
    assert Report([found("SG201", f"{file}:1")]).exit_code == 0


# Nothing that can be read: no such file or line, no line at all, bytes that are no text, a directory.
@pytest.mark.parametrize(
    "where", ["gone.py:3", "model.py:99", "model.py:0", "model.py", "binary.py:1", ".:1", ":", "x:"]
)
def test_what_cannot_be_read_allows_nothing_and_breaks_nothing(source: Any, where: str) -> None:
    source("x = 1\n")
    Path("binary.py").write_bytes(b"x = '\xff\xfe\x00'\n# spangraph: allow SG201 why\n")
    report = Report([found("SG201", where)])
    assert report.exit_code == 1
    assert "something is wrong" in report.text()
    assert json.loads(report.json())["diagnostics"][0]["rule"] == "SG201"
    assert json.loads(report.sarif())["runs"][0]["results"][0]["ruleId"] == "SG201"


# ---- for people ------------------------------------------------------------------------------------------------------


def test_text(source: Any) -> None:
    file = source("x = 1\n    y = conv(x)\nz = 1  # spangraph: allow SG202 rows are weighed\n")
    other = source("[[nodes]]\n", "configs/pipeline.toml")
    report = Report(
        [
            warned(where=f"{file}:2", message="conv mixes\npositions", count=3, related=(("the mark", f"{other}:1"),)),
            found("SG202", f"{file}:3", message="mean mixes\nrows"),
            found("SG301", f"{other}:1", node="a.b -> c", fix="take the spans", related=(("a thing", ""),)),
            found("SG101", "/elsewhere/gone.py:7"),
            found("SG204", node="root"),
        ]
    )
    assert report.text() == (
        f"""\
/elsewhere/gone.py
  7: error SG101 something is wrong

{os.path.join("configs", "pipeline.toml")}
  1: error SG301 something is wrong [a.b -> c]
      | [[nodes]]
      a thing
      fix: take the spans

model.py
  2: warning SG201 conv mixes
        positions (3x)
      | y = conv(x)
      the mark: {os.path.join("configs", "pipeline.toml")}:1

no file
  error SG204 something is wrong [root]

allowed
  model.py:3: SG202 mean mixes rows (rows are weighed)

3 errors, 1 warning, 1 allowed"""
    )


def test_color_changes_nothing_but_the_color(source: Any) -> None:
    file = source("x = 1\ny = 2  # spangraph: allow SG201 why\n")
    report = Report([found(where=f"{file}:1"), found("SG201", f"{file}:2"), warned()])
    colored = report.text(color=True)
    assert "\x1b[1;31merror SG301\x1b[0m" in colored
    assert "\x1b" not in report.text()
    plain = colored
    for code in ("0", "1", "2", "1;31", "1;33"):
        plain = plain.replace(f"\x1b[{code}m", "")
    assert plain == report.text()


@pytest.mark.parametrize(
    ("errors", "warnings", "summary"),
    [(1, 0, "1 error"), (2, 1, "2 errors, 1 warning"), (0, 2, "2 warnings"), (0, 0, "no findings")],
)
def test_summary(errors: int, warnings: int, summary: str) -> None:
    diagnostics = [found(message=str(i)) for i in range(errors)] + [warned(message=str(i)) for i in range(warnings)]
    report = Report(diagnostics)
    assert report.summary == report.text().splitlines()[-1] == summary
    assert repr(report) == f"<Report: {summary}>"


# ---- for programs ----------------------------------------------------------------------------------------------------


def test_json(source: Any) -> None:
    file = source("x = 1\ny = 2  # spangraph: allow SG201 why\n")
    report = Report(
        [
            found(where="C:\\engine\\model.py:3", node="n", fix="do", count=2, related=(("the mark", f"{file}:1"),)),
            warned(where=f"{file}:2"),
            warned("SG204"),
        ]
    )
    written = json.loads(report.json())
    assert written["version"] == 1
    assert written["summary"] == {"errors": 1, "warnings": 1, "allowed": 1}
    by_rule = {entry["rule"]: entry for entry in written["diagnostics"]}
    assert by_rule["SG301"] == {
        "rule": "SG301",
        "severity": "error",
        "message": "something is wrong",
        "file": "C:\\engine\\model.py",
        "line": 3,
        "node": "n",
        "fix": "do",
        "count": 2,
        "related": [{"message": "the mark", "file": file, "line": 1}],
        "allowed": None,
    }
    assert by_rule["SG201"]["allowed"] == "why"
    assert (by_rule["SG204"]["file"], by_rule["SG204"]["line"]) == ("", None)
