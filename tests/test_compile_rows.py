"""Rows of compiled models: owned, padded, withheld and bad ones, whatever the batch and whoever launches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spangraph
from spangraph import InputError, RowLookupError, SpanError, SpannedOutput, StaleStepError, from_lengths, withhold

from .toys import Spanned, Toy, batch, compiled, cut, plain, spanned, values

pytestmark = pytest.mark.usefixtures("with_and_without_debugging")

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])
BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])


@TRACES
@BACKENDS
@pytest.mark.parametrize("depth", [1, 2])
def test_plain_calls_are_safe(trace: str, on: str, depth: int) -> None:
    """K39: results of calls that are all read at the end; spanned rows and whole outputs."""
    model = plain(lambda self, x, n: (self.toy(x, n)["audio"], x.sum(1), self.toy.gain), toy=Toy())
    run = compiled(model, on, trace, depth=depth)
    batches = [batch((3, 0, 5)) for _ in range(5)]
    results = [run(x, n) for x, n in batches]
    for (x, _), (rows, total, gain) in zip(batches, results, strict=True):
        assert values(rows) == cut(x * 2 + 1, [3, 0, 5])
        assert total.equal(x.sum(1))
        assert gain.item() == 2


@BACKENDS
def test_owned_rows_outlive_everything(on: str) -> None:
    run = compiled(Toy(), on)
    x, n = batch((3, 5))
    with run.launch(x, n) as step:
        rows = step.rows()
        owned = rows.own()
    run(x * 0, n)
    run.close()
    assert values(owned) == cut(x * 2 + 1, [3, 5])
    owned[0].fill_(0)  # they are the caller's
    assert owned[1].tolist() == (x * 2 + 1)[1].tolist()
    with pytest.raises(StaleStepError, match="was released"):
        rows[0]


@TRACES
@BACKENDS
def test_views_die_with_their_step(trace: str, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K17: kept views are poisoned in debug mode, on each backend, so that such a program fails everywhere."""
    monkeypatch.setenv("SPANGRAPH_DEBUG", "1")
    run = compiled(Toy(), on, trace)
    x, n = batch((3, 5))
    step = run.launch(x, n)
    kept = step.rows()[0]
    assert kept.tolist() == (x * 2 + 1)[0, :3].tolist()
    step.release()
    run(x * 0, n)
    assert kept.tolist() != (x * 2 + 1)[0, :3].tolist()


# Batches of no row, one row, a row of one sample, nothing but withheld rows, full rows.
@TRACES
@BACKENDS
@pytest.mark.parametrize("lengths", [(), (3,), (0,), (1, 5), (0, 0, 0), (5, 5)])
def test_batches_of_every_kind(lengths: tuple[int, ...], trace: str, on: str) -> None:
    """K31, K32: a withheld row is absent, and a batch of them is legal."""
    x, n = torch.randn(len(lengths), 5), torch.tensor(lengths, dtype=torch.int64)
    run = compiled(Toy(), on, trace)
    for _ in range(2):
        rows = run(x, n)["audio"]
        assert values(rows) == cut(x * 2 + 1, lengths)
        assert len(rows) == sum(length > 0 for length in lengths)
        for i, length in enumerate(lengths):
            assert (rows.at(i) is None) is (length == 0)
        with pytest.raises(RowLookupError, match=f"the step has {len(lengths)} real rows"):
            rows.at(len(lengths))


@TRACES
@BACKENDS
def test_padding_rows_never_surface(trace: str, on: str) -> None:
    """K7, K8: whatever they hold, and whatever the same graph held before."""
    run = compiled(Toy(), on, trace)
    x, n = batch((3, 5, 2, 4))
    assert values(run(x, n, rows=list("abcd"))["audio"]) == dict(
        zip("abcd", cut(x * 2 + 1, [3, 5, 2, 4]).values(), strict=True)
    )
    x[1:] = float("nan")
    n[1:] = torch.tensor([5, -7, 2**62])
    with run.launch(x, n, rows=["a"], num_rows=1) as step:
        assert values(step.rows()) == {"a": (x * 2 + 1)[0, :3].tolist()}
        assert step.row_ids == ("a",)
        assert len(step.rows()) == 1
    assert values(run(x, n, num_rows=1)["audio"]) == cut(x * 2 + 1, [3])
    assert values(run(x, n, num_rows=0)["audio"]) == {}


