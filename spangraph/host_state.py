"""What a forward changes on the host, where no graph sees it.

A graph repeats what operators do. A counter, a list that grows, or a tensor bound to another attribute happen once, at
the trace. The tracer notes such state before a forward and compares afterwards.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What torch keeps in a module; the last two are what an RNN makes of its parameters.
INTERNAL = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
# Values that hold nothing else and do not change.
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_MISSING = object()
# Deep enough for a cache: object -> list of layers -> layer -> tensor. A model may also refer to the engine it runs in.
_MAX_DEPTH = 4


@dataclass(frozen=True)
class Held:
    """Something that a module's attributes hold: `box[key]`."""

    label: str
    box: Any
    key: Any
    value: Any


@dataclass(frozen=True)
class Change:
    """Something on the host that is not as it was: `box[key]`, or all of `box` where it has no keys."""

    label: str
    box: Any
    old: Any
    new: Any

    def is_state(self, used: set[int]) -> bool:
        """Whether a later call may see it: a tensor that is bound anew before it is used does not count."""
        return not (isinstance(self.old, Tensor) and isinstance(self.new, Tensor)) or id(self.old) in used


class HostState:
    """What a forward may change on the host, where no graph sees it: attributes of modules, containers and objects in
    them, and which tensors are bound to parameters and buffers.

    Attributes:
        tensors: memory -> label, of the tensors that are plain attributes.
        generators: torch generators among the attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[int, str] = {}
        self.generators: list[torch.Generator] = []
        self._boxes: list[tuple[str, Any, Any]] = []  # label, container, copy
        self._held: list[tuple[Tensor, tuple[Held, ...]]] = []
        self._seen: set[int] = set()
        self._buffers: set[int] = set()
        self._modules: set[int] = set()
        registered = [*model.parameters(), *model.buffers()]
        self._registered = set(map(id, registered))
        self._registered_memory = set(map(storage_key, registered))
        for fqn, module in model.named_modules():
            prefix = f"{fqn}." if fqn else ""
            self._buffers.add(id(module._buffers))
            self._modules.add(id(module.__dict__))
            boxes = (module._parameters, module._buffers, module.__dict__)
            for box in filter(lambda box: isinstance(box, dict), boxes):  # a ScriptModule has wrappers
                self._boxes.append((prefix, box, dict(box)))
            for name, value in module.__dict__.items():
                if name not in INTERNAL and not isinstance(value, ATOMS):
                    self._look_into(prefix + name, value, (Held(prefix + name, module.__dict__, name, value),))

    def held_in(self, memory: Collection[int]) -> list[Held]:
        """Where plain attributes hold tensors that lie in this memory, by themselves or in containers, and where those
        are held: each place once."""
        held = [each for tensor, path in self._held if storage_key(tensor) in memory for each in path]
        return list({(id(each.box), each.key): each for each in held}.values())

    def is_buffers(self, box: Any) -> bool:
        """Whether it is a module's dict of buffers."""
        return id(box) in self._buffers

    def _look_into(self, label: str, value: Any, path: tuple[Held, ...]) -> None:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                is_own = storage_key(value) not in self._registered_memory
                if is_own:
                    self.tensors.setdefault(storage_key(value), label)
                if is_own or id(value) in self._registered:  # a view of a registered one may be made at each forward
                    self._held.append((value, path))
            return
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        if id(value) in self._seen or len(path) > _MAX_DEPTH + 1:
            return
        self._seen.add(id(value))
        box = vars(value) if _is_plain_object(value) else value
        if isinstance(box, dict | list | deque | set):
            self._boxes.append((f"{label}." if isinstance(box, dict) else label, box, box.copy()))
        if isinstance(box, dict):
            items = list(box.items())  # at once: another thread may write
            children = [(f"{label}.{key}", key, child) for key, child in items if not isinstance(child, ATOMS)]
        elif isinstance(box, list | deque | tuple):
            children = [(f"{label}[{i}]", i, child) for i, child in enumerate(box) if not isinstance(child, ATOMS)]
        else:
            children = []
        for name, key, child in children:
            self._look_into(name, child, (*path, Held(name, box, key, child)))

    def changes(self) -> list[Change]:
        """What is not as it was."""
        found = []
        for label, box, before in self._boxes:
            if isinstance(box, dict):
                for key in self._keys(box, before):
                    old, new = before.get(key, _MISSING), box.get(key, _MISSING)
                    if not _is_same(old, new):
                        found.append(Change(f"{label}{key}", box, old, new))
            elif not _is_same(before, box):
                found.append(Change(label, box, before, box))
        return found

    def restore(self) -> None:
        """Put everything back."""
        for _, box, before in self._boxes:
            if isinstance(box, dict):
                for key in self._keys(box, before):
                    if key not in before:
                        del box[key]
                    elif box.get(key, _MISSING) is not before[key]:
                        box[key] = before[key]
            elif not _is_same(before, box):
                box.clear()
                box.update(before) if isinstance(box, set) else box.extend(before)

    def _keys(self, box: dict[Any, Any], before: dict[Any, Any]) -> list[Any]:
        keys = [*before, *(key for key in box if key not in before)]
        return [key for key in keys if key not in INTERNAL] if id(box) in self._modules else keys


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object of a class that is neither Python's, torch's nor ours, and no module."""
    package = type(value).__module__.partition(".")[0]
    known = package in sys.stdlib_module_names or package in ("torch", "numpy", "spangraph")
    return not known and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module)


def _is_same(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, list | deque | tuple):
        return len(old) == len(new) and all(map(_is_same, old, new))
    return old is new or (isinstance(old, (*ATOMS, set)) and old == new)


@contextlib.contextmanager
def preserve_random() -> Iterator[None]:
    """Put the random states of Python and numpy back to where they were.

    That a forward draws from them is no reason to refuse it: some draw, and do not use what they drew.
    """
    state = random.getstate()
    numpy = sys.modules.get("numpy.random")
    numpy_state = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.set_state(numpy_state)


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's memory; of the tensor itself where it has none of that kind (sparse ones)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)
