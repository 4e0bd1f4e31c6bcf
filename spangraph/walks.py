"""Walks of a compiled model, and how their launches find graphs: by bucket, by signature, or not at all."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from spangraph.backends import Backend
from spangraph.buckets import BATCH, Buckets, pad, padded_shape
from spangraph.builder import SignatureBuilder
from spangraph.counts import Statistics
from spangraph.errors import DeclarationError, InputError, TraceError
from spangraph.passes.sources import drop_sources
from spangraph.signature import Signature
from spangraph.structure import CallSpec, Constant, normalise_call, split_call

# Kinds of inputs whose signature is found without looking at the whole call; forgotten together, to stay few.
_MAX_KNOWN_SHAPES = 1024
# Graphs' worth of steps that ran eagerly and are kept, as they are: the next one of that shape need not be watched.
_MAX_EAGER = 8


class Place:
    """Where a signature is kept.

    Attributes:
        versions: its traces under different guards, the oldest first; none once they were dropped.
        last_used: when, in launches.
    """

    __slots__ = ("cache", "key", "last_used", "versions")

    def __init__(self, cache: GraphCache, key: Any) -> None:
        self.cache = cache
        self.key = key
        self.versions: list[Signature] = []
        self.last_used = 0

    def current(self) -> Signature | None:
        """The version whose guards hold, which is used now."""
        self.last_used = self.cache.clock = self.cache.clock + 1
        for version in self.versions:
            if (guard := version.trace.guard) is None or guard.holds():
                return version
        return None


class GraphCache:
    """Signatures of all walks, with at most so many graphs.

    Args:
        max_graphs: graphs that all signatures together may have; None for any number.

    Attributes:
        clock: counts uses.
    """

    def __init__(self, backend: Backend, max_graphs: int | None) -> None:
        self._backend = backend
        self.max_graphs = max_graphs
        self.clock = 0
        self._places: dict[Any, Place] = {}

    def place(self, key: Any) -> Place:
        """Where the signature of a key is kept, or will be."""
        return self._places.get(key) or Place(self, key)

    def put(self, place: Place, signature: Signature) -> None:
        """Keep a signature, for which there is room."""
        place.versions.append(signature)
        place.last_used = self.clock = self.clock + 1
        signature.place = self._places[place.key] = place

    def check_room(self, num_graphs: int) -> None:
        """Whether there can be so many graphs.

        Raises:
            InputError: if not.
        """
        if self.max_graphs is not None and num_graphs > self.max_graphs:
            raise InputError(
                f"max_graphs={self.max_graphs}, but {num_graphs} graphs are needed at once: one per bucket, and per"
                " step of depth where rows are views. Raise it, lower depth, or have all outputs copied (copies=)."
            )

    def make_room(self, num_graphs: int) -> None:
        """Drop the least recently used signatures until so many more graphs may be had.

        Raises:
            InputError: if there can be no room.
        """
        self.check_room(num_graphs)
        while self.max_graphs is not None and len(self) + num_graphs > self.max_graphs:
            self.drop(self.values()[0])

    def drop(self, signature: Signature) -> None:
        """Forget a signature, once the device is done with its graphs."""
        self._backend.synchronize()
        place = signature.place
        place.versions.remove(signature)
        if not place.versions:
            del self._places[place.key]
        signature.counts.evictions += 1

    def values(self) -> list[Signature]:
        """All signatures, and all versions of each; the least recently used first."""
        places = list(self._places.values())  # at once: another thread may launch
        places.sort(key=lambda place: place.last_used)
        return [signature for place in places for signature in place.versions]

    def clear(self) -> None:
        """Forget all."""
        self._places.clear()

    def __len__(self) -> int:
        """Number of graphs."""
        return sum(len(signature.instances) for signature in self.values())


@dataclass(eq=False, slots=True)
class Found:
    """What is known of a launch's inputs.

    Attributes:
        place: where what it runs is kept.
        batch: rows that the caller gave; None if that is not known.
        elements: of the caller's inputs.
        reason: why there was no graph; empty if there was.
        strides: those of the signature that takes such inputs as they are; None if that is not known of any.
        guards: check that inputs are of the same kinds; of torch.compile.
    """

    place: Place
    batch: int | None
    elements: int
    reason: str = ""
    strides: Any = None
    guards: Any = None


class WalkGraphs:
    """One walk of a compiled model.

    Attributes:
        name: what `spanned_outputs` and a forward's parameter `walk` are given.
    """

    def __init__(
        self,
        name: str,
        builder: SignatureBuilder,
        signature: inspect.Signature,
        buckets: Buckets | None,
        statistics: Statistics,
        cache: GraphCache,
        *,
        on_miss: str,
    ) -> None:
        self.name = name
        self.buckets = buckets
        self._builder = builder
        self._signature = signature
        self._statistics = statistics
        self._cache = cache
        self._eager = GraphCache(builder.core.backend, _MAX_EAGER * builder.core.ring.depth)
        self._on_miss = on_miss
        self._known: dict[Any, Found] = {}
        self._last: tuple[Any, int] = None, -1  # of those, and its number of inputs

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "not captured"
    ) -> tuple[Found, Signature, Sequence[Tensor]]:
        """What a call runs, on its tensors as they were given; traces and captures what is not there.

        Raises:
            InputError: for inputs that cannot be taken, or that fit no bucket.
            and what `SignatureBuilder.build` raises.
        """
        last, num_inputs = self._last
        if num_inputs == len(args) and not kwargs:
            try:
                # At a nested tensor, which has no sizes, the C++ of the guards ends the process.
                is_dense = True not in [arg.is_nested for arg in args]
            except AttributeError:  # no tensor
                is_dense = False
            # The check is one call, and takes a fifth of what looking the kinds up does.
            if is_dense and last.guards.check(*args) and (signature := last.place.current()) is not None:
                return last, signature, args
        kinds = None
        if not kwargs:
            try:
                kinds = tuple([(type(a), a.shape, a.stride(), a.dtype, a.device, a.layout) for a in args])
                if (known := self._known.get(kinds)) is not None and (signature := known.place.current()) is not None:
                    if args:
                        self._last = known, len(args)
                    return known, signature, args
            except (AttributeError, RuntimeError, TypeError):
                kinds = None  # not tensors alone, or some without strides
        call, tensors = self._split(args, kwargs)
        found, signature = self._find(call, tensors, why)
        if kinds is not None and len(tensors) == len(args) and all(kind[0] is Tensor for kind in kinds):
            if len(self._known) >= _MAX_KNOWN_SHAPES:
                self._known.clear()
            guards = TensorGuards(*args, dynamic_dims_sizes=None, dynamic_dims_strides=None) if args else None
            self._known[kinds] = replace(found, reason=signature.miss, guards=guards)
        return found, signature, tensors

    def captures(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any, Callable[..., Signature]]]:
        """What a warm-up captures: for each bucket its label, its key, and a function that builds its signature."""
        call, tensors = self._split(args, kwargs)
        if self.buckets is None:
            return [("", *self._capture(call, tensors, None))]
        self.buckets.fit(self.buckets.plan(self._signature, call, tensors), [t.shape for t in tensors])
        return [(self.buckets.label(b), *self._capture(call, tensors, b)) for b in self.buckets.all()]

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self._last = None, -1
        self._eager.clear()

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallSpec, list[Tensor]]:
        """The call, and its tensors.

        Raises:
            InputError: for what is no input.
        """
        call, tensors = split_call(*normalise_call(self._signature, args, kwargs, self.name))
        if any(tensor.is_nested or tensor.is_quantized for tensor in tensors):
            raise InputError(
                "an input is nested or quantized: expected a strided (dense) tensor. Pad it (to_padded_tensor) and pass"
                " its lengths, or dequantize it."
            )
        return call, tensors

    def _find(self, call: CallSpec, tensors: list[Tensor], why: str) -> tuple[Found, Signature]:
        elements = sum(tensor.numel() for tensor in tensors)
        if self.buckets is None:
            key, build = self._capture(call, tensors, None)
            batch = None
        else:
            fit = self.buckets.fit(self.buckets.plan(self._signature, call, tensors), [t.shape for t in tensors])
            batch = dict(zip(self.buckets.names, fit.sizes, strict=True)).get(BATCH)
            if fit.bucket is None:
                if self._on_miss == "error":
                    raise InputError(
                        f"{fit.problem}: add a larger one, or compile with on_miss='eager' to run it eagerly."
                    )
                eager = self._eagerly(call, tensors, batch, fit.reason)
                return Found(eager.place, batch, elements, fit.reason), eager
            key, build = self._capture(call, tensors, fit.bucket)
        place = self._cache.place(key)
        if (signature := place.current()) is not None:
            return Found(place, batch, elements), signature
        if place.versions:
            _refuse_recompiles(place.versions)
            why = "guards failed"
        signature = build()
        self._cache.put(place, signature)
        return Found(place, batch, elements, why), signature

    def _capture(
        self, call: CallSpec, tensors: Sequence[Tensor], bucket: Sequence[int] | None
    ) -> tuple[Any, Callable[..., Signature]]:
        """The key of a signature, and what builds it."""
        if self.buckets is None or bucket is None:
            padding, shapes, label = None, [tuple(t.shape) for t in tensors], ""
        else:
            padding = self.buckets.plan(self._signature, call, tensors)
            shapes = [padded_shape(p, bucket, t.shape) for p, t in zip(padding, tensors, strict=True)]
            label = self.buckets.label(bucket)

        def build(make_room: Callable[[int], None] = self._cache.make_room) -> Signature:
            self._check(tensors)
            inputs = tensors
            batch = None
            if self.buckets is not None and bucket is not None and padding is not None:
                inputs = [pad(t, shape, p.value) for t, shape, p in zip(tensors, shapes, padding, strict=True)]
                batch = dict(zip(self.buckets.names, bucket, strict=True)).get(BATCH)
            counts = self._statistics.of(self.name, label)
            with drop_sources() as kept:
                try:
                    signature = self._builder.build(call, inputs, counts=counts, batch=batch, make_room=make_room)
                except DeclarationError as error:
                    unnamed = [p.name for p in padding or () if not p.dims]
                    if not unnamed or not str(error).startswith("SG103"):
                        raise
                    hint = f"Inputs that dims= does not name are not padded: {unnamed}."
                    raise DeclarationError(f"{error} {hint}", error.where) from None
                kept += [(instance, instance.forward) for instance in signature.instances]
            signature.pad_values, signature.shapes = [p.value for p in padding or ()], shapes
            counts.captures += 1
            return signature

        return (self.name, *_key(call, tensors, shapes)), build

    def _eagerly(self, call: CallSpec, tensors: Sequence[Tensor], batch: int | None, reason: str) -> Signature:
        """A signature for inputs that fit no bucket: the model as it is, uncaptured."""
        key = (self.name, *_key(call, tensors, [t.shape for t in tensors]))
        place = self._eager.place(key)
        if (signature := place.current()) is None:
            self._check(tensors)
            _refuse_recompiles(place.versions)
            counts = self._statistics.of(self.name, "(eager)")
            with drop_sources() as kept:
                signature = self._builder.build_eager(
                    call, tensors, counts=counts, batch=batch, make_room=self._eager.make_room
                )
                kept += [(instance, instance.forward) for instance in signature.instances]
            signature.miss = reason
            self._eager.put(place, signature)
        return signature

    def _check(self, tensors: Sequence[Tensor]) -> None:
        device = self._builder.core.backend.device
        for tensor in tensors:
            if tensor.device != device and tensor.device.type != "cpu":
                raise InputError(
                    f"an input is on {tensor.device}, the model runs on {device}: move it there, or pass it on the CPU"
                    " to have it copied."
                )
            if tensor.layout is not torch.strided:
                raise InputError(f"an input has layout {tensor.layout}: expected a strided (dense) tensor.")


def _key(call: CallSpec, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """What tells signatures of a walk apart."""
    constants = tuple(_constant_key(c.value) for c in call.leaves if isinstance(c, Constant))
    places = tuple(isinstance(leaf, Constant) for leaf in call.leaves)
    kinds = tuple((t.dtype, t.device, t.layout) for t in tensors)
    return call.spec, constants, places, kinds, tuple(map(tuple, shapes))


def _constant_key(value: Any) -> tuple[Any, ...]:
    """Type and value. Not the value itself: 0.0 == -0.0, and nan is no key. Nor its own repr, which may say less."""
    if isinstance(value, slice | range):
        return type(value), *map(_constant_key, (value.start, value.stop, value.step))
    if isinstance(value, enum.Enum):  # there is one object of each member
        return type(value), id(value)
    base: Any = next((base for base in (int, float, complex, str, bytes) if isinstance(value, base)), type(value))
    return type(value), base.__repr__(value)


def _refuse_recompiles(versions: Sequence[Signature]) -> None:
    if versions and len(versions) >= torch._dynamo.config.recompile_limit:
        failures = dict.fromkeys(version.trace.failure() for version in versions)
        raise TraceError(
            f"one signature was traced {len(versions)} times (torch._dynamo.config.recompile_limit): what the forward"
            " reads on the host changes all the time. No trace holds now:\n"
            + "\n".join(f"  {failure}" for failure in failures)
            + "\nMake it a tensor: a buffer or an input."
        )
