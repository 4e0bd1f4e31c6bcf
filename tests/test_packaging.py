"""The three folders become one package: what is in the wheel, and what importing it pulls in."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = {"spangraph": "spangraph", "passes": "spangraph/passes", "kernels": "spangraph/kernels"}
_STALE_MODULE = "spangraph/deleted_long_ago.py"

# Nothing that a user of the package may not have. numpy is here although torch imports it where it finds it.
_OPTIONAL = [
    "triton",
    "numpy",
    "click",
    "scipy",
    "transformers",
    "diffusers",
    "silero_vad",
    "torchaudio",
    "soundfile",
    "matplotlib",
]

_IMPORT_WITHOUT_OPTIONAL = """
import sys, warnings

class Blocker:
    asked_for = []
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            self.asked_for.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocked = set(sys.argv[1:])
sys.meta_path.insert(0, Blocker())
import torch  # asks for some of them itself, and copes
Blocker.asked_for.clear()
warnings.simplefilter("error")
import spangraph, spangraph.passes, spangraph.kernels
assert not Blocker.asked_for, f"importing spangraph asked for {Blocker.asked_for}"
print(spangraph.__file__)
"""


def _run_python(*arguments, cwd):
    return subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The paths of an sdist, and of the wheel that was built from it, not from the tree."""
    tree = tmp_path_factory.mktemp("tree") / "spangraph"
    shutil.copytree(
        _ROOT,
        tree,
        ignore=shutil.ignore_patterns(".*", "build", "dist", "shared", "*.egg-info", "__pycache__", "demo-output"),
    )
    # What an earlier build may have left behind: a wheel built from the tree would bring it back.
    stale = tree / "build" / "lib" / _STALE_MODULE
    stale.parent.mkdir(parents=True)
    stale.touch()

    out = tmp_path_factory.mktemp("dist")
    build = _run_python("-m", "build", "--no-isolation", "--outdir", str(out), str(tree), cwd=out)
    assert build.returncode == 0, build.stdout + build.stderr
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel_names(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        return wheel.namelist()


def test_wheel_has_one_top_level_name(wheel_names):
    tops = {name.partition("/")[0] for name in wheel_names}
    metadata = {top for top in tops if top.endswith(".dist-info")}
    assert len(metadata) == 1
    assert tops - metadata == {"spangraph"}


def test_wheel_has_exactly_the_sources_of_the_three_folders(wheel_names):
    sources = {f"{inside}/{path.name}" for folder, inside in _FOLDERS.items() for path in (_ROOT / folder).glob("*.py")}
    assert len(sources) > len(_FOLDERS)
    assert {name for name in wheel_names if name.endswith(".py")} == sources


def test_folders_are_flat():
    """A subfolder would be missing from the wheel until pyproject.toml lists it as a package."""
    nested = [path for folder in _FOLDERS for path in (_ROOT / folder).glob("*/**/*.py")]
    assert nested == []


def test_wheel_is_marked_as_typed_and_carries_the_rules_and_the_license(wheel_names):
    assert "spangraph/py.typed" in wheel_names
    assert "spangraph/rules.md" in wheel_names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


def test_sdist_carries_what_is_needed_to_run_the_tests(distributions):
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    tests = {path.relative_to(_ROOT).as_posix() for path in (_ROOT / "tests").rglob("*.py")}
    assert tests <= names
    assert "tests/data/sarif-schema-2.1.0.json" in names
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"} <= names
    assert not any("__pycache__" in name for name in names)


def test_wheel_imports_without_triton_numpy_or_the_model_packages(distributions, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(distributions[1]) as wheel:
        wheel.extractall(site)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{_IMPORT_WITHOUT_OPTIONAL}"
    run = _run_python("-c", code, *_OPTIONAL, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()) == site / "spangraph" / "__init__.py"


def test_installed_package_imports_from_outside_the_repository(tmp_path):
    code = "import spangraph, spangraph.passes, spangraph.kernels, sys; print('triton' in sys.modules)"
    run = _run_python("-c", code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "False"
