"""Rows that are copied at the tail: their values, and how copies are asked for, inline and simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spangraph
from spangraph import (
    Copy,
    DeclarationError,
    InputError,
    Span,
    SpanError,
    SpannedOutput,
    from_lengths,
)

from .toys import Spans, Toy, batch, compiled, cut, num_instances, plain, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
LIFETIMES = pytest.mark.parametrize("lifetime", ["view", "device", "host"])
COPIED = pytest.mark.parametrize("lifetime", ["device", "host"])


# ---- values ----------------------------------------------------------------------------------------------------------


@BACKENDS
@LIFETIMES
@pytest.mark.parametrize("trace", ["export", "opaque"])
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_are_the_padded_slices_under_each_lifetime(on: str, lifetime: str, trace: str, depth: int) -> None:
    run = compiled(Toy(), on, trace, depth=depth, copies={"audio": lifetime})
    batches = [batch((3, 0, 5)) for _ in range(6)]
    for first in range(0, len(batches), depth):
        steps = [run.launch(x, n) for x, n in batches[first : first + depth]]
        for step, (x, n) in reversed(list(zip(steps, batches[first : first + depth], strict=True))):
            with step:
                assert values(step.rows()) == cut(x * 2 + 1, [3, 0, 5])
                result = step.result()
                assert values(result.outputs["audio"]) == cut(x * 2 + 1, [3, 0, 5])
                assert result.output_spans["audio"].equal(from_lengths(n))
                owned = step.rows().own()
            assert values(owned) == cut(x * 2 + 1, [3, 0, 5])


@BACKENDS
@LIFETIMES
def test_plain_calls_are_safe(on: str, lifetime: str) -> None:
    """K39: all results are read at the end."""
    run = compiled(Toy(), on, copies={"audio": lifetime})
    batches = [batch((3, 5)) for _ in range(5)]
    results = [run(x, n) for x, n in batches]
    for (x, n), result in zip(batches, results, strict=True):
        assert values(result.outputs["audio"]) == cut(x * 2 + 1, n.tolist())


@BACKENDS
@COPIED
def test_left_context(on: str, lifetime: str) -> None:
    """K3: new samples are the last of the row, so spans begin anywhere."""
    run = compiled(Spans(), on, copies={"audio": lifetime})
    x = torch.randn(3, 9)
    spans = torch.tensor([[6, 9], [0, 9], [8, 9]])
    with run.launch(x, spans) as step:
        assert values(step.rows()) == {0: x[0, 6:].tolist(), 1: x[1].tolist(), 2: x[2, 8:].tolist()}


@BACKENDS
@COPIED
def test_outputs_that_derive_are_copied_by_their_own_spans(on: str, lifetime: str) -> None:
    """Rows along another dim, reversed, sliced and upsampled positions: mapped on the device."""
    toy = Toy()

    def forward(self: Any, x: Tensor, n: Tensor) -> dict[str, Tensor]:
        y = self.toy(x, n)["audio"]
        return {
            "audio": y,
            "turned": y.t(),
            "late": y[:, 2:],
            "flipped": y.flip(1),
            "twice": y.repeat_interleave(2, dim=1),
            "thin": y[:, 1::2],
        }

    run = compiled(plain(forward, toy=toy), on, "export", copies={"audio": lifetime})
    x, n = batch((3, 5, 0, 1))
    y = x * 2 + 1
    with run.launch(x, n) as step:
        result = step.result()
        assert values(result["audio"]) == cut(y, n.tolist())
        assert values(result["turned"]) == cut(y, n.tolist())
        assert values(result["late"]) == {0: y[0, 2:3].tolist(), 1: y[1, 2:].tolist()}
        assert values(result["flipped"]) == {i: y[i, : n[i]].flip(0).tolist() for i in (0, 1, 3)}
        assert values(result["twice"]) == {i: y[i, : n[i]].repeat_interleave(2).tolist() for i in (0, 1, 3)}
        assert values(result["thin"]) == {0: y[0, 1:3:2].tolist(), 1: y[1, 1::2].tolist()}
        assert (result["late"].at(2), result["late"].at(3)) == (None, None)
    assert run.explain().count(f"copied to the {lifetime}") == 6


@BACKENDS
@COPIED
def test_a_bad_span_is_bad_in_what_derives_too(on: str, lifetime: str) -> None:
    run = compiled(
        plain(lambda self, x, s: self.inner(x, s)["audio"][:, :3], inner=Spans()), on, copies={"audio": lifetime}
    )
    x, spans = torch.randn(3, 5), torch.tensor([[0, 2], [0, 6], [1, 5]])
    with run.launch(x, spans) as step:
        rows = step.result()
        assert rows[0].equal(x[0, :2])
        assert rows[2].equal(x[2, 1:3])
        with pytest.raises(SpanError, match="row 1 of"):
            rows[1]


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@COPIED
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_copied_bit_for_bit(lifetime: str, dtype: torch.dtype) -> None:
    run = compiled(Spans(fn=lambda x: x.clone()), "simulated", copies={"audio": lifetime})
    most = 2 if dtype is torch.bool else 256
    x = torch.randint(0, most, (3, 2, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    spans = torch.tensor([[0, 5], [1, 2], [3, 3]])
    with run.launch(x, spans) as step:
        rows, owned = step.rows(), step.rows().own()
        for kept in (rows, owned):
            assert list(kept) == [0, 1]
            assert kept[0].dtype is dtype
            assert kept[0].contiguous().view(torch.uint8).equal(x[0].view(torch.uint8))
            assert kept[1].contiguous().view(torch.uint8).equal(x[1, :, 1:2].contiguous().view(torch.uint8))


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_copied_row_equals_its_padded_slice(data: st.DataObject) -> None:
    """Any shape, strides, spanned dims, number of spans and spans, good or bad, against plain slicing."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4), label="shape")
    ndim, bs = len(shape), shape[0]
    dims = data.draw(st.lists(st.integers(1, ndim - 1), min_size=1, max_size=2, unique=True), label="dims")
    order = data.draw(st.permutations(range(1, ndim)), label="strides")
    span = Span(dims=tuple(dim - ndim for dim in dims), max_spans=data.draw(st.integers(1, 2), label="max_spans"))
    bound = st.one_of(st.integers(-1, 5), st.sampled_from([-(2**63), 2**63 - 1]))
    pairs = [[[data.draw(st.tuples(bound, bound)) for _ in dims] for _ in range(span.max_spans)] for _ in range(bs)]
    lifetime = data.draw(st.sampled_from(["device", "host"]), label="lifetime")

    def strided(x: Tensor) -> Tensor:
        return (x * 1).permute(0, *order).contiguous().permute(0, *(1 + order.index(d) for d in range(1, ndim)))

    run = compiled(Spans(span, strided), "inline", copies={"audio": lifetime})
    x = torch.randn(shape)
    with run.launch(x, torch.tensor(pairs).view(span.shape(bs))) as step:
        rows = step.rows()
        for row in range(bs):
            good = [all(0 <= s <= e <= shape[d] for d, (s, e) in zip(dims, p, strict=True)) for p in pairs[row]]
            if not all(good):
                with pytest.raises(SpanError, match=f"row {row} of"):
                    rows.at(row)
                continue
            expected = []
            for extents in pairs[row]:
                index = [slice(None)] * (ndim - 1)
                for dim, (start, end) in zip(dims, extents, strict=True):
                    index[dim - 1] = slice(start, end)
                if (part := x[row][tuple(index)]).numel():
                    expected.append(part)
            found = rows.at(row)
            found = () if found is None else found if isinstance(found, tuple) else (found,)
            assert len(found) == len(expected)
            assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@BACKENDS
