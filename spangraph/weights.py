"""Notice parameters and buffers that were replaced after the trace.

A graph holds the tensors that the model had when it was traced. In-place updates are followed; a replaced Parameter, a
rebound buffer or `module.to(dtype)` are not, so a replay would silently use the old ones. Checking every tensor at each
launch would cost time that grows with the model; instead, what replaces tensors bumps one process-wide count, and a
launch checks all its tensors only when the count has moved. These do:

* registration of a parameter, buffer or submodule, by `setattr` too, as torch's global hooks tell;
* `Module._apply` (`to`, `half`, `cuda`) and `torch.utils.swap_tensors`, which are wrapped;
* `tensor.data = ...` and `tensor.set_(...)` of a tensor that a graph holds, as torch's dispatcher tells: each runs an
  operator to which a kernel of ours is added, in a place where torch has none, that calls torch's;
* the end of a held tensor's memory.

What none of them tells is noticed within a few launches, as each checks the next few tensors in turn: a write into
`module._parameters`, a storage that is resized, C++ code that goes past the dispatcher.

A 0-d integer buffer that the graph holds as a number is compared after a `load_state_dict`; one that is written in
place by hand is not.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from spangraph.errors import StaleGraphError

# Tensors that a launch checks: all of a small model's.
_NUM_PROBES = 8

_lock = threading.Lock()
_library: torch.library.Library | None = None
_replacements = 0
_loads = 0
# Of each `Weights`, the ids of its tensors. Read and changed by any thread, so by single operations only.
_held: dict[int, frozenset[int]] = {}


def _bump(*_: Any) -> None:
    global _replacements
    _replacements += 1


def _is_held(tensor: Tensor) -> bool:
    return any(id(tensor) in ids for ids in list(_held.values()))


_compatible = torch.ops.aten._has_compatible_shallow_copy_type.default
_set = torch.ops.aten.set_.source_Storage_storage_offset
# Ours comes before any device's kernel, after autograd's and Python's.
_devices = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _on_data(tensor: Tensor, new: Tensor) -> bool:
    """`tensor.data = new` asks this first. Nothing of Python's runs between the count and the assignment."""
    global _replacements
    held = _is_held(tensor)
    compatible: bool = _compatible.decompose(tensor, new)
    _replacements += held
    return compatible


def _on_set(keys: torch._C.DispatchKeySet, tensor: Tensor, *args: Any) -> Tensor:
    """All of `tensor.set_(...)` ends here."""
    out: Tensor = _set.redispatch(keys & _devices, tensor, *args)
    if _is_held(tensor):
        _bump()
    return out


def _count_calls(owner: Any, name: str, count: Callable[[], None]) -> None:
    """Let `count` be called after each call of a function of torch's."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            count()

    setattr(owner, name, counted)


def _count_load() -> None:
    global _loads
    _loads += 1


def _install() -> None:
    """Count what replaces tensors, and what loads their values."""
    global _library
    with _lock:
        if _library is not None:
            return
        _library = torch.library.Library("aten", "IMPL")
        # With autograd's keys alone, inference mode would go past; without them, subclasses would see the operator.
        for keys in ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA"):
            _library.impl(_compatible, _on_data, keys)
        _library.impl(_set, _on_set, "BackendSelect", with_keyset=True)
        nn_module.register_module_parameter_registration_hook(_bump)
        nn_module.register_module_buffer_registration_hook(_bump)
        nn_module.register_module_module_registration_hook(_bump)
        _count_calls(nn.Module, "_apply", _bump)
        _count_calls(torch.utils, "swap_tensors", _bump)
        _count_calls(nn.Module, "load_state_dict", _count_load)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a module's dict held under a name, and what a graph relies on of it."""

    label: str
    box: dict[str, Any]
    name: str
    value: Any
    traits: tuple[Any, ...]

    def is_replaced(self) -> bool:
        # Without get(): a ScriptModule's dicts have none.
        return self.name not in self.box or self.box[self.name] is not self.value


