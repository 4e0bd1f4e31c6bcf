"""The per-request path: requests that run one by one, merged to the same result as the batch of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import spangraph
from spangraph import (
    InputError,
    MergeError,
    RingFullError,
    RowLookupError,
    Rows,
    Span,
    SpanError,
    SpannedOutput,
    SpanStager,
    StopCheck,
    from_lengths,
    withhold,
)
from spangraph.testing import SimulatedDevice

from .toys import compiled, plain, spanned, values

pytestmark = pytest.mark.usefixtures("with_and_without_debugging")

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
LIFETIMES = pytest.mark.parametrize("lifetime", ["view", "device", "host"])

EOS = 7


class Speaker(nn.Module):
    """Spanned on one dim and with two spans a row, beside row values, whole tensors and constants."""

    def spanned_outputs(self, walk: str) -> dict[str, Span]:
        return {"audio": Span(), "speech": Span(max_spans=2)}

    def forward(self, x: Tensor, n: Tensor, token: Tensor) -> SpannedOutput:
        halves = torch.stack([from_lengths(n.clamp(max=1)), from_lengths(n.clamp(max=1), start=2)], 1)
        return SpannedOutput(
            {
                "audio": x * 2,
                "speech": x + 1,
                "mean": x.mean(1),
                "gain": x.new_tensor(0.5),
                "rate": 24000,
                "name": None,
                "window": torch.hann_window(4),
            },
            {"audio": withhold(from_lengths(n), token == EOS), "speech": halves},
            {"token": token},
        )


def check(rows: Any) -> StopCheck:
    """Withholds what token 5 says, on the host."""
    return StopCheck(withheld={row: ["speech"] for row in rows if rows[row]["token"] == 5})


def speaker(on: str = "inline", lifetime: str = "view", **options: Any) -> spangraph.Compiled:
    copies = {"audio": lifetime, "speech": lifetime}
    return compiled(Speaker(), on, "opaque", copies=copies, stop_check=check, **options)


def inputs(lengths: list[int], tokens: list[int], width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(len(lengths), width), torch.tensor(lengths), torch.tensor(tokens)


def one_by_one(batch: tuple[Tensor, ...], *sizes: int) -> list[tuple[Tensor, ...]]:
    """The rows of a batch as requests of these sizes, by default one row each."""
    parts = [tensor.split(list(sizes) or 1) for tensor in batch]
    return list(zip(*parts, strict=True))


def assert_same(found: Any, expected: Any) -> None:
    assert list(found.outputs) == list(expected.outputs)
    for name in ("audio", "speech"):
        rows, batched = found.outputs[name], expected.outputs[name]
        assert isinstance(rows, Rows)
        assert list(rows) == list(batched)
        assert len(rows) == len(batched)
        assert list(rows.row_ids) == list(batched.row_ids)
        for position, row_id in enumerate(rows.row_ids):
            assert rows.spans(row_id) == batched.spans(row_id)
            assert (rows.at(position) is None) is (batched.at(position) is None)
            assert (row_id in rows) is (row_id in batched)
        for entry, other in zip(rows.values(), batched.values(), strict=True):
            torch.testing.assert_close(entry, other, rtol=0, atol=0)
        assert rows.own() is rows
    for name in ("mean", "gain", "window"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    assert (found["rate"], found["name"]) == (24000, None)
    for mapping, other in ((found.output_spans, expected.output_spans), (found.row_values, expected.row_values)):
        assert {name: tensor.tolist() for name, tensor in mapping.items()} == {
            name: tensor.tolist() for name, tensor in other.items()
        }


# Depths below, at and above the number of requests; rows that are delivered, empty, ended on the device, withheld on
# the host.
@LIFETIMES
@BACKENDS
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_requests_one_by_one_are_the_batch(on: str, lifetime: str, depth: int) -> None:
    run = speaker(on, lifetime, depth=depth)
    batch = inputs([3, 0, 5, 4], [1, 2, EOS, 5])
    for rows in (None, ["a", ("b", 1), 3, "d"]):
        expected = run(*batch, rows=rows)
        assert_same(run.run_each(one_by_one(batch), rows=rows), expected)
    assert list(expected["audio"]) == ["a", "d"]
    assert list(expected["speech"]) == ["a", 3]
    assert run.memory().leased == 0


@BACKENDS
def test_requests_may_have_several_rows_and_inputs_by_name(on: str) -> None:
    run = speaker(on, depth=2)
    batch = inputs([3, 2, 5, 4], [1, 2, 3, 5])
    parts = one_by_one(batch, 1, 3)
    named = dict(zip(("x", "n", "token"), parts[1], strict=True))
    assert_same(run.run_each(iter([parts[0], named]), rows=list("abcd")), run(*batch, rows=list("abcd")))


@BACKENDS
def test_requests_of_different_widths_are_cut_by_their_own(on: str) -> None:
    """Padded to one width they could be a batch; each span is checked against its own request's width."""
    model = spanned(lambda self, x, n: self.spanned(x * 2, n))
    wide, short = torch.randn(1, 9), torch.randn(1, 4)
    rows = compiled(model, on, depth=2).run_each(
        [(short, torch.tensor([5])), (wide, torch.tensor([9])), (short, torch.tensor([4])), (wide, torch.tensor([10]))],
        rows=list("abcd"),
    )["audio"]
    assert torch.equal(rows["b"], wide[0] * 2)
    assert torch.equal(rows.at(2), short[0] * 2)
    iterator = iter(rows)
    assert [next(iterator), next(iterator)] == ["b", "c"]
    with pytest.raises(SpanError, match=r"row 'a' .*\[0, 5\) does not fit .* <= 4.*\n.*row 'd' .*<= 9") as caught:
        next(iterator)
    assert caught.value.rows == ("a", "d")
    assert len(rows) == 2
    with pytest.raises(RowLookupError, match=r"no row 'e' in this step; its rows are \['a', 'b', 'c', 'd'\]"):
        rows["e"]
    with pytest.raises(RowLookupError, match="no row at position 4: the step has 4 real rows"):
        rows.at(4)


