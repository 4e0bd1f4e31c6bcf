"""`Rows`: a mapping of the delivered rows, each equal to its padded slice bit for bit."""

import contextlib
import functools
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spangraph import (
    RowLookupError,
    Rows,
    Span,
    SpanError,
    SpannedOutput,
    SpanStager,
    Step,
    from_lengths,
    from_mask,
    withhold,
)
from spangraph.kernels import gather
from spangraph.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("with_and_without_debugging")


def launch(
    value: Tensor,
    spans: Any,
    span: Span | None = None,
    rows: Sequence[Hashable] | None = None,
    num_rows: int | None = None,
    *,
    as_it_lies: bool = False,
) -> Step:
    """One step whose graph gives a clone of `value`, or that itself, under these spans."""
    device, declared = SimulatedDevice(), span or Span()
    stager = SpanStager({"audio": declared}, max_rows=len(value), device=device)
    staged, graph = torch.as_tensor(spans), device.new_graph()
    with device.graph(graph):
        output = value if as_it_lies else value.clone()
        tail = stager.stage(SpannedOutput({"audio": output}, {"audio": staged}))
    with tail.step(rows, num_rows=num_rows) as step:
        graph.replay()
    return step


def assert_same(entry: Any, expected: Tensor) -> None:
    assert isinstance(entry, Tensor)
    torch.testing.assert_close(entry, expected, rtol=0, atol=0, equal_nan=True)


# ---- a mapping -----------------------------------------------------------------------------------------------------


def test_rows_are_a_mapping_in_launch_order() -> None:
    padded = torch.randn(4, 7)
    ids = ["req-9", ("user", 3), 17, frozenset({2})]
    rows = launch(padded, [[0, 7], [2, 5], [6, 7], [1, 2]], rows=ids).rows("audio")
    assert isinstance(rows, Mapping)
    assert list(rows) == list(rows.keys()) == list(rows.row_ids) == ids
    assert len(rows) == 4
    for row_id, i, (start, end) in zip(ids, range(4), [(0, 7), (2, 5), (6, 7), (1, 2)], strict=True):
        expected = padded[i, start:end]
        for entry in (rows[row_id], rows.get(row_id), rows.at(i), dict(rows)[row_id], list(rows.values())[i]):
            assert_same(entry, expected)
        assert row_id in rows
        assert rows.spans(row_id) == (((start, end),),)


def test_row_ids_default_to_positions() -> None:
    padded = torch.randn(3, 4)
    rows = launch(padded, [[0, 1], [0, 0], [2, 4]]).rows()
    assert list(rows) == [0, 2]
    assert list(rows.row_ids) == [0, 1, 2]
    assert_same(rows[2], padded[2, 2:4])
    for absent in (3, -1, "0", 1):
        assert absent not in rows
        assert rows.get(absent, "none") == "none"


def test_an_unknown_row_is_a_key_error_that_names_the_rows() -> None:
    rows = launch(torch.randn(2, 4), [[0, 1], [0, 0]], rows=["a", "b"]).rows()
    with pytest.raises(RowLookupError, match=r"no row 'c' in this step; its rows are \['a', 'b'\]"):
        rows["c"]
    with pytest.raises(KeyError, match="row 'b' of 'audio' is withheld: it has no entry"):
        rows["b"]
    with pytest.raises(RowLookupError, match="no row 'c'"):
        rows.spans("c")
    for position in (2, -1):
        with pytest.raises(RowLookupError, match=f"no row at position {position}: the step has 2 real rows"):
            rows.at(position)
    assert rows.at(1) is None
    assert rows.spans("b") == ()


def test_an_unknown_output_is_named_with_those_there_are() -> None:
    step = launch(torch.randn(2, 4), [[0, 1], [0, 0]])
    with pytest.raises(RowLookupError, match=r"no spanned output for 'video'; this step has \['audio'\]"):
        step.rows("video")
    with pytest.raises(RowLookupError, match=r"no row value 'token'; this step has \[\]"):
        step.row_values("token")


