"""The torch.library operators: `spangraph::stage`, `spangraph::compact`, `spangraph::mark`, `spangraph::mark_value`.

`mark` ties a value, its spans, its key and its name together inside a graph, `mark_value` a row value. They compute
nothing; a pass finds them and folds them into one `stage` at the graph's tail.

Registered with `Library` (4 us a call on CPU; `custom_op` takes 38), for the CPU and CUDA keys alone: a composite
implementation of `stage` would run under fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from spangraph.kernels.compact import compact, compact_ref
from spangraph.kernels.stage import stage, stage_copy, stage_ref

_NAMESPACE = "spangraph"
_STAGE = (
    "stage(Tensor(a!) cursor, Tensor(b!) slots, Tensor control, Tensor[] columns, int[] offsets, int graph, "
    "Tensor(c!)? mirror=None, int slot=0) -> ()"
)
_COMPACT = (
    "compact(Tensor cursor, Tensor control, Tensor[] sources, Tensor[] spans, Tensor(a!)[] rings, Tensor(b!) status, "
    "int graph, int[] ring_of, int[] firsts, int[] capacities, int[] dims, int[] max_spans, int[] casts) -> ()"
)
_MARK = "mark(Tensor value, Tensor spans, str key, str name) -> ()"
_MARK_VALUE = "mark_value(Tensor value, str key, str name) -> ()"


def _stage_by(ring_kernel: Callable[..., None]) -> Callable[..., None]:
    """The operator's implementation: `ring_kernel`, or the plain copy where a mirror is given."""

    def run(
        cursor: Tensor,
        slots: Tensor,
        control: Tensor,
        columns: Sequence[Tensor],
        offsets: Sequence[int],
        graph: int,
        mirror: Tensor | None = None,
        slot: int = 0,
    ) -> None:
        if mirror is None:
            ring_kernel(cursor, slots, control, columns, offsets, graph)
        else:
            stage_copy(cursor, slots, control, columns, offsets, graph, mirror, slot)

    return run


def _no_fake(*args: object, **kwargs: object) -> None:
    pass


def _mark(value: Tensor, spans: Tensor, key: str, name: str) -> None:
    pass


def _mark_value(value: Tensor, key: str, name: str) -> None:
    pass


def _define(
    library: torch.library.Library, schema: str, fake: Callable[..., None], **kernels: Callable[..., None]
) -> None:
    name = schema.partition("(")[0]
    library.define(schema)
    for key, kernel in kernels.items():
        library.impl(name, kernel, key)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    # Without outputs, dead-code elimination would drop it. Dynamo's graphs hold the packet, exported ones the overload.
    # torch recommends effect tokens here; they would wrap each mark in a `with_effects` node once decomposed.
    packet = getattr(getattr(torch.ops, _NAMESPACE), name)
    has_side_effect(packet)
    has_side_effect(packet.default)


# A second import (a reload, another name for this folder) finds the operators defined and leaves them alone. The
# library lives as long as its kernels, whose globals hold it.
if not hasattr(getattr(torch.ops, _NAMESPACE), "stage"):
    _library = torch.library.Library(_NAMESPACE, "DEF")
    _define(_library, _STAGE, _no_fake, CPU=_stage_by(stage_ref), CUDA=_stage_by(stage))
    _define(_library, _COMPACT, _no_fake, CPU=compact_ref, CUDA=compact)
    _define(_library, _MARK, _mark, CPU=_mark, CUDA=_mark)
    _define(_library, _MARK_VALUE, _mark_value, CPU=_mark_value, CUDA=_mark_value)
