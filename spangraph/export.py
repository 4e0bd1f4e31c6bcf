"""Trace by non-strict `torch.export` at static shapes: hooks emit mark ops, which survive it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.proxy import TracerBase
from torch.utils._python_dispatch import TorchDispatchMode

from spangraph.declare import Declaration
from spangraph.errors import SpangraphError, TraceError
from spangraph.host_state import Change, HostState, storage_key
from spangraph.marking import Marking, check_marked, marked_tensors
from spangraph.passes.host_reads import erase_dead_nodes
from spangraph.passes.marks import MarkInfo
from spangraph.passes.nodes import is_user_file, last_writes, placeholders
from spangraph.passes.unlift import unlift
from spangraph.structure import CallSpec, flatten_output
from spangraph.trace import HostStateError, Trace, run_mode, trace_of
from spangraph.watch import Calls, written_by

# Called as the model is: what it returns, what its marks mean, and their tensors.
Forward = Callable[..., tuple[Any, Mapping[tuple[str, str], MarkInfo], list[Tensor]]]


class _Root(nn.Module):
    """Flat tensors in, flat tensors out; structure and marks are left in `notes`."""

    def __init__(self, model: nn.Module, call: CallSpec, forward: Forward, notes: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._forward = forward
        self._notes = notes

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._call.build(tensors)
        with _literal_buffers(self.model, self._notes) as calls:
            before = HostState(self.model)
            try:
                with calls:
                    out, infos, marked = self._forward(*args, **kwargs)
                leaves, template, paths, spec = flatten_output(out)
                changes = [c for c in before.changes() if before.is_buffers(c.box) or c.is_state(calls.used)]
            finally:
                before.restore()
            self._notes["changed"] = _repeat_rebinds(before, changes, [*leaves, *marked], self._notes)
        self._notes.update(infos=dict(infos), template=template, paths=paths, spec=spec)
        return tuple(leaves)


def _hooked(model: nn.Module, declarations: Sequence[Declaration]) -> Forward:
    """The model's own forward, with hooks that mark what it declares."""

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, Mapping[tuple[str, str], MarkInfo], list[Tensor]]:
        with Marking(declarations, emit=True).hooked() as marking:
            out = model(*args, **kwargs)
        check_marked(out, marking)
        return out, marking.infos, marked_tensors(marking)

    return forward


def _repeat_rebinds(
    before: HostState, changes: Sequence[Change], delivered: Sequence[Tensor], notes: dict[str, Any]
) -> list[str]:
    """Write what a forward has bound to a buffer into the buffer itself, as the graph's last nodes.

    Returns the labels of the other changes, which no node can repeat.
    """
    memory = {storage_key(tensor) for tensor in delivered}
    others = []
    for change in changes:
        old, new = change.old, change.new
        if id(old) in notes["held"]:
            _keep_buffer(notes, id(old))
        elif (
            before.is_buffers(change.box)
            and isinstance(old, Tensor)
            and isinstance(new, Tensor)
            and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
            and storage_key(old) not in memory  # it would be delivered after the write
        ):
            old.copy_(new)
        else:
            others.append(change.label)
    return others


@contextlib.contextmanager
def _literal_buffers(model: nn.Module, notes: dict[str, Any]) -> Iterator[Calls]:
    """Give 0-d int buffers literal values inside the trace, so that reads of them are constants of the graph.

    A buffer that the forward writes must stay a buffer: it is noted in `notes["written"]`, and the trace repeated.
    Those that the forward uses are noted in `notes["used"]`.
    """
    held: dict[int, tuple[dict[str, Tensor | None], str, Tensor, Tensor, int]] = {}
    for buffers, name, value in notes["literals"]:
        buffer = buffers[name]
        if notes["identities"][id(buffers), name] not in notes["written"]:
            literal = torch.tensor(value, dtype=buffer.dtype, device="cpu")
            buffers[name] = literal
            held[id(literal)] = (buffers, name, buffer, literal, literal._version)
    notes["held"] = {key: notes["identities"][id(buffers), name] for key, (buffers, name, *_) in held.items()}
    calls = Calls()
    try:
        yield calls  # to be entered for the forward alone
    finally:
        for key, (buffers, name, buffer, literal, version) in held.items():
            if literal._version != version:
                _keep_buffer(notes, key)
            buffers[name] = buffer
    used = {(id(buffers), name) for key, (buffers, name, *_) in held.items() if key in calls.used}
    notes["used"] = [literal for literal in notes["literals"] if (id(literal[0]), literal[1]) in used]


def _keep_buffer(notes: dict[str, Any], literal: int) -> None:
    notes["written"].add(notes["held"][literal])
    notes["retry"] = True


