"""Declarations: spans from lengths and masks, merging, `declare()` from outside, and everything that is refused."""

import collections
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import spangraph
from spangraph import DeclarationError, MergeError, Span, SpanError, SpannedOutput, declare, from_lengths, from_mask

from .toys import Spanned, batch, compiled, cut, plain, spanned, values

# ---- Span and SpannedOutput ------------------------------------------------------------------------------------------


# One and several dims, one and several spans: the four shapes of a spans tensor.
@pytest.mark.parametrize(
    ("span", "shape", "words"),
    [
        (Span(), (3, 2), 2),
        (Span(dims=(-2, -1)), (3, 2, 2), 4),
        (Span(max_spans=4), (3, 4, 2), 8),
        (Span(dims=(1, 2, 3), max_spans=5), (3, 5, 3, 2), 30),
        (Span(dims=2), (3, 2), 2),
    ],
)
def test_a_span_knows_the_shape_of_its_spans(span: Span, shape: tuple[int, ...], words: int) -> None:
    assert span.shape(3) == shape
    assert span.words_per_row == words


@pytest.mark.parametrize("dims", [(), (0,), (1, 1), (0, 1), ("1",), (1.0,)])
def test_bad_dims_are_refused(dims: Any) -> None:
    with pytest.raises(DeclarationError, match="different ints, none of them 0"):
        Span(dims=dims)


@pytest.mark.parametrize("max_spans", [0, -1, 1.5])
def test_a_bad_number_of_spans_is_refused(max_spans: Any) -> None:
    with pytest.raises(DeclarationError, match="at least 1"):
        Span(max_spans=max_spans)


def test_a_spanned_output_is_a_pytree() -> None:
    out = SpannedOutput({"a": torch.ones(2, 3)}, {"a": torch.zeros(2, 2)}, {"n": torch.ones(2)}, row_ids=("x", "y"))
    doubled = pytree.tree_map(lambda leaf: leaf + 1, out)
    assert isinstance(doubled, SpannedOutput)
    assert doubled["a"].tolist() == [[2, 2, 2], [2, 2, 2]]
    assert doubled.output_spans["a"].tolist() == [[1, 1], [1, 1]]
    assert doubled.row_values["n"].tolist() == [2, 2]
    assert doubled.row_ids == ("x", "y")
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(out)[0]]
    assert paths == [".outputs['a']", ".output_spans['a']", ".row_values['n']"]


# ---- from_lengths ----------------------------------------------------------------------------------------------------


