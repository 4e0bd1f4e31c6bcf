"""Pipelines in TOML files: what they hold, the lines of it, and every mistake with its key path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spangraph import Edge, Node, Pipeline, PipelineError

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
