"""The soak of `benchmarks/`, for as long as a test may take."""

import re
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).resolve().parent.parent / "benchmarks" / "soak.py"
SECONDS = 20


def test_no_row_is_wrong_and_memory_is_flat() -> None:
    command = [sys.executable, str(SOAK), "--seconds", str(SECONDS), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(.+?) +([\d,-]+)$", done.stdout, re.MULTILINE)
    figures = {name: int(number.replace(",", "")) for name, number in found if name[0].islower()}
    assert figures["wrong"] == figures["slots lost"] == 0
    assert figures["rows compared"] > 10 * SECONDS  # some hundred a second where nothing else runs
    for name in ("cancelled", "dropped", "owned", "rows withheld", "evictions"):
        assert figures[name] > 0, name
    assert figures["pinned, most, KB"] < 2 * figures["pinned, least, KB"]