@TRACES
@BACKENDS
@pytest.mark.parametrize("buckets", [None, {"batch": (4,)}, {"batch": (1,)}])  # no buckets, a hit, a miss
def test_results_lose_the_callers_padding_rows(buckets: Any, trace: str, on: str) -> None:
    """Without buckets spans, row values and whole outputs kept them."""

    def forward(self: Spanned, x: Tensor, n: Tensor) -> Any:
        return SpannedOutput(
            {"audio": x * 2, "sums": x.sum(1), "table": x.sum(0)}, {"audio": from_lengths(n)}, {"n": n}
        )

    x, n = batch((3, 5))
    with compiled(spanned(forward), on, trace, buckets=buckets).launch(x, n, num_rows=1) as step:
        result = step.result()
        assert values(result.outputs["audio"]) == cut(x * 2, [3])
        assert result.outputs["sums"].tolist() == x.sum(1).tolist()[:1]
        assert result.outputs["table"].shape == (5,)
        assert result.output_spans["audio"].tolist() == [[0, 3]]
        assert result.row_values["n"].tolist() == [3]


@BACKENDS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": ["a"]}, "1 row ids for 2 real rows.* num_rows= says how many of the batch.s 2 rows are real"),
        ({"rows": ["a", "b", "c"]}, "3 row ids for 2 real rows"),
        ({"rows": ["a", "a"]}, r"row ids \['a', 'a'\] hold one id twice"),
        ({"num_rows": 3}, "num_rows=3 of a batch of 2 rows"),
        ({"num_rows": -1}, "num_rows=-1"),
        ({"num_rows": True}, "num_rows=True of a batch of 2 rows: expected an int"),
        ({"num_rows": 1.0}, "num_rows=1.0 of a batch of 2 rows: expected an int"),
        ({"rows": ["a"], "num_rows": 2}, "1 row ids for 2 real rows"),
    ],
)
def test_row_ids_that_do_not_fit_are_refused(options: dict[str, Any], message: str, on: str) -> None:
    run = compiled(Toy(), on)
    x, n = batch((3, 5))
    with pytest.raises(InputError, match=message):
        run.launch(x, n, **options)
    assert values(run(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])


@BACKENDS
def test_row_ids_are_frozen_at_launch(on: str) -> None:
    """K30: the caller's list may change; an aborted row is withheld, at any time."""
    ids: list[Any] = ["a", ("b", 1), 3]
    x, n = batch((3, 5, 2))
    with compiled(Toy(), on).launch(x, n, rows=ids) as step:
        ids[:] = ids[::-1]
        step.withhold(("b", 1))
        rows = step.rows()
        assert list(rows) == ["a", 3]
        assert rows[3].tolist() == (x * 2 + 1)[2, :2].tolist()
        with pytest.raises(KeyError, match=r"row \('b', 1\) of 'audio' is withheld"):
            rows["b", 1]


@BACKENDS
def test_a_span_past_what_was_produced_fails_its_row_alone(on: str) -> None:
    """K1: a model of output `5 T - 2`, with spans computed as `5 T`: no stale tail, and no silent clamp."""
    model = spanned(lambda self, x, n: self.spanned(F.pad(x.repeat_interleave(5, 1), (0, -2)), n * 5))
    x = torch.randn(3, 8)
    rows = compiled(model, on)(x, torch.tensor([5, 8, 7]))["audio"]
    assert rows.at(0).tolist() == x[0, :5].repeat_interleave(5).tolist()
    assert rows.at(2).tolist() == x[2, :7].repeat_interleave(5).tolist()
    with pytest.raises(SpanError, match=r"row 1 .*span \[0, 40\) does not fit 0 <= start <= end <= 38"):
        rows[1]
    iterator = iter(rows)
    assert [next(iterator), next(iterator)] == [0, 2]
    with pytest.raises(SpanError, match="row 1") as caught:
        next(iterator)
    assert caught.value.rows == (1,)
    assert len(rows) == 2


@TRACES
def test_chunks_add_up_to_the_whole(trace: str) -> None:
    """K2, K3: left context, new samples at the end of the row; the chunks together equal the one-shot output."""

    class Chunk(Spanned):
        def forward(self, x: Tensor, new: Tensor) -> Any:
            y = F.conv1d(x[:, None], self.kernel)[:, 0]
            return SpannedOutput({"audio": y}, {"audio": from_lengths(new, start=y.shape[1] - new)})

    model = Chunk()
    model.register_buffer("kernel", torch.randn(1, 1, 3))
    run = compiled(model, trace=trace)
    signal = torch.randn(1, 20)
    whole = F.conv1d(signal[:, None], model.kernel)[0, 0]
    chunks = []
    for end in (8, 14, 20):  # windows of 8, the first all new
        new = 6 if end == 8 else min(6, end - 2)
        chunks.append(run(signal[:, end - 8 : end], torch.tensor([new]))["audio"][0])
    torch.testing.assert_close(torch.cat(chunks), whole)
    assert sum(map(len, chunks)) == len(whole)


