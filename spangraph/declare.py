"""Declarations: which outputs of a submodule are spanned, said by the module itself or from outside.

This is the ground floor: nothing here knows about graphs, rings or devices.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spangraph.errors import DeclarationError
from spangraph.spans import Span, SpannedOutput

_ADAPTERS = "_spangraph_adapters"

SpansOf = Callable[..., "Tensor | None"]


@dataclass(frozen=True)
class _Adapter:
    method: str
    walks: tuple[str, ...] | None
    outputs: Mapping[str, SpansOf]
    spans: Mapping[str, Span]
    row_values: Mapping[str, SpansOf]


class _DeclaredScript(nn.Module):
    """Holds a ScriptModule, which takes no hooks, so that it can be declared."""

    def __init__(self, script: nn.Module) -> None:
        super().__init__()
        self.script = script

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.script(*args, **kwargs)


def declare(
    module: nn.Module,
    outputs: Mapping[str | int, SpansOf] | None = None,
    /,
    *,
    method: str = "forward",
    spans: Mapping[str | int, Span] | None = None,
    row_values: Mapping[str, SpansOf] | None = None,
    walks: Sequence[str] | None = None,
    **named: SpansOf,
) -> nn.Module:
    """Declare spanned outputs of a module whose code one cannot edit.

    Args:
        module: the module; it is changed in place and returned. A ScriptModule is wrapped: use what is returned.
        outputs, **named: output -> function `(out, *args, **kwargs) -> spans` of what the module returned and was
            called with; it runs on the device and is traced. An output is a field, key or index of what the module
            returns; where it returns one tensor, the only name given names that tensor. A function may return None:
            no spans at this call.
        method: the method that produces the outputs, e.g. `"decode"`.
        spans: output -> `Span`, for outputs spanned otherwise than once along the last dim.
        row_values: name -> function as above that returns int64 values `[bs]` or `[bs, k]`.
        walks: walks on which the outputs are spanned; all if None.

    Raises:
        DeclarationError: if nothing is declared, a function is not callable, or the method does not exist.
    """
    given: dict[Any, SpansOf] = {**(outputs or {}), **named}
    functions = {str(name): fn for name, fn in given.items()}
    shapes = {str(name): span for name, span in (spans or {}).items()}
    if not functions and not row_values:
        raise DeclarationError("declare() got no outputs: expected name=function, e.g. audio=lambda out, x, n: ...")
    for name, fn in {**functions, **(row_values or {})}.items():
        if not callable(fn):
            raise DeclarationError(
                f"declare({name}={type(fn).__name__}): expected a function (out, *args, **kwargs) -> spans,"
                f" e.g. {name}=lambda out, x, lengths: spangraph.from_lengths(lengths); dims and max_spans go to"
                f" spans={{{name!r}: Span(...)}}."
            )
    if unknown := sorted(set(shapes) - set(functions)):
        raise DeclarationError(f"spans= names {unknown}, which are not declared; declared are {sorted(functions)}.")
    if not callable(getattr(module, method, None)):
        raise DeclarationError(f"{type(module).__name__} has no method {method!r} to declare outputs of.")
    if isinstance(module, torch.jit.ScriptModule):
        if method != "forward":
            raise DeclarationError(f"a ScriptModule can be declared through forward only, got method={method!r}.")
        module = _DeclaredScript(module)
    adapter = _Adapter(
        method,
        None if walks is None else tuple(walks),
        functions,
        {name: shapes.get(name, Span()) for name in functions},
        dict(row_values or {}),
    )
    module.__dict__[_ADAPTERS] = (*module.__dict__.get(_ADAPTERS, ()), adapter)
    return module


@dataclass(frozen=True)
class Declaration:
    """One submodule's declaration on one walk.

    Attributes:
        module: the declaring submodule.
        fqn: its name in the model; `""` for the root.
        method: the method whose outputs are spanned.
        spans: declared name -> `Span`; empty where the walk has none.
        where: `"file:line"` of that method.
    """

    module: nn.Module
    fqn: str
    method: str
    spans: Mapping[str, Span]
    where: str
    adapter: _Adapter | None = None

    @property
    def names(self) -> set[str]:
        """Declared spanned outputs and row values."""
        return {*self.spans, *(self.adapter.row_values if self.adapter is not None else ())}

    def read(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpannedOutput:
        """What the module returned, as a checked `SpannedOutput` (empty where it returned no spans).

        Raises:
            DeclarationError: see `_check_output`.
        """
        if self.adapter is not None:
            out = _adapt(self, self.adapter, out, args, kwargs)
        if not isinstance(out, SpannedOutput):
            return SpannedOutput()
        _check_output(self, out)
        return out

    def __str__(self) -> str:
        name = self.fqn or "the root module"
        return f"{name} ({type(self.module).__name__}.{self.method})"


def find_declarations(model: nn.Module, walk: str) -> list[Declaration]:
    """All declarations in `model` on `walk`, outermost first, also those that declare nothing on it.

    Raises:
        DeclarationError: if `spanned_outputs` returns something else than names or a mapping name -> `Span`.
    """
    found = []
    for fqn, module in model.named_modules():
        if callable(own := getattr(type(module), "spanned_outputs", None)):
            names = own(module, walk)
            found.append(Declaration(module, fqn, "forward", _named_spans(fqn, names), source_of(module, "forward")))
        for adapter in module.__dict__.get(_ADAPTERS, ()):
            active = adapter.walks is None or walk in adapter.walks
            spans = adapter.spans if active else {}
            if active:
                where = source_of(module, adapter.method)
                found.append(Declaration(module, fqn, adapter.method, spans, where, adapter))
    return found


def _named_spans(fqn: str, names: Any) -> dict[str, Span]:
    if names is None:
        return {}
    spans = dict(names) if isinstance(names, Mapping) else {}
    if not isinstance(names, Mapping):
        if isinstance(names, str) or not isinstance(names, Sequence | set | frozenset):
            raise DeclarationError(
                f"spanned_outputs of {fqn or 'the root module'} returned {names!r}: expected a sequence of names or a"
                " mapping name -> Span, e.g. ('audio',)."
            )
        spans = {name: Span() for name in names}
    for name, span in spans.items():
        if not isinstance(name, str) or not isinstance(span, Span):
            raise DeclarationError(
                f"spanned_outputs of {fqn or 'the root module'} maps {name!r} to {span!r}: expected str -> Span."
            )
    return spans


def source_of(module: nn.Module, method: str) -> str:
    try:
        function = inspect.unwrap(getattr(type(module), method))
        first = function.__code__.co_firstlineno  # a decorator's, if there is one
        file = str(inspect.getsourcefile(function))
    except (TypeError, AttributeError):
        return ""
    lines = itertools.islice(linecache.getlines(file), first - 1, None)
    skipped = sum(1 for _ in itertools.takewhile(lambda line: not line.lstrip().startswith(("def ", "async ")), lines))
    return f"{file}:{first + skipped if linecache.getline(file, first + skipped) else first}"


def _adapt(
    declaration: Declaration, adapter: _Adapter, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SpannedOutput:
    for name, fn in {**adapter.outputs, **adapter.row_values}.items():
        try:
            inspect.signature(fn).bind(out, *args, **kwargs)
        except TypeError as error:
            raise DeclarationError(
                f"the function declared for {name!r} of {declaration} is called as (out, *args, **kwargs), with what"
                f" the module returned and was called with, and cannot be: {error}. Take *args, **kwargs."
            ) from None
    spans = {name: fn(out, *args, **kwargs) for name, fn in adapter.outputs.items()}
    values = {name: fn(out, *args, **kwargs) for name, fn in adapter.row_values.items()}
    given = {name: value for name, value in spans.items() if value is not None}
    outputs = {name: pick_output(declaration, out, name) for name in given}
    return SpannedOutput(outputs, given, {name: v for name, v in values.items() if v is not None})


def pick_output(declaration: Declaration, out: Any, name: str) -> Any:
    """What a declared name means in what the module returned: that tensor, or its field, key or index.

    Raises:
        DeclarationError: SG101, if there is no such thing.
    """
    if isinstance(out, Tensor) and len(declaration.spans) == 1:
        return out
    if isinstance(out, SpannedOutput) and name in out.outputs:
        return out.outputs[name]
    if isinstance(out, Mapping) and name in out:
        return out[name]
    if isinstance(out, Sequence) and name.lstrip("-").isdigit() and -len(out) <= int(name) < len(out):
        return out[int(name)]
    if not isinstance(out, Tensor) and hasattr(out, name):
        return getattr(out, name)
    if isinstance(out, Mapping):
        available: list[Any] = list(out)
    elif isinstance(out, Tensor):
        available = ["the one tensor it returns"]
    elif isinstance(out, Sequence):
        available = list(getattr(out, "_fields", range(len(out))))
    else:
        available = sorted(vars(out)) if hasattr(out, "__dict__") else []
    raise DeclarationError(
        f"SG101 {declaration} was declared to return {name!r}, but returned {type(out).__name__} with {available}: name"
        " a field, key or index of what it returns."
    )


def _check_output(declaration: Declaration, out: SpannedOutput) -> None:
    """Refuse spans that do not fit the declaration.

    Raises:
        DeclarationError: SG101 some but not all declared outputs have spans, SG102 spans for an undeclared output,
            SG103 wrong shape, SG104 wrong dtype, SG105 wrong device, SG106 bad row values.
    """
    declared, given = set(declaration.spans), set(out.output_spans)
    if undeclared := given - declared:
        raise DeclarationError(
            f"SG102 {declaration} returned spans for {sorted(undeclared)}, which it does not declare on this walk;"
            f" declared: {sorted(declared)}, given: {sorted(given)}. Add the names to spanned_outputs(walk)."
        )
    if given and given != declared:
        raise DeclarationError(
            f"SG101 {declaration} returned spans for {sorted(given)} but declares {sorted(declared)}: a step returns"
            " spans for every declared output or for none. Withhold a row with an empty span instead."
        )
    num_rows: dict[str, int] = {}
    for name, spans in out.output_spans.items():
        span, value = declaration.spans[name], out.outputs.get(name)
        label = f"{declaration}, output {name!r}"
        if not isinstance(value, Tensor):
            raise DeclarationError(
                f"SG101 {label}: spans were given, but outputs holds {type(value).__name__} under that name;"
                f" outputs: {sorted(out.outputs)}, spans: {sorted(given)}."
            )
        if not isinstance(spans, Tensor):
            raise DeclarationError(
                f"SG105 {label}: spans are a host {type(spans).__name__}; expected an int64 tensor on {value.device}."
            )
        if value.ndim < 2 or any(not -value.ndim <= d < value.ndim or d % value.ndim == 0 for d in span.dims):
            raise DeclarationError(
                f"SG103 {label}: spanned dims {list(span.dims)} do not fit a tensor of shape {list(value.shape)};"
                " dim 0 holds the rows."
            )
        _check_column(label, "spans", spans, span.shape(value.shape[0]), value.device)
        num_rows[name] = value.shape[0]
    for name, values in out.row_values.items():
        label = f"{declaration}, row value {name!r}"
        if not isinstance(values, Tensor):
            raise DeclarationError(f"SG106 {label}: a host {type(values).__name__}; expected an int64 tensor.")
        if values.ndim not in (1, 2):
            raise DeclarationError(f"SG106 {label}: shape {list(values.shape)}; expected [bs] or [bs, k].")
        _check_column(label, "row values", values, tuple(values.shape), values.device)
        num_rows[name] = values.shape[0]
    if len(set(num_rows.values())) > 1:
        raise DeclarationError(
            f"SG103 {declaration}: outputs and row values have different numbers of rows: {num_rows}; dim 0 of each"
            " holds the rows of the batch."
        )


def _check_column(label: str, what: str, column: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if column.dtype is not torch.int64:
        lengths = what == "spans" and column.is_floating_point()
        how = "spangraph.from_lengths(lengths)" if lengths else ".to(torch.int64)"
        raise DeclarationError(f"SG104 {label}: {what} are {column.dtype}, expected torch.int64; convert with {how}.")
    if tuple(column.shape) != shape:
        raise DeclarationError(
            f"SG103 {label}: {what} have shape {list(column.shape)}, expected {list(shape)} for this declaration:"
            " from_lengths and from_mask build them; Span(dims=..., max_spans=...) declares other shapes."
        )
    if column.device != device:
        raise DeclarationError(
            f"SG105 {label}: {what} are on {column.device}, the output is on {device}; build them on {device}."
        )
