"""Host reads in a graph: erase those that only feed assertions, refuse the others.

A host read (`.item()`, `x[mask]`, `nonzero`, ...) makes the launch thread wait for the device and cannot be captured.
Reads of constant 0-d buffers are gone before this pass: the tracer gives them literal values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from spangraph.diagnostics import Diagnostic
from spangraph.errors import HostReadError
from spangraph.passes.nodes import nested_graphs, val, where, written

aten = torch.ops.aten

_ASSERTIONS = {
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
# Operators that read device values on the host whatever their arguments: the result is a number, or its shape depends
# on values. istft checks its window on the host.
_READS = {
    "aten::item": "a tensor's value (.item(), int(), float(), if tensor)",
    "aten::_local_scalar_dense": "a tensor's value (.item(), int(), float(), if tensor)",
    "aten::is_nonzero": "a tensor's truth value (if tensor, bool(tensor))",
    "aten::equal": "whether two tensors are equal (torch.equal)",
    "aten::allclose": "whether two tensors are close (torch.allclose)",
    "aten::nonzero": "how many values are non-zero (nonzero, where with one argument)",
    "aten::nonzero_numpy": "how many values are non-zero (nonzero)",
    "aten::argwhere": "how many values are non-zero (argwhere)",
    "aten::masked_select": "how many values a mask selects (masked_select)",
    "aten::_unique": "how many values are unique (unique)",
    "aten::_unique2": "how many values are unique (unique)",
    "aten::unique_dim": "how many values are unique (unique)",
    "aten::unique_consecutive": "how many values are unique (unique_consecutive)",
    "aten::unique_dim_consecutive": "how many values are unique (unique_consecutive)",
    "aten::bincount": "the largest value (bincount)",
    "aten::istft": "whether its window overlaps enough (istft)",
    **dict.fromkeys(
        [f"aten::linalg_{name}" for name in ("inv", "cholesky", "solve", "eig", "eigh", "lstsq", "lu_factor", "svd")]
        + ["aten::inverse", "aten::cholesky", "aten::_linalg_check_errors", "aten::_linalg_svd", "aten::_linalg_eigh"]
        + ["aten::linalg_pinv"],
        "whether a matrix could be decomposed (linalg)",
    ),
}
_FIX = (
    "keep the value on the device: declare the extent as a span and cut after the step, use torch.where or masked_fill"
    " for masks."
)


def read_by(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """What an operator call reads on the host, or None. `args` hold tensors or example values."""
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in ("cond", "while_loop"):
        return "which branch to take (torch.cond, while_loop)"
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name
    if name in _READS:
        return _READS[name]
    # repeat_interleave(repeats) sums the repeats on the host unless told the size.
    if name == "aten::repeat_interleave":
        positional = {"Tensor": 1, "self_Tensor": 3}.get(target._overloadname)
        size = kwargs.get(
            "output_size", args[positional] if positional is not None and len(args) > positional else None
        )
        return "the sum of repeats (repeat_interleave without output_size)" if positional and size is None else None
    if name == "aten::tensor_split" and isinstance(args[1], Tensor):
        return "where to split (tensor_split at a tensor of indices)"
    if name == "aten::where" and len(args) == 1 and not kwargs:
        return "how many values are non-zero (where with one argument)"
    if name in ("aten::linspace", "aten::logspace") and any(isinstance(bound, Tensor) for bound in args[:2]):
        return "the bounds of a range (linspace, logspace)"
    if name == "aten::normal" and any(isinstance(std, Tensor) for std in args[1:2]):
        return "whether a standard deviation is negative (torch.normal)"
    if name == "aten::histc" and tuple(args[2:4]) in ((), (0, 0)):
        return "the smallest and largest value (histc without min and max)"
    if name in ("aten::to", "aten::_to_copy") and _leaves_device(args[0], *args[1:], kwargs.get("device")):
        return "a device tensor's values (.cpu(), .to('cpu'))"
    if name == "aten::copy_" and not (len(args) > 2 and args[2]) and _leaves_device(args[1], args[0]):
        return "a device tensor's values (copy_ to the CPU)"
    if name in ("aten::index", "aten::_unsafe_index") and any(_is_mask(index) for index in args[1]):
        return "how many values a mask selects (x[mask])"
    # x[mask] = scalar is a masked fill; x[mask] = tensor counts the mask.
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_") and any(_is_mask(i) for i in args[1]):
        values = args[2] if len(args) > 2 else kwargs.get("values")
        return None if _is_scalar(values) else "how many values a mask selects (x[mask] = y)"
    return None


def _leaves_device(source: Any, *targets: Any) -> bool:
    """Whether a device tensor is copied to the CPU; `targets` are devices, tensors, or something else."""
    if not isinstance(source, Tensor) or source.device.type == "cpu":
        return False
    devices = [target.device if isinstance(target, Tensor) else target for target in targets]
    return torch.device("cpu") in devices


def _is_scalar(values: Any) -> bool:
    # Not numel(): a size that is only known when it runs cannot be compared.
    return isinstance(values, Tensor) and all(isinstance(size, int) and size == 1 for size in values.shape)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def diagnose_read(what: str, place: str, node: str = "") -> Diagnostic:
    """The SG401 diagnostic of one host read."""
    return Diagnostic(
        "SG401", f"the forward reads {what} on the host, which stalls and breaks capture.", place, node, _FIX
    )


def erase_assertions(gm: fx.GraphModule) -> fx.GraphModule:
    """Erase assertions on host values, and the reads that feed nothing else.

    item = aten.item(x)                      (gone)
    ok = item >= 0                           (gone)
    aten._assert_scalar(ok, "message")       (gone)
    y = aten.relu(x)                         y = aten.relu(x)
    """
    erased = 0
    for module in nested_graphs(gm):
        asserts = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _ASSERTIONS]
        for node in asserts:
            module.graph.erase_node(node)
        erased += len(asserts)
    return erase_dead_nodes(gm) if erased else gm


def erase_dead_nodes(gm: fx.GraphModule) -> fx.GraphModule:
    """Erase what nothing uses and what does nothing, in nested graphs too.

    `Graph.eliminate_dead_code` takes a graph in the graph without used results for dead, with all the marks and writes
    in it, and whatever it is told it does so inside nested graphs.
    """
    for module in nested_graphs(gm):
        dead = 0
        for node in reversed(module.graph.nodes):
            if not node.users and not _is_impure(node):
                module.graph.erase_node(node)
                dead += 1
        if dead:
            module.graph.lint()
            if module is not gm:
                module.recompile()
    return gm


# Where functions on Python's numbers are.
_PURE = ("_operator", "builtins", "math", "torch")


def _is_impure(node: fx.Node) -> bool:
    """Whether a node must stay though nothing uses it: it writes, draws, marks, or is a graph that may do so."""
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        seeded = torch.Tag.nondeterministic_seeded in target.tags  # what is drawn later depends on it
        return bool(written(node)) or target.namespace == "spangraph" or not target._schema.returns or seeded
    # A graph in the graph may write anything; a Python number may not. `torch.vmap` begins and ends by functions.
    is_function = node.op == "call_function"
    return node.op == "call_module" or (is_function and getattr(target, "__module__", "") not in _PURE)


def find_host_reads(gm: fx.GraphModule) -> list[Diagnostic]:
    """Every host read that is left in the graph and its subgraphs."""
    found = []
    for module in nested_graphs(gm):
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: val(n))
            if what := read_by(node.target, args, kwargs):
                found.append(diagnose_read(what, where(node), node.name))
    return found


def refuse_host_reads(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the graph as it is, if it reads nothing on the host.

    Raises:
        HostReadError: naming every read with its file:line (SG401).
    """
    if reads := find_host_reads(gm):
        raise host_read_error(reads)
    return gm


def host_read_error(reads: list[Diagnostic]) -> HostReadError:
    """The error that names all of `reads`."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for read in reads:
        counts[read.where, read.message, "" if read.fix == _FIX else f" Fix: {read.fix}"] += read.count
    lines = [f"  {place or 'unknown line'}: {what} ({count}x){fix}" for (place, what, fix), count in counts.items()]
    fix = f"Fix: {_FIX} spangraph.compile(verify='warn') runs a model uncaptured, if no shape depends on what it reads."
    return HostReadError(
        "SG401 host reads in the forward:\n" + "\n".join([*lines, fix]),
        reads,
    )
