"""Declarations: which outputs of a submodule are spanned, and the spans themselves.

This is the ground floor: nothing here knows about graphs, rings or devices. Everything that builds spans works on the
device, without a host read, and traces.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spangraph.errors import DeclarationError, MergeError

_ADAPTERS = "_spangraph_adapters"
# A span that could not be built carries its reason to the host, where its check fails: a start far beyond its end, and
# far enough from int64's limits that scaling by a hop (up to 2**20) or clamping to a row's length keeps it so.
_BAD_END = -(2**40)
_NOT_WHOLE = 2**42  # + the float32 bits of the length
_TOO_MANY_RUNS = 2**40  # + the number of runs


@dataclass(frozen=True)
class Span:
    """How an output is spanned.

    Args:
        dims: spanned dims of the output tensor, e.g. `(-1,)` for samples, `(-2, -1)` for height and width. Dim 0 holds
            the rows and cannot be spanned.
        max_spans: number of spans a row may have. With more than one, a row's entry is a tuple of tensors, and unused
            spans are empty.

    The spans tensor of an output is int64, `[bs, 2]`; `[bs, len(dims), 2]` for several dims; `[bs, max_spans, 2]` for
    several spans; `[bs, max_spans, len(dims), 2]` for both.

    Raises:
        DeclarationError: if dims are empty, repeated or name dim 0, or `max_spans` is below 1.
    """

    dims: tuple[int, ...] = (-1,)
    max_spans: int = 1

    def __post_init__(self) -> None:
        dims = (self.dims,) if isinstance(self.dims, int) else tuple(self.dims)
        object.__setattr__(self, "dims", dims)
        if not dims or any(not isinstance(d, int) for d in dims) or len(set(dims)) != len(dims) or 0 in dims:
            raise DeclarationError(
                f"Span(dims={self.dims!r}): expected one or more different ints, none of them 0 (dim 0 holds the rows)."
            )
        if not isinstance(self.max_spans, int) or self.max_spans < 1:
            raise DeclarationError(f"Span(max_spans={self.max_spans!r}): expected an int of at least 1.")

    @property
    def words_per_row(self) -> int:
        """Number of int64 words that one row's spans take."""
        return self.max_spans * len(self.dims) * 2

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Shape of the spans tensor for `num_rows` rows."""
        spans = (self.max_spans,) if self.max_spans > 1 else ()
        dims = (len(self.dims),) if len(self.dims) > 1 else ()
        return (num_rows, *spans, *dims, 2)


@dataclass(eq=False)
class SpannedOutput:
    """What a declaring forward returns. A registered pytree.

    Args:
        outputs: name -> padded tensor `[bs, ...]`.
        output_spans: name -> int64 spans on the same device (shapes: see `Span`), for every declared name or for none.
        row_values: name -> small int64 values `[bs]` or `[bs, k]` that travel to the host with the spans.
        row_ids: ids of the rows, where the caller knows them; used by `merge`.
    """

    outputs: Mapping[str, Any] = field(default_factory=dict)
    output_spans: Mapping[str, Tensor] = field(default_factory=dict)
    row_values: Mapping[str, Tensor] = field(default_factory=dict)
    row_ids: tuple[Hashable, ...] | None = None

    def __getitem__(self, name: str) -> Any:
        """The output called `name`."""
        return self.outputs[name]

    @staticmethod
    def merge(parts: Sequence[SpannedOutput]) -> SpannedOutput:
        """Concatenate per-request outputs along dim 0: outputs, spans, row values and row ids.

        Raises:
            MergeError: if there is nothing to merge, if names, padded shapes, dtypes or devices differ, if only some
                parts carry spans, row values or row ids, if the tensors or ids of one part are not of as many rows, or
                if a row id occurs twice.
        """
        if not parts:
            raise MergeError("SpannedOutput.merge got no outputs: expected at least one.")
        for i, part in enumerate(parts):
            _check_rows(i, part)
        merged: dict[str, dict[str, Tensor]] = {}
        for kind in ("outputs", "output_spans", "row_values"):
            first = getattr(parts[0], kind)
            for i, part in enumerate(parts):
                if set(getattr(part, kind)) != set(first):
                    raise MergeError(
                        f"{kind} of part 0 are {sorted(first)}, of part {i} {sorted(getattr(part, kind))}: merged parts"
                        " need the same names. Merge requests of one kind, or return spans from all of them."
                    )
            merged[kind] = {name: _concatenate(kind, name, [getattr(p, kind)[name] for p in parts]) for name in first}
        have_ids = [i for i, part in enumerate(parts) if part.row_ids is not None]
        row_ids: tuple[Hashable, ...] | None = None
        if have_ids:
            if len(have_ids) != len(parts):
                raise MergeError(f"only parts {have_ids} of {len(parts)} carry row_ids: give them to all or to none.")
            row_ids = tuple(row_id for part in parts for row_id in part.row_ids or ())
            if len(set(row_ids)) != len(row_ids):
                raise MergeError(f"row_ids {list(row_ids)} hold one id twice: every row needs its own.")
        return SpannedOutput(merged["outputs"], merged["output_spans"], merged["row_values"], row_ids)


def _check_rows(index: int, part: SpannedOutput) -> None:
    """Refuse a part whose tensors would not line up row by row after the merge."""
    num_rows = {} if part.row_ids is None else {"row_ids": len(part.row_ids)}
    for kind in ("outputs", "output_spans", "row_values"):
        for name, tensor in getattr(part, kind).items():
            if not isinstance(tensor, Tensor) or tensor.ndim == 0:
                found = "a 0-d tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise MergeError(f"{kind}[{name!r}] of part {index} is {found}: only tensors [bs, ...] can be merged.")
            num_rows[f"{kind}[{name!r}]"] = tensor.shape[0]
    if len(set(num_rows.values())) > 1:
        raise MergeError(f"part {index} has different numbers of rows: {num_rows}.")


def _concatenate(kind: str, name: str, tensors: Sequence[Tensor]) -> Tensor:
    kinds = {(tuple(t.shape[1:]), t.dtype, t.device) for t in tensors}
    if len(kinds) > 1:
        raise MergeError(
            f"{kind}[{name!r}] differs between parts: {sorted(map(str, kinds))}. Pad every request to one width, on one"
            " device, before the merge; the spans say what is valid."
        )
    return torch.cat(list(tensors))


def _flatten_output(out: SpannedOutput) -> tuple[list[Any], tuple[Hashable, ...] | None]:
    return [dict(out.outputs), dict(out.output_spans), dict(out.row_values)], out.row_ids


def _flatten_output_with_keys(out: SpannedOutput) -> tuple[list[tuple[Any, Any]], tuple[Hashable, ...] | None]:
    children, context = _flatten_output(out)
    names = ("outputs", "output_spans", "row_values")
    return [(pytree.GetAttrKey(n), c) for n, c in zip(names, children, strict=True)], context


def _unflatten_output(children: Any, context: tuple[Hashable, ...] | None) -> SpannedOutput:
    outputs, spans, values = children
    return SpannedOutput(outputs, spans, values, context)


pytree.register_pytree_node(
    SpannedOutput,
    _flatten_output,
    _unflatten_output,
    serialized_type_name="spangraph.SpannedOutput",
    flatten_with_keys_fn=_flatten_output_with_keys,
)


# ---- spans, on the device ----------------------------------------------------------------------------------------


def from_lengths(lengths: Tensor, *, start: Tensor | int = 0) -> Tensor:
    """Spans `[start, start + length)`, one per length.

    Args:
        lengths: `[bs]`, or `[bs, num_dims]` for an output spanned on several dims; any int or float dtype. Floats must
            be whole: a fraction, NaN or infinity becomes a span that fails its check on the host, for that row alone.
        start: an int, or a tensor that broadcasts to `lengths`.

    Returns:
        int64 spans, the shape of `lengths` with a last dim of 2.

    Raises:
        DeclarationError: if `lengths` is not a tensor, is bool or complex, or has no row dim; or if `start` is no int.
    """
    if not isinstance(lengths, Tensor):
        raise DeclarationError(f"from_lengths needs a tensor on the model's device, got {type(lengths).__name__}.")
    if lengths.dtype is torch.bool or lengths.is_complex():
        raise DeclarationError(f"from_lengths got {lengths.dtype} lengths: for a mask use from_mask.")
    if lengths.ndim < 1:
        raise DeclarationError("from_lengths got a 0-d tensor: expected [bs] or [bs, num_dims].")
    if isinstance(start, Tensor) and not start.is_floating_point() and start.dtype is not torch.bool:
        start = start.to(torch.int64)
    elif not isinstance(start, int) or isinstance(start, bool):
        found = f"{start.dtype} tensor" if isinstance(start, Tensor) else repr(start)
        raise DeclarationError(f"from_lengths(start=...) got {found}: expected an int, or a tensor of ints.")
    if not lengths.is_floating_point():
        lengths = lengths.to(torch.int64)
        first = torch.zeros_like(lengths) + start
        return torch.stack([first, first + lengths], -1)
    whole = torch.isfinite(lengths) & (lengths == lengths.floor()) & (lengths.abs() < 2.0**53)
    length = torch.where(whole, lengths, 0).to(torch.int64)
    bits = lengths.to(torch.float32).contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    first = torch.zeros_like(length) + start
    last = torch.where(whole, first + length, _BAD_END)
    return torch.stack([torch.where(whole, first, bits + _NOT_WHOLE), last], -1)


def from_mask(mask: Tensor, *, max_spans: int = 1) -> Tensor:
    """Spans of the runs of valid positions in a mask.

    Args:
        mask: `[bs, width]`, bool or int (non-zero is valid, as in attention masks).
        max_spans: number of runs a row may have. A row with more becomes a span that fails its check on the host.

    Returns:
        int64 spans `[bs, 2]`, or `[bs, max_spans, 2]`; a row without valid positions has empty spans (withheld).

    Raises:
        DeclarationError: if `mask` is not a 2-d bool or int tensor, or `max_spans` is below 1.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point() or mask.is_complex():
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise DeclarationError(
            f"from_mask needs a bool or int mask [bs, width], got {found}; reduce it to one value a position (any), and"
            " compare floats first (> 0)."
        )
    if not isinstance(max_spans, int) or max_spans < 1:
        raise DeclarationError(f"from_mask(max_spans={max_spans!r}): expected an int of at least 1.")
    valid = mask if mask.dtype is torch.bool else mask != 0
    width = valid.shape[1]
    edge = torch.zeros_like(valid[:, :1])
    starts = valid & ~torch.cat([edge, valid[:, :-1]], 1)
    ends = valid & ~torch.cat([valid[:, 1:], edge], 1)
    position = torch.arange(width, device=mask.device)
    # Sorting pushes "no run here" to the back: no nonzero(), so no host read and a static shape.
    firsts = torch.where(starts, position, width).sort(1).values
    lasts = torch.where(ends, position + 1, width + 1).sort(1).values
    if width < max_spans:
        firsts = torch.nn.functional.pad(firsts, (0, max_spans - width), value=width)
        lasts = torch.nn.functional.pad(lasts, (0, max_spans - width), value=width + 1)
    firsts, lasts = firsts[:, :max_spans], lasts[:, :max_spans]
    used = lasts <= width
    num_runs = starts.sum(1, keepdim=True)
    spans = torch.stack([torch.where(used, firsts, 0), torch.where(used, lasts, 0)], -1)
    bad = torch.stack([num_runs + _TOO_MANY_RUNS, torch.full_like(num_runs, _BAD_END)], -1)
    spans = torch.where((num_runs > max_spans)[..., None], bad, spans)
    return spans[:, 0] if max_spans == 1 else spans


