"""Nodes, edges and walks of an engine's pipeline: what a worker may start before a step's rows are cut.

    talker --codes (spanned)--> codec --audio--> out

A worker that speculates launches `talker`, and before its rows are cut starts `codec` on its padded outputs. Whether
that can happen, and to which outputs, is read off the pipeline alone (`Pipeline.verify`, rules SG3xx and SG5xx).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from torch import nn

from spangraph.declare import find_declarations
from spangraph.diagnostics import Diagnostic
from spangraph.errors import PipelineError
from spangraph.passes.nodes import is_user_file
from spangraph.report import Report


def _caller_line() -> str:
    """`"file:line"` of the innermost frame of the user."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True)
class Node:
    """One node of a pipeline: a model that a worker launches, step by step.

    Attributes:
        name: unique in the pipeline.
        module: the model, if it is at hand; its declarations say what is spanned.
        spanned: names of the spanned outputs, on every walk or per walk. Not together with `module`.
        outputs: names of the other outputs.
        worker: the process that launches it. Nodes of one worker share a device stream and a ring.
        enable_async_scheduling: whether its outputs may be used, and it may be started, before the cut.
        lockstep: whether it runs in step with peers on other workers (tensor parallel), which rules speculation out.
        group: nodes of one group are ranks of one model, and must declare the same spanned outputs.
        where: `"file:line"`; default the line that builds it.
    """

    name: str
    module: nn.Module | None = None
    spanned: Mapping[str, Sequence[str]] | Sequence[str] = ()
    outputs: Sequence[str] = ()
    worker: str = "0"
    enable_async_scheduling: bool = True
    lockstep: bool = False
    group: str = ""
    where: str = field(default_factory=_caller_line, compare=False)

    @property
    def speculates(self) -> bool:
        """Whether a worker may start it, or something on its outputs, before a cut."""
        return self.enable_async_scheduling and not self.lockstep

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        """Names of the spanned outputs on a walk."""
        if self.module is not None:
            return tuple(dict.fromkeys(n for d in find_declarations(self.module, walk) for n in d.spans))
        return tuple(self.spanned.get(walk, ()) if isinstance(self.spanned, Mapping) else self.spanned)


@dataclass(frozen=True)
class Edge:
    """An output of one node that is an input of another.

    Attributes:
        source: `"node.output"`.
        target: name of the node that takes it.
        streaming: the source gives one or more chunks a step, and the target takes one a step, in order: there may be
            chunks left over from earlier steps.
        loop_back: the target takes it in its next iteration; in the first it takes a value from outside.
        takes_spans: the target takes the spans too, and gives padding no meaning.
        walks: the walks it belongs to; None: all.
        where: `"file:line"`; default the line that builds it.
    """

    source: str
    target: str
    streaming: bool = False
    loop_back: bool = False
    takes_spans: bool = False
    walks: Sequence[str] | None = None
    where: str = field(default_factory=_caller_line, compare=False)

    @property
    def node(self) -> str:
        """Name of the source node."""
        return self.source.rpartition(".")[0]

    @property
    def output(self) -> str:
        """Name of the source's output."""
        return self.source.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@dataclass(frozen=True)
