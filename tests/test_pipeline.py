"""Pipelines: what is not whole is refused with its key path; TOML files; pipelines derived from traced models."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import Edge, Node, Pipeline, PipelineError, SpannedOutput, from_lengths

TALKER = Node("talker", spanned=("codes",), outputs=("hidden",))
CODEC = Node("codec", spanned={"decode": ("audio",)})
SELF = Edge("talker.codes", "talker", loop_back=True)

GOOD = """\
walks = ["prefill", "decode"]
speculation_depth = 1
ring_depth = 2

[nodes.talker]
worker = "gpu0"
spanned = { decode = ["codes"] }
outputs = ["hidden"]

[nodes."codec.v2"]
worker = "gpu0"
enable_async_scheduling = true
spanned = ["audio"]

[[edges]]
source = "talker.codes"
target = "codec.v2"
walks = ["decode"]

[[edges]]
source = "codec.v2.audio"
target = "talker"
loop_back = true
streaming = false
takes_spans = true
"""


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


# ---- TOML ------------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_holds_a_pipeline_and_its_lines(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    pipeline = Pipeline.from_toml(path)
    assert pipeline == Pipeline(
        [
            Node("talker", worker="gpu0", spanned={"decode": ["codes"]}, outputs=["hidden"]),
            Node("codec.v2", worker="gpu0", spanned=["audio"]),
        ],
        [
            Edge("talker.codes", "codec.v2", walks=["decode"]),
            Edge("codec.v2.audio", "talker", loop_back=True, takes_spans=True),
        ],
        ["prefill", "decode"],
        1,
        2,
    )
    lines = GOOD.splitlines()
    for part, header in ((pipeline.nodes[1], '[nodes."codec.v2"]'), (pipeline.nodes[0], "[nodes.talker]")):
        assert part.where == f"{path}:{lines.index(header) + 1}"
    assert pipeline.edges[1].where == f"{path}:{len(lines) - lines[::-1].index('[[edges]]')}"
    (found,) = pipeline.verify().errors
    assert (found.rule, found.where) == ("SG301", f"{path}:{lines.index('[[edges]]') + 1}")


def test_a_comment_in_the_file_allows_a_conflict(tmp_path: Path) -> None:
    allowed = GOOD.replace("[[edges]]", "[[edges]]  # spangraph: allow SG301 codec masks padding itself", 1)
    report = Pipeline.from_toml(written(tmp_path, allowed)).verify()
    assert not report.errors
    assert [found.allowed for found in report.allowed] == ["codec masks padding itself"]


def test_tables_may_be_written_inline(tmp_path: Path) -> None:
    text = 'nodes = { a = { spanned = ["x"] }, b = {} }\nedges = [{ source = "a.x", target = "b" }]\n'
    path = written(tmp_path, text)
    (found,) = Pipeline.from_toml(path).verify().errors
    assert (found.where, found.related[0][1]) == (f"{path}:2", f"{path}:1")


def test_edges_of_a_list_have_lines_of_their_own(tmp_path: Path) -> None:
    """One comment must not allow the conflicts of all."""
    text = (
        'edges = [\n    { source = "a.x", target = "b" }, # spangraph: allow SG301 b masks\n'
        '    { source = "a.x", target = "c" },\n]\n[nodes]\na = { spanned = ["x"] }\nb = {}\nc = {}\n'
    )
    path = written(tmp_path, text)
    report = Pipeline.from_toml(path).verify()
    assert [found.where for found in report.allowed] == [f"{path}:2"]
    assert [(found.where, found.related[1][1]) for found in report.errors] == [(f"{path}:3", f"{path}:8")]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.toml", tmp_path):
        with pytest.raises(PipelineError, match=rf"{re.escape(str(path))} cannot be read"):
            Pipeline.from_toml(path)
    (tmp_path / "latin.toml").write_bytes(b"walks = ['d\xe9codage']")
    with pytest.raises(PipelineError, match="cannot be read"):
        Pipeline.from_toml(tmp_path / "latin.toml")
    (tmp_path / "bom.toml").write_text("nodes.a = {}\n", encoding="utf-8-sig")
    assert Pipeline.from_toml(tmp_path / "bom.toml").nodes[0].name == "a"


def test_every_mistake_in_a_file_is_named(tmp_path: Path) -> None:
    path = written(
        tmp_path, GOOD.replace("streaming", "streming").replace("outputs", "output").replace("ring_", "rng_")
    )
    with pytest.raises(PipelineError) as caught:
        Pipeline.from_toml(path)
    keys = [problem.partition(":")[0] for problem in caught.value.problems]
    assert keys == ["rng_depth", "nodes.talker.output (line 5)", "edges[1].streming (line 20)"]


def test_a_module_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_engine.py").write_text(
        "from torch import nn\nclass M(nn.Module):\n    def spanned_outputs(self, walk):\n        return ('x',)\n"
        "def broken():\n    raise OSError('no weights')\nnot_one = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = written(tmp_path, '[nodes.a]\nmodule = "some_engine:M"\n')
    assert Pipeline.from_toml(path).nodes[0].spanned_outputs("forward") == ("x",)
    for name, says in (("broken", "no weights"), ("missing", "has no attribute"), ("not_one", "not callable")):
        path = written(tmp_path, f'[nodes.a]\nmodule = "some_engine:{name}"\n')
        with pytest.raises(
            PipelineError, match=rf"nodes\.a\.module \(line 1\): 'some_engine:{name}' cannot be loaded.*{says}"
        ):
            Pipeline.from_toml(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes = [", "pipeline.toml cannot be read: Invalid value"),
        ("", "nodes: none; expected at least one"),
        ("edges = [{ source = 'a.x', target = 'a', walks = [] }]\nnodes.a.spanned = ['x']", "edges[0].walks: none"),
        ("nodez = {}", "nodez: it is not known; expected one of ['edges', 'nodes', 'ring_depth'"),
        ("nodes = 3", "nodes: 3; expected tables [nodes.name]"),
        ("edges = {}", "edges: {}; expected tables [[edges]]"),
        ("nodes.a = 3", "nodes.a: 3; expected a table"),
        ("nodes.a.wroker = '0'", "nodes.a.wroker: it is not known"),
        ("nodes.a.worker = 0", "nodes.a.worker: 0; expected a string"),
        ("nodes.a.lockstep = 1", "nodes.a.lockstep: 1; expected true or false"),
        ("nodes.a.where = 'x:1'", "nodes.a.where: it is not known"),
        ("nodes.a.spanned = 'x'", "nodes.a.spanned: 'x'; expected a list of names, or a table"),
        ("nodes.a.spanned.forward = 'x'", "nodes.a.spanned: {'forward': 'x'}; expected a list of names, or a table"),
        ("nodes.a.spanned = [1]", "nodes.a.spanned: [1]; expected a list of names, or a table"),
        ("nodes.a.outputs = 'x'", "nodes.a.outputs: 'x'; expected a list of names"),
        ("nodes.a = {}\nwalks = [1]", "walks: [1]; expected a list of names"),
        ("speculation_depth = true\nnodes.a = {}", "speculation_depth: True; expected a whole number"),
        ("ring_depth = 1.5\nnodes.a = {}", "ring_depth: 1.5; expected a whole number"),
        ("edges = [{ target = 'a' }]\nnodes.a = {}", "edges[0].source: it is missing"),
        ("edges = [1]\nnodes.a = {}", "edges[0]: 1; expected a table"),
        ("edges = [{ from = 'a.x', to = 'a' }]\nnodes.a = {}", "edges[0].from: it is not known"),
        ("edges = [{ source = 'a.x', target = 'b' }]\nnodes.a = {}", "edges[0].target: 'b' names no node"),
    ],
)
def test_what_a_file_gets_wrong_is_named_with_its_key_path(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PipelineError) as caught:
        Pipeline.from_toml(path)
    assert says in re.sub(r" \(line \d+\)", "", str(caught.value))
    assert str(caught.value).count(str(path)) == 1
