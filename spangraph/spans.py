"""Spans and the outputs that carry them: what a forward returns, and what builds spans on the device.

Everything that builds spans works without a host read, and traces. Nothing here knows of declarations or graphs.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spangraph.errors import DeclarationError, MergeError

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
        ids = [part.row_ids for part in parts if part.row_ids is not None]
        for kind in ("outputs", "output_spans", "row_values"):
            first = getattr(parts[0], kind)
            refuse_mixed(kind, [getattr(part, kind) for part in parts], ids if len(ids) == len(parts) else None)
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


_RETURNED = {"outputs": "outputs", "output_spans": "spans for", "row_values": "row values"}


def refuse_mixed(kind: str, names: Sequence[Iterable[str]], ids: Sequence[Sequence[Hashable]] | None) -> None:
    """Requests that return different names cannot be merged.

    Args:
        kind: the field of `SpannedOutput` that these are names of.
        names: per request.
        ids: row ids per request; None counts the requests.

    Raises:
        MergeError: with every group of requests that return the same.
    """
    groups: dict[tuple[str, ...], list[Hashable]] = {}
    for i, found in enumerate(names):
        groups.setdefault(tuple(sorted(found)), []).extend([i] if ids is None else ids[i])
    if len(groups) > 1:
        who, what = "parts" if ids is None else "requests", _RETURNED[kind]
        said = [
            f"{who} {group} return {f'{what} {list(found)}' if found else 'no ' + what.removesuffix(' for')}"
            for found, group in groups.items()
        ]
        raise MergeError(f"{', '.join(said)}: merge requests of one kind, or let all of them return the same names.")


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
        raise DeclarationError(
            f"from_lengths needs a tensor on the model's device, got {type(lengths).__name__}: a number there is a host"
            " read (.item(), .tolist()), which stalls and cannot be captured. Pass the tensor itself."
        )
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
        if isinstance(start, int):  # two kernels of each step less
            return torch.stack([torch.full_like(lengths, start), lengths + start if start else lengths], -1)
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


def iter_spanned(out: Any) -> Iterator[SpannedOutput]:
    """Every `SpannedOutput` in a pytree."""
    leaves, _ = pytree.tree_flatten(out, is_leaf=lambda node: isinstance(node, SpannedOutput))
    yield from (leaf for leaf in leaves if isinstance(leaf, SpannedOutput))
