"""What a check found: a rule, a place and a way out. Errors carry them, `explain()` and reports print them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnostic:
    """One finding.

    Attributes:
        rule: stable code, `"SG101"` to `"SG509"`; `spangraph rules` lists them.
        message: what was found, in one sentence.
        where: `"file:line"` of the user's code, or `""` where no line is known.
        node: name of the graph node, submodule or pipeline edge.
        fix: what to do.
        severity: `"error"` or `"warning"`.
        count: how often it was found there.
        related: other places that belong to it, `(what it is, "file:line")`.
        allowed: the reason given on the source line for allowing it; such a finding no longer counts.
    """

    rule: str
    message: str
    where: str = ""
    node: str = ""
    fix: str = ""
    severity: str = "error"
    count: int = 1
    related: tuple[tuple[str, str], ...] = ()
    allowed: str | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        subject = f" [{self.node}]" if self.node else ""
        times = f" ({self.count}x)" if self.count > 1 else ""
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"{place}{self.rule} {self.message}{times}{subject}{fix}"
