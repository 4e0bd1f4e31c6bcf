"""Nodes, edges and walks of an engine's pipeline: what a worker may start before a step's rows are cut.

    talker --codes (spanned)--> codec --audio--> out

A worker that speculates launches `talker`, and before its rows are cut starts `codec` on its padded outputs. Whether
that can happen, and to which outputs, is read off the pipeline alone (`Pipeline.verify`, rules SG3xx and SG5xx).
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from spangraph.declare import find_declarations
from spangraph.errors import PipelineError
from spangraph.passes.nodes import is_user_file


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
        speculation_depth: how many launches a worker may start, one on top of the other, before the cut of a step.
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