def test_entries_are_views_made_when_asked_for() -> None:
    """No padded copies: two reads give the same memory."""
    rows = launch(torch.randn(2, 4), [[1, 3], [0, 4]]).rows()
    first, second = rows[0], rows[0]
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert first.data_ptr() == second.data_ptr()
    assert first.untyped_storage().nbytes() == 2 * 4 * 4


def test_a_repr_does_not_read_the_rows() -> None:
    step = launch(torch.randn(2, 4), [[3, 1], [0, 4]])
    assert repr(step.rows()) == "Rows('audio', 2 rows at launch, view)"
    assert repr(step.rows().own()) == "Rows('audio', 2 rows at launch, owned)"


# ---- which part of a row -------------------------------------------------------------------------------------------


def test_each_row_is_cut_at_its_own_end() -> None:
    """K9: batch noise after short rows. K4: a constant trim drops a real item where a row ended by its length cap."""
    padded = torch.randn(2, 9)
    rows = launch(padded, from_lengths(torch.tensor([3, 9]))).rows()
    assert_same(rows[0], padded[0, :3])
    assert_same(rows[1], padded[1])


def test_a_start_above_zero_works_everywhere() -> None:
    """K3: left context: the new samples are the last n of the row, in copies too."""
    padded, new = torch.randn(3, 8), torch.tensor([1, 8, 5])
    rows = launch(padded, from_lengths(new, start=8 - new)).rows()
    for i, n in enumerate(new.tolist()):
        assert_same(rows[i], padded[i, 8 - n :])
        assert_same(rows.own()[i], padded[i, 8 - n :])


def transposed_convolution(x: Tensor) -> Tensor:
    """A vocoder's last layer: k = 4 samples per frame, c = 3 fewer in all, as without output padding."""
    return x.repeat_interleave(4, -1)[..., :-3]


def test_a_nominal_length_past_what_was_produced_is_an_error() -> None:
    """K1: nominal length trusted: rows of 5 of 8 frames say `frames * 4`, and the full one says one k too many."""
    frames = torch.tensor([5, 8])
    padded = transposed_convolution(torch.randn(2, 8))
    rows = launch(padded, from_lengths(frames * 4), rows=["short", "full"]).rows()
    assert_same(rows["short"], padded[0, :20])
    with pytest.raises(SpanError, match=r"span \[0, 32\) does not fit 0 <= start <= end <= 29"):
        rows["full"]


def test_chunks_add_up_to_the_whole() -> None:
    """K2: a Python slice clamps silently, so every chunk loses c samples: 3 chunks of 4 frames against one shot."""
    x = torch.randn(1, 12)
    whole = transposed_convolution(x)
    chunks = []
    for start in range(0, 12, 4):
        # One frame of right context, but for the last chunk: all of a chunk's own samples are there.
        chunk = x[:, start : start + 5]
        out = transposed_convolution(chunk)
        samples = torch.tensor([16 if start + 5 <= 12 else 13])
        chunks.append(launch(out, from_lengths(samples)).rows()[0])
    assert_same(torch.cat([chunk for chunk in chunks if isinstance(chunk, Tensor)]), whole[0])


# ---- withheld ------------------------------------------------------------------------------------------------------


def test_a_withheld_row_is_absent() -> None:
    """K31: an empty last chunk breaks stack, cat and cross-fade: nothing zero-width may come out."""
    padded = torch.randn(3, 5)
    spans = withhold(from_lengths(torch.tensor([5, 1, 4])), torch.tensor([True, False, False]))
    for rows in (launch(padded, spans, rows=list("abc")).rows(), launch(padded, spans, rows=list("abc")).rows().own()):
        assert list(rows) == ["b", "c"]
        assert len(rows) == 2
        assert "a" not in rows
        assert rows.at(0) is None
        assert all(row.numel() for row in rows.values() if isinstance(row, Tensor))
        assert_same(rows["b"], padded[1, :1])
        assert_same(rows["c"], padded[2, :4])