def _entries(model: nn.Module, kinds: Sequence[str], traits: Callable[[Any], tuple[Any, ...]]) -> list[_Entry]:
    return [
        _Entry(f"{fqn}.{name}" if fqn else name, box, name, value, traits(value))
        for fqn, module in model.named_modules()
        for box in (getattr(module, kind) for kind in kinds)
        for name, value in box.items()
        if value is not None
    ]


def _traits(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape


def _address(tensor: Tensor) -> int | None:
    return tensor.data_ptr() if tensor.layout is torch.strided else None  # a sparse tensor has no memory of its own


def _baked_traits(tensor: Tensor) -> tuple[Any, ...]:
    address = _address(tensor)
    return *_traits(tensor), address, () if address is None else tensor.stride()


def _no_traits(module: nn.Module) -> tuple[Any, ...]:
    return ()


class Weights:
    """The parameters and buffers of a model at its trace, and its submodules.

    Args:
        addresses: whether the graph has their addresses baked in, as a captured one has.
        literals: buffers that the graph holds as numbers: module's buffers, name and number of each.
        probe_all: check all tensors at every launch, at a cost that grows with the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        addresses: bool,
        literals: Sequence[tuple[dict[str, Any], str, int]] = (),
        probe_all: bool = False,
    ) -> None:
        _install()
        self._probe_all = probe_all
        self._literals = literals
        self._seen_loads = _loads
        self._traits = _baked_traits if addresses else _traits
        self._next_probe = 0
        self._seen = _replacements
        self._tensors = _entries(model, ("_parameters", "_buffers"), self._traits)
        self._probes = [(e.box, e.name, e.value, _address(e.value) if addresses else None) for e in self._tensors]
        self._modules = _entries(model, ("_modules",), _no_traits)
        _held[id(self)] = frozenset(id(entry.value) for entry in self._tensors)
        weakref.finalize(self, _held.pop, id(self)).atexit = False
        # Gone with this object, without a call, or with the memory, with one.
        strided = [entry.value for entry in self._tensors if entry.value.layout is torch.strided]
        self._memory = [weakref.ref(tensor.untyped_storage(), _bump) for tensor in strided]

    def check(self) -> None:
        """Notice a replaced tensor, in a time that does not grow with the model while nothing was replaced anywhere.

        Raises:
            StaleGraphError: naming what was replaced.
        """
        if self._seen_loads != _loads:
            self._check_literals()
        seen = _replacements
        if self._seen == seen and not self._probe_all and not self._probe():
            return
        stale = [e.label for e in self._tensors if e.is_replaced() or self._traits(e.value) != e.traits]
        stale += [e.label for e in self._modules if e.is_replaced()]
        if stale:
            self._seen = -1  # so that the next launch finds it too
            more = f" and {len(stale) - 4} more" if len(stale) > 4 else ""
            raise StaleGraphError(
                f"{', '.join(stale[:4])}{more} was replaced after the trace, so the graph would compute with the old"
                " one. Update weights in place (copy_, load_state_dict without assign=True), or compile again."
            )
        self._seen = seen

    def _check_literals(self) -> None:
        seen = _loads
        for buffers, name, number in self._literals:
            tensor = buffers.get(name)
            if tensor is not None and int(tensor.item()) != number:
                raise StaleGraphError(
                    f"buffer {name!r} was {number} at the trace, which the graph holds as a number, and is now"
                    f" {int(tensor.item())}: compile again."
                )
        self._seen_loads = seen

    def _probe(self) -> bool:
        """Whether one of the next few tensors was replaced."""
        first, end = self._next_probe, self._next_probe + _NUM_PROBES
        self._next_probe = end if end < len(self._probes) else 0
        for box, name, tensor, address in self._probes[first:end]:
            if name not in box or box[name] is not tensor or (address is not None and tensor.data_ptr() != address):
                return True
        return False
