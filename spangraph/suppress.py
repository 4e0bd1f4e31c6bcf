"""Comments that allow a finding on its line: `# spangraph: allow SG201 <reason>`."""

from __future__ import annotations

import dataclasses
import linecache
import re
import tokenize
from collections.abc import Iterable, Mapping

from spangraph import rules
from spangraph.diagnostics import Diagnostic

_ALLOW = re.compile(r"#\s*spangraph:\s*allow\b\s*((?:[A-Za-z]+\d+\b(?:[\s,;]+(?=[A-Za-z]+\d+\b))?)*)[\s,:;-]*(.*)")
_TOML_COMMENT = re.compile(r"""^(?:[^"'#]|"(?:\\.|[^"\\])*"|'[^']*')*(#.*)""")


def split_where(where: str) -> tuple[str, int | None]:
    """File and line of a `"file:line"`; the colon of a drive is not that of a line."""
    file, _, line = where.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else (where, None)


def apply_comments(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The same findings: allowed where a comment on their line says so, with a note where one means to but cannot."""
    comments: dict[str, Mapping[int, str]] = {}
    applied = []
    for diagnostic in found:
        file, line = split_where(diagnostic.where)
        if file not in comments:
            comments[file] = _comments(file)
        applied.append(_apply(diagnostic, comments[file].get(line or 0, "")))
        for what, place in diagnostic.related:
            if what == "called from" and applied[-1].allowed is None:  # the user's own line, where a library reads
                file, line = split_where(place)
                applied[-1] = _apply(applied[-1], comments.setdefault(file, _comments(file)).get(line or 0, ""))
    return applied


def _comments(file: str) -> dict[int, str]:
    """The comments of a file by line; none of one that cannot be read."""
    linecache.checkcache(file)
    lines = linecache.getlines(file) if file else []
    if not file.endswith(".py"):
        return {i: match[1] for i, line in enumerate(lines, 1) if (match := _TOML_COMMENT.match(line))}
    found = {}
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            if token.type == tokenize.COMMENT:
                found[token.start[0]] = token.string
    except (tokenize.TokenError, SyntaxError):
        pass  # what stands before the error counts
    return found


def _apply(found: Diagnostic, comment: str) -> Diagnostic:
    match = _ALLOW.search(comment)
    if match is None:
        return found
    codes, reason = re.findall(r"\w+", match[1]), match[2].strip()
    problems = [f"names {code}, which is no rule" for code in codes if code not in rules.RULES]
    if not codes:
        problems = ["names no rule: write `# spangraph: allow SG201 <reason>`"]
    elif found.rule in codes and reason:
        found = dataclasses.replace(found, allowed=reason)
    elif found.rule in codes:
        problems.append("gives no reason and does not count: write one behind the code")
    notes = ((f"the comment on this line {problem}", found.where) for problem in problems)
    return dataclasses.replace(found, related=tuple(dict.fromkeys((*found.related, *notes))))