def test_nans_of_copies_are_counted_per_row() -> None:
    x = torch.randn(3, 5).clamp(-1, 1)
    x[1, 0] = x[2, 1] = x[2, 2] = float("nan")
    model = spanned(lambda self, x, n: self.spanned(x * 1, n))
    run = compiled(model, copies={"audio": spangraph.Copy("host", dtype=torch.int16)})
    rows = run.run_each([(row[None], torch.tensor([5 - 2 * i])) for i, row in enumerate(x)])["audio"]
    assert [rows.nans(i) for i in range(3)] == [0, 1, 0]
    assert values(rows) == values(run(x, torch.tensor([5, 3, 1]))["audio"])


@BACKENDS
def test_a_stop_check_knows_the_requests_by_their_ids(on: str) -> None:
    seen: list[Any] = []

    model = spanned(lambda self, x, n: self.spanned(x * 2, n))

    def named(rows: Any) -> StopCheck:
        seen.extend(rows)
        return StopCheck(withheld=[row for row in rows if row in ("b", 1)])

    run = compiled(model, on, stop_check=named)
    requests = [(torch.randn(1, 3), torch.tensor([2])) for _ in range(3)]
    assert list(run.run_each(requests, rows=list("abc"))["audio"]) == ["a", "c"]
    assert list(run.run_each(requests)["audio"]) == [0, 2]
    assert seen == ["a", "b", "c", 0, 1, 2]


@BACKENDS
def test_all_rows_may_be_withheld(on: str) -> None:
    """K32, and K31: one row empty, one of one sample."""
    model = spanned(lambda self, x, n: self.spanned(x * 2, n))
    run, x = compiled(model, on), torch.randn(2, 3)
    assert values(run.run_each([(row[None], torch.tensor([0])) for row in x])["audio"]) == {}
    rows = run.run_each([(row[None], torch.tensor([i])) for i, row in enumerate(x)])["audio"]
    assert torch.equal(torch.stack([*rows.values()]), x[1:, :1] * 2)


# ---- what cannot be merged -----------------------------------------------------------------------------------------


