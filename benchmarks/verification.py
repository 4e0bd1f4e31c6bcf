"""How long the passes and the verification of a graph take, per node: 1k, 10k and 50k nodes.

    python benchmarks/verification.py [--rounds 3]

The graph is a chain of residual blocks (convolution, norm, attention-like product, views, an in-place write) from a
padded input to a marked value. `prepare_graph` does everything but the staging node, leaks included. CPU time is
printed, as all is done in one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from spangraph import Span
from spangraph.passes.leaks import Source, find_leaks
from spangraph.passes.marks import MarkInfo
from spangraph.passes.prepare import prepare_graph

aten = torch.ops.aten
ROWS, CHANNELS, WIDTH = 4, 8, 64


def build(num_nodes: int) -> tuple[fx.GraphModule, fx.Node]:
    """A flat graph of about that many nodes, with example values, and its padded input."""
    mode = FakeTensorMode()
    root = nn.Module()
    root.register_buffer("weight", torch.randn(CHANNELS, CHANNELS, 3))
    root.register_buffer("square", torch.randn(CHANNELS, CHANNELS))
    graph = fx.Graph(root)
    with mode:
        examples = torch.empty(ROWS, CHANNELS, WIDTH), torch.empty(ROWS, dtype=torch.int64)
        weights = {"weight": torch.empty(CHANNELS, CHANNELS, 3), "square": torch.empty(CHANNELS, CHANNELS)}
    x, lengths = graph.placeholder("x"), graph.placeholder("lengths")
    x.meta["val"], lengths.meta["val"] = examples
    attrs = {}
    for name, value in weights.items():
        attrs[name] = graph.get_attr(name)
        attrs[name].meta["val"] = value

    def call(op: torch._ops.OpOverload, *args: object) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta["stack_trace"] = '  File "model.py", line 7, in forward\n'
        with mode:
            node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    value = x
    while len(graph.nodes) < num_nodes - 4:
        y = call(aten.conv1d.default, value, attrs["weight"], None, [1], [1])
        y = call(aten.gelu.default, y)
        y = call(aten.transpose.int, y, 1, 2)
        y = call(aten.layer_norm.default, y, [CHANNELS])
        y = call(aten.linear.default, y, attrs["square"])
        y = call(aten.view.default, y, [ROWS, WIDTH, 2, CHANNELS // 2])
        y = call(aten.flatten.using_ints, y, 2)
        y = call(aten.transpose.int, y, 1, 2)
        level = call(aten.amax.default, y, [-1], True)
        y = call(aten.div.Tensor, y, level)
        y = call(aten.mul_.Tensor, y, 2.0)
        value = call(aten.add.Tensor, value, y)
    spans = call(aten.stack.default, [call(aten.zeros_like.default, lengths), lengths], -1)
    call(torch.ops.spangraph.mark.default, value, spans, "", "audio")
    graph.output((value,))
    return fx.GraphModule(root, graph), x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    infos = {("", "audio"): MarkInfo("", "", "audio", Span(), "model.py:1")}
    print("nodes    find_leaks (us/node)    all passes (us/node)    all passes (s)")
    for num_nodes in (1_000, 10_000, 50_000):
        leaks, passes = [], []
        for _ in range(rounds):
            gm, x = build(num_nodes)
            source = Source(x, "x", (-1,), "right")
            start = time.process_time()
            found, _ = find_leaks(gm.graph, [source])
            leaks.append(time.process_time() - start)
            assert len(found) > num_nodes // 10
            start = time.process_time()
            prepare_graph(gm, infos, ["audio"], sources=[source], padding="right")
            passes.append(time.process_time() - start)
        one, other = statistics.median(leaks), statistics.median(passes)
        print(f"{num_nodes:>6}{one / num_nodes * 1e6:>20.1f}{other / num_nodes * 1e6:>24.1f}{other:>18.2f}")


if __name__ == "__main__":
    main()
