"""Notice parameters and buffers that were replaced after the trace.

A graph holds the tensors that the model had when it was traced. In-place updates are followed; a replaced Parameter, a
rebound buffer or `module.to(dtype)` are not, so a replay would silently use the old ones. Checking every tensor at each
launch would cost time that grows with the model; instead, what replaces tensors bumps one process-wide count, and a
launch checks all its tensors only when the count has moved. These do:

* registration of a parameter, buffer or submodule, by `setattr` too, as torch's global hooks tell;
* `Module._apply` (`to`, `half`, `cuda`), `torch.utils.swap_tensors`, and what changes a module's structure past those
  hooks (`del`, `insert`, `pop`, `clear`), which are wrapped;
* `tensor.data = ...`, `tensor.set_(...)` and `tensor.resize_(...)` of a tensor that a graph holds, as torch's
  dispatcher tells: each runs an operator to which a kernel of ours is added, in a place where torch has none, that
  calls torch's;
* the end of a held tensor's memory.

What none of them tells is noticed within a few launches, as each checks the next few tensors and submodules in turn: a
plain attribute that is another tensor now (these are checked first), a write into `module._parameters` or
`module._modules`, a storage that is resized, C++ code that goes past the dispatcher.

A 0-d integer buffer that the graph holds as a number is compared when its version counter has moved; one that has none,
as it was made in inference mode, or that was written past it (`.data`), after a `load_state_dict`.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from spangraph.errors import StaleGraphError
from spangraph.host_state import HostState

# Tensors that a launch checks: all of a small model's.
_NUM_PROBES = 8

# What replaces tensors or changes a module's structure, and ends in none of torch's hooks.
_UNHOOKED = (
    (torch.utils, "swap_tensors"),
    (nn.Module, "_apply"),
    (nn.Module, "__delattr__"),
    (nn.ModuleDict, "__delitem__"),
    (nn.ModuleDict, "clear"),
    (nn.ModuleList, "insert"),
    (nn.Sequential, "insert"),
)

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
# All of `tensor.set_(...)` ends in the first.
_in_place = (torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.resize_.default)
# Ours comes before any device's kernel, after autograd's and Python's.
_devices = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _on_data(tensor: Tensor, new: Tensor) -> bool:
    """`tensor.data = new` asks this first. Nothing of Python's runs between the count and the assignment."""
    global _replacements
    held = _is_held(tensor)
    compatible: bool = _compatible.decompose(tensor, new)
    _replacements += held
    return compatible