def _int_buffers(model: nn.Module) -> list[tuple[dict[str, Tensor | None], str, int]]:
    return [
        (module._buffers, name, int(buffer.item()))
        for module in model.modules()
        if isinstance(module._buffers, dict)  # not a ScriptModule's
        for name, buffer in module._buffers.items()
        if buffer is not None
        and buffer.ndim == 0
        and not buffer.is_floating_point()
        and not buffer.is_complex()
        and buffer.dtype is not torch.bool
    ]


def export_model(
    model: nn.Module,
    call: CallSpec,
    tensors: Sequence[Tensor],
    declarations: Sequence[Declaration],
    *,
    inference: bool,
    forward: Forward | None = None,
) -> Trace:
    """Trace by non-strict `torch.export` at static shapes.

    Args:
        forward: what is traced in place of the model's own forward.

    Raises:
        TraceError: if the model does not export; the message says why.
        DeclarationError: as raised by the hooks.
    """
    notes: dict[str, Any] = {"written": set()}
    # Literals are given only to buffers that hold a Python-readable value; bools are flags that code branches on.
    notes["literals"] = _int_buffers(model)
    # Of the buffers themselves: inside the trace fake ones stand in for them, new ones each time.
    notes["identities"] = {(id(buffers), name): id(buffers[name]) for buffers, name, _ in notes["literals"]}
    while True:
        notes["retry"] = False
        gm = _export(_Root(model, call, forward or _hooked(model, declarations), notes), tensors, inference)
        if not notes["retry"]:  # else once more, with one literal less
            break
    if notes["changed"]:
        raise HostStateError(
            f"the forward changes {', '.join(notes['changed'])} at every call, which a graph would do once, at its"
            " trace: keep such state in registered buffers, and update them in place."
        )
    gm = erase_dead_nodes(gm)
    trace = trace_of(gm, notes["infos"], notes["template"], notes["paths"], notes["spec"], "export", inference)
    trace.literals = notes["used"]
    touched = last_writes(gm.graph)
    trace.writes_inputs = [i for i, node in enumerate(placeholders(gm.graph)) if node in touched]
    return trace


def _export(root: _Root, tensors: Sequence[Tensor], inference: bool) -> fx.GraphModule:
    before = HostState(root.model)  # export puts containers in attributes back as copies
    try:
        with (
            run_mode(inference),
            warnings.catch_warnings(),
            _quiet(),
            _user_frames(),
            _RefuseWrites(root.model, before),
            _use_lazy_graph_module(True),  # most modules that export makes on its way never run
        ):
            warnings.simplefilter("ignore")  # export warns of its own internals
            return unlift(torch.export.export(root, tuple(tensors), strict=False))
    except SpangraphError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # export wraps what forward raised
            if isinstance(cause, SpangraphError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise TraceError(f"torch.export failed: {type(error).__name__}: {first}") from error
    finally:
        before.restore()


@contextlib.contextmanager
def _user_frames() -> Iterator[None]:
    """Let nodes keep the user's frames: helpers and methods, too. Export keeps frames of functions called forward."""
    filtered = TracerBase._filter_traceback_frames

    def keep_users(self: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
        # What called our `forward` says nothing of the node, and is long.
        called = itertools.takewhile(lambda f: f.filename != __file__ or f.name != "forward", reversed(frames))
        inner = traceback.StackSummary(reversed([*called]))
        kept = traceback.StackSummary([frame for frame in inner if is_user_file(frame.filename)])
        return kept or filtered(self, inner)

    TracerBase._filter_traceback_frames = keep_users  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = filtered  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep an export that fails from logging, and from printing its half-built graph: the error says enough."""
    thread = threading.get_ident()

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(is_elsewhere)
    try:
        with contextlib.redirect_stderr(cast("TextIO", _WithoutGraphs(sys.stderr, thread))):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_elsewhere)


class _WithoutGraphs:
    """Standard error without the graphs that one thread prints."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread
        self._dropped = False

    def write(self, text: str) -> int:
        mine = threading.get_ident() == self._thread
        drop = mine and ("def forward(self" in text or (self._dropped and text == "\n"))
        if mine:
            self._dropped = drop
        return len(text) if drop else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _RefuseWrites(TorchDispatchMode):
    """Refuse an export that writes a real tensor: export would write it once, for good.

    Inside the trace fake tensors stand in for registered parameters and buffers, so a real one is written only where
    the forward reaches it otherwise: as a plain attribute, or through an object that holds a registered buffer too.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, state: HostState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        held = {storage_key(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        self._labels = held | state.tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}) if isinstance(func, OpOverload) else ():
            if (label := self._labels.get(storage_key(tensor))) is not None:
                raise HostStateError(
                    f"the forward writes {label} otherwise than as a registered buffer of its module, so a graph would"
                    " get a copy of its own: register it, and write it as self.name; trace='auto' runs such a model"
                    " opaquely."
                )
        return func(*args, **(kwargs or {}))
