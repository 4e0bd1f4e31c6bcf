"""SARIF: valid under the published schema, data/sarif-schema-2.1.0.json of oasis-tcs/sarif-spec, and what it says."""

import json
import re
import urllib.parse
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangraph import Diagnostic, Report
from spangraph.rules import RULES

_SCHEMA = json.loads((Path(__file__).parent / "data" / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
_VALIDATOR = jsonschema.Draft4Validator(_SCHEMA)


def written(*found: Diagnostic) -> dict[str, Any]:
    """The only run of a report's SARIF log, which is checked against the schema."""
    log = json.loads(Report(found).sarif())
    _VALIDATOR.validate(log)
    (run,) = log["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    return run


def artifact(run: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return run["results"][index]["locations"][0]["physicalLocation"]["artifactLocation"]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory; one with a space, as a checkout may have."""
    path = tmp_path / "the checkout"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def test_the_schema_refuses_what_is_no_sarif() -> None:
    """Guards the tests below: a validator that takes everything would pass them all."""
    log = json.loads(Report([Diagnostic("SG101", "m", "a.py:1")]).sarif())
    log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    assert not _VALIDATOR.is_valid(log)
    assert not _VALIDATOR.is_valid({"version": "2.1.0"})


def test_an_empty_report() -> None:
    run = written()
    assert run["results"] == []
    assert run["tool"]["driver"] == {"name": "spangraph", "version": run["tool"]["driver"]["version"], "rules": []}


def test_all_that_a_finding_has(root: Path) -> None:
    file = root / "model.py"
    file.write_text("x = 1\ny = 2  # spangraph: allow SG201 padding is zero\n")
    run = written(
        Diagnostic(
            "SG301", "bad", f"{file}:1", "talker.codes", "mend", "error", 3, (("the mark", f"{file}:2"), ("a node", ""))
        ),
        Diagnostic("SG201", "leaks", f"{file}:2", severity="warning"),
        Diagnostic("SG204", "opaque", node="decoder", severity="warning"),
        Diagnostic("SG501", "differ"),
    )
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["SG201", "SG204", "SG301", "SG501"]
    assert [rule["defaultConfiguration"]["level"] for rule in rules] == ["warning", "warning", "error", "error"]
    assert rules[2]["shortDescription"]["text"] == RULES["SG301"].title
    assert rules[2]["fullDescription"]["text"] == RULES["SG301"].text
    assert RULES["SG301"].wrong in rules[2]["help"]["markdown"]

    results = {result["ruleId"]: result for result in run["results"]}
    place = {"artifactLocation": {"uri": "model.py", "uriBaseId": "%SRCROOT%"}, "region": {"startLine": 1}}
    assert results["SG301"]["locations"] == [
        {"physicalLocation": place, "logicalLocations": [{"name": "talker.codes"}]}
    ]
    assert results["SG301"]["message"] == {"text": "bad Fix: mend"}
    assert (results["SG301"]["level"], results["SG301"]["occurrenceCount"]) == ("error", 3)
    second = {"physicalLocation": {**place, "region": {"startLine": 2}}}
    assert results["SG301"]["relatedLocations"] == [
        {"id": 0, "message": {"text": "the mark"}, **second},
        {"id": 1, "message": {"text": "a node"}},
    ]
    assert results["SG201"]["suppressions"] == [{"kind": "inSource", "justification": "padding is zero"}]
    assert results["SG201"]["level"] == "warning"
    assert not any("suppressions" in results[code] for code in ("SG301", "SG204", "SG501"))
    assert results["SG204"]["locations"] == [{"logicalLocations": [{"name": "decoder"}]}]
    assert "locations" not in results["SG501"]
    assert "%SRCROOT%" in run["originalUriBaseIds"]


# What a name may hold that a URI may not, or that a URI means something else by.
ODD = [
    "a b.py",
    "größe.py",
    "音声/模型.py",
    "100%.py",
    "a#b?c.py",
    "c:d.py",
    "C:\\engine\\model.py",
    "..py",
    "a&b=c;d.py",
]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("below", [True, False])
def test_paths_become_uris_and_back(root: Path, name: str, below: bool) -> None:
    file = str((root if below else root.parent) / name)
    uri = artifact(written(Diagnostic("SG101", "m", f"{file}:7")))
    assert ("uriBaseId" in uri) == below
    assert re.fullmatch(r"[A-Za-z0-9._~:/%&=;-]+", uri["uri"])
    parts = urllib.parse.urlsplit(uri["uri"])
    assert (parts.scheme, parts.query, parts.fragment) == ("" if below else "file", "", "")
    path = urllib.parse.unquote(parts.path)
    assert (str(root / path) if below else path) == file


def test_relative_paths_and_dots_are_resolved(root: Path) -> None:
    run = written(*(Diagnostic("SG101", "m", f"{file}:1") for file in ("sub/../m.py", "sub/n.py", "../out.py")))
    assert [artifact(run, i)["uri"] for i in range(3)] == [(root.parent / "out.py").as_uri(), "m.py", "sub/n.py"]


def test_a_link_into_the_checkout_is_in_the_checkout(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert artifact(written(Diagnostic("SG101", "m", f"{link / 'm.py'}:1"))) == {
        "uri": "m.py",
        "uriBaseId": "%SRCROOT%",
    }


def test_a_path_without_a_line_has_no_region() -> None:
    location = written(Diagnostic("SG101", "m", "pipeline.toml"))["results"][0]["locations"][0]
    assert location == {"physicalLocation": {"artifactLocation": {"uri": "pipeline.toml", "uriBaseId": "%SRCROOT%"}}}


def test_a_rule_that_is_not_ours_is_named_without_a_text() -> None:
    assert written(Diagnostic("XY1", "m"))["tool"]["driver"]["rules"] == [{"id": "XY1"}]


texts = st.text(st.characters(exclude_categories=()), max_size=12)
paths = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    found=st.lists(
        st.builds(
            Diagnostic,
            st.sampled_from(["SG101", "SG301"]),
            texts,
            paths | paths.map(lambda path: f"{path}:3"),
            texts,
            texts,
            st.sampled_from(["error", "warning"]),
            st.integers(1, 9),
            st.lists(st.tuples(texts, paths), max_size=2).map(tuple),
            st.none() | texts,
        ),
        max_size=4,
    )
)
def test_any_report_is_valid(found: list[Diagnostic]) -> None:
    """Names, messages and paths hold anything that they can: lone surrogates, control characters, colons."""
    written(*found)


# ---- fingerprints ----------------------------------------------------------------------------------------------------


def fingerprints(*found: Diagnostic) -> list[str]:
    prints = [result["partialFingerprints"]["spangraph/v1"] for result in written(*found)["results"]]
    assert len(set(prints)) == len(prints)
    return prints


def leak(file: Path, line: int, message: str = "conv mixes") -> Diagnostic:
    return Diagnostic("SG201", f"{message} ({file}:{line})", f"{file}:{line}", "conv")


def test_fingerprints_stay_when_lines_are_added_above(root: Path) -> None:
    file = root / "model.py"
    text = "x = pad(x)\nx = conv(x)\ny = pool(x)\nx = conv(x)\n"
    file.write_text(text)
    before = fingerprints(leak(file, 2), leak(file, 3), leak(file, 4))
    file.write_text("import torch\n\n" + text)
    assert fingerprints(leak(file, 4), leak(file, 5), leak(file, 6)) == before


def test_fingerprints_are_those_of_another_checkout(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "model.py").write_text("x = conv(x)\n")
    here = fingerprints(leak(root / "model.py", 1))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    (other / "model.py").write_text("x = conv(x)\n")
    assert fingerprints(leak(other / "model.py", 1)) == here


def test_fingerprints_differ_where_findings_do(root: Path) -> None:
    file = root / "model.py"
    file.write_text("x = conv(x)\nx = pool(x)\n")
    kinds = [
        leak(file, 1),
        leak(file, 2),
        leak(file, 1, "attention mixes"),
        leak(root / "other.py", 1),
        Diagnostic("SG202", "conv mixes", f"{file}:1", "conv"),
        Diagnostic("SG201", "conv mixes", f"{file}:1", "conv_1"),
    ]
    assert len({fingerprints(found)[0] for found in kinds}) == len(kinds)
