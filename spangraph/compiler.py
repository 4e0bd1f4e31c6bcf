"""Compile a graph up to its tail with a backend of `torch.compile`, by its name.

The staging node stays outside: functionalisation would clone the ring that it writes. A capture records both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from spangraph.errors import InputError, TraceError
from spangraph.host_state import storage_key
from spangraph.passes.nodes import last_writes, placeholders, result_nodes
from spangraph.passes.prepare import Prepared
from spangraph.trace import Trace


def check_compiler(name: str) -> None:
    """Refuse what cannot compile graphs that are captured.

    Raises:
        InputError: for a name that `torch.compile` does not know, or a backend that captures CUDA graphs itself.
    """
    import torch._dynamo

    if name not in torch._dynamo.list_backends(exclude_tags=()):
        raise InputError(
            f"backend {name!r} is neither a device (cpu, cuda) nor a backend of torch.compile"
            f" ({', '.join(torch._dynamo.list_backends())})."
        )
    reason = ""
    if name == "cudagraphs" or "cudagraphs" in getattr(torch._dynamo.lookup_backend(name), "_tags", ()):
        reason = "it captures CUDA graphs itself"
    elif name == "inductor":
        import torch._inductor.config

        if torch._inductor.config.triton.cudagraphs:
            reason = "it captures CUDA graphs itself while torch._inductor.config.triton.cudagraphs is on"
    if reason:
        raise InputError(
            f"backend {name!r}: {reason}, and would leave the staging node outside of them; the graph is captured as a"
            " whole here."
        )


class _Body(nn.Module):
    """A compiled graph.

    Results in memory of an argument are cloned: a compiler may drop a clone of a buffer that it writes, and return the
    buffer.
    """

    def __init__(self, compiled: Callable[..., Sequence[Tensor]]) -> None:
        super().__init__()
        self._compiled = compiled
        self._shared: set[int] | None = None

    def forward(self, *tensors: Tensor) -> Sequence[Tensor]:
        results = self._compiled(*tensors)
        if self._shared is None:  # it is the same at each call
            memory = set(map(storage_key, tensors))
            self._shared = {i for i, result in enumerate(results) if storage_key(result) in memory}
        if not self._shared:
            return results
        return [result.clone() if i in self._shared else result for i, result in enumerate(results)]


def compile_graph(prepared: Prepared, trace: Trace, inputs: Sequence[Tensor], name: str) -> Prepared:
    """Compile all of a prepared graph; the one that is returned calls what was compiled.

        a = relu(x); y = mul(a, w)               body = compiled(w, x)
        s = mul(n, 2)                            y = body[0]; s = body[1]
        return (y,)                              return (y,)

    Args:
        trace: the graph's, whose `compiler` and `written` are set.
        inputs: examples.

    Raises:
        TraceError: if the compiler fails.
        InputError: if it captures CUDA graphs itself by now.
    """
    check_compiler(name)
    gm = prepared.gm
    results = result_nodes(gm.graph)
    needed = dict.fromkeys([*results, *(node for mark in prepared.marks for node in (mark.value, mark.spans) if node)])
    tensors, body = _split_off(gm, list(needed))
    trace.compiler, trace.written = name, _written_tensors(gm)
    with torch.inference_mode(False), torch.no_grad():
        examples = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]  # dense, and never one tensor twice
    try:
        with trace.context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compilers warn of their own internals
            compiled: Any = torch._dynamo.lookup_backend(name)(body, [*tensors.values(), *examples])
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise TraceError(f"torch.compile's backend {name!r} failed: {type(error).__name__}: {first}") from error

    graph = fx.Graph()
    nodes = {node: graph.placeholder(node.name) for node in placeholders(gm.graph)}
    held = [graph.get_attr(target) for target in tensors]
    holder = nn.Module()
    for i, (node, tensor) in enumerate(zip(held, tensors.values(), strict=True)):
        node.target = f"tensor_{i}"
        setattr(holder, str(node.target), tensor)
    holder.add_module("body", _Body(compiled))
    call = graph.call_module("body", (*held, *nodes.values()))
    for i, node in enumerate(needed):
        nodes[node] = graph.call_function(_getitem, (call, i))
    for old, new in nodes.items():
        new.meta.update(val=old.meta.get("val"), stack_trace=old.meta.get("stack_trace"))
    graph.output(tuple(nodes[node] for node in results))
    marks = [
        replace(mark, value=nodes[mark.value], spans=None if mark.spans is None else nodes[mark.spans])
        for mark in prepared.marks
    ]
    return replace(prepared, gm=fx.GraphModule(holder, graph), marks=marks, results=result_nodes(graph))


def _getitem(tensors: Sequence[Tensor], index: int) -> Tensor:
    return tensors[index]


def _split_off(gm: fx.GraphModule, needed: list[fx.Node]) -> tuple[dict[str, Tensor], fx.GraphModule]:
    """The graph as a function of the model's tensors, each once, and the inputs; and these tensors."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    known: dict[int, fx.Node] = {}
    tensors: dict[str, Tensor] = {}
    for node in gm.graph.nodes:
        value = attrgetter(str(node.target))(gm) if node.op == "get_attr" else None
        if isinstance(value, Tensor):
            if id(value) not in known:
                known[id(value)] = graph.placeholder(f"tensor_{len(known)}")
                tensors[str(node.target)] = value
            copies[node] = known[id(value)]
    for node in placeholders(gm.graph):
        copies[node] = graph.placeholder(node.name)
    graph.graph_copy(gm.graph, copies)
    graph.output(tuple(copies[node] for node in needed))
    for node in graph.nodes:
        node.meta.pop("val", None)  # of the trace's fake mode; the compiler has one of its own
    return tensors, fx.GraphModule(gm, graph)


def _written_tensors(gm: fx.GraphModule) -> list[Tensor]:
    """Tensors of the model that the graph writes."""
    return [attrgetter(str(node.target))(gm) for node in last_writes(gm.graph) if node.op == "get_attr"]