@pytest.mark.parametrize("spans", [[[0, 0], [0, 0]], [[3, 3], [5, 5]]])
def test_all_rows_withheld(spans: list[list[int]]) -> None:
    """K32: an end marker at step 0: legal, cheap, no error. An empty span may lie anywhere."""
    rows = launch(torch.randn(2, 5), spans).rows()
    assert dict(rows) == {}
    assert dict(rows.own()) == {}
    assert not rows
    assert rows.at(1) is None


# ---- bad spans -----------------------------------------------------------------------------------------------------

# Every way to violate 0 <= start <= end <= 5, by one and by a lot.
BAD_SPANS = [(3, 2), (0, 6), (6, 6), (-1, 2), (-3, -1), (2, -1), (0, 2**40), (-(2**62), 2**62)]


@pytest.mark.parametrize("bad", BAD_SPANS)
def test_a_bad_span_is_an_error_of_its_row_alone(bad: tuple[int, int]) -> None:
    padded = torch.randn(3, 5)
    step = launch(padded, [[0, 5], list(bad), [2, 4]], rows=["a", "b", "c"])
    for rows in (step.rows(), step.rows().own()):
        assert_same(rows["a"], padded[0])
        assert_same(rows.at(2), padded[2, 2:4])
        for read in (lambda rows=rows: rows["b"], lambda rows=rows: rows.at(1), lambda rows=rows: rows.spans("b")):
            with pytest.raises(SpanError, match="row 'b' of 'audio'") as raised:
                read()
            assert raised.value.rows == ("b",)
            assert f"[{bad[0]}, {bad[1]})" in str(raised.value)
            assert "Other rows of the step are not affected" in str(raised.value)
        assert len(rows) == 2


def test_iteration_yields_all_good_rows_and_then_names_every_bad_one() -> None:
    padded = torch.randn(5, 4)
    rows = launch(padded, [[9, 9], [0, 2], [3, 1], [0, 0], [1, 4]], rows=list("abcde")).rows()
    delivered: list[tuple[Hashable, Any]] = []
    with pytest.raises(SpanError, match="row 'a'") as raised:
        delivered.extend(rows.items())  # keeps what came before the error
    assert [row_id for row_id, _ in delivered] == ["b", "e"]
    assert_same(delivered[0][1], padded[1, :2])
    assert_same(delivered[1][1], padded[4, 1:])
    assert raised.value.rows == ("a", "c")
    assert "span [9, 9) does not fit 0 <= start <= end <= 4" in str(raised.value)
    assert "span [3, 1)" in str(raised.value)
    with pytest.raises(SpanError, match="row 'a'"):
        dict(rows)


def test_float_lengths_must_be_whole() -> None:
    """K37: float lengths from a model: 3.0 converts, 3.5 fails that row's check, and the message says why."""
    padded = torch.randn(4, 5)
    rows = launch(padded, from_lengths(torch.tensor([3.0, 3.5, float("nan"), 5.0])), rows=list("abcd")).rows()
    assert_same(rows["a"], padded[0, :3])
    assert_same(rows["d"], padded[3])
    with pytest.raises(SpanError, match=r"length 3\.5 is not a whole number.* round it in the model"):
        rows["b"]
    with pytest.raises(SpanError, match="length nan is not a whole number"):
        rows["c"]


# ---- several spans, several dims -----------------------------------------------------------------------------------


def test_several_spans_per_row() -> None:
    """A VAD row: its entry is a tuple of tensors, unused spans are empty, and it is withheld when all are."""
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [0] * 6, [0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1]])
    padded = torch.randn(4, 6)
    for rows in (
        launch(padded, from_mask(mask, max_spans=3), Span(max_spans=3)).rows(),
        launch(padded, from_mask(mask, max_spans=3), Span(max_spans=3)).rows().own(),
    ):
        assert list(rows) == [0, 2, 3]
        expected = {0: [(0, 2), (3, 4), (5, 6)], 2: [(2, 6)], 3: [(0, 1), (2, 3), (4, 6)]}
        for row_id, spans in expected.items():
            entry = rows[row_id]
            assert isinstance(entry, tuple)
            assert len(entry) == len(spans)
            for part, (start, end) in zip(entry, spans, strict=True):
                assert_same(part, padded[row_id, start:end])
            assert rows.spans(row_id) == tuple((span,) for span in spans)