# Every integer dtype, unsigned ones without promotion to int64 among them.
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32]
)
def test_lengths_of_any_int_dtype(dtype: torch.dtype) -> None:
    spans = from_lengths(torch.tensor([0, 3, 7], dtype=dtype), start=2)
    assert spans.dtype is torch.int64
    assert spans.tolist() == [[2, 2], [2, 5], [2, 9]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_whole_floats_convert(dtype: torch.dtype) -> None:
    """K37: a model's float lengths."""
    spans = from_lengths(torch.tensor([3.0, 0.0, 4.0], dtype=dtype), start=torch.tensor([1, 2, 3], dtype=torch.int32))
    assert spans.dtype is torch.int64
    assert spans.tolist() == [[1, 4], [2, 2], [3, 7]]


# A fraction, the values without a size, and one too large to count in.
@pytest.mark.parametrize("bad", [3.5, -0.25, float("nan"), float("inf"), float("-inf"), 2.0**60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_float_that_is_not_whole_fails_its_row_alone(bad: float, dtype: torch.dtype) -> None:
    """K37: 3.5 fails on the host, the message says why, and the rows beside it are delivered."""

    def forward(self: Spanned, x: Tensor, lengths: Tensor) -> SpannedOutput:
        return self.spanned(x * 1, lengths)

    x = torch.randn(3, 5)
    rows = compiled(spanned(forward), trace="opaque")(x, torch.tensor([3.0, bad, 5.0], dtype=dtype))["audio"]
    assert rows.at(0).tolist() == x[0, :3].tolist()
    assert rows.at(2).tolist() == x[2].tolist()
    with pytest.raises(
        SpanError, match=re.escape(f"length {bad} is not a whole number below 2**53: round it")
    ) as caught:
        rows[1]
    assert "row 1 of" in str(caught.value)
    assert caught.value.rows == (1,)


def test_lengths_per_dim_and_starts_that_broadcast() -> None:
    spans = from_lengths(torch.tensor([[2, 3], [4, 5]]), start=torch.tensor([[1], [10]]))
    assert spans.tolist() == [[[1, 3], [1, 4]], [[10, 14], [10, 15]]]


# No tensor; a mask by mistake; no order; no row.
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 4], "needs a tensor on the model's device, got list"),
        (torch.tensor([True]), "torch.bool lengths: for a mask use from_mask"),
        (torch.tensor([1j]), "torch.complex64 lengths"),
        (torch.tensor(3), "0-d tensor"),
    ],
)
def test_lengths_of_another_kind_are_refused(lengths: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        from_lengths(lengths)


@pytest.mark.parametrize("start", [1.0, True, torch.tensor([1.0]), torch.tensor([True]), "1"])
def test_a_start_that_is_no_int_is_refused(start: Any) -> None:
    """A float start made float spans, refused later with the advice to call from_lengths."""
    with pytest.raises(DeclarationError, match=r"from_lengths\(start=\.\.\.\) got"):
        from_lengths(torch.tensor([3]), start=start)


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    st.integers(-5, 5),
    st.sampled_from([torch.int32, torch.int64, torch.float64]),
)
def test_lengths_agree_with_python(lengths: list[int], start: int, dtype: torch.dtype) -> None:
    spans = from_lengths(torch.tensor(lengths, dtype=dtype), start=start)
    assert spans.tolist() == [[start, start + length] for length in lengths]


# ---- from_mask -------------------------------------------------------------------------------------------------------


def _runs(mask: list[bool]) -> list[list[int]]:
    """Plain Python: the runs of true values."""
    edges = [i for i in range(len(mask) + 1) if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])]
    return [[start, end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


masks = st.integers(0, 9).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4)
)


@given(masks, st.integers(1, 6), st.sampled_from([torch.bool, torch.int64, torch.uint8]))
def test_masks_agree_with_python(rows: list[list[bool]], max_spans: int, dtype: torch.dtype) -> None:
    spans = from_mask(
        torch.tensor(rows, dtype=torch.bool).to(dtype) * 3
        if dtype is not torch.bool
        else torch.tensor(rows, dtype=torch.bool),
        max_spans=max_spans,
    )
    assert spans.dtype is torch.int64
    assert list(spans.shape) == [len(rows), *([max_spans] if max_spans > 1 else []), 2]
    for found, row in zip(spans.view(len(rows), max_spans, 2).tolist(), rows, strict=True):
        runs = _runs(row)
        if len(runs) <= max_spans:
            assert found == runs + [[0, 0]] * (max_spans - len(runs))
        else:
            assert all(end < 0 < start for start, end in found)


def test_a_row_with_too_many_runs_fails_alone_and_says_how_many() -> None:
    def forward(self: Spanned, x: Tensor, mask: Tensor) -> SpannedOutput:
        return SpannedOutput({"audio": x * 1}, {"audio": from_mask(mask)})

    x = torch.randn(3, 5)
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
    rows = compiled(spanned(forward), trace="opaque")(x, mask)["audio"]
    assert rows[0].tolist() == x[0, 1:3].tolist()
    assert rows.at(2) is None
    with pytest.raises(SpanError, match=r"its mask has 3 runs .*Span\(max_spans=3\)"):
        rows[1]


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(3, dtype=torch.bool), torch.ones(2, 2, 2) > 0, [[1]]])
def test_masks_of_another_kind_are_refused(mask: Any) -> None:
    with pytest.raises(DeclarationError, match=r"bool or int mask \[bs, width\]"):
        from_mask(mask)


