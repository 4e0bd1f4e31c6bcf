"""Shared test set-up: tests import the installed package, never the repository's folders."""

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != _ROOT]
os.environ.setdefault("SPANGRAPH_DEBUG", "1")
