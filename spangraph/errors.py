"""Every error that spangraph raises: one base class, one class per situation.

A message says what was found, what was expected and what to do. Errors that a built-in type also describes derive
from it too, so `except ValueError` and `except KeyError` keep working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spangraph.diagnostics import Diagnostic


class SpangraphError(Exception):
    """Base class of all errors raised by spangraph."""


class DeclarationError(SpangraphError, ValueError):
    """A declaration and what the forward returned do not fit (rules SG101-SG109, which the message begins with).

    Attributes:
        where: `"file:line"` of the declaring method, or of what overwrites its value.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class MergeError(SpangraphError, ValueError):
    """Per-request outputs cannot be merged without losing something."""


class InputError(SpangraphError, ValueError):
    """A launch was given inputs or row ids that the compiled object cannot take."""


class TraceError(SpangraphError, RuntimeError):
    """The model could not be turned into a graph."""


class HostReadError(TraceError):
    """The forward reads device values on the host, which stalls the launch thread and breaks capture (SG401).

    Attributes:
        diagnostics: one per read, each with its file:line.
    """

    def __init__(self, message: str, diagnostics: Sequence[Diagnostic] = ()) -> None:
        super().__init__(message)
        self.diagnostics = tuple(diagnostics)


class PipelineError(SpangraphError, ValueError):
    """A pipeline, or the file it comes from, names what does not exist, twice, or what cannot start.

    Attributes:
        problems: one line each, beginning with a key path.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join((f"{message}:" if problems else message, *problems)))
        self.problems = tuple(problems)


class VerificationError(SpangraphError, ValueError):
    """A verification found errors; the message is the report.

    Attributes:
        diagnostics: everything that the report holds, warnings and allowed findings too.
    """

    def __init__(self, message: str, diagnostics: Sequence[Diagnostic] = ()) -> None:
        super().__init__(message)
        self.diagnostics = tuple(diagnostics)


class CaptureError(SpangraphError, RuntimeError):
    """A graph could not be captured. Pool, stream and ring are as before; the next launch captures again."""


class StagingError(SpangraphError, RuntimeError):
    """A step's event completed, but its slot does not hold the step: nothing of it can be trusted."""


class StaleGraphError(SpangraphError, RuntimeError):
    """A parameter or buffer was replaced after the trace, so the graph would compute with the old one."""


class StaleStepError(SpangraphError, RuntimeError):
    """A step was used after its release, or its memory now belongs to a later step."""


class StepStateError(SpangraphError, RuntimeError):
    """A step or launch was used out of order (read before it was launched, launched twice, used after an error)."""


class RingFullError(SpangraphError, RuntimeError):
    """As many steps are open or leased as the ring's depth allows."""


class StepTimeoutError(SpangraphError, TimeoutError):
    """A wait for a step took longer than its timeout; the step stays open and can be waited for again."""


class ClosedError(SpangraphError, RuntimeError):
    """A closed object was used."""


class RowLookupError(SpangraphError, KeyError):
    """A row id or an output name that the step did not deliver."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument
        return str(self.args[0])


class SpanError(SpangraphError, ValueError):
    """A row's span fails `0 <= start <= end <= width`; only the rows named are affected.

    Attributes:
        rows: ids of the rows whose spans are bad.
    """

    def __init__(self, message: str, rows: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)
