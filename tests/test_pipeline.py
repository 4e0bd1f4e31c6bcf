"""Pipelines: what is not whole is refused with its key path; pipelines derived from traced models."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import Edge, Node, Pipeline, PipelineError, SpannedOutput, from_lengths

TALKER = Node("talker", spanned=("codes",), outputs=("hidden",))
CODEC = Node("codec", spanned={"decode": ("audio",)})
SELF = Edge("talker.codes", "talker", loop_back=True)


def here() -> int:
    return sys._getframe(1).f_lineno


# ---- what is not whole -----------------------------------------------------------------------------------------------


def joined(source: str, target: str, times: int = 1, **options: Any) -> Callable[[], Pipeline]:
    return lambda: Pipeline([TALKER, CODEC], [Edge(source, target, **options)] * times, ("decode",))


@pytest.mark.parametrize(
    ("build", "key", "says"),
    [
        (lambda: Pipeline([]), "nodes", "at least one"),
        (joined("talker.codes", "codec", walks=()), "edges[0].walks", "leave it out for all walks"),
        (lambda: Pipeline([TALKER, TALKER]), "nodes.talker", "2 nodes have this name"),
        (joined("speaker.codes", "codec"), "edges[0].source", "names no node"),
        (joined("talker", "codec"), "edges[0].source", "names no node"),
        (joined("talker.code", "codec"), "edges[0].source", "has no output 'code'; it has ['codes', 'hidden']"),
        (joined("talker.codes", "codek"), "edges[0].target", "names no node"),
        (joined("talker.codes", "codec", walks=("deocde",)), "edges[0].walks", "unknown walks ['deocde']"),
        (joined("talker.codes", "codec", times=2), "edges[1]", "a second edge"),
        (lambda: Pipeline([TALKER, Node("c")], [SELF]), "nodes.c", "unreachable; no edge"),
        (lambda: Pipeline([CODEC]), "nodes.codec.spanned", "unknown walks ['decode']"),
        (lambda: Pipeline([TALKER], [Edge("talker.codes", "talker")]), "nodes.talker", "waits for itself"),
        (lambda: Pipeline([TALKER], speculation_depth=-1), "speculation_depth", "at least 0"),
        (lambda: Pipeline([TALKER], ring_depth=0), "ring_depth", "at least 1"),
        (lambda: Pipeline([TALKER], walks=()), "walks", "at least one"),
        (lambda: Pipeline([TALKER], walks=("a", "a")), "walks", "different names"),
        (lambda: Pipeline([Node("m", nn.Linear(1, 1), ("x",))]), "nodes.m.spanned", "leave one of the two out"),
    ],
)
def test_what_is_not_whole_is_named_with_its_key_path(build: Any, key: str, says: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(says)) as caught:
        build()
    assert re.search(rf"^  {re.escape(key)}: ", str(caught.value), re.MULTILINE), caught.value


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(PipelineError) as caught:
        Pipeline([TALKER, TALKER], [Edge("a.b", "c"), Edge("talker.nothing", "talker", loop_back=True)])
    assert str(caught.value).count("\n") == 4


def test_a_cycle_waits_for_itself_with_all_that_follows() -> None:
    nodes = [Node(name, outputs=("x",)) for name in "abcd"]
    with pytest.raises(PipelineError) as caught:
        Pipeline(nodes, [Edge("a.x", "b"), Edge("b.x", "c"), Edge("c.x", "b"), Edge("c.x", "d")])
    assert re.findall(r"nodes\.(\w): unreachable", str(caught.value)) == ["b", "c"]  # d waits for them only
    Pipeline(nodes, [Edge("a.x", "b"), Edge("b.x", "c"), Edge("c.x", "b", loop_back=True), Edge("c.x", "d")])


def test_walks_have_edges_of_their_own() -> None:
    pipeline = Pipeline(
        [TALKER, CODEC],
        [Edge("talker.codes", "codec", walks=("decode",)), Edge("talker.hidden", "codec", walks=("prefill",))],
        ("prefill", "decode"),
    )
    assert [found.message[:17] for found in pipeline.verify().errors] == ["on walk 'decode',"]
    assert not pipeline.verify("prefill").diagnostics
    with pytest.raises(PipelineError, match=r"walk 'encode' is not one of \['prefill', 'decode'\]"):
        pipeline.verify("encode")


def test_a_conflict_names_both_nodes_the_edge_the_walk_and_the_lines() -> None:
    talker, first = Node("talker", spanned=("codes",)), here()
    codec, second = Node("codec", worker="0"), here()
    edge, third = Edge("talker.codes", "codec"), here()
    (found,) = Pipeline([talker, codec], [edge]).verify().errors
    assert found.rule == "SG301"
    assert found.node == "talker.codes -> codec"
    assert found.where == f"{__file__}:{third}"
    assert found.related == (("node 'talker'", f"{__file__}:{first}"), ("node 'codec'", f"{__file__}:{second}"))
    ways_out = (
        "enable_async_scheduling = false or lockstep = true for 'talker' or 'codec'",
        "another worker",
        "takes_spans",
    )
    for way_out in (*ways_out, "on walk 'forward'"):
        assert way_out in found.message + found.fix


def test_all_conflicts_are_reported() -> None:
    nodes = [Node("a", spanned=("x", "y")), Node("b", spanned=("z",)), Node("c", spanned=("w",))]
    edges = [
        Edge("a.x", "b"),
        Edge("a.y", "b"),
        Edge("a.y", "c"),
        Edge("b.z", "a", loop_back=True),
        Edge("c.w", "c", loop_back=True),
        Edge("a.x", "a", loop_back=True),  # waits for b's, which comes after the cut
    ]
    report = Pipeline(nodes, edges, ring_depth=1).verify()
    assert [(found.rule, found.node) for found in report.errors if found.rule != "SG304"] == [
        ("SG301", "a.x -> b"),
        ("SG301", "a.y -> b"),
        ("SG301", "a.y -> c"),
        ("SG302", "b.z -> a"),
        ("SG303", "c.w -> c"),
    ]
    assert [found.node for found in report.errors if found.rule == "SG304"] == ["worker 0"]


def test_ranks_of_a_group_must_declare_the_same() -> None:
    ranks = [
        Node(f"rank{i}", spanned=("audio",) if i < 2 else ("audio", "f0"), group="tp", lockstep=True) for i in range(3)
    ]
    (found,) = Pipeline(ranks).verify().errors
    assert (found.rule, found.node) == ("SG501", "rank2")
    assert "['audio', 'f0']" in found.message
    assert not Pipeline(ranks[:2]).verify().diagnostics

    # Names count, not how many or in which order; and those of the walk, not of the first one.
    def pair(first: Any, second: Any) -> list[str]:
        nodes = [Node("a", spanned=first, group="tp"), Node("b", spanned=second, group="tp")]
        return [found.message[:16] for found in Pipeline(nodes, walks=("talk", "listen")).verify().errors]

    assert pair(("x",), ("y",)) == ["on walk 'talk' a"]
    assert pair(("x", "y"), ("y", "x")) == []
    assert pair({"listen": ("x",)}, {"talk": ("x",)}) == ["on walk 'listen'", "on walk 'talk', "]
    assert pair({"talk": ("x",), "listen": ("y",)}, {"talk": ("x",), "listen": ("y",)}) == []


def test_what_python_lets_through_is_of_the_right_type() -> None:
    """A string is a sequence of names to Python, and 0 another worker than "0"."""
    nodes = [
        Node("a", spanned="codes"),
        Node("b", outputs="xy"),
        Node("c", worker=0, lockstep="no"),
        Node("d", module="m:M"),
        Node(""),
        Node("e", spanned=(name for name in "xy")),
        Node("f", outputs=("x.y",)),
    ]
    edges = [
        Edge("a.codes", "b", walks="forward"),
        Edge(3, "b"),
        "a.codes -> b",
        Edge("a.x", "b", takes_spans="no"),
    ]
    with pytest.raises(PipelineError) as caught:
        Pipeline(nodes, edges, walks="forward")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "walks",
        "nodes.a.spanned",
        "nodes.b.outputs",
        "nodes.c.worker",
        "nodes.c.lockstep",
        "nodes.d.module",
        "nodes[4]",
        "nodes.e.spanned",
        "nodes.f",
        "edges[0].walks",
        "edges[1]",
        "edges[2]",
        "edges[3].takes_spans",
    ]
    with pytest.raises(PipelineError, match="speculation_depth: True"):
        Pipeline([TALKER], speculation_depth=True)
    with pytest.raises(PipelineError, match="nodes: 'ab'; expected a list of Nodes"):
        Pipeline("ab")
    with pytest.raises(PipelineError, match=r"there is no node 'codec': expected one of \['talker'\]"):
        Pipeline([TALKER]).node("codec")


def test_one_conflict_on_two_walks_is_one_finding() -> None:
    pipeline = Pipeline([TALKER, Node("codec")], [Edge("talker.codes", "codec")], ("prefill", "decode"))
    (found,) = pipeline.verify().errors
    assert found.message.startswith("on walk 'prefill' and 'decode', 'codec' may start")


class Talker(nn.Module):
    """Spans along time, and a second output without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("codes",) if walk != "prefill" else ()

    def forward(self, x: Tensor, lengths: Tensor) -> SpannedOutput:
        hidden = self.linear(x)
        if not hidden.requires_grad and self.training:
            raise AssertionError
        return SpannedOutput({"codes": hidden.relu(), "hidden": hidden}, {"codes": from_lengths(lengths)})


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def decode(self, codes: Tensor, lengths: Tensor) -> SpannedOutput:
        return SpannedOutput({"audio": self.linear(codes)}, {"audio": from_lengths(lengths)})

    forward = decode