class Pipeline:
    """Nodes and edges, per walk.

    Attributes:
        nodes, edges: see `Node` and `Edge`.
        walks: names of the walks.
        speculation_depth: how many launches a worker may start, one on top of the other, before the cut of a step. What
            can be started is the same at any depth above 0; how many steps are open at once is not.
        ring_depth: steps of a worker that may be open at once; None: as many as speculation asks for.

    Raises:
        PipelineError: naming every unknown node, output and walk, every duplicate, and every node that cannot start,
            each with its key path.
    """

    nodes: Sequence[Node]
    edges: Sequence[Edge] = ()
    walks: Sequence[str] = ("forward",)
    speculation_depth: int = 1
    ring_depth: int | None = None

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise PipelineError("the pipeline is not whole", problems)

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Pipeline:
        """Read a pipeline from a TOML file.

            walks = ["prefill", "decode"]
            speculation_depth = 1

            [nodes.talker]
            worker = "gpu0"
            spanned = { decode = ["codes"] }    # or module = "package.module:factory"

            [nodes.codec]
            worker = "gpu0"

            [[edges]]
            source = "talker.codes"
            target = "codec"

        Keys are the attributes of `Pipeline`, `Node` and `Edge`.

        Raises:
            PipelineError: naming the file and the key path of what is unknown, of the wrong type, or missing.
        """
        from spangraph.pipeline_file import read_pipeline

        return read_pipeline(path)

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        walk: str = "forward",
        workers: Mapping[str, str] | None = None,
        speculation_depth: int = 1,
        ring_depth: int | None = None,
    ) -> Pipeline:
        """Derive a pipeline from a traced model: declaring submodules are nodes, data flow between them is edges.

        Args:
            args, kwargs: example inputs.
            workers: worker of each node by the submodule's name; default one for all.

        This is for a model that is to be served in parts: compiled whole, it is one graph and nothing is speculated on.

        Raises:
            TraceError: if the model does not export.
            DeclarationError: if its declarations do not fit.
            PipelineError: if `workers` names what does not declare, or nothing does.
        """
        from spangraph.derive import derive_pipeline

        nodes, edges = derive_pipeline(model, args, kwargs or {}, walk)
        names = [node.name for node in nodes]
        if unknown := sorted(set(workers or {}) - set(names)):
            raise PipelineError(f"workers names {unknown}: the declaring submodules are {names}.")
        nodes = [replace(node, worker=(workers or {}).get(node.name, node.worker)) for node in nodes]
        return cls(nodes, edges, (walk,), speculation_depth, ring_depth)

    def node(self, name: str) -> Node:
        """The node of that name.

        Raises:
            PipelineError: if there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise PipelineError(f"there is no node {name!r}: expected one of {[node.name for node in self.nodes]}.")

    def edges_on(self, walk: str) -> list[Edge]:
        """The edges of one walk."""
        return [edge for edge in self.edges if edge.walks is None or walk in edge.walks]

    def verify(self, walk: str | None = None) -> Report:
        """Find what may start before a cut, on one walk or on all: SG3xx and SG5xx, all of them errors.

        Raises:
            PipelineError: for an unknown walk.
        """
        from spangraph.speculation_rules import find_conflicts

        if walk is not None and walk not in self.walks:
            raise PipelineError(f"walk {walk!r} is not one of {list(self.walks)}.")
        found: dict[Diagnostic, list[str]] = {}
        for name in self.walks if walk is None else (walk,):
            for diagnostic in find_conflicts(self, name):
                found.setdefault(diagnostic, []).append(repr(name))
        return Report([replace(d, message=f"on walk {' and '.join(walks)}, {d.message}") for d, walks in found.items()])


def _problems(pipeline: Pipeline) -> Iterator[str]:
    """What is unknown, named twice, or cannot start, each with its key path."""
    if wrong := list(_wrong_types(pipeline)):
        yield from wrong
        return
    names = [node.name for node in pipeline.nodes]
    if not names:
        yield "nodes: none; expected at least one."
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"nodes.{name}: {names.count(name)} nodes have this name."
    if not pipeline.walks or len(set(pipeline.walks)) < len(pipeline.walks):
        yield f"walks: {list(pipeline.walks)}; expected different names, at least one."
    for key, least in (("speculation_depth", 0), ("ring_depth", 1)):
        value = getattr(pipeline, key)
        if value is not None and (type(value) is not int or value < least):
            yield f"{key}: {value!r}; expected a whole number, at least {least}."
    known = {node.name: node for node in pipeline.nodes}
    outputs: dict[str, set[str]] = {}
    for node in known.values():
        key = f"nodes.{node.name}"
        if node.module is not None and node.spanned:
            yield f"{key}.spanned: the module says itself what is spanned; leave one of the two out."
        if isinstance(node.spanned, Mapping) and (strange := sorted(set(node.spanned) - set(pipeline.walks))):
            yield f"{key}.spanned: unknown walks {strange}; the pipeline has {list(pipeline.walks)}."
        outputs[node.name] = {*node.outputs, *(n for walk in pipeline.walks for n in node.spanned_outputs(walk))}
    seen: set[tuple[str, str, str]] = set()
    for i, edge in enumerate(pipeline.edges):
        key = f"edges[{i}]"
        if edge.node not in known:
            yield f"{key}.source: {edge.source!r} names no node; expected node.output with a node of {names}."
        elif edge.output not in outputs[edge.node]:
            yield (
                f"{key}.source: {edge.node!r} has no output {edge.output!r}; it has {sorted(outputs[edge.node])}. List"
                f" outputs without spans in nodes.{edge.node}.outputs."
            )
        if edge.target not in known:
            yield f"{key}.target: {edge.target!r} names no node of {names}."
        if edge.walks is not None and not edge.walks:
            yield f"{key}.walks: none; leave it out for all walks."
        if edge.walks is not None and (strange := sorted(set(edge.walks) - set(pipeline.walks))):
            yield f"{key}.walks: unknown walks {strange}; the pipeline has {list(pipeline.walks)}."
        for walk in pipeline.walks if edge.walks is None else edge.walks:
            if (walk, edge.source, edge.target) in seen:
                yield f"{key}: a second edge {edge} on walk {walk!r}."
            seen.add((walk, edge.source, edge.target))
    if len(known) > 1 and pipeline.edges:
        joined = {name for edge in pipeline.edges for name in (edge.node, edge.target)}
        for name in names:
            if name not in joined and not outputs[name]:
                yield f"nodes.{name}: unreachable; no edge leads to it or from it, and it has no output."
    for walk in pipeline.walks:
        edges = [edge for edge in pipeline.edges_on(walk) if not edge.loop_back]
        waiting = set(known)
        while started := {n for n in waiting if not any(e.target == n and e.node in waiting for e in edges)}:
            waiting -= started
        while ended := {n for n in waiting if not any(e.node == n and e.target in waiting for e in edges)}:
            waiting -= ended  # these wait for the cycles only
        for name in sorted(waiting):
            yield (
                f"nodes.{name}: unreachable on walk {walk!r}; it waits for itself. One edge of the cycle, among"
                f" {sorted(waiting)}, must be loop_back."
            )


_NAMES = "a list of names"
_FLAG = "true or false"
# What Python lets through: a string for a list of names, a number for a worker, "no" for a flag.
_NODE_TYPES: dict[str, tuple[Any, str]] = {
    "worker": (str, "a string"),
    "group": (str, "a string"),
    "enable_async_scheduling": (bool, _FLAG),
    "lockstep": (bool, _FLAG),
    "module": (nn.Module | None, "an nn.Module"),
}
_EDGE_TYPES: dict[str, tuple[Any, str]] = {name: (bool, _FLAG) for name in ("streaming", "loop_back", "takes_spans")}


def _wrong_types(pipeline: Pipeline) -> Iterator[str]:
    for key, kind in (("nodes", Node), ("edges", Edge)):
        if not isinstance(parts := getattr(pipeline, key), Sequence) or isinstance(parts, str):
            yield f"{key}: {parts!r}; expected a list of {kind.__name__}s."
            return
    if not _are_names(pipeline.walks):
        yield f"walks: {pipeline.walks!r}; expected {_NAMES}."
    for i, node in enumerate(pipeline.nodes):
        if not isinstance(node, Node) or not _are_names([node.name]):
            yield f"nodes[{i}]: {node!r}; expected a Node with a name."
            continue
        key = f"nodes.{node.name}"
        parts = [*(node.spanned.values() if isinstance(node.spanned, Mapping) else [node.spanned]), node.outputs]
        if not all(map(_are_names, parts[:-1])):
            yield f"{key}.spanned: {node.spanned!r}; expected {_NAMES}, or a table walk -> {_NAMES}."
        elif not _are_names(node.outputs):
            yield f"{key}.outputs: {node.outputs!r}; expected {_NAMES}."
        elif dotted := [name for part in parts for name in part if "." in name]:
            yield f"{key}: outputs {dotted} have dots, but edges are written node.output."
        yield from _wrong_attributes(key, node, _NODE_TYPES)
    for i, edge in enumerate(pipeline.edges):
        if not isinstance(edge, Edge) or not isinstance(edge.source, str) or not isinstance(edge.target, str):
            yield f"edges[{i}]: {edge!r}; expected an Edge from 'node.output' to a node's name."
            continue
        if edge.walks is not None and not _are_names(edge.walks):
            yield f"edges[{i}].walks: {edge.walks!r}; expected {_NAMES}."
        yield from _wrong_attributes(f"edges[{i}]", edge, _EDGE_TYPES)


def _are_names(value: object) -> bool:
    if not isinstance(value, Collection) or isinstance(value, str):
        return False
    return all(isinstance(name, str) and name.isprintable() and name for name in value)


def _wrong_attributes(key: str, part: object, types: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    for name, (kind, what) in types.items():
        if not isinstance(value := getattr(part, name), kind):
            yield f"{key}.{name}: {value!r}; expected {what}."
