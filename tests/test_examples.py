"""The examples run as a user would run them, and print what they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> str:
    """What an example prints, run on its own."""
    command = [sys.executable, str(EXAMPLES / name)]
    environment = {**os.environ, "SPANGRAPH_DEBUG": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_runner_delivers_each_request_s_samples() -> None:
    """Three samples per frame, half as loud; an empty request is withheld; chunks of under four frames are the last."""
    printed = run("engine_runner.py")
    backend = "cuda" if torch.cuda.is_available() else "simulated"
    assert printed.startswith(f"captured buckets [8, 4, 2, 1] on the {backend} backend\n")
    steps = re.findall(r"^step (\d+): (\d+) rows, (\d+) delivered$", printed, re.MULTILINE)
    assert steps == [("1", "3", "3"), ("2", "1", "1"), ("3", "6", "5"), ("4", "2", "2")]
    lengths = [[5, 8, 3], [1], [4, 0, 7, 7, 2, 6], [8, 8]]
    expected = []
    for batch, frames in enumerate(lengths):
        for i, n in enumerate(frames):
            what = f"{3 * n} samples, sum {3 * n * n / 2:.1f}" if n else "withheld"
            expected.append(f"  req-{batch}.{i}: {what}{', last chunk' if n < 4 else ''}")
    assert [line for line in printed.splitlines() if line.startswith("  req-")] == expected
