"""All that a capture of a forward cannot hold, found in one eager run, with the lines.

On the CPU nothing waits and no copy shows, so each tensor is taken for what it would be with the model and its inputs
on a device: a *host tensor* is made by a factory without `device=`, or computed from such alone; all others are device
tensors. Reading a host tensor costs nothing anywhere.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import linecache
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors

from spangraph.cut_hints import Position, cut_hint
from spangraph.declare import Declaration
from spangraph.diagnostics import Diagnostic
from spangraph.host_state import preserve_random, storage_key
from spangraph.passes.host_reads import diagnose_read, read_by
from spangraph.passes.nodes import is_user_file
from spangraph.watch import HOST_CALLS, Calls, Watch, run_watched, settle, tensors_in, written_by

aten = torch.ops.aten

_PRINTED = "a tensor's values (print, f-string)"
_HOST_CALLS = {**HOST_CALLS, Tensor.__repr__: _PRINTED, Tensor.__format__: _PRINTED}
_LEAVES = "a device tensor's values (.cpu(), .to('cpu'))"
_FROM_DATA = ("tensor", "as_tensor", "asarray")
_MOVES = ("to", "cpu", "cuda", "type_as", *_FROM_DATA)
# Composite operators whose checks read values, but on the CPU alone.
_CPU_CHECKS = ("one_hot", "quantile", "nanquantile")
_INDEXING = ("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Operators that want some arguments on the host, or a dummy.
_TAKES_HOST = ["_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "_ctc_loss", "_nested_view_from_jagged"]


def find_capture_hazards(
    model: nn.Module,
    run: Callable[..., Any],
    tensors: Sequence[Tensor],
    declared: Callable[[], Iterable[tuple[Declaration, str, Tensor]]] = tuple,
) -> list[Diagnostic]:
    """Run a forward, and say what of it a capture cannot hold: SG401 host reads, SG402 copies between the device and
    pageable memory, SG403 host tensors among device tensors (a warning), SG404 host state, SG405 writes to inputs.

    The model, its inputs and all generators are left as they were. A forward that changes host state is run twice.

    Args:
        run: calls the model on `tensors`.
        declared: after a run, the spans that it returned, which must not be made on the host (SG105).

    Returns:
        One diagnostic per rule, line and finding, with the number of times, in order of first occurrence.
    """
    with preserve_random():
        _, watch, changed = settle(model, run, tensors, kind=_Hazards)
    assert isinstance(watch, _Hazards)
    for label in changed:
        what = f"the forward changes {label} at every call, which a replay cannot repeat."
        watch.report("SG404", what, "keep such state in a buffer, written in place.", node=label)
    for declaration, name, spans in declared():
        if watch.is_host(spans) and not watch.is_real:
            what = f"the spans of {name!r} are made on the host."
            fix = "make them on the device of the output, from tensors that are there (device=x.device)."
            watch.found["SG105", declaration.where, name] = Diagnostic("SG105", what, declaration.where, name, fix)
    return list(watch.found.values())


class _Hazards(Watch):
    """Collects diagnostics in `found`, and knows which memory would be the host's.

    Attributes:
        is_real: whether the model is on a device indeed.
        makes_host: whether what the running call makes is the host's; None outside of calls.
        quiet: whether all about the running call is known.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__(model, inputs)
        self.found: dict[tuple[str, str, str], Diagnostic] = {}
        self.is_real = any(t.device.type != "cpu" for t in [*model.parameters(), *model.buffers(), *inputs])
        self.makes_host: bool | None = None
        self.quiet = False
        self._calls = _HazardCalls(self)
        self._inputs = [storage_key(tensor) for tensor in inputs]
        self._host: dict[int, StorageWeakRef] = {}  # a weak reference keeps the key from being used again
        forward: Any = getattr(type(model), "forward", None)  # a ScriptModule has none
        self._code = getattr(inspect.unwrap(forward), "__code__", None)

    def is_host(self, tensor: Tensor) -> bool:
        """Whether it is, or would be, in host memory."""
        return tensor.device.type == "cpu" if self.is_real else _key(tensor) in self._host

    def mark_host(self, tree: Any) -> None:
        """Take the tensors' memory for the host's."""
        for tensor in tensors_in(tree):
            if (key := _key(tensor)) is not None and key not in self._host:
                self._host[key] = StorageWeakRef(tensor.untyped_storage())

    def report(self, rule: str, what: str, fix: str, node: str = "", severity: str = "error") -> None:
        """Add a finding at the running line, or at the forward if none is running."""
        frames = _user_frames()
        file = getattr(self._code, "co_filename", "")
        where = f"{file}:{self._code.co_firstlineno}" if self._code and is_user_file(file) else ""
        where = _where(frames[0]) if frames else where
        if (key := (rule, where, what)) in self.found:
            self.found[key] = dataclasses.replace(self.found[key], count=self.found[key].count + 1)
            return
        related: tuple[tuple[str, str], ...] = ()
        if frames:
            node = frames[0].f_code.co_qualname
            hint = cut_hint(where, _position(frames[0])) if rule == "SG401" else None
            fix = hint if hint and ("from_mask" in hint) == ("mask" in what) else fix
            own = [frame for frame in frames if frame.f_code.co_filename == file]
            related = (("called from", _where(own[0])),) if own and own[0] is not frames[0] else ()
        self.found[key] = Diagnostic(rule, what, where, node, fix, severity, related=related)

    def _note(self, what: str) -> None:
        read = diagnose_read(what, "")
        self.report(read.rule, read.message, read.fix)

    def note_copy(self, what: str = "host memory to the device") -> None:
        """SG402."""
        fix = "make it once in __init__, as a buffer; or on the device (torch.full, torch.arange with device=)."
        if what.startswith("device"):
            fix = "copy into pinned memory (pin_memory=True)."
        self.report("SG402", f"the forward copies {what}, which stalls and breaks capture.", fix)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func._schema.name if isinstance(func, OpOverload) else ""
        for tensor in written_by(func, args, kwargs) if name else ():
            if (key := _key(tensor)) in self._inputs:
                text = f"the forward writes its tensor input {self._inputs.index(key)} in place; a replay has a copy."
                self.report("SG405", text, "clone the input, or return the result.")
        tensors = tensors_in((args, kwargs))
        is_host = [self.is_host(tensor) for tensor in tensors]
        # Outside of a call `equal` is TorchScript's own, which compares constants.
        if self.quiet or (name == "aten::equal" and self.makes_host is None):
            return
        what = read_by(func, args, kwargs)
        if what is not None:
            if not all(map(self.is_host, tensors_in(args[1])) if name in _INDEXING else is_host):
                self._note(what)
        elif name == "aten::copy_":
            self.note_move(args[1], is_host[0], len(args) > 2 and args[2], target=args[0])
        elif name == "aten::_to_copy" and kwargs.get("device") is not None and self.is_real:
            self.note_move(args[0], kwargs["device"].type == "cpu", kwargs.get("non_blocking", False))
        elif name == "aten::_pack_padded_sequence" and not is_host[1]:
            self._note("the lengths (pack_padded_sequence)")
        elif (op := name.removeprefix("aten::")) not in _TAKES_HOST and not all(is_host):
            text = f"a host tensor meets device tensors in {op}: on CUDA an error or a copy."
            fix = "make it with device=x.device, or once in __init__ as a buffer."
            if any(host and tensor.ndim for host, tensor in zip(is_host, tensors, strict=True)):
                self.report("SG403", text, fix, severity="warning")

    def note_move(self, source: Tensor, to_host: bool, non_blocking: bool, target: Tensor | None = None) -> bool:
        """Note what a copy costs; returns whether it is one between host and device."""
        if self.is_host(source) is to_host:
            return False
        if to_host and not (target is not None and non_blocking):
            self._note(_LEAVES if target is None else "a device tensor's values (copy_ to the CPU)")
        elif to_host and not target.is_pinned():  # type: ignore[union-attr]
            self.note_copy("device memory to the host without waiting, but not to pinned memory")
        elif not (to_host or (non_blocking and source.is_pinned()) or (target is not None and source.ndim == 0)):
            self.note_copy()
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # No more than a lift_fresh shows of torch.IntTensor and torch.from_numpy.
        sources = [] if func is aten.lift_fresh.default else tensors_in((args, kwargs))
        is_host = kwargs.get("device") is None and all(map(self.is_host, sources))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if is_host if self.makes_host is None else self.makes_host and not self.quiet:
            self.mark_host(out)
        return out