@TRACES
def test_each_row_is_cut_by_its_own_rule(trace: str) -> None:
    """K4, K9: one row ended by its end marker, one by its length; a blind `[:-1]` drops a real sample."""

    def forward(self: Spanned, tokens: Tensor) -> Any:
        is_end = tokens == 0
        ended = is_end.any(1)
        length = torch.where(ended, is_end.long().argmax(1), tokens.shape[1])
        spans = withhold(from_lengths(length), length == 0)
        return SpannedOutput({"audio": tokens * 10}, {"audio": spans}, {"ended": ended.long()})

    tokens = torch.tensor([[4, 5, 0, 9], [1, 2, 3, 4], [0, 7, 7, 7]])
    with compiled(spanned(forward), trace=trace).launch(tokens) as step:
        assert values(step.rows()) == {0: [40, 50], 1: [10, 20, 30, 40]}
        assert step.row_values("ended").tolist() == [1, 0, 1]


@BACKENDS
def test_spans_on_several_dims_and_several_per_row(on: str) -> None:
    class Images(nn.Module):
        def spanned_outputs(self, walk: str) -> Any:
            return {"image": spangraph.Span(dims=(-2, -1)), "speech": spangraph.Span(max_spans=2)}

        def forward(self, x: Tensor, sizes: Tensor, speech: Tensor) -> Any:
            return SpannedOutput(
                {"image": x[:, None] * 2, "speech": x.flatten(1)}, {"image": from_lengths(sizes), "speech": speech}
            )

    x = torch.randn(2, 4, 6)
    sizes = torch.tensor([[2, 3], [4, 0]])
    speech = torch.tensor([[[0, 2], [5, 9]], [[3, 4], [0, 0]]])
    out = compiled(Images(), on)(x, sizes, speech)
    assert out["image"][0].equal(x[:1, :2, :3] * 2)
    assert list(out["image"]) == [0]  # a size of 0 on one dim is an empty span
    flat = x.flatten(1)
    assert [part.tolist() for part in out["speech"][0]] == [flat[0, :2].tolist(), flat[0, 5:9].tolist()]
    assert [part.tolist() for part in out["speech"][1]] == [flat[1, 3:4].tolist()]


@BACKENDS
def test_a_nan_in_a_padding_row_stays_there(on: str) -> None:
    """K6: rows that are cut hold what their own row held; the model mixes none here."""
    x, n = batch((3, 5))
    x[0, 3:] = float("nan")
    rows = compiled(Toy(), on)(x, n)["audio"]
    assert values(rows) == cut(x * 2 + 1, [3, 5])


@TRACES
@BACKENDS
def test_launches_inside_inference_mode(trace: str, on: str) -> None:
    run = compiled(Toy(), on, trace, depth=2)
    with torch.inference_mode():
        x, n = batch((3, 5))
        step = run.launch(x, n)
    assert values(step.rows()) == cut(x * 2 + 1, [3, 5])
    step.release()
    x, n = batch((2, 4))
    with torch.inference_mode():
        step = run.launch(x, n)
        owned = step.rows().own()
        step.release()
    assert not owned[0].is_inference()
    owned[0].add_(1)
    assert owned[0].tolist() == ((x * 2 + 1)[0, :2] + 1).tolist()


@BACKENDS
def test_row_values_travel_with_the_spans(on: str) -> None:
    def forward(self: Spanned, x: Tensor, n: Tensor) -> Any:
        values = {"top": x.argmax(1), "pair": torch.stack([n, n * 2], 1)}
        return SpannedOutput({"audio": x * 2}, {"audio": from_lengths(n)}, values)

    x, n = batch((3, 0, 5))
    with compiled(spanned(forward), on).launch(x, n, num_rows=2) as step:
        assert step.row_values("top").tolist() == x.argmax(1).tolist()[:2]  # withheld rows have values too
        assert step.row_values("pair").tolist() == [[3, 6], [0, 0]]
        assert list(step.rows()) == [0]


@BACKENDS
def test_steps_are_read_in_any_order(on: str) -> None:
    run = compiled(Toy(), on, depth=3)
    batches = [batch((i + 1, 5 - i)) for i in range(3)]
    steps = [run.launch(x, n) for x, n in batches]
    for step, (x, n) in reversed(list(zip(steps, batches, strict=True))):
        assert values(step.rows()) == cut(x * 2 + 1, n.tolist())
        assert values(step.rows()) == cut(x * 2 + 1, n.tolist())
    assert [step.generation for step in steps] == sorted(step.generation for step in steps)
