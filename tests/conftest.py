"""Shared test set-up: tests import the installed package, never the repository's folders."""

import os
import sys
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != _ROOT]
os.environ.setdefault("SPANGRAPH_DEBUG", "1")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests have counted (`record_property("counted", ...)`), though they passed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "counted":
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {value}")
