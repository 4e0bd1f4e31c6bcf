"""The command: which targets it takes, what it prints where, and its exit codes."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import spangraph
from spangraph import Diagnostic, Pipeline, Report, Span
from spangraph.cli import main
from spangraph.rules import RULES

ERROR = Diagnostic("SG301", "codes feed codec", "engine.toml:3", fix="take the spans")
WARNING = Diagnostic("SG201", "conv mixes positions", severity="warning")

_names = (f"engine_{i}" for i in itertools.count())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes a module into the current directory and returns its name, a new one each time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)

    def write(text: str) -> str:
        name = next(_names)
        (tmp_path / f"{name}.py").write_text(
            "import torch\nfrom spangraph import Diagnostic, Edge, Node, Pipeline, Report, SpannedOutput\n"
            f"ERROR, WARNING = {ERROR!r}, {WARNING!r}\nMODEL = torch.nn.Linear(2, 2)\n{text}",
            encoding="utf-8",
        )
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("engine_"):
            del sys.modules[name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `spangraph.verify` and `Pipeline.verify` are called with; each finds a warning that names the walk."""
    made: list[Any] = []

    def verify(model: Any, args: Any, kwargs: Any = None, **options: Any) -> Report:
        made.append((type(model).__name__, args, kwargs, options))
        return Report([Diagnostic("SG201", f"on {options['walk']}", severity="warning")])

    def verify_pipeline(pipeline: Pipeline, walk: str | None = None) -> Report:
        made.append(walk)
        return Report([Diagnostic("SG301", f"on {walk}")])

    monkeypatch.setattr(spangraph, "verify", verify, raising=False)
    monkeypatch.setattr(Pipeline, "verify", verify_pipeline, raising=False)
    return made


# ---- what is printed, and the exit code ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "exit_code", "summary"),
    [("", 0, "no findings"), ("WARNING", 0, "1 warning"), ("ERROR, WARNING", 1, "1 error, 1 warning")],
)
def test_the_text_goes_to_stdout_and_errors_to_the_exit_code(
    engine: Any, found: str, exit_code: int, summary: str
) -> None:
    name = engine(f"def check():\n    return Report([{found}])\n")
    done = run("verify", f"{name}:check")
    assert done.exit_code == exit_code
    assert done.stdout.splitlines()[-1] == summary
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("format_", ["text", "json", "sarif"])
def test_formats_and_output(engine: Any, format_: str) -> None:
    name = engine("report = Report([ERROR])")
    expected = getattr(Report([ERROR]), format_)() + "\n"
    assert run("verify", f"{name}:report", "--format", format_).stdout == expected
    done = run("verify", f"{name}:report", "--format", format_, "--output", "report.out")
    assert (done.exit_code, done.stdout) == (1, "1 error\n")
    assert Path("report.out").read_text(encoding="utf-8") == expected


def test_color_only_where_it_is_asked_for_or_seen(engine: Any) -> None:
    name = engine("report = Report([ERROR])")
    assert "\x1b[1;31m" in run("verify", f"{name}:report", "--color").stdout
    assert "\x1b" not in run("verify", f"{name}:report", "--no-color").stdout
    run("verify", f"{name}:report", "--output", "report.txt")
    assert "\x1b" not in Path("report.txt").read_text(encoding="utf-8")


def test_what_a_target_prints_does_not_get_into_the_report(engine: Any) -> None:
    name = engine("print('loading')\ndef check():\n    print('building')\n    return Report()\n")
    done = run("verify", f"{name}:check", "--format", "json")
    assert json.loads(done.stdout)["summary"] == {"errors": 0, "warnings": 0, "allowed": 0}
    assert done.stderr == "loading\nbuilding\n"


def test_several_targets_add_up(engine: Any) -> None:
    name = engine("a = Report([WARNING])\nclass Inner:\n    b = Report([ERROR, WARNING])\n")
    done = run("verify", f"{name}:a", f"{name}:Inner.b")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "1 error, 1 warning"
    assert "(2x)" in done.stdout