class Chain(nn.Module):
    """talker.codes -> codec, through glue; codec.audio and talker's hidden -> post."""

    def __init__(self) -> None:
        super().__init__()
        self.talker, self.codec, self.post = Talker(), Codec(), Codec()

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[SpannedOutput, SpannedOutput]:
        spoken = self.talker(x, lengths)
        audio = self.codec((spoken.outputs["codes"] * 2).clamp(max=3), lengths)
        return audio, self.post(audio.outputs["audio"] + spoken.outputs["hidden"], lengths)


INPUTS = (torch.randn(3, 8, 8), torch.tensor([3, 4, 5]))


def test_a_module_says_what_is_spanned_on_which_walk() -> None:
    nodes = [Node("talker", module=Talker()), Node("codec")]
    pipeline = Pipeline(nodes, [Edge("talker.codes", "codec", walks=("decode",))], ("prefill", "decode"))
    (found,) = pipeline.verify().errors
    assert "walk 'decode'" in found.message
    declared = [place for place in found.related if "is declared" in place[0]]
    assert declared == [("'codes' is declared", f"{__file__}:{Talker.forward.__code__.co_firstlineno}")]


def test_of_several_declaring_submodules_the_right_one_is_named() -> None:
    pipeline = Pipeline([Node("chain", module=Chain()), Node("out")], [Edge("chain.codes", "out")])
    (found,) = pipeline.verify().errors
    assert [where for what, where in found.related if "is declared" in what] == [
        f"{__file__}:{Talker.forward.__code__.co_firstlineno}"
    ]


