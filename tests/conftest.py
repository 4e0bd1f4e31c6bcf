"""Shared test set-up: tests import the installed package, never the repository's folders."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != _ROOT]
os.environ.setdefault("SPANGRAPH_DEBUG", "1")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests have counted (`record_property("counted", ...)`), though they passed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "counted":
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {value}")


@pytest.fixture(params=["view", "device", "host"])
def each_lifetime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets rows of `rig.Engine` live in the graph's output, or in a ring."""
    from .rig import Engine

    monkeypatch.setattr(Engine, "lifetime", request.param)


@pytest.fixture(params=["0", "1"])
def with_and_without_debugging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut another way under debugging, which remembers who takes them."""
    monkeypatch.setenv("SPANGRAPH_DEBUG", request.param)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small networks: threads that wait for each other take many times as long as one, on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
