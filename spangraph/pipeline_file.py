"""Pipelines in TOML files: keys are the attributes of `Pipeline`, `Node` and `Edge`, and every mistake has a line."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from spangraph.errors import PipelineError
from spangraph.pipeline import Edge, Node, Pipeline


def read_pipeline(path: str | PathLike[str]) -> Pipeline:
    """See `Pipeline.from_toml`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        table = tomllib.loads(text)
    except (OSError, ValueError) as error:  # not there, not text, not TOML
        raise PipelineError(f"{path} cannot be read: {error}") from None
    return _Reader(path, text).pipeline(table)


class _Reader:
    """Builds a pipeline from a parsed file, and collects what is wrong with it."""

    def __init__(self, path: str | PathLike[str], text: str) -> None:
        self._path = path
        self._lines = text.split("\n")
        self._problems: list[str] = []

    def pipeline(self, table: dict[str, Any]) -> Pipeline:
        options = self._known("", table, Pipeline)
        named, listed = options.pop("nodes", {}), options.pop("edges", [])
        for key, value, kind in (("nodes", named, dict), ("edges", listed, list)):
            if not isinstance(value, kind):
                self._refuse(
                    [f"{key}: {value!r}; expected {'tables [nodes.name]' if kind is dict else 'tables [[edges]]'}."]
                )
        nodes = [self._node(name, value) for name, value in named.items()]
        edges = [self._edge(i, value) for i, value in enumerate(listed)]
        if self._problems:
            self._refuse(self._problems)
        try:
            return Pipeline(nodes, edges, **options)
        except PipelineError as error:
            self._refuse(error.problems)

    def _refuse(self, problems: Sequence[str]) -> NoReturn:
        raise PipelineError(f"{self._path} does not describe a pipeline", [self._with_line(p) for p in problems])

    def _with_line(self, problem: str) -> str:
        """The problem with the line of its node or edge behind the key path."""
        key, _, rest = problem.partition(":")
        if match := re.match(r"nodes\.(.+?)(\.(\w+))?$|edges\[(\d+)\]", key):
            line = self._line_of_edge(int(match[4])) if match[4] else self._line_of_node(match[1])
            return f"{key} (line {line}):{rest}"
        return problem

    def _node(self, name: str, value: Any) -> Node:
        table = self._known(f"nodes.{name}", value, Node)
        if (given := table.get("module")) is not None:
            table["module"] = self._load(f"nodes.{name}.module", given)
        return Node(name, **table, where=f"{self._path}:{self._line_of_node(name)}")

    def _edge(self, index: int, value: Any) -> Edge:
        table = self._known(f"edges[{index}]", value, Edge)
        for required in {"source", "target"} - table.keys():
            self._problems.append(f"edges[{index}].{required}: it is missing.")
            table[required] = ""
        return Edge(**table, where=f"{self._path}:{self._line_of_edge(index)}")

    def _known(self, key: str, value: Any, cls: type) -> dict[str, Any]:
        """The keys of a table that are attributes of the class; others are noted."""
        if not isinstance(value, dict):
            self._problems.append(f"{key}: {value!r}; expected a table.")
            return {}
        names = {attribute.name for attribute in fields(cls)} - {"name", "where"}
        for name in value.keys() - names:
            self._problems.append(f"{key}{key and '.'}{name}: it is not known; expected one of {sorted(names)}.")
        return {name: given for name, given in value.items() if name in names}

    def _load(self, key: str, name: Any) -> nn.Module | None:
        try:
            found = pkgutil.resolve_name(name)
            module = found if isinstance(found, nn.Module) else found()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any code of the user's
            self._problems.append(f"{key}: {name!r} cannot be loaded: {type(error).__name__}: {error}")
            return None
        if not isinstance(module, nn.Module):
            self._problems.append(f"{key}: {name!r} gives a {type(module).__name__}, not an nn.Module.")
            return None
        return module

    def _line_of_node(self, name: str) -> int:
        quoted = rf"[\"']?{re.escape(name)}[\"']?"
        return self._line(0, rf"^\s*\[\s*nodes\s*\.\s*{quoted}\s*[\].]", rf"\b{quoted}\s*[.=]")

    def _line_of_edge(self, index: int) -> int:
        return self._line(index, r"^\s*\[\[\s*[\"']?edges[\"']?\s*\]\]", r"\bsource\s*=")

    def _line(self, nth: int, *patterns: str) -> int:
        """The line where the n-th match of a pattern begins, of the first pattern that has so many."""
        for pattern in patterns:
            found = [i for i, line in enumerate(self._lines, 1) for _ in re.finditer(pattern, line)]
            if nth < len(found):
                return found[nth]
        return 1