# ---- derived from a model --------------------------------------------------------------------------------------------


def test_a_pipeline_is_derived_from_data_flow() -> None:
    pipeline = Pipeline.from_module(Chain().eval(), INPUTS)
    assert [(node.name, node.spanned) for node in pipeline.nodes] == [
        ("talker", ("codes",)),
        ("codec", ("audio",)),
        ("post", ("audio",)),
    ]
    assert [str(edge) for edge in pipeline.edges] == [
        "talker.codes -> codec",
        "codec.audio -> post",
        "talker.unnamed -> post",
    ]
    assert all(edge.where.startswith(__file__) for edge in pipeline.edges)
    assert [found.node for found in pipeline.verify().errors] == ["talker.codes -> codec", "codec.audio -> post"]
    apart = Pipeline.from_module(Chain().eval(), INPUTS, workers={"codec": "gpu1"})
    assert not apart.verify().diagnostics


def test_what_cannot_be_derived() -> None:
    with pytest.raises(PipelineError, match=r"workers names \['vocoder'\]"):
        Pipeline.from_module(Chain().eval(), INPUTS, workers={"vocoder": "1"})
    with pytest.raises(PipelineError, match="no submodule of Linear declares"):
        Pipeline.from_module(nn.Linear(8, 8), INPUTS[:1])


