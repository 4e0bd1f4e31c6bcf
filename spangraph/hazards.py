"""All that a capture of a forward cannot hold, found in one eager run, with the lines.

On CPU tensors nothing waits and nothing is copied, so each tensor is taken for what it would be with the model and its
inputs on a device: a *host tensor* is made by a factory without `device=`, or computed from such alone; all others are
device tensors. Reading a host tensor costs nothing anywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from spangraph.cut_hints import cut_hint
from spangraph.diagnostics import Diagnostic
from spangraph.host_state import preserve_random, storage_key
from spangraph.passes.host_reads import diagnose_read, read_by
from spangraph.passes.nodes import is_user_file
from spangraph.watch import HOST_CALLS, Calls, Watch, run_watched, settle, written_by

_HOST_CALLS = HOST_CALLS | dict.fromkeys(
    [Tensor.__repr__, Tensor.__format__], "a tensor's values (repr, print, f-string)"
)
_FROM_DATA = ("tensor", "as_tensor", "asarray")
# Composite operators whose checks read values, but on the CPU only.
_CPU_CHECKS = ("one_hot", "quantile", "nanquantile")
_INDEXING = ("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_PACK = "aten::_pack_padded_sequence"
# Operators that want some arguments on the host.
_TAKES_HOST = (_PACK, "aten::_pad_packed_sequence", "aten::lstm", "aten::gru", "aten::_ctc_loss", "aten::ctc_loss")

_BUFFER_FIX = "make it once in __init__ and register it as a buffer, or make it there (torch.full, torch.arange, device=)."
_PIN_FIX = "copy into pinned memory (pin_memory=True)."


def find_capture_hazards(
    model: nn.Module,
    run: Callable[..., Any],
    tensors: Sequence[Tensor],
    generators: Sequence[torch.Generator] = (),
) -> list[Diagnostic]:
    """Run a forward, and say what of it a capture cannot hold: SG401 host reads, SG402 copies between the device and
    pageable memory, SG403 host tensors among device tensors (a warning), SG404 host state, SG405 writes to inputs.

    The model, its inputs and all generators are left as they were. A forward that changes host state is run twice.

    Args:
        run: calls the model on `tensors`.

    Returns:
        One diagnostic per rule, line and finding, with the number of times, in order of first occurrence.
    """
    inference = any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
    with preserve_random():
        (_, watch), changed = settle(
            model, lambda: run_watched(model, run, tensors, inference, generators, kind=_Hazards)
        )
    assert isinstance(watch, _Hazards)
    for label in changed:
        watch.report(
            Diagnostic(
                "SG404",
                f"the forward changes {label} at every call, which a replay cannot repeat.",
                node=label,
                fix="keep such state in a buffer, written in place.",
            )
        )
    return list(watch.found.values())


class _Hazards(Watch):
    """Collects diagnostics in `found`, and knows which memory would be the host's."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__(model, inputs)
        self.found: dict[tuple[str, str, str], Diagnostic] = {}
        self._calls = _HazardCalls(self)
        self._inputs = [storage_key(tensor) for tensor in inputs]
        self._is_real = any(t.device.type != "cpu" for t in [*model.parameters(), *model.buffers(), *inputs])
        self._host: dict[int, StorageWeakRef] = {}  # a weak reference keeps the key from being used again
        self._quiet = False
        self._makes_host: bool | None = None  # what the call that is running makes; None outside of calls
        code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        is_user = code is not None and is_user_file(code.co_filename)
        self._file, self._forward = (code.co_filename, f"{code.co_filename}:{code.co_firstlineno}") if is_user else ("", "")

    def is_host(self, tensor: Tensor) -> bool:
        """Whether it is, or would be, in host memory."""
        return tensor.device.type == "cpu" if self._is_real else _key(tensor) in self._host

    def mark_host(self, tree: Any) -> None:
        """Take the tensors' memory for the host's."""
        for tensor in _tensors(tree):
            if (key := _key(tensor)) is not None and key not in self._host:
                self._host[key] = StorageWeakRef(tensor.untyped_storage())

    def is_host_device(self, device: Any, source: str) -> bool:
        """Whether a call is told to use the host. Where all is on the CPU, only "cpu" in its source means the host:
        `x.device` is "cpu" as well."""
        return torch.device(device).type == "cpu" and (self._is_real or "cpu" in source)

    def report(self, diagnostic: Diagnostic) -> None:
        """Add a finding at the running line, if any, or at the forward."""
        frames = [frame for frame in _frames() if is_user_file(frame.f_code.co_filename)]
        where, node, related = self._forward, diagnostic.node, ()
        if frames:
            where, node = _where(frames[0]), getattr(frames[0].f_code, "co_qualname", "")
            callers = [] if frames[0].f_code.co_filename == self._file else frames
            caller = next((frame for frame in callers if frame.f_code.co_filename == self._file), None)
            related = () if caller is None else (("called from", _where(caller)),)
        key = (diagnostic.rule, where, diagnostic.message)
        if key in self.found:
            self.found[key] = dataclasses.replace(self.found[key], count=self.found[key].count + 1)
            return
        hint = cut_hint(where, _position(frames[0])) if frames and diagnostic.rule == "SG401" else None
        self.found[key] = dataclasses.replace(
            diagnostic, where=where, node=node, related=related, fix=hint or diagnostic.fix
        )

    def _note(self, what: str) -> None:
        self.report(diagnose_read(what, ""))

    def note_copy(self, what: str, fix: str = _BUFFER_FIX) -> None:
        """SG402."""
        self.report(Diagnostic("SG402", f"the forward copies {what}, which stalls and breaks capture.", fix=fix))

    @contextlib.contextmanager
    def inside(self, makes_host: bool, quiet: bool) -> Iterator[None]:
        """While a call runs: where what it makes is, and whether all about it is known."""
        before = self._makes_host, self._quiet
        self._makes_host, self._quiet = makes_host, quiet or self._quiet
        try:
            yield
        finally:
            self._makes_host, self._quiet = before

    @property
    def quiet(self) -> bool:
        """Whether all about the running call is known."""
        return self._quiet

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        if isinstance(func, OpOverload):
            for tensor in written_by(func, args, kwargs):
                if (key := storage_key(tensor)) in self._inputs:
                    what = f"the forward writes its tensor input {self._inputs.index(key)} in place; a replay has a copy"
                    self.report(Diagnostic("SG405", f"{what} of it.", fix="clone the input first, or return the result."))
        if self._quiet:
            return
        name = func._schema.name if isinstance(func, OpOverload) else ""
        tensors = _tensors((args, kwargs))
        if what := read_by(func, args, kwargs):
            if not all(map(self.is_host, _tensors(args[1]) if name in _INDEXING else tensors)):
                self._note(what)
        elif name == "aten::copy_":
            self._check_copy(args[0], args[1], non_blocking=len(args) > 2 and args[2])
        elif name == _PACK and not self.is_host(args[1]):
            self._note("the lengths (pack_padded_sequence)")
        elif name == "aten::_to_copy" and self._is_real:
            self.check_upload(args[0], kwargs.get("device"), non_blocking=kwargs.get("non_blocking"))
        elif name not in _TAKES_HOST and not all(map(self.is_host, tensors)):
            if any(self.is_host(tensor) and tensor.ndim for tensor in tensors):
                what = f"a host tensor meets device tensors in {name.removeprefix('aten::')}, which is an error or a copy"
                self.report(
                    Diagnostic(
                        "SG403", f"{what} on CUDA.", fix="make it with device=x.device, or as a buffer.", severity="warning"
                    )
                )

    def check_upload(self, source: Tensor, device: Any, non_blocking: Any) -> None:
        """Note a copy of pageable memory to the device; `device` is None where it stays on its own."""
        if device is not None and torch.device(device).type != "cpu" and self.is_host(source):
            if not (non_blocking and source.is_pinned()):
                self.note_copy("host memory to the device")

    def _check_copy(self, target: Tensor, source: Tensor, non_blocking: Any) -> None:
        to_host, from_host = self.is_host(target), self.is_host(source)
        if to_host and not from_host and not non_blocking:
            self._note("a device tensor's values (copy_ to the CPU)")
        elif to_host and not from_host and not target.is_pinned():
            self.note_copy("device memory to the host without waiting, but not into pinned memory", _PIN_FIX)
        elif from_host and not to_host and source.ndim and not (non_blocking and source.is_pinned()):
            self.note_copy("host memory to the device")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        is_fresh = not tensors or func is torch.ops.aten.lift_fresh.default  # the second is all that a legacy or a numpy constructor shows
        all_host = kwargs.get("device") is None if is_fresh else all(map(self.is_host, tensors))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._makes_host if is_fresh and self._makes_host is not None else all_host and self._makes_host is not False:
            self.mark_host(out)
        if func in (torch.ops.aten._pack_padded_sequence.default, torch.ops.aten._pad_packed_sequence.default):
            self.mark_host(out[1])
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
        tensors = _tensors((args, kwargs))
        on_device = not all(map(hazards.is_host, tensors))
        known = self._note_call(func, name, args, kwargs, target) or name in _CPU_CHECKS
        makes_host = not on_device if target is None else target
        with hazards.inside(makes_host, quiet=known):
            out = super().__torch_function__(func, types, args, kwargs)
            if target is not None and isinstance(out, Tensor) and not hazards._is_real:
                if hazards.is_host(out) is not target:  # it is where it should go, as all is on the CPU
                    with hazards.inside(makes_host, quiet=True):
                        out = out.clone()
        if makes_host:
            hazards.mark_host(out)
        return out

    def _target(self, func: Any, name: str, args: Any, kwargs: Any, frame: FrameType) -> bool | None:
        """Whether a call is told to put its result on the host (True) or the device (False); None if neither."""
        hazards = self._hazards
        if name == "cpu":
            return True
        device = kwargs.get("device")
        if name in ("to", "type_as"):
            for value in (*args[1:], device, kwargs.get("other")):
                if isinstance(value, Tensor):
                    return hazards.is_host(value)
                if isinstance(value, str | torch.device) or type(value) is int:
                    return hazards.is_host_device(value, _source(frame))
            return None
        if device is not None:
            return hazards.is_host_device(device, _source(frame))
        if func not in _device_constructors():
            return None
        data = args[0] if args and name in _FROM_DATA else None
        return hazards.is_host(data) if isinstance(data, Tensor) else True

    def _note_call(self, func: Any, name: str, args: Any, kwargs: Any, target: bool | None) -> bool:
        """Note what a call reads or copies; returns whether that is all about it."""
        hazards = self._hazards
        first = args[0] if args else None
        if isinstance(first, Tensor):
            if hazards.is_host(first):
                if name in ("to", "type_as", "cuda", *_FROM_DATA) and target is False:
                    hazards.note_copy("host memory to the device")
                    return True
                return False
            if what := _HOST_CALLS.get(func):
                hazards._note(what)
            elif name == "one_hot" and -1 in (*args[1:], kwargs.get("num_classes", -1 if len(args) == 1 else 0)):
                hazards._note("the largest value (one_hot without num_classes)")
            elif target and name in ("to", "cpu", "type_as", *_FROM_DATA):
                hazards._note("a device tensor's values (.cpu(), .to('cpu'))")
            elif name in ("__getitem__", "__setitem__") and any(
                isinstance(index, list) for index in (args[1] if isinstance(args[1], tuple) else args[1:2])
            ):
                hazards.note_copy("a list of indices to the device")
            elif name == "new_tensor" and target is not True:
                hazards.note_copy("Python numbers to the device")
            else:
                return False
            return True
        if name in _FROM_DATA:
            if not all(map(hazards.is_host, _tensors(first))):
                hazards._note(f"the values of a list of tensors (torch.{name})")
            elif target is False:
                hazards.note_copy("Python numbers to the device")
            return True
        return False


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, or inside vmap: it has none
        return None


def _frames() -> Iterator[FrameType]:
    """The running frames, innermost first, as far as the run that is watched."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not run_watched.__code__:
        yield frame
        frame = frame.f_back


def _where(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _position(frame: FrameType) -> tuple[int, int, int, int] | None:
    found = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), ())
    return None if None in found or len(found) != 4 else found  # type: ignore[return-value]


def _source(frame: FrameType) -> str:
    """The source of the running call, from its last `to(` on."""
    position = _position(frame)
    if position is None:
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    first, last, left, right = position
    lines = linecache.getlines(frame.f_code.co_filename)[first - 1 : last]
    return "".join(lines).encode()[left : right if first == last else None].decode().rpartition("to(")[2]
