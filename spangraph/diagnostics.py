"""What a check found: a rule, a place and a way out. Errors carry them, `explain()` and reports print them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnostic:
    """One finding.

    Attributes:
        rule: stable code, `"SG101"` to `"SG509"`.
        message: what was found, in one sentence.
        where: `"file:line"` of the user's code, or `""` where no line is known.
        node: name of the graph node or submodule.
        fix: what to do.
    """

    rule: str
    message: str
    where: str = ""
    node: str = ""
    fix: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        subject = f" [{self.node}]" if self.node else ""
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"{place}{self.rule} {self.message}{subject}{fix}"
