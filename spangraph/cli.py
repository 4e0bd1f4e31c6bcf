"""The command `spangraph`: verify models and pipelines, explain rules. Exit codes: 0 fine, 1 errors, 2 no verdict."""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

import spangraph
from spangraph import Pipeline, Report, Span, rules
from spangraph.passes.nodes import is_user_file

try:
    import click
except ModuleNotFoundError:  # an extra; nothing but the command imports this module
    print("The command spangraph needs click: pip install 'spangraph[cli]'", file=sys.stderr)
    raise SystemExit(2) from None


class _Failure(click.ClickException):
    exit_code = 2


@click.group()
@click.version_option(spangraph.__version__, prog_name="spangraph")
def main() -> None:
    """Check what padding, speculation and capture would do to a model, before it is served."""


@main.command(name="rules")
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """List the rules, or explain one: spangraph rules SG301."""
    if code is not None and code not in rules.RULES:
        raise click.UsageError(f"there is no rule {code}: `spangraph rules` lists them.")
    for known in rules.RULES.values() if code is None else [rules.rule(code)]:
        click.echo(f"{known.code}  {known.severity:7}  {known.title}" + (f"\n\n{known.markdown}" if code else ""))


def _input_spans(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> Any:
    try:
        return {name: Span(tuple(map(int, dims.split(",")))) for name, _, dims in (t.partition("=") for t in given)}
    except ValueError as error:  # also what Span raises
        raise click.BadParameter(f"{' '.join(given)}: expected NAME=DIM[,DIM], such as mel=-1 ({error})") from None


@main.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@click.option("--walk", multiple=True, help="Check this walk; several add up.")
@click.option("--strict", is_flag=True, help="Count leaks, and reads that export leaves out, as errors.")
@click.option("--format", "format_", type=click.Choice(["text", "json", "sarif"]), default="text")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write there; print the summary only.")
@click.option("--color/--no-color", default=None, help="Default: on a terminal.")
@click.option("--input-span", multiple=True, callback=_input_spans, metavar="NAME=DIM[,DIM]", help="A padded input.")
@click.option("--padding", type=click.Choice(["both", "left", "right"]), help="Where inputs are padded; default: both.")
@click.option("--traceback", "trace", is_flag=True, help="Show all of what a target raises.")
def verify(targets: tuple[str, ...], format_: str, output: Path | None, color: bool | None, **options: Any) -> None:
    """Verify each TARGET: package.module:factory, or a .toml file with a pipeline.

    The factory is called without arguments, and gives a Pipeline, a Report, (model, args) or (model, args, kwargs).
    Without --walk a pipeline is checked on all its walks, a model on "forward".
    """
    trace, report = options.pop("trace"), Report()
    for target in targets:
        with _explained(target, trace):
            report += _verify(target, **options)
    plain = output is not None or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    color = not plain and sys.stdout.isatty() if color is None else bool(color and output is None)
    text = report.text(color=bool(color)) if format_ == "text" else getattr(report, format_)()
    if output is not None:
        with _explained(str(output), trace):
            output.write_text(f"{text}\n", encoding="utf-8")
    click.echo(text if output is None else report.summary, color=color)
    raise SystemExit(report.exit_code)


def _verify(target: str, walk: tuple[str, ...], strict: bool, input_span: Mapping[str, Any], padding: str) -> Report:
    found = _load(target)
    given = {"--walk": walk, "--strict": strict, "--input-span": input_span, "--padding": padding}
    takes = {Report: 0, Pipeline: 2}.get(type(found), 4)
    if unused := [option for option, value in list(given.items())[takes:] if value]:
        raise click.UsageError(f"{target} gives a {type(found).__name__}, which takes no {', '.join(unused)}.")
    if isinstance(found, Report):
        return found
    if isinstance(found, Pipeline):
        return sum((found.verify(w) for w in walk or (None,)), Report())
    rest: dict[str, Any] = {"strict": strict, "input_spans": input_span or None, "padding": padding or "both"}
    return sum((spangraph.verify(*found, walk=w, **rest) for w in walk or ("forward",)), Report())


def _load(target: str) -> Any:
    if target.endswith(".toml"):
        return Pipeline.from_toml(target)
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise click.UsageError(f"{target!r} is no target: expected package.module:factory or a .toml file.")
    sys.path.insert(0, os.getcwd())
    found: Any = operator.attrgetter(attribute)(importlib.import_module(name))
    found = found() if callable(found) and not isinstance(found, nn.Module) else found
    match found:
        case Pipeline() | Report() | (nn.Module(), tuple()) | (nn.Module(), tuple(), None | Mapping()):
            return found
    kinds = ", ".join(type(x).__name__ for x in (found if isinstance(found, tuple) else [found]))
    expected = "a Pipeline, a Report, (model, args) or (model, args, kwargs), args being a tuple"
    raise click.UsageError(f"{target} gives {kinds}; expected {expected}.")


@contextlib.contextmanager
def _explained(subject: str, trace: bool) -> Iterator[None]:
    """Turn what is raised, SystemExit too, into a message and exit code 2; keep what a target prints off stdout."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except click.UsageError:
        raise
    except BaseException as error:  # noqa: BLE001 - any code of the user's may end in SystemExit, or a skip of pytest's
        if trace:
            traceback.print_exc()
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
        users = [f"{f.filename}:{f.lineno}" for f in frames if f.filename != importlib.__file__]
        below = [where for where in users if where.startswith(os.path.join(os.getcwd(), ""))]
        at = f" ({(below or users)[-1]})" if users else ""
        raise _Failure(f"{subject}: {type(error).__name__}: {error}{at}") from None