@pytest.mark.parametrize("max_spans", [0, -1, 2.0])
def test_a_mask_with_a_bad_number_of_spans_is_refused(max_spans: Any) -> None:
    """0 gave spans of no columns."""
    with pytest.raises(DeclarationError, match="expected an int of at least 1"):
        from_mask(torch.ones(1, 2) > 0, max_spans=max_spans)


# ---- withhold and merge ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 2), (3, 4, 2), (3, 4, 2, 2)])
def test_withhold_empties_the_rows_it_is_told(shape: tuple[int, ...]) -> None:
    spans = torch.randint(1, 9, shape)
    withheld = spangraph.withhold(spans, torch.tensor([False, True, False]))
    assert withheld[1].eq(0).all()
    assert withheld[[0, 2]].equal(spans[[0, 2]])


@pytest.mark.parametrize("mask", [torch.tensor([1, 0]), torch.tensor([True]), torch.ones(2, 2) > 0, [True, False]])
def test_withhold_refuses_what_is_no_flag_per_row(mask: Any) -> None:
    with pytest.raises(DeclarationError, match=r"bool mask \[2\]"):
        spangraph.withhold(torch.zeros(2, 2, dtype=torch.int64), mask)


def _part(*lengths: int, ids: Any = None, width: int = 5) -> SpannedOutput:
    rows = len(lengths)
    return SpannedOutput(
        {"audio": torch.randn(rows, width), "pitch": torch.randn(rows, 2)},
        {"audio": from_lengths(torch.tensor(lengths))},
        {"token": torch.arange(rows) + lengths[0]},
        ids,
    )


def test_merge_concatenates_everything() -> None:
    parts = [_part(1, 2, ids=("a", "b")), _part(3, ids=("c",))]
    merged = SpannedOutput.merge(parts)
    assert merged["audio"].equal(torch.cat([part["audio"] for part in parts]))
    assert merged["pitch"].equal(torch.cat([part["pitch"] for part in parts]))
    assert merged.output_spans["audio"].tolist() == [[0, 1], [0, 2], [0, 3]]
    assert merged.row_values["token"].tolist() == [1, 2, 3]
    assert merged.row_ids == ("a", "b", "c")


# Each would lose something, or misalign rows: names, spans of some, ids of some, ids twice, widths, rows within a part.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"outputs": {"audio": torch.ones(1, 5)}},
            r"requests \['a'\] return outputs \['audio', 'pitch'\], requests \['c'\] return outputs \['audio'\]",
        ),
        ({"output_spans": {}}, r"requests \['a'\] return spans for \['audio'\], requests \['c'\] return no spans"),
        ({"row_values": {}}, r"requests \['a'\] return row values \['token'\], requests \['c'\] return no row values"),
        ({"row_ids": None}, r"only parts \[0\] of 2 carry row_ids"),
        ({"row_ids": ("a",)}, "hold one id twice"),
        (
            {"outputs": {"audio": torch.ones(1, 6), "pitch": torch.ones(1, 2)}},
            "differs between parts.*Pad every request",
        ),
        ({"row_values": {"token": torch.ones(1)}}, "differs between parts"),
        ({"row_ids": ("c", "d")}, "part 1 has different numbers of rows: {'row_ids': 2"),
        ({"output_spans": {"audio": torch.zeros(2, 2, dtype=torch.int64)}}, "part 1 has different numbers of rows"),
        ({"outputs": {"audio": torch.ones(1, 5), "pitch": [1.0]}}, r"outputs\['pitch'\] of part 1 is list"),
    ],
)
def test_merge_refuses_what_would_be_lost(change: dict[str, Any], message: str) -> None:
    parts = [_part(2, ids=("a",)), dataclasses.replace(_part(3, ids=("c",)), **change)]
    with pytest.raises(MergeError, match=message):
        SpannedOutput.merge(parts)


def test_merge_of_nothing_is_refused_and_of_one_part_is_that_part() -> None:
    with pytest.raises(MergeError, match="at least one"):
        SpannedOutput.merge([])
    part = _part(2, 3)
    assert SpannedOutput.merge([part])["audio"].equal(part["audio"])


