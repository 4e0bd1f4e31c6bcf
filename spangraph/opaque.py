"""Trace by running: the model is one leaf of the graph, and hooks collect values and spans."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from spangraph.declare import Declaration
from spangraph.errors import TraceError
from spangraph.host_state import storage_key
from spangraph.marking import Marking, check_marked, marked_tensors
from spangraph.passes.host_reads import host_read_error
from spangraph.passes.marks import MarkInfo
from spangraph.structure import CallSpec, Constant, flatten_output
from spangraph.trace import Trace, trace_of
from spangraph.watch import settle

aten = torch.ops.aten


class OpaqueRoot(nn.Module):
    """The whole model as one leaf: flat tensors in; outputs, then values and spans of every mark, out."""

    def __init__(self, model: nn.Module, call: CallSpec, declarations: Sequence[Declaration]) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._declarations = declarations
        self._expected: Any = None

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the model.

        Raises:
            TraceError: if the outputs' structure or the marks are not those of the first run.
        """
        args, kwargs = self._call.build(tensors)
        with Marking(self._declarations, emit=False).hooked() as marking:
            out = self.model(*args, **kwargs)
        leaves, template, paths, spec = flatten_output(out)
        check_marked(out, marking)
        marked = [(tensor.shape, tensor.dtype) for tensor in marked_tensors(marking)]
        found = {"structure": spec, "spans": list(marking.infos), "spanned shapes": marked, "constants": template}
        if self._expected is None:
            self._expected = found
            self.notes = (marking.infos, template, paths, spec)
        elif changed := [what for what, value in found.items() if value != self._expected[what]]:
            what = changed[0]
            advice = (
                "One signature must always return the same outputs and spans; use another walk or a constant argument."
            )
            if what == "spanned shapes":
                advice = "A shape depends on values: pad it to one that inputs have, and declare its extent as a span."
            raise TraceError(
                f"the model's output has other {what} than at its first run: {found[what]}, not"
                f" {self._expected[what]}. {advice}"
            )
        for value, spans in marking.values.values():
            leaves.append(value)
            if spans is not None:
                leaves.append(spans)
        return leaves


def trace_opaquely(
    model: nn.Module,
    call: CallSpec,
    tensors: Sequence[Tensor],
    declarations: Sequence[Declaration],
    *,
    inference: bool,
    verify: str,
    generators: Sequence[torch.Generator] = (),
) -> Trace:
    """Trace by running the model once; the run leaves no trace in buffers, other state and generators.

    Raises:
        HostReadError: if the forward reads device values on the host and `verify` is "error".
        DeclarationError, or whatever the forward raises.
    """
    root = OpaqueRoot(model, call, declarations)
    leaves, watch, rebinds = settle(model, root, tensors, generators)
    if watch.reads and verify != "off":
        error = host_read_error(watch.reads)
        if verify == "error":
            raise error
        warnings.warn(f"running uncaptured: {error}", stacklevel=2)
    infos, template, paths, spec = root.notes
    num_outputs = sum(not isinstance(leaf, Constant) for leaf in template)
    gm = _opaque_graph(root, tensors, leaves, infos, watch.external | watch.owned, num_outputs=num_outputs)
    trace = trace_of(gm, infos, template, paths, spec, "opaque", inference)
    trace.captures, trace.rebinds = not watch.reads, rebinds
    trace.writes_inputs = [i for i, tensor in enumerate(tensors) if storage_key(tensor) in watch.written]
    trace.diagnostics.extend(watch.reads)
    return trace


def _opaque_graph(
    root: OpaqueRoot,
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    infos: dict[tuple[str, str], MarkInfo],
    external: set[int],
    *,
    num_outputs: int,
) -> fx.GraphModule:
    holder = nn.Module()
    holder.add_module("root", root)
    graph = fx.Graph(holder)  # type: ignore[arg-type]  # any module will do
    placeholders = []
    for i, tensor in enumerate(inputs):
        placeholders.append(graph.placeholder(f"x{i}"))
        placeholders[-1].meta["val"] = _example(tensor)
    call = graph.call_module("root", tuple(placeholders))
    nodes: list[fx.Node] = []
    known = {id(tensor): node for tensor, node in zip(inputs, placeholders, strict=True)}
    for i, leaf in enumerate(leaves):
        if id(leaf) not in known:
            known[id(leaf)] = graph.call_function(_getitem, (call, i))
            known[id(leaf)].meta["val"] = _example(leaf)
        nodes.append(known[id(leaf)])
    _clone_external(graph, external | {storage_key(tensor) for tensor in inputs}, leaves, nodes)
    outputs = list(nodes[:num_outputs])
    marked = iter(zip(leaves[num_outputs:], nodes[num_outputs:], strict=True))
    for (key, name), info in infos.items():
        value, node = next(marked)
        if info.span is None:
            graph.call_function(torch.ops.spangraph.mark_value.default, (node, key, name))
            continue
        _, spans = next(marked)
        graph.call_function(torch.ops.spangraph.mark.default, (node, spans, key, name))
        for i, leaf in enumerate(leaves[:num_outputs]):
            if leaf is not value and (view := _as_view_of(graph, leaf, value, node)) is not None:
                outputs[i] = view
    graph.output(tuple(outputs))
    return fx.GraphModule(holder, graph)


def _getitem(leaves: Sequence[Tensor], index: int) -> Tensor:
    return leaves[index]


def _example(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _clone_external(graph: fx.Graph, external: set[int], leaves: Sequence[Tensor], nodes: list[fx.Node]) -> None:
    """Clone outputs in memory that the forward did not make (inputs, weights, caches): the next step may write it."""
    clones: dict[fx.Node, fx.Node] = {}
    for i, leaf in enumerate(leaves):
        if storage_key(leaf) in external:
            node = nodes[i]
            if node not in clones:
                clones[node] = graph.call_function(aten.clone.default, (node,))
                clones[node].meta["val"] = _example(leaf)
            nodes[i] = clones[node]


def _as_view_of(graph: fx.Graph, leaf: Tensor, value: Tensor, node: fx.Node) -> fx.Node | None:
    """`leaf` as a view of `value`, where both are the same elements in another order of dims; else None."""
    if leaf.dtype is not value.dtype or leaf.data_ptr() != value.data_ptr() or storage_key(leaf) != storage_key(value):
        return None
    if leaf.ndim == 0 or leaf.shape[0] != value.shape[0] or leaf.numel() != value.numel():
        return None
    free = [d for d in range(1, value.ndim) if value.shape[d] != 1]
    order = []
    for d in range(1, leaf.ndim):
        if leaf.shape[d] == 1:
            continue
        match = [v for v in free if value.shape[v] == leaf.shape[d] and value.stride(v) == leaf.stride(d)]
        if not match:
            return None
        order.append(match[0])
        free.remove(match[0])
    if free:
        return None
    ones = [d for d in range(1, value.ndim) if value.shape[d] == 1]
    view = graph.call_function(aten.permute.default, (node, [0, *order, *ones]))
    view.meta["val"] = node.meta["val"].permute(0, *order, *ones)
    shown = view.meta["val"].view(leaf.shape)
    view = graph.call_function(aten.view.default, (view, list(leaf.shape)))
    view.meta["val"] = shown
    return view
