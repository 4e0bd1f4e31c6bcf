"""What a verification found: for people, for programs (JSON), and for code scanning (SARIF 2.1.0)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import linecache
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spangraph import rules
from spangraph.diagnostics import Diagnostic
from spangraph.errors import VerificationError
from spangraph.suppress import apply_comments, split_where

_JSON_VERSION = 1
_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_STYLES = {"error": "1;31", "warning": "1;33", "file": "1", "dim": "2"}


class Report:
    """What was found, without repeats, in order of file, line and rule. Reports add up with `+`.

    A comment `# spangraph: allow SG201 <reason>` at the end of the line that a finding points to, in a Python or a TOML
    file, allows that finding there: it is listed, and does not count. Several rules: `allow SG201, SG203 <reason>`.
    Without a reason it allows nothing. Source lines are read once, when the report is made.

    Attributes:
        diagnostics: all findings; each is also in one of the following.
        errors, warnings: what counts.
        allowed: what a comment allows.
    """

    def __init__(self, diagnostics: Iterable[Diagnostic] = ()) -> None:
        merged: dict[tuple[str, ...], Diagnostic] = {}
        for found in diagnostics:
            key = (found.rule, found.where, found.message, found.node)
            merged[key] = _merge(merged[key], found) if key in merged else found
        self.diagnostics = tuple(sorted(apply_comments(merged.values()), key=_place))
        self.allowed = tuple(d for d in self.diagnostics if d.allowed is not None)
        self.errors = tuple(d for d in self.diagnostics if d.allowed is None and d.severity == "error")
        self.warnings = tuple(d for d in self.diagnostics if d.allowed is None and d.severity != "error")

    def __add__(self, other: Report) -> Report:
        return Report([*self.diagnostics, *other.diagnostics])

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Report: {self.summary}>"

    @property
    def exit_code(self) -> int:
        """1 if there are errors, else 0."""
        return 1 if self.errors else 0

    @property
    def summary(self) -> str:
        """How many of what, such as `"2 errors, 1 warning, 1 allowed"`."""
        counts = {"error": self.errors, "warning": self.warnings, "allowed": self.allowed}
        plural = {"error": "s", "warning": "s", "allowed": ""}
        parts = [f"{len(f)} {kind}{plural[kind] if len(f) > 1 else ''}" for kind, f in counts.items() if f]
        return ", ".join(parts) or "no findings"

    def raise_for_errors(self) -> None:
        """Do nothing if there are no errors.

        Raises:
            VerificationError: with the report as its message, if there are.
        """
        if self.errors:
            raise VerificationError(self.text(), self.diagnostics)

    def text(self, *, color: bool = False) -> str:
        """The report for people: file by file, each finding with its line of source; then what is allowed."""

        def paint(style: str, text: str) -> str:
            return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if color else text

        lines: list[str] = []
        heading = None
        for found in (d for d in self.diagnostics if d.allowed is None):
            file, line = split_where(found.where)
            if file != heading:
                heading = file
                lines += ["", paint("file", _shown(file) or "no file")]
            kind = paint("error" if found.severity == "error" else "warning", f"{found.severity} {found.rule}")
            times = f" ({found.count}x)" if found.count > 1 else ""
            node = f" [{found.node}]" if found.node else ""
            lines.append(f"  {f'{line}: ' if line else ''}{kind} {_indented(found.message)}{times}{node}")
            if source := _source_line(found.where):
                lines.append(paint("dim", f"      | {source}"))
            lines += [
                f"      {_indented(what)}{f': {_shown(where)}' if where else ''}" for what, where in found.related
            ]
            lines += [f"      fix: {_indented(found.fix)}"] if found.fix else []
        lines += ["", "allowed"] if self.allowed else []
        for found in self.allowed:
            place = f"{_shown(found.where)}: " if found.where else ""
            lines.append(paint("dim", f"  {place}{found.rule} {' '.join(found.message.split())} ({found.allowed})"))
        text = "\n".join([*lines[1:], *([""] if lines else []), self.summary])
        # What a message brings along must not drive a terminal.
        return re.sub(r"(?!\x1b\[[\d;]*m)[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)

    def json(self) -> str:
        """The report for programs; docs/verify.md describes it. Its version counts up when a field changes meaning."""
        findings = []
        for found in self.diagnostics:
            entry = dataclasses.asdict(found)
            entry["file"], entry["line"] = split_where(entry.pop("where"))
            places = ((what, *split_where(where)) for what, where in found.related)
            entry["related"] = [dict(zip(("message", "file", "line"), place, strict=True)) for place in places]
            findings.append(entry)
        counts = {kind: len(getattr(self, kind)) for kind in ("errors", "warnings", "allowed")}
        return json.dumps({"version": _JSON_VERSION, "summary": counts, "diagnostics": findings}, indent=2)

    def sarif(self) -> str:
        """The report for code scanning. Paths are relative to the current directory where they lie below it."""
        from spangraph import __version__  # the package imports this module

        codes = sorted({d.rule for d in self.diagnostics})
        driver = {"name": "spangraph", "version": __version__, "rules": [_sarif_rule(code) for code in codes]}
        seen: Counter[str] = Counter()
        results = []
        for found in self.diagnostics:
            result = _sarif_result(found) | {"ruleIndex": codes.index(found.rule)}
            fingerprint = _fingerprint(found)
            # The ordinal tells two findings of one text in one file apart.
            result["partialFingerprints"] = {"spangraph/v1": f"{fingerprint}:{seen[fingerprint]}"}
            seen[fingerprint] += 1
            results.append(result)
        root = {"%SRCROOT%": {"description": {"text": "The directory in which the check ran."}}}
        run = {"tool": {"driver": driver}, "originalUriBaseIds": root, "results": results}
        return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _merge(one: Diagnostic, other: Diagnostic) -> Diagnostic:
    severity = "error" if "error" in (one.severity, other.severity) else one.severity
    related = tuple(dict.fromkeys(one.related + other.related))
    return dataclasses.replace(one, count=one.count + other.count, severity=severity, related=related)


def _place(found: Diagnostic) -> tuple[Any, ...]:
    file, line = split_where(found.where)
    return not file, file, line or 0, found.rule, found.message, found.node


def _relative(file: str) -> Path | None:
    """The path below the current directory, if it lies there, perhaps by way of a link."""
    return _below(file, Path.cwd())


@functools.lru_cache(maxsize=1024)
def _below(file: str, cwd: Path) -> Path | None:
    paths = (Path(os.path.abspath(file)), Path(os.path.realpath(file)))
    return next((path.relative_to(cwd) for path in paths if path.is_relative_to(cwd)), None)


def _shown(where: str) -> str:
    file, line = split_where(where)
    return f"{(file and _relative(file)) or file}{f':{line}' if line else ''}"


def _indented(text: str) -> str:
    return text.replace("\n", "\n        ")


def _source_line(where: str) -> str:
    file, line = split_where(where)
    return linecache.getline(file, line).strip() if line else ""


def _physical(where: str) -> dict[str, Any]:
    file, line = split_where(where)
    if not file:
        return {}
    relative = _relative(file)
    artifact = {"uri": Path(os.path.abspath(file)).as_uri()}
    if relative is not None:
        artifact = {"uri": quote(os.fsencode(relative.as_posix())), "uriBaseId": "%SRCROOT%"}
    return {"physicalLocation": {"artifactLocation": artifact, **({"region": {"startLine": line}} if line else {})}}


def _sarif_result(found: Diagnostic) -> dict[str, Any]:
    location = _physical(found.where) | ({"logicalLocations": [{"name": found.node}]} if found.node else {})
    places = [{"id": i, "message": {"text": what}} | _physical(at) for i, (what, at) in enumerate(found.related)]
    optional = {
        "locations": [location] if location else [],
        "relatedLocations": places,
        "suppressions": [] if found.allowed is None else [{"kind": "inSource", "justification": found.allowed}],
    }
    return {
        "ruleId": found.rule,
        "level": "error" if found.severity == "error" else "warning",
        "message": {"text": f"{found.message} Fix: {found.fix}" if found.fix else found.message},
        "occurrenceCount": found.count,
        **{key: value for key, value in optional.items() if value},
    }


def _sarif_rule(code: str) -> dict[str, Any]:
    if (known := rules.RULES.get(code)) is None:
        return {"id": code}
    return {
        "id": code,
        "shortDescription": {"text": known.title},
        "fullDescription": {"text": known.text},
        "help": {"text": known.text, "markdown": known.markdown},
        "defaultConfiguration": {"level": known.severity},
    }


def _fingerprint(found: Diagnostic) -> str:
    """What stays when lines are added above, and on another machine."""
    file, _ = split_where(found.where)
    place = file and (_relative(file) or Path(os.path.basename(file))).as_posix()
    message = re.sub(r"\S*:\d+\b", "", found.message.replace(file, ""))
    parts = "\0".join((found.rule, place, _source_line(found.where), found.node, message))
    return hashlib.sha256(parts.encode(errors="backslashreplace")).hexdigest()[:16]
