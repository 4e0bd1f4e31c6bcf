"""The suite for a GPU, on the simulated device: all of it runs, and nothing that needs a GPU gets a number."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUITE = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_suite.py"
SECTIONS = ["correctness", "staging", "host", "copies", "end-to-end"]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("gpu_suite", SUITE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_suite", module)
    spec.loader.exec_module(module)
    return module


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The rows of a JSON file."""
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_all_of_it_runs_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    command = [sys.executable, str(SUITE), "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert list(found["seconds"]) == list(dict.fromkeys(row["section"] for row in found["rows"])) == SECTIONS
    for row in found["rows"]:
        if row["section"] == "correctness":
            assert row["verdict"] == "ok", row
            assert row["value"] > 0
        else:
            assert row["verdict"] == "not measured", row
            assert not row["note"]
            assert row["value"] is row["quartiles"] is None
        assert row["what"] in done.stdout
    assert {"torch", "CUDA", "Triton", "Python", "command", "date", "revision"} <= set(found)


def test_a_section_that_raises_leaves_the_others(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(rig: object, table: object) -> None:
        raise RuntimeError("a device error\nand its second line")

    monkeypatch.setitem(suite.SECTIONS, "staging", raises)
    out = tmp_path / "suite.json"
    assert suite.main(["--device", "cpu", "--only", "staging,copies", "--out", str(out)]) == 1
    failed, *others = rows_of(out)
    assert (failed["section"], failed["verdict"]) == ("staging", "FAILED")
    assert failed["note"] == "RuntimeError: a device error"
    assert {row["section"] for row in others} == {"copies"}
    assert {row["verdict"] for row in others} == {"not measured"}


def test_wrong_values_are_an_error(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirrored case of the first test: a check that compares nothing would pass there."""

    def wrong(cursor: Any, slots: Any, *rest: object) -> None:
        slots[0, 0] = 1

    for check in ("compare_compaction", "compare_gather", "replay_many", "run_tests"):
        monkeypatch.setattr(suite, check, lambda *args: 1)
    monkeypatch.setattr(suite.torch.ops.spangraph, "stage", type("Wrong", (), {"default": staticmethod(wrong)}))
    out = tmp_path / "suite.json"
    assert suite.main(["--device", "cpu", "--only", "correctness", "--out", str(out)]) == 1
    assert [row["verdict"] for row in rows_of(out)] == ["FAILED", "ok", "ok", "FAILED", "ok", "ok", "ok"]


def test_a_section_in_a_process_of_its_own(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are taken over; if the process dies, that is a row, too."""
    out = tmp_path / "suite.json"
    arguments = ["--device", "cpu", "--isolate", "--only", "staging", "--out", str(out)]
    assert suite.main(arguments) == 0
    assert {row["verdict"] for row in rows_of(out)} == {"not measured"}
    dying = tmp_path / "dying.py"
    dying.write_text("import os\nos._exit(9)\n")
    monkeypatch.setattr(suite, "__file__", str(dying))
    assert suite.main(arguments) == 1
    [row] = rows_of(out)
    assert (row["section"], row["verdict"]) == ("staging", "FAILED")
    assert "exit status 9, after 0 rows" in row["note"]


def test_what_is_out_of_time_is_not_measured(suite: Any, tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    assert suite.main(["--device", "cpu", "--budget", "0", "--only", "host,copies", "--out", str(out)]) == 0
    assert [(row["section"], row["verdict"], row["note"]) for row in rows_of(out)] == [
        ("host", "not measured", "out of time"),
        ("copies", "not measured", "out of time"),
    ]


def test_a_number_is_the_median_against_its_target(suite: Any, tmp_path: Path) -> None:
    table = suite.Table(tmp_path / "suite.json", {})
    for limit in (2.0, 3.0):
        table.number("wait", "us", [1.0, 2.5, 9.0], target=f"< {limit}", good=lambda us, limit=limit: us < limit)
    assert [(row["value"], row["verdict"]) for row in rows_of(table.out)] == [(2.5, "MISSED"), (2.5, "ok")]
    assert rows_of(table.out)[0]["quartiles"] == [1.0, 9.0]
