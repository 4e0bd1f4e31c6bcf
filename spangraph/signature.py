"""What one input signature needs at a launch: its trace, its graphs with their tails, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, is_grad_enabled, is_inference_mode_enabled
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled

from spangraph.backends import Backend, Event, Graph
from spangraph.counts import Counts
from spangraph.cuts import Cut
from spangraph.errors import TraceError
from spangraph.opaque import OpaqueRoot
from spangraph.passes.prepare import Prepared
from spangraph.step import Results
from spangraph.tail import Tail
from spangraph.trace import Trace
from spangraph.weights import Weights


@dataclass(eq=False)
class Instance:
    """One graph of a signature, with inputs of its own on a captured backend.

    Attributes:
        forward: runs the graph, on the calling thread or to be captured.
    """

    gm: fx.GraphModule
    tail: Tail
    forward: MethodType
    inputs: list[Tensor] = field(default_factory=list)
    graph: Graph | None = None
    uploads: list[tuple[list[Tensor], Event]] = field(default_factory=list)


@dataclass(eq=False)
class Signature:
    """Everything that one input signature needs.

    Attributes:
        counts: what its launches count in.
        batch: rows of its bucket; None where those are not bucketed.
        cuts: the model's outputs that are cut, by their index.
        results: make a step's result in the model's own output structure, with its rows and with owned rows.
        place: where it is kept.
        num_elements, shapes: of its inputs.
        strides: of its inputs, on which a graph relies; empty where the model itself runs.
        pad_values: what the padding of each input holds; empty where nothing is padded.
        miss: why its launches are misses; empty for a graph.
        weights: checks at every launch that the model is still the one that was traced, as far as that matters.
    """

    label: str
    trace: Trace
    prepared: Prepared
    counts: Counts
    batch: int | None = None
    cuts: dict[int, Cut] = field(default_factory=dict)
    instances: list[Instance] = field(default_factory=list)
    tails: list[Tail] = field(default_factory=list)
    weights: Weights | OpaqueRoot | None = None
    results: Results | None = None
    place: Any = None
    num_elements: int = 0
    shapes: Sequence[Sequence[int]] = ()
    strides: Sequence[Sequence[int]] = ()
    pad_values: Sequence[float | int | bool] = ()
    miss: str = ""


def restrided(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """The tensor, or a copy of it, with these strides."""
    if tensor.stride() == stride:
        return tensor
    with torch.no_grad():
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def run(trace: Trace, forward: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run the graph under the modes of its trace."""
    if (
        is_grad_enabled()
        or is_inference_mode_enabled() is not trace.inference
        or is_any_autocast_enabled()
        or trace.autocast[1]
    ):
        with trace.context():
            return forward(*leaves)
    return forward(*leaves)


@dataclass
class Runner:
    """Runs one instance's graph on its own inputs."""

    trace: Trace
    instance: Instance

    def __call__(self) -> Sequence[Tensor]:
        return run(self.trace, self.instance.forward, self.instance.inputs)


@dataclass
class Uncaptured:
    """Stands in for the graph of a forward that cannot be captured: a replay runs it, into static outputs."""

    backend: Backend
    run: Runner
    outputs: Sequence[Tensor]

    def replay(self) -> None:
        self.backend.enqueue(self._step)

    def _step(self) -> None:
        for static, fresh in zip(self.outputs, self.run(), strict=True):
            if static.shape != fresh.shape:
                raise TraceError(
                    f"an output has shape {list(fresh.shape)}, and had {list(static.shape)} at the trace: its shape"
                    " depends on values. Pad it, and declare its extent as a span."
                )
            static.copy_(fresh)