def test_one_bad_span_of_several_makes_the_row_bad() -> None:
    rows = launch(torch.randn(2, 6), [[[0, 2], [4, 7]], [[0, 0], [1, 6]]], Span(max_spans=2)).rows()
    with pytest.raises(SpanError, match=r"span \[4, 7\)"):
        rows[0]
    assert len(rows[1]) == 1


def test_several_dims() -> None:
    """Images: cut in height and width at once; empty in one dim is empty."""
    padded = torch.randn(3, 2, 5, 7)
    spans = [[[0, 5], [0, 7]], [[1, 3], [2, 6]], [[2, 2], [0, 7]]]
    rows = launch(padded, spans, Span(dims=(-2, -1))).rows()
    assert list(rows) == [0, 1]
    assert_same(rows[0], padded[0])
    assert_same(rows[1], padded[1, :, 1:3, 2:6])
    assert_same(rows.own()[1], padded[1, :, 1:3, 2:6])
    assert rows.spans(1) == (((1, 3), (2, 6)),)
    bad = launch(padded, [[[0, 5], [0, 8]], *spans[1:]], Span(dims=(-2, -1))).rows()
    with pytest.raises(SpanError, match=r"dim -1\): span \[0, 8\) does not fit 0 <= start <= end <= 7"):
        bad[0]


# Word sizes of 1, 2, 4, 8 and 16 bytes; integers and bools have no NaN to be poisoned with.
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.complex128, torch.int16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (3, 2, 5), (3, 1, 5)])
def test_every_dtype_is_delivered_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    padded = torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
    step = launch(padded, [[0, 5], [1, 2], [0, 0]])
    owned = step.rows().own()
    assert step.rows()[1].dtype is dtype  # type: ignore[union-attr]
    for rows in (step.rows(), owned):
        assert_same(rows[0], padded[0])
        assert_same(rows[1], padded[1, ..., 1:2])
    step.release()
    assert_same(owned[0], padded[0])


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((3, 5), -1),
        ((3, 5, 2), -2),
        ((3, 1, 5), -1),
        ((3, 1, 5, 2), 2),
        ((3, 2, 5), -1),
        ((3, 2, 5), 1),
        ((3, 5, 2, 2), 1),
    ],
)
@pytest.mark.parametrize("order", ["dense", "transposed", "swapped", "sliced", "expanded"])
def test_owned_rows_have_just_their_own_memory(shape: tuple[int, ...], dim: int, order: str) -> None:
    """However a row lies: in one piece, which one call copies, or with gaps."""
    if order == "transposed":
        padded = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    elif order == "swapped":
        padded = torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    elif order == "sliced":
        padded = torch.randn([size + 1 for size in shape])[tuple(slice(1, None) for _ in shape)]
    elif order == "expanded":
        padded = torch.randn(1, *shape[1:]).expand(shape)
    else:
        padded = torch.randn(shape)
    width = shape[dim]
    step = launch(padded, [[0, width], [1, 2], [0, 0]], Span(dims=(dim,)), as_it_lies=True)
    views, owned = dict(step.rows()), step.rows().own()
    assert list(owned) == list(views) == [0, 1]
    for row_id, row in owned.items():
        assert_same(row, views[row_id])
        assert_same(row, padded[row_id].narrow(dim if dim < 0 else dim - 1, row_id, (width, 1)[row_id]))
        assert row.is_contiguous()
        assert row.untyped_storage().nbytes() == row.numel() * row.itemsize
        assert_same(pickle.loads(pickle.dumps(row)), row)
        row.zero_()
        assert views[row_id].abs().min() > 0


