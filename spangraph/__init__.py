"""spangraph: cut padded rows after a captured step.

A submodule declares its spanned outputs, a pass puts one staging node at the graph's tail, and the rows are cut on the
host after the step: no host read in the model, no padded copies.
"""

import importlib
from typing import TYPE_CHECKING

from spangraph import kernels as kernels  # registers the operators, before anything traces
from spangraph.backends import Backend, InlineBackend
from spangraph.compile import Walk, compile
from spangraph.counts import Counts, Statistics
from spangraph.declare import declare
from spangraph.diagnostics import Diagnostic
from spangraph.errors import (
    CaptureError,
    ClosedError,
    DeclarationError,
    HostReadError,
    InputError,
    MergeError,
    PipelineError,
    RingFullError,
    RowLookupError,
    SpanError,
    SpangraphError,
    StagingError,
    StaleGraphError,
    StaleStepError,
    StepStateError,
    StepTimeoutError,
    TraceError,
    VerificationError,
)
from spangraph.memory import Memory, MemoryUse
from spangraph.rows import Rows
from spangraph.slots import Copy
from spangraph.spans import Span, SpannedOutput, from_lengths, from_mask, withhold
from spangraph.stager import SpanStager
from spangraph.step import Step
from spangraph.stops import StopCheck
from spangraph.streams import Stream, Streams
from spangraph.tail import Tail

if TYPE_CHECKING:
    from spangraph.compiled import Compiled
    from spangraph.cuda import CudaBackend
    from spangraph.pipeline import Edge, Node, Pipeline
    from spangraph.report import Report
    from spangraph.verification import verify

__version__ = "0.1.0"

# Imported when it is asked for: what traces or captures, and what verifies.
_LATE = {
    "Compiled": "compiled",
    "CudaBackend": "cuda",
    "Edge": "pipeline",
    "Node": "pipeline",
    "Pipeline": "pipeline",
    "Report": "report",
    "verify": "verification",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module 'spangraph' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"spangraph.{_LATE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})


__all__ = [
    "Backend",
    "CaptureError",
    "ClosedError",
    "Compiled",
    "Copy",
    "Counts",
    "CudaBackend",
    "DeclarationError",
    "Diagnostic",
    "Edge",
    "HostReadError",
    "InlineBackend",
    "InputError",
    "Memory",
    "MemoryUse",
    "MergeError",
    "Node",
    "Pipeline",
    "PipelineError",
    "Report",
    "RingFullError",
    "RowLookupError",
    "Rows",
    "Span",
    "SpanError",
    "SpanStager",
    "SpangraphError",
    "SpannedOutput",
    "StagingError",
    "StaleGraphError",
    "StaleStepError",
    "Statistics",
    "Step",
    "StepStateError",
    "StepTimeoutError",
    "StopCheck",
    "Stream",
    "Streams",
    "Tail",
    "TraceError",
    "VerificationError",
    "Walk",
    "compile",
    "declare",
    "from_lengths",
    "from_mask",
    "verify",
    "withhold",
]
