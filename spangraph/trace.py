"""A traced model: a flat fx graph with marks, and what it takes to rebuild calls and outputs around it.

The graph's inputs are the tensor leaves of `(args, kwargs)` in order, its output is a flat tuple of tensors, and
everything else in the output is a constant of the trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from spangraph.diagnostics import Diagnostic
from spangraph.errors import TraceError
from spangraph.passes.marks import MarkInfo
from spangraph.structure import Constant, Leaf, leaf_name, structure_maker


class Guard(Protocol):
    """What a trace holds for, beyond its signature."""

    def holds(self) -> bool:
        """Whether all is as it was at the trace."""
        ...

    def failure(self) -> str:
        """What is not."""
        ...


@dataclass
class Trace:
    """A traced model.

    Attributes:
        gm: the flat graph, with marks.
        infos: what each mark and row value means, by key and name.
        out_spec, out_leaves: the model's output structure: for each leaf an index into the graph's outputs, or a
            constant wrapped in `Constant`.
        leaf_names: last path key of each graph output, for telling names on one tensor apart.
        tracer: `"export"`, `"dynamo"` or `"opaque"`.
        reason: why the trace is opaque, if export was tried.
        inference: whether the graph must run in inference mode, as some of its weights were made in it.
        autocast: device type, whether autocast was on at the trace, and its dtype.
        rebinds: what an opaque forward changes on the host at every call: attributes, rebound buffers, random states.
        writes_inputs: inputs that the forward writes, by index.
        literals: 0-d integer buffers that the graph holds as numbers.
        paths: key path of each output leaf.
        guard: for a trace by dynamo: when the model must be traced again.
        captures: whether the graph may be captured (false for forwards with host reads under `verify="warn"`, and for
            what a backend cannot record).
        compiler: the `torch.compile` backend that has compiled the graph up to its tail.
        written: tensors of the model that the compiled code writes, which no dispatch mode sees.
        diagnostics: what was found on the way.
    """

    gm: fx.GraphModule
    infos: dict[tuple[str, str], MarkInfo]
    out_spec: pytree.TreeSpec
    out_leaves: list[Any]
    leaf_names: list[str]
    tracer: str
    reason: str = ""
    inference: bool = False
    autocast: tuple[str, bool, torch.dtype] = ("cpu", False, torch.bfloat16)
    captures: bool = True
    rebinds: Sequence[str] = ()
    writes_inputs: Sequence[int] = ()
    literals: Sequence[tuple[dict[str, Tensor | None], str, int]] = ()
    paths: Sequence[Any] = ()
    guard: Guard | None = None
    compiler: str = ""
    written: Sequence[Tensor] = ()
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def holds(self) -> bool:
        """Whether the graph is still the model's, as far as that can change without a trace."""
        return self.guard is None or self.guard.holds()

    def failure(self) -> str:
        """Why it does not hold."""
        return "" if self.guard is None else self.guard.failure()

    def result_maker(self, leaves: Sequence[Leaf]) -> Callable[[Any, Any], Any]:
        """A function of a step and its launch that builds the model's output structure with these leaves."""
        # A Hugging Face ModelOutput of one field iterates over that field when it is built, and takes pairs for items:
        # it gets its leaves afterwards.
        late = self._model_output_leaves()
        early = list(leaves)
        for i in late:
            early[i] = (lambda step, launch, what: what, torch.empty(0, device="cpu"))
        make_early = structure_maker(self.out_spec, early)
        if not late:
            return make_early

        def make_result(step: Any, launch: Any) -> Any:
            out = make_early(step, launch)
            for i in late:
                parent = out
                for key in self.paths[i][:-1]:
                    parent = key.get(parent)
                make, what = leaves[i]
                parent[self.paths[i][-1].key] = make(step, launch, what)
            return out

        return make_result

    def _model_output_leaves(self) -> list[int]:
        out = pytree.tree_unflatten([torch.empty(0, device="cpu")] * len(self.out_leaves), self.out_spec)
        found: list[int] = []
        for i, path in enumerate(self.paths):
            parent = out
            for key in path[:-1]:
                parent = key.get(parent)
            if path and isinstance(parent, dict) and dataclasses.is_dataclass(parent):
                found.append(i)
        return found

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The grad mode and autocast that the graph was traced under, whatever the caller's are."""
        device_type, enabled, dtype = self.autocast
        with run_mode(self.inference):
            if torch.is_autocast_enabled(device_type) == enabled and not enabled:
                yield
            else:
                with torch.autocast(device_type, dtype=dtype, enabled=enabled):
                    yield


@contextlib.contextmanager
def run_mode(inference: bool) -> Iterator[None]:
    """Inference mode, or plain no-grad mode even inside the caller's inference mode."""
    if inference:
        with torch.inference_mode():
            yield
    else:
        with torch.inference_mode(False), torch.no_grad():
            yield


class HostStateError(TraceError):
    """A forward changes what no graph sees."""


def trace_of(
    gm: fx.GraphModule,
    infos: dict[tuple[str, str], MarkInfo],
    template: list[Any],
    paths: list[Any],
    spec: pytree.TreeSpec,
    tracer: str,
    inference: bool,
) -> Trace:
    names = [leaf_name(path) for path, leaf in zip(paths, template, strict=True) if not isinstance(leaf, Constant)]
    return Trace(gm, infos, spec, template, names, tracer, inference=inference, paths=paths)