# ---- what it verifies ------------------------------------------------------------------------------------------------


def test_a_model_is_verified_on_forward_or_on_the_walks_given(engine: Any, calls: list[Any]) -> None:
    name = engine("def make():\n    return MODEL, (torch.ones(1, 2),), {'scale': 3}\nplain = MODEL, (1,)\n")
    assert run("verify", f"{name}:make").exit_code == 0
    model, args, kwargs, options = calls.pop()
    assert (model, kwargs) == ("Linear", {"scale": 3})
    assert args[0].equal(torch.ones(1, 2))
    assert options == {"walk": "forward", "strict": False, "input_spans": None, "padding": "both"}

    spans = ["--input-span", "mel=-1", "--input-span", "image=-2,-1"]
    done = run("verify", f"{name}:plain", "--walk", "a", "--walk", "b", "--strict", *spans, "--padding", "left")
    assert [call[:2] for call in calls] == [("Linear", (1,))] * 2
    expected = {"strict": True, "input_spans": {"mel": Span((-1,)), "image": Span((-2, -1))}, "padding": "left"}
    assert [call[3] for call in calls] == [{"walk": walk, **expected} for walk in ("a", "b")]
    assert [line.split()[-1] for line in done.stdout.splitlines() if " on " in line] == ["a", "b"]


def test_a_pipeline_is_verified_on_all_its_walks_or_on_those_given(
    engine: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = engine("def make():\n    return Pipeline([Node('talker')], walks=('a', 'b'))\n")
    assert run("verify", f"{name}:make").exit_code == 1
    assert run("verify", f"{name}:make", "--walk", "a", "--walk", "b", "--strict").exit_code == 1
    assert calls == [None, "a", "b"]
    pipeline = Pipeline([spangraph.Node("talker")])
    monkeypatch.setattr(Pipeline, "from_toml", {"configs/engine.toml": pipeline}.__getitem__, raising=False)
    assert run("verify", "configs/engine.toml").exit_code == 1
    assert calls[3:] == [None]


# What each kind of target has no use for: to skip it silently would be to check less than was asked for.
@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("pipeline", ["--input-span", "x=-1"], "gives a Pipeline, which takes no --input-span"),
        ("pipeline", ["--padding", "left", "--strict"], "gives a Pipeline, which takes no --padding"),
        ("report", ["--walk", "a", "--strict"], "gives a Report, which takes no --walk, --strict"),
    ],
)
def test_options_without_use_are_refused(
    engine: Any, calls: list[Any], target: str, options: list[str], message: str
) -> None:
    name = engine("pipeline, report = Pipeline([Node('talker')]), Report()")
    done = run("verify", f"{name}:{target}", *options)
    assert (done.exit_code, calls) == (2, [])
    assert message in done.stderr


# ---- no verdict ------------------------------------------------------------------------------------------------------