class Maybe(nn.Module):
    """Returns spans where it is asked for them."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, x: Tensor, spanned: int = True) -> SpannedOutput:
        if spanned < 0:
            raise ArithmeticError("the model's own")
        n = torch.full((x.shape[0],), 2, device=x.device)
        return SpannedOutput({"audio": x * 2}, {"audio": from_lengths(n)} if spanned else {})


@BACKENDS
@pytest.mark.parametrize("order", [[True, False, True], [False, True, False]])
def test_a_mix_of_requests_with_and_without_spans_names_both_groups(order: list[bool], on: str) -> None:
    run, x = compiled(Maybe(), on, "opaque", depth=2), torch.randn(1, 3)
    with_spans, without = (["a", "c"], ["b"]) if order[0] else (["b"], ["a", "c"])
    with pytest.raises(MergeError) as caught:
        run.run_each([(x, flag) for flag in order], rows=list("abc"))
    assert f"requests {with_spans} return spans for ['audio']" in str(caught.value)
    assert f"requests {without} return no spans" in str(caught.value)
    assert run.memory().leased == 0
    assert list(run.run_each([(x,), (x, True)])["audio"]) == [0, 1]


@BACKENDS
def test_requests_without_spans_are_merged_whole(on: str) -> None:
    run, x = compiled(Maybe(), on, "opaque", depth=2), torch.randn(3, 4)
    merged = run.run_each([(row[None], False) for row in x])
    assert torch.equal(merged["audio"], x * 2)
    assert merged.output_spans == {}


# A scalar, a constant, a structure, a class, a width, a table that is not per row: equal in all requests, or refused.
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: {"total": x.sum()}, r"output\['total'\] is delivered whole, and cannot be merged: its shapes"),
        (lambda x: {"y": x[:, :2], "width": x.shape[1]}, r"output\['width'\] differs between requests: 3, 4"),
        (lambda x: [x] * (x.shape[1] - 2), r"requests \[0\] and \[1\] return different structures"),
        (lambda x: (x[:, :2], None if x.shape[1] == 3 else "wide"), r"output\[1\] is of types \['NoneType', 'str'\]"),
        (lambda x: x * 2, r"output is delivered whole.*its shapes by request are \[\[1, 3\], \[1, 4\]\]"),
        (lambda x: (x[:, :2], x[0]), r"output\[1\] is delivered whole.* are \[\[3\], \[4\]\]"),
        (lambda x: (x[:, :2], x[0, :2] * 2), r"output\[1\] is delivered whole.* are \[\[2\], \[2\]\]"),
    ],
)
def test_what_differs_without_spans_is_refused(make: Callable[[Tensor], Any], message: str) -> None:
    run = compiled(plain(lambda self, x: make(x)), "inline", "opaque")
    with pytest.raises(MergeError, match=message):
        run.run_each([(torch.ones(1, 3),), (torch.ones(1, 4) * 2,)])


class Keyless:
    """A class that pytree knows no key paths of."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


pytree.register_pytree_node(Keyless, lambda out: ([out.y], None), lambda leaves, _: Keyless(*leaves))


def test_outputs_of_a_class_without_key_paths_are_merged() -> None:
    run, x = compiled(plain(lambda self, x: Keyless(x * 2)), "inline", "opaque"), torch.randn(3, 2)
    merged = run.run_each([(row[None],) for row in x])
    assert isinstance(merged, Keyless)
    assert torch.equal(merged.y, x * 2)


def test_what_is_equal_in_all_requests_is_there_once() -> None:
    """The mirrored case; a NaN is equal to a NaN."""
    model = plain(lambda self, x: (x, x[0, :2].log() * 0, torch.arange(5), 3.0, x.shape[1], "kind"))
    run = compiled(model, "inline", "opaque")
    y, nan, table, *constants = run.run_each([(torch.zeros(1, 3),), (torch.zeros(1, 3),)])
    assert y.shape == (2, 3)
    assert nan.shape == (2,)
    assert nan.isnan().all()
    assert table.tolist() == list(range(5))
    assert constants == [3.0, 3, "kind"]