# ---- declare(): from outside -----------------------------------------------------------------------------------------


class Foreign(nn.Module):
    """Returns `make(x * 2)`; nobody may edit it."""

    def __init__(self, make: Any = lambda y: y) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.make(x * 2)

    def decode(self, x: Tensor, lengths: Tensor) -> Any:
        return self.make(x * 3)


def _spans(out: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return from_lengths(lengths)


Pair = collections.namedtuple("Pair", ("flag", "wave"))


@dataclasses.dataclass
class Out:
    wave: Tensor


# A field of each kind of output, a key, an index from either end, and the one tensor under any name.
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda y: y, "anything"),
        (lambda y: {"wave": y, "n": 1}, "wave"),
        (lambda y: (1, y), 1),
        (lambda y: [y, 1], -2),
        (lambda y: Pair(1, y), "wave"),
        (Out, "wave"),
        (lambda y: SpannedOutput({"wave": y}), "wave"),
    ],
)
@pytest.mark.parametrize("trace", ["export", "opaque"])
def test_declare_finds_fields_keys_and_indices(make: Any, name: Any, trace: str) -> None:
    x, lengths = batch((2, 5))
    step = compiled(declare(Foreign(make), {name: _spans}), trace=trace).launch(x, lengths)
    assert values(step.rows()) == cut(x * 2, [2, 5])
    assert values(step.rows(str(name))) == cut(x * 2, [2, 5])


# Names that are not there: the message lists those that are.
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda y: {"wave": y}, r"dict with \['wave'\]"),
        (lambda y: (y, y), r"tuple with \[0, 1\]"),
        (lambda y: Pair(1, y), r"Pair with \['flag', 'wave'\]"),
        (lambda y: SimpleNamespace(wave=y), r"SimpleNamespace with \['wave'\]"),
        (lambda y: 7, r"int with \[\]"),
    ],
)
def test_a_name_that_is_not_there_is_refused(make: Any, found: str) -> None:
    module = declare(Foreign(make), audio=_spans)
    with pytest.raises(DeclarationError, match=f"SG101 .*declared to return 'audio', but returned {found}"):
        compiled(module, trace="opaque").launch(*batch())


def test_two_names_for_one_bare_tensor_are_refused() -> None:
    module = declare(Foreign(), a=_spans, b=_spans)
    with pytest.raises(DeclarationError, match="the one tensor it returns"):
        compiled(module, trace="opaque").launch(*batch())


@pytest.mark.parametrize("trace", ["export", "opaque"])
def test_declare_of_another_method(trace: str) -> None:
    """Hooks fire through `module(...)` alone: `method=` covers `self.vae.decode(z)`."""
    vae = declare(Foreign(), method="decode", wave=_spans)
    model = plain(lambda self, x, lengths: self.vae.decode(x, lengths), vae=vae)
    x, lengths = batch((1, 4))
    assert values(compiled(model, trace=trace)(x, lengths)) == cut(x * 3, [1, 4])
    assert "decode" not in vars(vae)  # the trace has taken its wrapper away
    assert vae.decode(x, lengths).equal(x * 3)


def test_declared_methods_may_be_shadowed_by_the_instance() -> None:
    vae = Foreign()
    vae.decode = lambda x, lengths: x * 5
    before = vae.decode
    model = plain(lambda self, x, lengths: self.vae.decode(x, lengths), vae=declare(vae, method="decode", wave=_spans))
    x, lengths = batch((2, 3))
    assert values(compiled(model, trace="opaque")(x, lengths)) == cut(x * 5, [2, 3])
    assert vae.decode is before