class _HazardCalls(Calls):
    """What no operator shows: copies to where a tensor is already, data that is not in tensors, and which device was
    asked for."""

    def __init__(self, hazards: _Hazards) -> None:
        super().__init__()
        self._hazards = hazards

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hazards, kwargs = self._hazards, kwargs or {}
        if hazards.quiet or isinstance(func, OpOverload) or torch.compiler.is_dynamo_compiling():
            return super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        target = self._target(func, name, args, kwargs, sys._getframe(1))
        hazards.quiet = self._note_call(func, name, args, kwargs, target) or name in _CPU_CHECKS
        hazards.makes_host = all(map(hazards.is_host, tensors_in((args, kwargs)))) if target is None else target
        try:
            out = super().__torch_function__(func, types, args, kwargs)
            if name in _MOVES and target not in (None, hazards.is_host(out)) and not hazards.is_real:
                hazards.quiet = True
                out = out.clone()  # all is on the CPU, and so it is the tensor that should have been copied
            if hazards.makes_host:
                hazards.mark_host(out)
            if name in ("_pack_padded_sequence", "_pad_packed_sequence"):
                hazards.mark_host(out[1])
            return out
        finally:
            hazards.quiet, hazards.makes_host = False, None

    def _target(self, func: Any, name: str, args: Any, kwargs: Any, frame: FrameType) -> bool | None:
        """Whether a call is told to put its result on the host (True) or the device (False); None if neither."""
        named = [kwargs.get("device"), kwargs.get("other"), *(args[1:] if name in ("to", "type_as") else ())]
        for value in named:
            if isinstance(value, Tensor) and name in ("to", "type_as"):
                return self._hazards.is_host(value)
            if isinstance(value, str | torch.device):
                # Where all is on the CPU `x.device` is "cpu" too: only a call that spells it out means the host.
                spelt = self._hazards.is_real or ("cpu" in (source := _source(frame)) and "cuda" not in source)
                return torch.device(value).type == "cpu" and spelt
        if func not in _device_constructors():
            return True if name == "cpu" else None
        is_copy = name in _FROM_DATA and args and isinstance(args[0], Tensor)
        return self._hazards.is_host(args[0]) if is_copy else True

    def _note_call(self, func: Any, name: str, args: Any, kwargs: Any, target: bool | None) -> bool:
        """Note what a call reads or copies; returns whether that is all about it."""
        hazards = self._hazards
        data = args[0] if args else None
        if not isinstance(data, Tensor):
            if name in _FROM_DATA and not all(map(hazards.is_host, tensors_in(data))):
                hazards._note(f"the values of a list of tensors (torch.{name})")
            elif name in _FROM_DATA and target is False and data not in ([], ()):
                hazards.note_copy("Python numbers to the device")
            return name in _FROM_DATA
        if name in _MOVES and target is not None:
            return hazards.note_move(data, target, kwargs.get("non_blocking", False))
        if hazards.is_host(data):
            return False
        indices = args[1] if name in ("__getitem__", "__setitem__") else ()
        if what := _HOST_CALLS.get(func):
            hazards._note(what)
        elif name == "one_hot" and (args[1:] or [kwargs.get("num_classes", -1)])[0] == -1:
            hazards._note("the largest value (one_hot without num_classes)")
        elif any(isinstance(index, list) for index in (indices if isinstance(indices, tuple) else [indices])):
            hazards.note_copy("a list of indices to the device")
        elif name == "new_tensor" and not target:
            hazards.note_copy("Python numbers to the device")
        else:
            return False
        return True


def _key(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, or inside vmap: it has none
        return None


def _user_frames() -> list[FrameType]:
    """The frames of the watched run that are neither torch's nor ours, innermost first; none outside of a run."""
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None and frame.f_code is not run_watched.__code__:
        frames += [frame] if is_user_file(frame.f_code.co_filename) else []
        frame = frame.f_back
    return frames if frame is not None else []


def _where(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _position(frame: FrameType) -> Position | None:
    found = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return None if None in found else found  # type: ignore[return-value]


def _source(frame: FrameType) -> str:
    """The source of the running call, from its last `to(` on."""
    first, last, left, right = _position(frame) or (frame.f_lineno, frame.f_lineno, 0, None)
    lines = linecache.getlines(frame.f_code.co_filename)[first - 1 : last]
    return "".join(lines).encode()[left : right if first == last else None].decode().rpartition("to(")[2]
