"""Every Python block of the README and the docs runs, and prints what its comments say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_BLOCKS = [
    pytest.param(page, block, id=f"{page.name}-{i}")
    for page in _PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("page", "block"), _BLOCKS)
def test_block_runs(page: Path, block: str) -> None:
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, f"{page.name}:\n{block}\n{done.stderr}"
    # A comment behind a print is what it prints, line by line.
    expected = [
        line for shown in re.findall(r"print\(.*?#  ?(.+)$", block, re.MULTILINE) for line in shown.split(" | ")
    ]
    assert done.stdout.splitlines() == expected


def test_the_first_example_is_ten_lines() -> None:
    """The example a newcomer meets stays short: its code without imports and the class frame."""
    block = re.search(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    lines = [line for line in block[1].splitlines() if line.strip() and not line.startswith(("import", "class"))]
    assert len(lines) <= 10