def test_a_root_that_declares_is_one_node() -> None:
    pipeline = Pipeline.from_module(Talker().eval(), INPUTS)
    assert [(node.name, node.outputs) for node in pipeline.nodes] == [("Talker", ())]
    assert not pipeline.edges


def test_data_flow_through_memory_is_seen() -> None:
    class Chained(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3, 8, 8))

        def forward(self, x: Tensor, lengths: Tensor) -> tuple[SpannedOutput, SpannedOutput]:
            spoken = self.talker(x, lengths)
            padded = torch.zeros(3, 8, 9)
            padded[..., :8] = spoken.outputs["codes"]
            audio = self.codec(padded[..., 1:], lengths)
            self.cache.copy_(audio.outputs["audio"])
            return audio, self.post(self.cache * 2, lengths)

    pipeline = Pipeline.from_module(Chained().eval(), INPUTS)
    assert [str(edge) for edge in pipeline.edges] == ["talker.codes -> codec", "codec.audio -> post"]


def test_a_submodule_that_returns_its_input_passes_it_on_as_its_own() -> None:
    class Named(Talker):
        def forward(self, x: Tensor, lengths: Tensor) -> SpannedOutput:
            return SpannedOutput({"codes": x}, {"codes": from_lengths(lengths)})

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named, self.codec, self.vad = Named(), Codec(), Codec()

        def forward(self, x: Tensor, lengths: Tensor) -> tuple[SpannedOutput, SpannedOutput]:
            return self.codec(self.named(x, lengths).outputs["codes"], lengths), self.vad(x + 1, lengths)

    pipeline = Pipeline.from_module(Held().eval(), INPUTS)
    assert "named.codes -> codec" in [str(edge) for edge in pipeline.edges]
    assert "vad" in [node.name for node in pipeline.nodes]  # though nothing joins it


def test_submodules_in_an_autocast_block_are_refused() -> None:
    class Cast(Chain):
        def forward(self, x: Tensor, lengths: Tensor) -> tuple[SpannedOutput, SpannedOutput]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x, lengths)

    with pytest.raises(PipelineError, match="run inside an autocast or no_grad block"):
        Pipeline.from_module(Cast().eval(), INPUTS)


def test_a_declared_method_is_found_by_its_submodules() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.talker, self.vae = Talker(), nn.Module()
            self.vae.decoder = nn.Linear(8, 8)
            self.vae.decode = lambda z: self.vae.decoder(z)
            spangraph.declare(self.vae, method="decode", output=lambda out, *args: from_lengths(torch.full((3,), 8)))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.vae.decode(self.talker(x, lengths).outputs["codes"])

    pipeline = Pipeline.from_module(Holder().eval(), INPUTS)
    assert [str(edge) for edge in pipeline.edges] == ["talker.codes -> vae"]
