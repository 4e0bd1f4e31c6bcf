"""Counts calls, which repeat exactly where seconds do not."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(fn: Callable[[], object]) -> int:
    """Calls that a function makes, of Python's functions and of C's: operators, and methods of tensors. Those inside a
    graph that it runs are not counted."""
    count = graphs = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count, graphs
        is_graph = frame.f_code.co_filename.startswith("<eval_with_key>")
        if event == "return" and is_graph:
            graphs -= 1
        elif event == "call" and is_graph:
            graphs += 1
        elif event in ("call", "c_call") and not graphs:
            count += 1

    gc.disable()  # finalisers of what other tests have left would be counted
    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count - 1  # setprofile itself