def withhold(spans: Tensor, mask: Tensor) -> Tensor:
    """Empty the spans of the rows where `mask` is true, so that they yield no entry.

    Args:
        spans: int64 spans, any shape that `Span` allows.
        mask: bool `[bs]`, on the same device.

    Raises:
        DeclarationError: if `mask` is not a bool tensor with one value per row.
    """
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape != spans.shape[:1]:
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise DeclarationError(f"withhold needs a bool mask [{spans.shape[0]}] (one value per row), got {found}.")
    return torch.where(mask.reshape(-1, *[1] * (spans.ndim - 1)), 0, spans)


def describe_bad_span(start: int, end: int, width: int) -> str:
    """Say why `[start, end)` is not a span of an output of that width."""
    hop, odd = divmod(end, _BAD_END)
    if hop > 0 and not odd and start % hop == 0:
        if start // hop >= _NOT_WHOLE:
            value = struct.unpack("<f", struct.pack("<I", (start // hop - _NOT_WHOLE) & 0xFFFFFFFF))[0]
            return f"length {value} is not a whole number below 2**53: round it in the model before from_lengths"
        if start // hop >= _TOO_MANY_RUNS:
            runs = start // hop - _TOO_MANY_RUNS
            return f"its mask has {runs} runs of valid positions: declare Span(max_spans={runs}) or mend the mask"
    return f"span [{start}, {end}) does not fit 0 <= start <= end <= {width}"


# ---- who declares what -------------------------------------------------------------------------------------------

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
    outputs = {name: _pick(declaration, out, name) for name in given}
    return SpannedOutput(outputs, given, {name: v for name, v in values.items() if v is not None})


def _pick(declaration: Declaration, out: Any, name: str) -> Any:
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


def iter_spanned(out: Any) -> Iterator[SpannedOutput]:
    """Every `SpannedOutput` in a pytree."""
    leaves, _ = pytree.tree_flatten(out, is_leaf=lambda node: isinstance(node, SpannedOutput))
    yield from (leaf for leaf in leaves if isinstance(leaf, SpannedOutput))