def test_a_script_module_is_wrapped() -> None:
    """A ScriptModule takes no hooks: declared in place, it would never fire."""

    class Source(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return x * 2 + lengths.sum() * 0

    with pytest.warns(DeprecationWarning, match=r"torch.jit.script"):
        script = torch.jit.script(Source())
    with pytest.raises(DeclarationError, match="through forward only"):
        declare(script, method="eval", audio=_spans)
    model = declare(script, audio=_spans)
    assert model is not script
    x, lengths = batch((2, 5))
    assert values(compiled(model)(x, lengths)) == cut(x * 2, [2, 5])
    inside = plain(lambda self, x, lengths: self.net(x, lengths) + 1, net=declare(script, audio=_spans))
    step = compiled(inside).launch(x, lengths)
    assert values(step.rows("audio")) == cut(x * 2, [2, 5])


def test_walks_choose_what_is_spanned() -> None:
    module = declare(Foreign(lambda y: {"a": y, "b": y + 1}), walks=["codec"], a=_spans)
    declare(module, walks=["prefill"], b=_spans)
    x, lengths = batch((2, 5))
    codec = compiled(module, walk="codec", trace="opaque")(x, lengths)
    assert values(codec["a"]) == cut(x * 2, [2, 5])
    assert codec["b"].equal(x * 2 + 1)
    prefill = compiled(module, walk="prefill", trace="opaque")(x, lengths)
    assert prefill["a"].equal(x * 2)
    assert values(prefill["b"]) == cut(x * 2 + 1, [2, 5])
    other = compiled(module, walk="other", trace="opaque")(x, lengths)
    assert other["a"].equal(x * 2)


def test_a_function_may_return_no_spans() -> None:
    module = declare(Foreign(lambda y: {"a": y}), a=lambda out, x, lengths: None)
    x, lengths = batch()
    assert compiled(module, trace="opaque")(x, lengths)["a"].equal(x * 2)


@pytest.mark.parametrize("trace", ["export", "opaque"])
def test_row_values_dims_and_several_spans_from_outside(trace: str) -> None:
    module = declare(
        Foreign(lambda y: {"image": y.view(2, 3, 4), "speech": y[:, :6]}),
        {
            "image": lambda out, x, n: from_lengths(torch.stack([n, n + 1], 1)),
            "speech": lambda out, x, n: from_mask(out["speech"] > 0, max_spans=6),
        },
        spans={"image": Span(dims=(1, 2)), "speech": Span(max_spans=6)},
        row_values={"token": lambda out, x, n: n * 10, "pair": lambda out, x, n: torch.stack([n, -n], 1)},
    )
    x, lengths = torch.randn(2, 12), torch.tensor([1, 2])
    with compiled(module, trace=trace).launch(x, lengths) as step:
        image = (x * 2).view(2, 3, 4)
        assert step.rows("image")[0].equal(image[0, :1, :2])
        assert step.rows("image")[1].equal(image[1, :2, :3])
        for i in range(2):
            speech = x[i, :6] * 2
            found = [part.tolist() for part in step.rows("speech")[i]] if i in step.rows("speech") else []
            assert found == [speech[a:b].tolist() for a, b in _runs((speech > 0).tolist())]
        assert step.row_values("token").tolist() == [10, 20]
        assert step.row_values("pair").tolist() == [[1, -1], [2, -2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: declare(m), "got no outputs"),
        (lambda m: declare(m, audio=3), r"declare\(audio=int\): expected a function"),
        (lambda m: declare(m, row_values={"t": 3}, audio=_spans), r"declare\(t=int\)"),
        (lambda m: declare(m, audio=_spans, spans={"image": Span()}), r"names \['image'\], which are not declared"),
        (lambda m: declare(m, audio=_spans, method="encode"), "has no method 'encode'"),
    ],
)
def test_declare_refuses_what_declares_nothing(call: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        call(Foreign())


@pytest.mark.parametrize("names", ["audio", 3, {"audio": 1}, {1: Span()}])
def test_spanned_outputs_of_another_kind_are_refused(names: Any) -> None:
    module = Foreign()
    type(module).spanned_outputs = lambda self, walk: names
    try:
        with pytest.raises(DeclarationError, match="spanned_outputs of the root module"):
            compiled(module, trace="opaque").launch(*batch())
    finally:
        del type(module).spanned_outputs