@pytest.mark.parametrize(("shape", "dim"), [((2, 0), 1), ((2, 0, 4), 1), ((2, 0, 4), 2), ((2, 3, 0), 2)])
def test_of_nothing_no_rows_are_owned(shape: tuple[int, ...], dim: int) -> None:
    step = launch(torch.randn(shape), torch.zeros(shape[0], 2, dtype=torch.int64), Span(dims=(dim,)))
    assert dict(step.rows()) == dict(step.rows().own()) == {}


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_quantized_rows_are_owned_with_their_scale() -> None:
    padded = torch.quantize_per_tensor(torch.randn(2, 6), 0.1, 3, torch.qint8)
    step = launch(padded, [[1, 4], [0, 0]], as_it_lies=True)
    owned = step.rows().own()[0]
    assert (owned.q_scale(), owned.q_zero_point()) == (padded.q_scale(), padded.q_zero_point())
    assert owned.int_repr().equal(padded[0, 1:4].int_repr())


def test_a_row_is_withheld_while_others_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread."""
    padded = torch.randn(3, 5)
    step = launch(padded, [[0, 5], [1, 2], [2, 4]])

    def withholding(*args: Any) -> list[Tensor]:
        step.withhold(1)
        return gather.gather(*args)

    monkeypatch.setattr("spangraph.rows.gather", withholding)
    owned = step.rows().own()
    assert step._launch.withheld
    assert list(owned) == [0, 2]
    assert_same(owned[2], padded[2, 2:4])


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 3), (2, 5, 0), (2, 2**17)])
@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, torch.enable_grad, functools.partial(torch.device, "meta")]
)
def test_owned_rows_are_plain_in_every_mode(
    mode: Callable[[], contextlib.AbstractContextManager[Any]], shape: tuple[int, ...]
) -> None:
    padded = torch.randn(shape)
    step = launch(padded, [[0, shape[1]], [1, 2]], Span(dims=(1 - len(shape),)))
    with mode():
        owned = dict(step.rows().own())
    for row in owned.values():
        assert not row.is_inference()
        assert not row.requires_grad
        assert not row._is_view()
        assert row.device == padded.device
    assert_same(owned[1], padded[1, 1:2])
    owned[1] *= torch.ones((), requires_grad=True)
    assert owned[1].requires_grad


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_row_equals_its_padded_slice(data: st.DataObject) -> None:
    """Any shape, spanned dims, number of spans and spans, good or bad, against plain slicing."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4), label="shape")
    ndim, bs = len(shape), shape[0]
    dims = data.draw(st.lists(st.integers(1, ndim - 1), min_size=1, max_size=2, unique=True), label="dims")
    max_spans = data.draw(st.integers(1, 2), label="max_spans")
    span = Span(dims=tuple(dim - ndim for dim in dims), max_spans=max_spans)
    padded, bound = torch.randn(shape), st.integers(-1, 5)
    pairs = [[[data.draw(st.tuples(bound, bound)) for _ in dims] for _ in range(max_spans)] for _ in range(bs)]
    rows: Rows = launch(padded, torch.tensor(pairs).view(span.shape(bs)), span).rows()

    for row in range(bs):
        expected = []
        is_bad = False
        for extents in pairs[row]:
            is_bad |= not all(0 <= s <= e <= shape[d] for d, (s, e) in zip(dims, extents, strict=True))
            index = [slice(None)] * (ndim - 1)
            for dim, (start, end) in zip(dims, extents, strict=True):
                index[dim - 1] = slice(start, end)
            expected.append(padded[row][tuple(index)])
        if is_bad:
            with pytest.raises(SpanError, match=f"row {row} of"):
                rows.at(row)
            continue
        expected = [part for part in expected if part.numel()]
        for entry in (rows.at(row), rows.own().at(row)):
            parts = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            assert len(parts) == len(expected)
            for part, value in zip(parts, expected, strict=True):
                assert_same(part, value)
