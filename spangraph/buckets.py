"""Buckets: the sizes to which input dims are padded, so that few graphs serve all launches."""

from __future__ import annotations

import inspect
import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from spangraph.errors import InputError
from spangraph.structure import CallSpec, Constant, tensor_paths

BATCH = "batch"
"""The bucketed dim that holds the rows: dim 0."""


@dataclass(frozen=True)
class Padded:
    """How one tensor of a call is padded.

    Attributes:
        name: path of the input, e.g. `"mel"`.
        dims: its bucketed dims: dim -> which of the buckets.
        value: what padding holds.
    """

    name: str
    dims: Mapping[int, int]
    value: float | int | bool = 0


@dataclass(frozen=True)
class Fit:
    """What a launch takes of its buckets.

    Attributes:
        sizes: of each bucketed dim as the caller gave it.
        bucket: the smallest sizes that fit; None if none does.
        reason: then which dim is too large, in words that do not depend on its size.
        problem: and in words that do.
    """

    sizes: tuple[int, ...]
    bucket: tuple[int, ...] | None
    reason: str = ""
    problem: str = ""


class Buckets:
    """Sizes of named input dims.

    Args:
        sizes: name -> sizes. `"batch"` is the rows: dim 0.
        dims: path of an input (`"mel"`, `"batch.mel"`, `"batch[0]"`) -> its dim -> name. Inputs that are not named are
            taken as they are. By default dim 0 of every tensor is `"batch"`.
        pad_values: path of an input -> what its padding holds, default 0.

    Raises:
        InputError: for sizes that are no different positive ints, names without a dim, or dims without sizes.
    """

    def __init__(
        self,
        sizes: Mapping[str, Sequence[int]],
        dims: Mapping[str, Mapping[int, str]] | None = None,
        pad_values: Mapping[str, float | int | bool] | None = None,
    ) -> None:
        if not isinstance(sizes, Mapping) or not sizes:
            raise InputError(f'buckets={sizes!r}: expected a mapping such as {{"batch": (1, 2, 4, 8)}}.')
        for name, given in sizes.items():
            listed = given if isinstance(given, Sequence) and not isinstance(given, str) else ()
            if not listed or any(type(n) is not int or n < 1 for n in listed) or len(set(listed)) < len(listed):
                raise InputError(
                    f"buckets[{name!r}]={given!r}: expected different ints of at least 1, such as (1, 2, 4)."
                )
        self.sizes = {name: tuple(sorted(given)) for name, given in sizes.items()}
        self.names = tuple(self.sizes)
        if dims is None and self.names != (BATCH,):
            raise InputError(
                f"buckets of {[name for name in self.names if name != BATCH]}, but no dims= that say where they are:"
                ' expected dims={"mel": {0: "batch", 2: "frames"}, ...} for every input that is to be padded.'
            )
        self._dims = {path: dict(named) for path, named in dims.items()} if dims is not None else None
        for path, named in (self._dims or {}).items():
            for dim, name in named.items():
                if type(dim) is not int or dim < 0 or name not in self.sizes:
                    raise InputError(
                        f"dims[{path!r}] has {dim!r}: {name!r}: expected a dim from 0 up, and one of the buckets"
                        f" {list(self.names)}."
                    )
        used = {name for named in (self._dims or {}).values() for name in named.values()}
        if self._dims is not None and (unused := sorted(set(self.names) - used)):
            raise InputError(f"buckets of {unused}, but no input has such a dim: dims= names {sorted(used)}.")
        self._pad_values = dict(pad_values or {})
        self._plans: dict[Any, list[Padded]] = {}

    # ---- what a call takes ---------------------------------------------------------------------------------------

    def plan(self, signature: inspect.Signature, call: CallSpec, tensors: Sequence[Tensor]) -> list[Padded]:
        """How each tensor of a call is padded.

        Raises:
            InputError: for paths in `dims` or `pad_values` that the call has no tensor for, dims it does not have, or
                values that its dtype does not have.
        """
        kinds = tuple((tensor.ndim, tensor.dtype) for tensor in tensors)
        key = call.spec, tuple(isinstance(leaf, Constant) for leaf in call.leaves), kinds
        if (known := self._plans.get(key)) is not None:
            return known
        paths = tensor_paths(signature, call, tensors)
        for what, given in (("dims", self._dims or {}), ("pad_values", self._pad_values)):
            if unknown := sorted(set(given) - set(paths)):
                raise InputError(f"{what}= names {unknown}: the forward was given the tensors {paths}.")
        plan = []
        for path, tensor in zip(paths, tensors, strict=True):
            named = {0: BATCH} if self._dims is None and tensor.ndim else (self._dims or {}).get(path, {})
            if wrong := [dim for dim in named if dim >= tensor.ndim]:
                raise InputError(f"dims[{path!r}] names dim {wrong[0]} of a tensor of shape {list(tensor.shape)}.")
            at = {dim: self.names.index(name) for dim, name in named.items()}
            plan.append(Padded(path, at, _fitting(path, self._pad_values.get(path, 0), tensor.dtype)))
        self._plans[key] = plan
        return plan

    def fit(self, plan: Sequence[Padded], shapes: Sequence[Sequence[int]]) -> Fit:
        """The smallest bucket for inputs of these shapes.

        Raises:
            InputError: if two inputs have different sizes of one dim, or no input has a dim of some name.
        """
        found: dict[int, tuple[int, str]] = {}
        for padded, shape in zip(plan, shapes, strict=True):
            for dim, index in padded.dims.items():
                size, path = found.setdefault(index, (shape[dim], padded.name))
                if size != shape[dim]:
                    raise InputError(
                        f"{self.names[index]!r} is {size} in {path!r} and {shape[dim]} in {padded.name!r}: inputs of"
                        " one launch need the same size. dims= says which dims of which inputs are bucketed."
                    )
        if len(found) < len(self.names):
            missing = [name for i, name in enumerate(self.names) if i not in found]
            raise InputError(f"no tensor of this call has a dim {missing}, which buckets= names.")
        sizes = tuple(found[i][0] for i in range(len(self.names)))
        bucket = []
        for name, size in zip(self.names, sizes, strict=True):
            known = self.sizes[name]
            if size > known[-1]:
                problem = f"{name} {size} is above {known[-1]}, the largest bucket"
                return Fit(sizes, None, f"{name} above {known[-1]}", problem)
            bucket.append(known[bisect_left(known, size)])
        return Fit(sizes, tuple(bucket))

    def all(self) -> list[tuple[int, ...]]:
        """Every bucket, the largest first: of a pool's memory, smaller graphs then use what the largest has taken."""
        return sorted(itertools.product(*self.sizes.values()), key=lambda bucket: (prod(bucket), bucket), reverse=True)

    def label(self, bucket: Sequence[int]) -> str:
        """A bucket's name: `"batch=8, frames=200"`."""
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, bucket, strict=True))