def _on_op(op: Any, keys: torch._C.DispatchKeySet, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = op.redispatch(keys & _devices, tensor, *args, **kwargs)
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
            if not torch.compiler.is_dynamo_compiling():  # which would compile again when the count has moved
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
        for op in _in_place:
            _library.impl(op, functools.partial(_on_op, op), "BackendSelect", with_keyset=True)
        nn_module.register_module_parameter_registration_hook(_bump)
        nn_module.register_module_buffer_registration_hook(_bump)
        nn_module.register_module_module_registration_hook(_bump)
        for owner, name in _UNHOOKED:
            _count_calls(owner, name, _bump)
        _count_calls(nn.Module, "load_state_dict", _count_load)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a container held under a key, and what a graph relies on of it."""

    label: str
    box: Any
    key: Any
    value: Any
    traits: tuple[Any, ...]

    def is_replaced(self) -> bool:
        try:  # not get(): a ScriptModule's dicts have none
            return self.box[self.key] is not self.value
        except (KeyError, IndexError):
            return True


def _traits(value: Any) -> tuple[Any, ...]:
    return (value.dtype, value.device, value.shape) if isinstance(value, Tensor) else ()


def _address(value: Any) -> int | None:
    # A sparse tensor has no memory of its own.
    return value.data_ptr() if isinstance(value, Tensor) and value.layout is torch.strided else None


def _baked_traits(value: Any) -> tuple[Any, ...]:
    address = _address(value)
    return *_traits(value), address, () if address is None else value.stride()


def _named(labels: Sequence[str], how: str) -> str:
    more = f" and {len(labels) - 4} more" if len(labels) > 4 else ""
    return f"{', '.join(labels[:4])}{more} {'was' if len(labels) == 1 else 'were'} {how}"


class Weights:
    """The parameters, buffers and submodules of a model at its trace, and the plain attributes that a graph holds.

    Args:
        addresses: whether the graph has their addresses baked in, as a captured one has.
        constants: plain attributes that the graph holds, by their memory.
        literals: buffers that the graph holds as numbers: module's buffers, name and number of each.
        probe_all: check all tensors at every launch, at a cost that grows with the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        addresses: bool,
        constants: Collection[int] = frozenset(),
        literals: Sequence[tuple[dict[str, Any], str, int]] = (),
        probe_all: bool = False,
    ) -> None:
        _install()
        self._model, self._training = model, model.training
        self._probe_all = probe_all
        self._literals = [(name, buffers[name], number) for buffers, name, number in literals]
        self._versioned = [buffer for _, buffer, _ in self._literals if not buffer.is_inference()]
        self._versions = [buffer._version for buffer in self._versioned]
        self._seen_loads = _loads
        self._traits = _baked_traits if addresses else _traits
        self._seen = _replacements
        # Names with None, too: a bias or a cache may come later.
        self._boxes: list[tuple[str, nn.Module, str, Any, tuple[Any, ...]]] = []
        held = HostState(model).held_in(constants)
        plain = [_Entry(each.label, each.box, each.key, each.value, self._traits(each.value)) for each in held]
        registered = []
        for fqn, module in model.named_modules():
            prefix = f"{fqn}." if fqn else ""
            for kind in ("_parameters", "_buffers", "_modules"):
                box = getattr(module, kind)
                self._boxes.append((prefix, module, kind, box, tuple(box.keys())))
                registered += [
                    _Entry(f"{prefix}{name}", box, name, value, self._traits(value)) for name, value in box.items()
                ]
        self._entries = plain + registered
        tensors = [entry for entry in self._entries if isinstance(entry.value, Tensor)]
        self._turns = self._probes(addresses)
        _held[id(self)] = frozenset(id(entry.value) for entry in tensors)
        weakref.finalize(self, _held.pop, id(self)).atexit = False
        # Gone with this object, without a call, or with the memory, with one.
        strided = [entry.value for entry in tensors if entry.value.layout is torch.strided]
        self._memory = [weakref.ref(tensor.untyped_storage(), _bump) for tensor in strided]

    def are_suspect(self) -> bool:
        """Whether there is something to `check`, in a time that does not grow with the model. Runs at every launch."""
        if self._seen != _replacements or self._probe_all or self._model.training is not self._training:
            return True
        if self._literals and self._have_literals_moved():
            return True
        box, size, last, probes = next(self._turns)
        try:
            if len(box) != size or next(reversed(box)) != last:
                return True
            for box, key, value, address in probes:
                if box[key] is not value or (address is not None and value.data_ptr() != address):
                    return True
        except (KeyError, IndexError, StopIteration):
            return True
        return False

    def check(self) -> None:
        """Notice replaced tensors.

        Raises:
            StaleGraphError: naming what was replaced.
        """
        if self._have_literals_moved():
            self._check_literals()
        seen = _replacements
        stale = {"replaced": [e.label for e in self._entries if e.is_replaced() or self._traits(e.value) != e.traits]}
        for prefix, module, kind, box, keys in self._boxes:
            now = getattr(module, kind)
            if now is not box:
                stale["replaced"].append(f"{prefix}{kind}")
            if (names := tuple(now.keys())) != keys:
                stale.setdefault("added", []).extend(f"{prefix}{key}" for key in names if key not in keys)
                if set(names) == set(keys):
                    stale.setdefault("reordered", []).append(f"{prefix}{kind}")
        if self._model.training is not self._training:
            stale["switched to " + ("eval" if self._training else "train") + " mode"] = ["the model"]
        if what := " and ".join(_named(found, how) for how, found in stale.items() if found):
            self._seen = -1  # so that the next launch finds it too
            raise StaleGraphError(
                f"{what} after the trace, so the graph would compute with the model as it was then. Update weights in"
                " place (copy_, load_state_dict without assign=True), compile with on_stale='recapture', or compile"
                " again."
            )
        self._seen = seen

    def _have_literals_moved(self) -> bool:
        return self._seen_loads != _loads or self._versions != [buffer._version for buffer in self._versioned]

    def _check_literals(self) -> None:
        seen, versions = _loads, [buffer._version for buffer in self._versioned]
        for name, buffer, number in self._literals:
            if (now := int(buffer.item())) != number:
                raise StaleGraphError(
                    f"buffer {name!r} was {number} at the trace, which the graph holds as a number, and is now {now}:"
                    " compile again."
                )
        self._seen_loads, self._versions = seen, versions

    def _probes(self, addresses: bool) -> Iterator[tuple[Any, ...]]:
        """What a launch looks at, one launch after the other."""
        values = [entry for entry in self._entries if entry.value is not None]
        probes = [(e.box, e.key, e.value, _address(e.value) if addresses else None) for e in values]
        parents = [(box, len(keys), keys[-1]) for *_, kind, box, keys in self._boxes if kind == "_modules" and keys]
        parents = [parent for parent in parents if isinstance(parent[0], dict)] or [({None: None}, 1, None)]
        few = [probes[i : i + _NUM_PROBES] for i in range(0, len(probes), _NUM_PROBES)] or [[]]
        num_turns = max(len(parents), len(few))
        return itertools.cycle((*parents[i % len(parents)], few[i % len(few)]) for i in range(num_turns))
