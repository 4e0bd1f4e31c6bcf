"""Choose a tracer: export where that works, opaque where it does not, one trace at a time in the process."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from spangraph.declare import find_declarations
from spangraph.diagnostics import Diagnostic
from spangraph.errors import HostReadError, SpangraphError, TraceError
from spangraph.export import export_model
from spangraph.hazards import find_capture_hazards
from spangraph.host_state import preserve_random
from spangraph.opaque import OpaqueRoot, trace_opaquely
from spangraph.passes.host_reads import host_read_error
from spangraph.structure import CallSpec
from spangraph.trace import HostStateError, Trace, run_mode
from spangraph.watch import is_for_inference, settle

# torch.export patches global state: parallel traces break each other.
TRACE_LOCK = threading.Lock()


class Tracing:
    """Who traces.

    Attributes:
        thread: the thread that does, under the lock; None if nobody does.
    """

    thread: int | None = None


def refuse_nested() -> None:
    """Refuse to launch inside a trace: the launch would be traced, or happen once.

    Raises:
        TraceError: if this thread is tracing.
    """
    if Tracing.thread == threading.get_ident():
        raise TraceError(
            "the forward of a compiled model launches another compiled model: call the plain module inside, and compile"
            " the whole, or launch one after the other outside."
        )


@contextlib.contextmanager
def _one_trace() -> Iterator[None]:
    """The only trace in the process, and not inside another; Python's and numpy's random states stay as they are."""
    refuse_nested()
    with TRACE_LOCK, preserve_random():
        Tracing.thread = threading.get_ident()
        try:
            yield
        finally:
            Tracing.thread = None


@_one_trace()
def trace_model(
    model: nn.Module,
    walk: str,
    call: CallSpec,
    tensors: Sequence[Tensor],
    *,
    tracer: str,
    verify: str,
    generators: Sequence[torch.Generator] = (),
) -> Trace:
    """Trace `model` for one signature.

    Args:
        tracer: `"export"`, `"dynamo"`, `"opaque"`, or `"auto"`: export, and opaquely where that fails, with the reason
            recorded.
        verify: `"error"`, `"warn"` or `"off"`: what to do about host reads.
        generators: what the model draws from; they are left as they are.

    Raises:
        TraceError, HostReadError, DeclarationError, or what the forward raises.
    """
    declarations = find_declarations(model, walk)
    inference = is_for_inference(model)
    with run_mode(inference):
        examples = [t.detach().clone() if t.is_inference() and not inference else t.detach() for t in tensors]
    device_type = examples[0].device.type if examples else "cpu"
    autocast = (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
    reason = ""
    trace: Trace | None = None

    def run(*tensors: Tensor) -> None:
        args, kwargs = call.build(tensors)
        model(*args, **kwargs)

    if tracer == "dynamo":
        from spangraph.dynamo import trace_by_dynamo  # imports torch._dynamo

        trace = trace_by_dynamo(model, call, examples, declarations, inference=inference, generators=generators)
    elif tracer != "opaque":
        try:
            try:
                trace = export_model(model, call, examples, declarations, inference=inference)
            except HostStateError:
                if settle(model, run, examples, generators)[2]:
                    raise
                trace = export_model(model, call, examples, declarations, inference=inference)
        except HostReadError:
            raise
        except TraceError as error:
            if tracer == "export":
                raise
            reason = str(error)
    if trace is None:
        try:
            trace = trace_opaquely(
                model, call, examples, declarations, inference=inference, verify=verify, generators=generators
            )
        except HostReadError as error:
            if not reason:
                raise
            raise HostReadError(f"{error}\nThis is an opaque trace, because {reason}", error.diagnostics) from None
    trace.reason, trace.autocast = reason, autocast
    for declaration in declarations:
        seen = {info.name for info in trace.infos.values() if info.fqn == declaration.fqn}
        if silent := sorted(set(declaration.spans) - seen):
            trace.diagnostics.append(
                Diagnostic(
                    "SG101",
                    f"{declaration} declares {silent} but returned no spans, so its outputs are delivered whole.",
                    declaration.where,
                    fix="return a SpannedOutput with output_spans, if its rows are to be cut.",
                    severity="warning",
                )
            )
    return trace


def locate_reads(
    model: nn.Module, walk: str, call: CallSpec, tensors: Sequence[Tensor], found: HostReadError
) -> HostReadError:
    """The same error with all that cannot be captured, and the lines: a graph knows those of forwards at best."""
    run = OpaqueRoot(model, call, find_declarations(model, walk))
    try:
        with TRACE_LOCK:
            hazards = [hazard for hazard in find_capture_hazards(model, run, tensors) if hazard.severity == "error"]
    except SpangraphError:
        return found  # what else it is will show where the reads are mended
    if not any(hazard.rule == "SG401" for hazard in hazards):
        return found
    note = str(found).partition("\nThis is an opaque trace")
    error = host_read_error(hazards)
    return HostReadError(f"{error}{''.join(note[1:])}", error.diagnostics)


def retrace_uncaptured(
    model: nn.Module, walk: str, call: CallSpec, tensors: Sequence[Tensor], found: HostReadError, *, warn: bool
) -> Trace:
    """For a graph that reads device values, where that is not refused: run the model opaquely and uncaptured."""
    if warn:
        warnings.warn(f"running uncaptured: {found}", stacklevel=2)
    trace = trace_model(model, walk, call, tensors, tracer="opaque", verify="off")
    trace.captures = False
    trace.reason = "host reads in the exported graph"
    trace.diagnostics.extend(found.diagnostics)
    return trace