_BROKEN = """
import json
class Model(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("no such bucket")
def in_forward():
    return Report([], Model()(1))
def in_library():
    return json.loads("{")
def leaves():
    raise SystemExit(0)
def nothing(): ...
def bare():
    return MODEL
linear = MODEL
unpacked = MODEL, torch.ones(1)
four = MODEL, (), {}, 1
text = "Report"
"""


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("in_forward", r"RuntimeError: no such bucket \({file}:9\)"),
        ("in_library", r"JSONDecodeError: Expecting .* \({file}:13\)"),
        ("leaves", r"SystemExit: 0 \({file}:15\)"),
        ("missing", "AttributeError: .*no attribute 'missing'"),
        ("linear.wieght", "AttributeError: .*no attribute 'wieght'"),
        ("nothing", "gives NoneType; expected a Pipeline, a Report"),
        ("bare", r"gives Linear; expected .*\(model, args\)"),
        ("linear", "gives Linear; expected"),
        ("unpacked", "gives Linear, Tensor; expected .* args being a tuple"),
        ("four", "gives Linear, tuple, dict, int; expected"),
        ("text", "gives str; expected"),
    ],
)
def test_a_target_that_fails_or_is_none_is_explained(engine: Any, attribute: str, message: str) -> None:
    name = engine(_BROKEN)
    done = run("verify", f"{name}:{attribute}")
    assert (done.exit_code, done.stdout) == (2, "")
    pattern = message.replace("{file}", re.escape(os.path.join(os.getcwd(), f"{name}.py")))
    assert re.search(pattern, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_the_traceback_is_shown_if_asked_for(engine: Any) -> None:
    name = engine(_BROKEN)
    done = run("verify", f"{name}:in_forward", "--traceback")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr
    assert "in forward" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify"], "Missing argument 'TARGET...'"),
        (["verify", "engine"], "'engine' is no target: expected package.module:factory or a .toml file"),
        (["verify", ":factory"], "':factory' is no target"),
        (["verify", "engine:"], "'engine:' is no target"),
        (["verify", "no_such_engine:factory"], "ModuleNotFoundError: No module named 'no_such_engine'\n"),
        (["verify", "a:b", "--format", "xml"], "Invalid value for '--format'"),
        (["verify", "a:b", "--input-span", "mel"], r"expected NAME=DIM[,DIM], such as mel=-1"),
        (["verify", "a:b", "--input-span", "mel=x"], r"expected NAME=DIM[,DIM], such as mel=-1"),
        (["verify", "a:b", "--input-span", "mel=0"], "none of them 0 (dim 0 holds the rows)"),
        (["rules", "SG999"], "there is no rule SG999: `spangraph rules` lists them"),
        (["verfy"], "No such command 'verfy'"),
    ],
)
def test_wrong_usage_is_2(engine: Any, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_module_that_does_not_import_says_which_line(engine: Any) -> None:
    name = engine("import no_such_dependency\n")
    done = run("verify", f"{name}:check")
    assert done.exit_code == 2
    assert f"No module named 'no_such_dependency' ({os.path.join(os.getcwd(), name)}.py:5)" in done.stderr


def test_an_output_that_cannot_be_written(engine: Any) -> None:
    name = engine("report = Report()")
    done = run("verify", f"{name}:report", "--output", "no/such/folder/report.txt")
    assert done.exit_code == 2
    assert "FileNotFoundError" in done.stderr


def test_a_file_that_does_not_exist_or_parse(engine: Any) -> None:
    Path("broken.toml").write_text("[[nodes]\n")
    for file in ("gone.toml", "broken.toml"):
        done = run("verify", file)
        assert (done.exit_code, done.stdout) == (2, "")
        assert file in done.stderr
        assert "Traceback" not in done.stderr


# ---- rules, and how it is started ------------------------------------------------------------------------------------


def test_rules() -> None:
    listed = run("rules").stdout.splitlines()
    assert [line.split()[:2] for line in listed] == [[rule.code, rule.severity] for rule in RULES.values()]
    explained = run("rules", "SG301").stdout
    assert explained.startswith(f"SG301  error    {RULES['SG301'].title}\n\n{RULES['SG301'].text}\n\nWrong:")
    assert RULES["SG301"].right in explained


def started(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """A process of its own, in the current directory."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "spangraph"]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_module_runs_and_finds_what_lies_in_the_current_directory(engine: Any) -> None:
    name = engine("report = Report([ERROR])")
    done = started("verify", f"{name}:report")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == f"{Report([ERROR]).text()}\n"


def test_the_script_finds_what_lies_in_the_current_directory(engine: Any) -> None:
    """Unlike `python -m`, a script has its own folder on the path."""
    name = engine("report = Report([ERROR])")
    code = "import sys; sys.path = [p for p in sys.path if p]; from spangraph.cli import main; sys.exit(main())"
    assert started("verify", f"{name}:report", code=code).returncode == 1


def test_without_click_it_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['click'] = None; import spangraph; import spangraph.cli"
    done = started(code=code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "The command spangraph needs click: pip install 'spangraph[cli]'\n"