def _fitting(path: str, value: float | bool, dtype: torch.dtype) -> float | int | bool:
    try:
        held = torch.full((), value, dtype=dtype, device="cpu").item()
        fits = held == value or dtype.is_floating_point
    except (RuntimeError, TypeError, OverflowError):
        fits = False
    if not fits:
        raise InputError(f"pad_values[{path!r}]={value!r} is no value of {dtype}, the dtype of that input.")
    return value


def padded_shape(padded: Padded, bucket: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an input once it is padded."""
    return tuple(bucket[padded.dims[dim]] if dim in padded.dims else size for dim, size in enumerate(shape))


def regions(static: Tensor, shape: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """The corner of `static` that a tensor of `shape` fills, and the rest of it in parts that do not overlap."""
    rest = []
    for dim, size in enumerate(shape):
        if size < static.shape[dim]:
            rest.append(static.narrow(dim, size, static.shape[dim] - size))
            static = static.narrow(dim, 0, size)
    return static, rest


def pad(tensor: Tensor, shape: Sequence[int], value: float | bool) -> Tensor:
    """The tensor in a new one of `shape`, cut off where that is smaller; itself if it has that shape."""
    if tensor.shape == torch.Size(shape):
        return tensor
    with torch.no_grad():
        padded = tensor.new_full(tuple(shape), value)
        sizes = [min(have, want) for have, want in zip(tensor.shape, shape, strict=True)]
        regions(padded, sizes)[0].copy_(regions(tensor.detach(), sizes)[0])
    return padded
