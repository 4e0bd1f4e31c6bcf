"""The rules that a check can find broken, read from `rules.md`, which is their only description."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CODE = r"```python\n(?P<{}>.*?)```"
_SECTION = re.compile(
    r"^## (?P<code>SG\d{3}) (?P<title>[^\n]+)\n\nSeverity: (?P<severity>error|warning)\n\n"
    rf"(?P<markdown>(?P<text>.*?)\n\nWrong:\n\n{_CODE.format('wrong')}\n\nRight:\n\n{_CODE.format('right')})",
    re.MULTILINE | re.DOTALL,
)

RULES: dict[str, Rule]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        code: `"SG101"`.
        title: what is wrong, in a few words.
        severity: `"error"` or `"warning"`, where a finding does not say otherwise.
        text: what it is, why a replay or a row would be wrong, and what to do.
        wrong, right: a program that breaks it, and the same program mended.
        markdown: text and programs as `rules.md` has them.
    """

    code: str
    title: str
    severity: str
    text: str
    wrong: str
    right: str
    markdown: str


@functools.cache
def _load() -> dict[str, Rule]:
    text = Path(__file__).with_name("rules.md").read_text(encoding="utf-8")
    return {match["code"]: Rule(**match.groupdict()) for match in _SECTION.finditer(text)}


def __getattr__(name: str) -> Any:
    if name == "RULES":
        return _load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def rule(code: str) -> Rule:
    """The rule of that code.

    Raises:
        KeyError: if there is none; `RULES` holds all.
    """
    return _load()[code]
