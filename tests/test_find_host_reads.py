"""All that a capture cannot hold is found in one eager run, each thing at its line, as often as it happens."""

from __future__ import annotations

import collections
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from spangraph.cut_hints import cut_hint
from spangraph.diagnostics import Diagnostic
from spangraph.hazards import _Hazards, find_capture_hazards

from . import read_corpus
from .toys import line_of, plain

RULES = {"READ": "SG401", "COPY": "SG402", "MIXED": "SG403", "WRITE": "SG405"}


def hazards(model: nn.Module, *inputs: Tensor) -> list[Diagnostic]:
    return find_capture_hazards(model, lambda *tensors: model(*tensors), inputs)


def test_the_corpus_has_exactly_the_hazards_that_its_comments_say() -> None:
    lines = Path(inspect.getfile(read_corpus)).read_text().splitlines()
    expected = {
        (RULES[found[1]], i): int(found[2])
        for i, line in enumerate(lines, 1)
        if (found := re.search(r"  # ([A-Z]+) (\d+)", line))
    }
    counted: collections.Counter[tuple[str, int]] = collections.Counter()
    for model, inputs in read_corpus.EXAMPLES:
        for diagnostic in hazards(model, *inputs):
            file, _, line = diagnostic.where.rpartition(":")
            assert file == inspect.getfile(read_corpus), diagnostic
            counted[diagnostic.rule, int(line)] += diagnostic.count
    differ = {key for key in expected.keys() | counted if expected.get(key, 0) != counted[key]}
    assert not differ, [(rule, line, counted[rule, line], lines[line - 1].strip()) for rule, line in sorted(differ)]
    assert len(expected) > 60