@pytest.mark.parametrize(
    ("requests", "rows", "message"),
    [
        ([], None, "run_each got no requests"),
        ([], ["a"], "1 row ids for 0 rows"),
        ([(torch.ones(1, 3),)] * 3, ["a", "b"], "2 row ids for 3 rows"),
        ([(torch.ones(1, 3),)] * 2, ["a", "b", "c"], "3 row ids for 2 rows"),
        ([(torch.ones(1, 3),)] * 2, ["a", "a"], "hold one id twice"),
        ([(torch.ones(1, 3),)] * 2, "ab", "is one string"),
        ([(torch.ones(1, 3),)], [["a"]], "cannot be keys"),
        ([{"x": torch.ones(1, 3), "rows": ["a"]}], None, r"request 0 has \['rows'\]: launch\(\) takes these itself"),
        ([(torch.ones(1, 3),), {"wait": True, "walk": "w"}], None, r"request 1 has \['walk', 'wait'\]"),
        ([(torch.ones(1, 3),), torch.ones(1, 3)], None, "request 1 is a Tensor: expected a tuple of the model's"),
    ],
)
def test_requests_and_their_ids_must_fit(requests: Any, rows: Any, message: str) -> None:
    run = compiled(Maybe(), "inline", "opaque", depth=2)
    with pytest.raises(InputError, match=message):
        run.run_each(requests, rows=rows)
    assert list(run(torch.ones(1, 3))["audio"]) == [0]


# ---- failures and room ---------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_that_fails_takes_the_others_with_it_and_nothing_else(on: str, depth: int) -> None:
    def requests() -> Iterator[tuple[Tensor]]:
        yield (torch.ones(1, 3),)
        yield (torch.ones(1, 3),)
        raise ZeroDivisionError

    run = compiled(Maybe(), on, "opaque", depth=depth)
    failing: list[tuple[Any, type[BaseException], str | None]] = [
        (requests(), ZeroDivisionError, None),
        ([(torch.ones(1, 3),), (torch.ones(1, 3), torch.ones(1), 3)], TypeError, "cannot be called like this"),
        ([(torch.ones(1, 3),), {"x": torch.ones(1, 3), "rows": None}], InputError, "rows"),
        ([(torch.ones(1, 3),), (torch.ones(1, 3), -1)], ArithmeticError, "the model's own"),
    ]
    for request, error, message in failing:
        with pytest.raises(error, match=message):
            run.run_each(request)
        assert run.memory().leased == 0
        steps = [run.launch(torch.ones(1, 3)) for _ in range(depth)]  # nothing is leased
        assert all(list(step.rows()) == [0] for step in steps)
        for step in steps:
            step.release()


def test_a_check_that_raises_leaves_no_step_leased() -> None:
    calls: list[int] = []

    def raising(rows: Any) -> StopCheck:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return StopCheck()

    run, x = compiled(Maybe(), "simulated", "opaque", depth=3, stop_check=raising), torch.ones(1, 3)
    with pytest.raises(ZeroDivisionError):
        run.run_each([(x,)] * 4)
    assert run.memory().leased == 0
    assert list(run.run_each([(x,)] * 4)["audio"]) == [0, 1, 2, 3]


@BACKENDS
def test_steps_of_others_leave_less_room(on: str) -> None:
    """Requests then run on what is left; on none, it is refused, or waited for."""
    run, x = compiled(Maybe(), on, "opaque", depth=2), torch.ones(1, 3)
    held = run.launch(x)
    assert list(run.run_each([(x,)] * 3)["audio"]) == [0, 1, 2]
    other = run.launch(x)
    with pytest.raises(RingFullError, match="depth=2 and 2 steps are open or leased"):
        run.run_each([(x,)] * 3)
    with pytest.raises(spangraph.StepTimeoutError, match="no room for a launch"):
        run.run_each([(x,)] * 3, wait=True, timeout=0.01)
    assert list(held.rows()) == list(other.rows()) == [0]


def test_requests_are_in_flight_up_to_the_depth() -> None:
    """The next ones are launched before the first is waited for."""
    device, fetched = SimulatedDevice(), []
    run = spangraph.compile(Maybe(), backend=device, trace="opaque", depth=3)
    x = torch.ones(1, 3)
    run(x)

    def requests() -> Iterator[tuple[Tensor]]:
        device.hold()
        for i in range(5):
            fetched.append(i)
            if i == 3:
                assert len(run._ring._live) == 3
                device.resume()
            yield (x,)

    assert list(run.run_each(requests())["audio"]) == [0, 1, 2, 3, 4]
    assert fetched == [0, 1, 2, 3, 4]