def test_a_dim_of_one_and_of_ten_million(on: str) -> None:
    for width in (1, 10_000_000):
        run = compiled(Spans(), on, copies={"audio": "host"})
        x = torch.arange(width, dtype=torch.float32)[None]
        with run.launch(x, torch.tensor([[width // 3, width]])) as step:
            assert step.rows()[0].equal(x[0, width // 3 :])


def test_lifetimes_are_chosen_per_output() -> None:
    class Two(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("audio", "image")

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            spans = from_lengths(n)
            return SpannedOutput({"audio": x + 1, "image": x + 2}, {"audio": spans, "image": spans})

    run = compiled(Two(), "simulated", depth=2, copies={"audio": "host"})
    x, n = batch((3, 5))
    steps = [run.launch(x, n), run.launch(x, n)]
    for step in steps:
        assert values(step.rows("audio")) == cut(x + 1, [3, 5])
        assert values(step.rows("image")) == cut(x + 2, [3, 5])
    assert num_instances(run) == 2  # one output is a view still


def test_names_are_those_of_the_declarations() -> None:
    pair = plain(lambda self, x, n: (self.a(x, n), self.b(x, n)), a=Toy(), b=Toy())
    with pytest.raises(DeclarationError, match=r"copies of \['sound'\], but walk 'forward' declares .*'a.audio'"):
        spangraph.compile(pair, copies={"sound": "host"})
    for names, both in (({"audio": "host"}, 2), ({"b.audio": "host"}, 1), ({"audio": "host", "a.audio": "view"}, 1)):
        run = compiled(pair, "simulated", copies=names)
        run(*batch())
        assert run.explain().count("copied to the host") == both


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("pinned", r"Copy\(to='pinned'\): expected 'view', 'device' or 'host'"),
        (3, r"copies\['audio'\] is 3: expected 'view', 'device', 'host' or a Copy"),
        ({"to": "host", "capacity": True}, "expected bytes of a step's rows, at least 1"),
        ({"to": "host", "dtype": torch.int8}, "expected torch.int16"),
        ({"to": "host", "capacity": 0}, "expected bytes of a step's rows, at least 1"),
        ({"to": "host", "capacity": 1.5}, "expected bytes of a step's rows"),
        ({"to": "view", "capacity": 16}, "takes no dtype and no capacity"),
    ],
)
def test_bad_copies_are_refused(given: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        spangraph.compile(Toy(), copies={"audio": Copy(**given) if isinstance(given, dict) else given})


def test_a_plain_copy_of_spans_leaves_no_room_for_copies() -> None:
    with pytest.raises(InputError, match="copies= needs staging='kernel'"):
        compiled(Toy(), "simulated", copies={"audio": "host"}, staging="copy")
    compiled(Toy(), "simulated", copies={"audio": "view"}, staging="copy")(*batch())
