"""Trace by running: the model is one leaf of the graph, and hooks collect values and spans."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import keystr

from spangraph.declare import Declaration
from spangraph.errors import StaleGraphError, TraceError
from spangraph.host_state import storage_key
from spangraph.marking import Marking, check_marked, marked_tensors
from spangraph.passes.host_reads import host_read_error
from spangraph.passes.marks import MarkInfo
from spangraph.structure import CallSpec, Constant, flatten_output
from spangraph.trace import Trace, run_mode, trace_of
from spangraph.watch import settle

aten = torch.ops.aten


@dataclass(frozen=True)
class _Tie:
    """A leaf that is another one, a spanned value: the same elements, with its dims in another order.

    Attributes:
        value: index of the value among the leaves.
        dims, shape: the value's dims in the leaf's order, those of size 1 last, and the leaf's shape.
    """

    value: int
    dims: tuple[int, ...]
    shape: torch.Size


class OpaqueRoot(nn.Module):
    """The whole model as one leaf: flat tensors in; outputs, then values and spans of every mark, out.

    Attributes:
        notes: of the first run: marks, template, paths and structure of the output.
        ties: leaves that are spanned values, by index; so they must be at every run.
        owned: the model's memory. A leaf in it, or in an input's, is cloned, as the next run may write it.
        cloned: leaves that the first run did not make, which are cloned too.
    """

    def __init__(self, model: nn.Module, call: CallSpec, declarations: Sequence[Declaration]) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._declarations = declarations
        self._expected: Any = None
        self.ties: dict[int, _Tie] = {}
        self.owned: Collection[int] = ()
        self.cloned: Collection[int] = ()

    def are_suspect(self) -> bool:
        """Whether there is something to `check`; there are few modules to look at."""
        return True

    def check(self) -> None:
        """Notice that a submodule which declares spans was replaced: the model runs itself, but the hooks go elsewhere.

        Raises:
            StaleGraphError: naming it.
        """
        for declaration in self._declarations:
            try:
                now = self.model.get_submodule(declaration.fqn)
            except AttributeError:
                now = None
            if now is not declaration.module:
                raise StaleGraphError(
                    f"submodule {declaration.fqn}, which declares spans, was replaced after the trace. Compile with"
                    " on_stale='recapture', or compile again."
                )

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the model.

        Raises:
            TraceError: if the outputs' structure, the marks, or which outputs are marked values are not as at the first
                run.
        """
        args, kwargs = self._call.build(tensors)
        with Marking(self._declarations, emit=False).hooked() as marking:
            out = self.model(*args, **kwargs)
        leaves, template, paths, spec = flatten_output(out)
        check_marked(out, marking)
        marked = [(tensor.shape, tensor.dtype) for tensor in marked_tensors(marking)]
        found = {"structure": spec, "spans": list(marking.infos), "spanned shapes": marked, "constants": template}
        num_outputs, values = len(leaves), []
        for value, spans in marking.values.values():
            if spans is not None:
                values.append(len(leaves))
            leaves += [value] if spans is None else [value, spans]
        if self._expected is None:
            self._expected = found
            self.notes = (marking.infos, template, paths, spec)
            self.ties = _find_ties(leaves, num_outputs, values)
            return leaves
        if changed := [what for what, value in found.items() if value != self._expected[what]]:
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
        self._check_ties(leaves)
        return self._cloned(tensors, leaves)

    def _check_ties(self, leaves: Sequence[Tensor]) -> None:
        if not (loose := [i for i, tie in self.ties.items() if _tie(leaves, i, tie.value) != tie]):
            return
        infos, template, paths, _ = self.notes
        leaf_paths = zip(paths, template, strict=True)
        labels = [f"output{keystr(path)}" for path, leaf in leaf_paths if not isinstance(leaf, Constant)]
        for info in infos.values():
            name = f"the spanned {info.name!r} of {info.fqn or 'the root module'}"
            labels += [name] if info.span is None else [name, f"the spans of {info.name!r}"]
        pairs = " and ".join(f"{labels[i]} was {labels[self.ties[i].value]}" for i in loose)
        raise TraceError(
            f"{pairs} itself at the first run, by whose spans it is cut, and is another tensor now. One signature"
            " must always return the same: return a clone() where it is the same tensor, or declare both."
        )

    def _cloned(self, tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        external = {storage_key(tensor) for tensor in tensors}
        clones: dict[int, Tensor] = {}
        for i, leaf in enumerate(leaves):
            key = storage_key(leaf)
            if id(leaf) not in clones and (i in self.cloned or key in self.owned or key in external):
                clones[id(leaf)] = leaf.clone()
        return [clones.get(id(leaf), leaf) for leaf in leaves]


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
    with run_mode(inference):
        tensors = _apart(model, tensors)
    leaves, watch, rebinds = settle(model, root, tensors, generators)
    if watch.reads and verify != "off":
        error = host_read_error(watch.reads)
        if verify == "error":
            raise error
        warnings.warn(f"running uncaptured: {error}", stacklevel=2)
    infos, template, paths, spec = root.notes
    num_outputs = sum(not isinstance(leaf, Constant) for leaf in template)
    root.owned = watch.owned - {storage_key(tensor) for tensor in tensors}
    root.cloned = {i for i, leaf in enumerate(leaves) if storage_key(leaf) in watch.external | watch.owned}
    gm = _opaque_graph(root, tensors, leaves, infos, num_outputs=num_outputs)
    trace = trace_of(gm, infos, template, paths, spec, "opaque", inference)
    trace.captures, trace.rebinds = not watch.reads, rebinds
    trace.writes_inputs = [i for i, tensor in enumerate(tensors) if storage_key(tensor) in watch.written]
    trace.diagnostics.extend(watch.reads)
    return trace


def _apart(model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same inputs in memory of their own: that two are one tensor at the trace says nothing of later launches."""
    seen = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    apart = []
    for tensor in tensors:
        apart.append(tensor.clone() if storage_key(tensor) in seen else tensor)
        seen.add(storage_key(tensor))
    return apart


def _opaque_graph(
    root: OpaqueRoot,
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    infos: dict[tuple[str, str], MarkInfo],
    *,
    num_outputs: int,
) -> fx.GraphModule:
    """A graph in which every leaf is a node of its own, but for those that are tied to a spanned value."""
    holder = nn.Module()
    holder.add_module("root", root)
    graph = fx.Graph(holder)  # type: ignore[arg-type]  # any module will do
    placeholders = []
    for i, tensor in enumerate(inputs):
        placeholders.append(graph.placeholder(f"x{i}"))
        placeholders[-1].meta["val"] = _example(tensor)
    call = graph.call_module("root", tuple(placeholders))

    @functools.cache
    def node(index: int) -> fx.Node:
        if (tie := root.ties.get(index)) is not None:
            return _ordered(graph, node(tie.value), tie)
        item = graph.call_function(_getitem, (call, index))
        item.meta["val"] = _example(leaves[index])
        return item

    index = num_outputs
    for (key, name), info in infos.items():
        if info.span is None:
            graph.call_function(torch.ops.spangraph.mark_value.default, (node(index), key, name))
        else:
            graph.call_function(torch.ops.spangraph.mark.default, (node(index), node(index + 1), key, name))
        index += 1 if info.span is None else 2
    graph.output(tuple(map(node, range(num_outputs))))
    return fx.GraphModule(holder, graph)


def _getitem(leaves: Sequence[Tensor], index: int) -> Tensor:
    return leaves[index]


def _example(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _find_ties(leaves: Sequence[Tensor], num_outputs: int, values: Sequence[int]) -> dict[int, _Tie]:
    """Outputs that are spanned values, and values that an earlier mark has, too."""
    ties = {}
    for i in (*range(num_outputs), *values):
        same = [v for v in values if leaves[v] is leaves[i]][:1] or (values if i < num_outputs else [])
        if found := [tie for v in same if v != i and (tie := _tie(leaves, i, v)) is not None]:
            ties[i] = found[0]
    return ties


def _tie(leaves: Sequence[Tensor], index: int, of: int) -> _Tie | None:
    """How a leaf has just the elements of a value, in another order of dims; None if it does not."""
    leaf, value = leaves[index], leaves[of]
    if leaf is not value and (
        leaf.dtype is not value.dtype
        or storage_key(leaf) != storage_key(value)
        or leaf.data_ptr() != value.data_ptr()
        or (leaf.is_conj(), leaf.is_neg()) != (value.is_conj(), value.is_neg())
    ):
        return None
    if leaf.shape == value.shape and leaf.stride() == value.stride():
        return _Tie(of, tuple(range(value.ndim)), leaf.shape)
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
    return _Tie(of, (0, *order, *ones), leaf.shape)


def _ordered(graph: fx.Graph, value: fx.Node, tie: _Tie) -> fx.Node:
    example = value.meta["val"]
    if tie.dims == tuple(range(example.ndim)) and tie.shape == example.shape:
        return value
    permuted = graph.call_function(aten.permute.default, (value, list(tie.dims)))
    permuted.meta["val"] = example.permute(tie.dims)
    view = graph.call_function(aten.view.default, (permuted, list(tie.shape)))
    view.meta["val"] = permuted.meta["val"].view(tie.shape)
    return view