# ---- in a graph ----------------------------------------------------------------------------------------------------


@BACKENDS
def test_a_model_that_runs_its_requests_one_by_one_in_its_graph(on: str) -> None:
    """The forward merges: the same rows as the batched one, without a host read."""

    def part(self: Any, x: Tensor, n: Tensor) -> SpannedOutput:
        return SpannedOutput({"audio": x.cumsum(1)}, {"audio": from_lengths(n)}, {"n": n})

    def merged(self: Any, x: Tensor, n: Tensor) -> SpannedOutput:
        return SpannedOutput.merge([part(self, x[i : i + 1], n[i : i + 1]) for i in range(x.shape[0])])

    batch = torch.randn(3, 5), torch.tensor([3, 0, 5])
    with compiled(spanned(merged), on).launch(*batch) as step, compiled(spanned(part), on).launch(*batch) as batched:
        assert (
            values(step.rows())
            == values(batched.rows())
            == {0: batch[0].cumsum(1)[0, :3].tolist(), 2: batch[0].cumsum(1)[2].tolist()}
        )
        assert step.row_values("n").tolist() == batched.row_values("n").tolist() == [3, 0, 5]


def test_a_captured_graph_that_merges_its_requests_stages_the_batch() -> None:
    device = SimulatedDevice()
    stager = SpanStager({"audio": Span()}, max_rows=3, row_values=["token"], depth=2, device=device)
    x, n, token = torch.randn(3, 5), torch.tensor([3, 0, 5]), torch.tensor([1, 2, EOS])

    def forward(x: Tensor, n: Tensor, token: Tensor) -> SpannedOutput:
        spans = withhold(from_lengths(n), token == EOS)
        return SpannedOutput({"audio": x * 2}, {"audio": spans}, {"token": token.clone()})

    batched, each = device.new_graph(), device.new_graph()
    with device.graph(batched):
        tail = stager.stage(forward(x, n, token))
    with device.graph(each):
        parts = [forward(*request) for request in one_by_one((x, n, token))]
        tail_of_each = stager.stage(SpannedOutput.merge(parts))
    for _ in range(3):
        x.normal_()
        n.random_(0, 6)
        token.random_(EOS - 1, EOS + 1)
        with tail.step(list("abc")) as step:
            batched.replay()
        with tail_of_each.step(list("abc")) as other:
            each.replay()
        with step, other:
            assert values(other.rows()) == values(step.rows())
            expected = {row: (x * 2)[i, : n[i]].tolist() for i, row in enumerate("abc") if token[i] != EOS and n[i] > 0}
            assert values(step.rows()) == expected
            assert torch.equal(other.row_values("token"), step.row_values("token"))


@pytest.mark.parametrize("kind", ["output_spans", "row_values", "outputs"])
@pytest.mark.parametrize("named", [False, True])
def test_a_merge_of_parts_with_and_without_names_both_groups(kind: str, named: bool) -> None:
    def part(i: int, full: bool) -> SpannedOutput:
        fields: dict[str, Any] = {
            "outputs": {"audio": torch.ones(2, 3), "mean": torch.ones(2)},
            "output_spans": {"audio": torch.zeros(2, 2, dtype=torch.int64)},
            "row_values": {"token": torch.zeros(2, dtype=torch.int64)},
        }
        if not full:
            fields[kind] = {}
        return SpannedOutput(**fields, row_ids=((i, "x"), (i, "y")) if named else None)

    what = {
        "output_spans": "spans for ['audio']",
        "row_values": "row values ['token']",
        "outputs": "outputs ['audio', 'mean']",
    }
    who = "requests [(0, 'x'), (0, 'y'), (2, 'x'), (2, 'y')]" if named else "parts [0, 2]"
    others = "requests [(1, 'x'), (1, 'y')]" if named else "parts [1]"
    none = {"output_spans": "no spans", "row_values": "no row values", "outputs": "no outputs"}[kind]
    for full, first, second in ((True, what[kind], none), (False, none, what[kind])):
        with pytest.raises(MergeError) as caught:
            SpannedOutput.merge([part(0, full), part(1, not full), part(2, full)])
        assert f"{who} return {first}, {others} return {second}: merge requests of one kind" in str(caught.value)
