"""A model's call and output as flat tensors: what is copied in, what is baked in, and how to rebuild the structure."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spangraph.errors import InputError, TraceError
from spangraph.host_state import ATOMS
from spangraph.spans import SpannedOutput

# Leaves of (args, kwargs) that may be baked into a graph: compared by type and value.
_CONSTANTS = (*ATOMS, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Constant:
    """An output leaf that is not a tensor."""

    value: Any


def normalise_call(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], walk: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` in one canonical form, so that `f(x, 1)` and `f(x, n=1)` share a graph; a forward that has a
    parameter `walk` is told the walk."""
    if "walk" in signature.parameters:
        kwargs = {"walk": walk, **kwargs}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"the model's forward{signature} cannot be called like this: {error}") from None
    return bound.args, bound.kwargs


def is_constant(leaf: Any) -> bool:
    """Whether a leaf of the inputs may be baked into a graph."""
    if isinstance(leaf, slice):
        return all(map(is_constant, (leaf.start, leaf.stop, leaf.step)))
    return isinstance(leaf, (*_CONSTANTS, enum.Enum, range))


@dataclass(frozen=True)
class CallSpec:
    """How to rebuild `(args, kwargs)` from the tensor leaves."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # a Constant, or an index into the tensors

    def build(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments."""
        leaves = [leaf.value if isinstance(leaf, Constant) else tensors[leaf] for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def example_args(args: Any) -> tuple[Any, ...]:
    """Example inputs as a tuple.

    Raises:
        InputError: for a lone tensor.
    """
    if not isinstance(args, tuple | list):
        raise InputError(f"args is a {type(args).__name__}: expected a tuple of the model's inputs, such as (x,).")
    return tuple(args)


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallSpec, list[Tensor]]:
    """The tensors of a call, and how to rebuild it around them.

    Raises:
        InputError: for a leaf that is neither a tensor nor a constant.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    template: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            template.append(len(tensors))
            tensors.append(leaf)
        elif is_constant(leaf):
            template.append(Constant(leaf))
        else:
            raise InputError(
                f"an input of type {type(leaf).__name__} can be neither copied in nor baked into a graph: pass tensors,"
                " numbers, strings or None, or register the class as a pytree (torch.export.register_dataclass)."
            )
    return CallSpec(spec, tuple(template)), tensors


def tensor_paths(signature: inspect.Signature, call: CallSpec, tensors: Sequence[Tensor]) -> list[str]:
    """What each tensor of a call is called: a parameter of the forward, or `"batch.mel"`, `"batch[0]"` inside one."""
    args, kwargs = call.build(tensors)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    try:
        leaves: Any = pytree.tree_flatten_with_path(arguments)[0]
    except ValueError:  # a class that was registered without keys: its leaves are counted
        leaves = [
            ((pytree.MappingKey(name), *([] if pytree.tree_is_leaf(value) else [pytree.SequenceKey(i)])), leaf)
            for name, value in arguments.items()
            for i, leaf in enumerate(pytree.tree_leaves(value))
        ]
    paths = [path for path, leaf in leaves if isinstance(leaf, Tensor)]
    return [f"{path[0].key}{pytree.keystr(path[1:])}".replace("['", ".").replace("']", "") for path in paths]


def flatten_output(out: Any) -> tuple[list[Tensor], list[Any], list[Any], pytree.TreeSpec]:
    """Tensors of an output, its template (index or Constant per leaf), the key path per leaf, and the spec.

    Raises:
        TraceError: if a leaf holds tensors in a class that pytree does not know.
    """
    register_dataclasses(out)
    try:
        paths, spec = pytree.tree_flatten_with_path(out)
    except ValueError:  # a class that was registered without keys
        leaves, spec = pytree.tree_flatten(out)
        paths = [((), leaf) for leaf in leaves]
    tensors: list[Tensor] = []
    template: list[Any] = []
    for _, leaf in paths:
        if isinstance(leaf, Tensor):
            template.append(len(tensors))
            tensors.append(leaf)
        elif _holds_tensors(leaf):
            raise TraceError(
                f"the model returned a {type(leaf).__name__}, whose tensors cannot be reached: make it a dataclass, or"
                " register it with torch.utils._pytree.register_pytree_node."
            )
        else:
            template.append(Constant(leaf))
    return tensors, template, [path for path, _ in paths], spec


# What makes a leaf of a step's result of (step, its launch, what): a function, and what it is given third.
Leaf = tuple[Callable[[Any, Any, Any], Any], Any]


def structure_maker(spec: pytree.TreeSpec, leaves: Sequence[Leaf]) -> Callable[[Any, Any], Any]:
    """A function of a step and its launch that builds the structure of `spec`: one expression.

    `pytree.tree_unflatten` walks the spec at every call; a step's result has the same one each time.
    """
    names: dict[str, Any] = {}
    unused = iter(leaves)

    def named(value: Any) -> str:
        name = f"value{len(names)}"
        names[name] = value
        return name

    def expression(spec: pytree.TreeSpec) -> str:
        if spec.is_leaf():
            make, what = next(unused)
            return f"{named(make)}(step, launch, {named(what)})"
        children = [expression(child) for child in spec.children()]
        if spec.type is dict:
            return f"{{{', '.join(f'{named(k)}: {child}' for k, child in zip(spec.context, children, strict=True))}}}"
        if spec.type is SpannedOutput:
            return f"{named(SpannedOutput)}({', '.join(children)}, {named(spec.context)})"
        unflatten = pytree.SUPPORTED_NODES[spec.type].unflatten_fn
        return f"{named(unflatten)}([{', '.join(children)}], {named(spec.context)})"

    try:
        make_structure: Callable[[Any, Any], Any] = eval(f"lambda step, launch: {expression(spec)}", names)
        return make_structure
    except (SyntaxError, RecursionError, MemoryError):  # nested deeper than an expression may be
        return lambda step, launch: pytree.tree_unflatten([make(step, launch, what) for make, what in leaves], spec)


def leaf_name(path: Any) -> str:
    key = path[-1] if path else None
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))))


def register_dataclasses(out: Any) -> None:
    """Let pytree look into dataclass outputs that nobody registered."""
    pending = [out]
    while pending:
        node = pending.pop()
        if dataclasses.is_dataclass(node) and not isinstance(node, type) and type(node) not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(node))
        if not pytree.tree_is_leaf(node):
            pending.extend(pytree.tree_leaves(node, is_leaf=lambda child, parent=node: child is not parent))  # type: ignore[misc]


def _holds_tensors(leaf: Any, seen: set[int] | None = None) -> bool:
    seen = set() if seen is None else seen
    if isinstance(leaf, Tensor):
        return True
    if isinstance(leaf, (*_CONSTANTS, type)) or id(leaf) in seen:
        return False
    seen.add(id(leaf))
    if isinstance(leaf, dict | list | tuple | set | frozenset | deque):
        children = [*leaf, *leaf.values()] if isinstance(leaf, dict) else list(leaf)
    else:
        slots = [name for base in type(leaf).__mro__ for name in getattr(base, "__slots__", ())]
        children = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in slots)]
    return any(_holds_tensors(child, seen) for child in children)
