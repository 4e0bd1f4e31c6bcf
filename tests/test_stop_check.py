"""Stop checks: rows that end, and outputs that are withheld, by what the row values say on the host."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import (
    Copy,
    InputError,
    RowLookupError,
    Span,
    SpanError,
    SpannedOutput,
    SpanStager,
    StopCheck,
    from_lengths,
    withhold,
)
from spangraph.testing import SimulatedDevice

from .toys import compiled, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
LIFETIMES = pytest.mark.parametrize("lifetime", ["view", "device", "host"])

EOS = 7


class Talker(nn.Module):
    """`audio` is twice `x` up to `n`, `pitch` is `x + 1` up to `n`, and the token travels."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio", "pitch")

    def forward(self, x: Tensor, n: Tensor, token: Tensor) -> SpannedOutput:
        spans = from_lengths(n)
        values = {"token": token, "pair": torch.stack([n, token], 1)}
        return SpannedOutput({"audio": x * 2, "pitch": x + 1}, {"audio": spans, "pitch": spans}, values)


class Ended(nn.Module):
    """Withholds on the device what a sampled end token ends."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, x: Tensor, n: Tensor, token: Tensor) -> SpannedOutput:
        spans = withhold(from_lengths(n), token == EOS)
        return SpannedOutput({"audio": x * 2}, {"audio": spans}, {"token": token})


def at_eos(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
    """Ends and withholds the rows whose token is the end marker."""
    ended = [row_id for row_id, row in rows.items() if row["token"] == EOS]
    return StopCheck(stops=ended, withheld=ended)


def talker(on: str, check: Callable[..., Any], lifetime: str = "view", **options: Any) -> spangraph.Compiled:
    copies = {"audio": lifetime, "pitch": lifetime}
    return compiled(Talker(), on, "opaque", copies=copies, stop_check=check, **options)


def speech(*tokens: int, lengths: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(len(tokens), 5), torch.tensor(lengths or [4] * len(tokens)), torch.tensor(tokens)


# ---- what a check is given -----------------------------------------------------------------------------------------


@BACKENDS
def test_a_check_runs_once_a_step_on_the_values_of_its_real_rows(on: str) -> None:
    seen: list[Any] = []

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        seen.append({row_id: dict(row) for row_id, row in rows.items()})
        return StopCheck()

    with talker(on, check).launch(*speech(3, 4, 5, lengths=(1, 2, 3)), rows=["a", "b"], num_rows=2) as step:
        for _ in range(2):
            step.wait()
            step.rows("audio").own()
            step.result()
            assert step.stops == frozenset()
    assert seen == [{"a": {"token": 3, "pair": (1, 3)}, "b": {"token": 4, "pair": (2, 4)}}]
    assert type(seen[0]["a"]["token"]) is int


@BACKENDS
def test_row_ids_default_to_positions_and_a_step_may_have_none(on: str) -> None:
    seen: list[Any] = []

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        seen.append({row_id: row["token"] for row_id, row in rows.items()})
        return StopCheck(stops=rows, withheld=list(rows))

    run = talker(on, check)
    x, n, token = speech(3, 4)
    with run.launch(x, n, token) as step:
        assert step.stops == {0, 1}
    with run.launch(x, n, token, num_rows=0) as step:
        assert step.stops == set()
    assert seen == [{0: 3, 1: 4}, {}]


@BACKENDS
def test_a_step_without_row_values_is_checked_too(on: str) -> None:
    seen: list[Any] = []

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        seen.append(rows)
        return StopCheck(stops=["a"])

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with compiled(Plain(), on, stop_check=check).launch(torch.ones(1, 2), rows=["a"]) as step:
        assert step.stops == {"a"}
    assert seen == [{"a": {}}]


@BACKENDS
def test_a_step_that_nobody_reads_is_not_checked(on: str) -> None:
    seen: list[Any] = []

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        seen.append(list(rows))
        return StopCheck()

    run = talker(on, check)
    run.launch(*speech(1), rows=["released"]).release()
    run.launch(*speech(1), rows=["cancelled"]).cancel()
    run(*speech(1), rows=["read"])
    assert seen == [["read"]]


def test_without_a_check_no_row_stops() -> None:
    with compiled(Talker()).launch(*speech(EOS, 1)) as step:
        assert step.stops == frozenset()
        assert list(step.rows("audio")) == [0, 1]


# ---- what it withholds ---------------------------------------------------------------------------------------------


@LIFETIMES
@BACKENDS
def test_what_a_check_withholds_reaches_no_result(on: str, lifetime: str) -> None:
    run = talker(on, at_eos, lifetime)
    x, n, token = speech(3, EOS, 5)
    with run.launch(x, n, token, rows=list("abc")) as step:
        result = step.result().outputs
        for rows, padded in ((step.rows("audio"), x * 2), (result["audio"], x * 2), (result["pitch"], x + 1)):
            for some in (rows, rows.own()):
                assert values(some) == {"a": padded[0, :4].tolist(), "c": padded[2, :4].tolist()}
                assert some.at(1) is None
                assert some.spans("b") == ()
                assert len(some) == 2
        assert step.stops == {"b"}
        assert step.row_values("token").tolist() == [3, EOS, 5]
    owned = run(x, n, token, rows=list("abc"))
    assert values(owned["audio"]) == {"a": (x * 2)[0, :4].tolist(), "c": (x * 2)[2, :4].tolist()}


@BACKENDS
def test_a_check_may_withhold_without_stopping_and_stop_without_withholding(on: str) -> None:
    """`ignore_eos` withholds the end marker and goes on; a length cap ends a row with a real item."""

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        return StopCheck(stops=["capped"], withheld=[row for row in rows if rows[row]["token"] == EOS])

    x, n, token = speech(EOS, 1)
    with talker(on, check).launch(x, n, token, rows=["ignores", "capped"]) as step:
        assert values(step.rows("audio")) == {"capped": (x * 2)[1, :4].tolist()}
        assert step.stops == {"capped"}


@BACKENDS
def test_a_check_withholds_named_outputs(on: str) -> None:
    x, n, token = speech(EOS, EOS, 1)
    check = StopCheck(withheld={"a": ["audio"], "b": ["audio", "pitch"], "c": ()})
    with talker(on, lambda rows: check).launch(x, n, token, rows=list("abc")) as step:
        assert list(step.rows("audio")) == ["c"]
        assert values(step.rows("pitch")) == {"a": (x + 1)[0, :4].tolist(), "c": (x + 1)[2, :4].tolist()}


@LIFETIMES
@BACKENDS
def test_a_rule_per_row_drops_the_end_marker_alone(on: str, lifetime: str) -> None:
    """K4: one row ended by its end marker, one by its length cap; a blind `[:-1]` drops a real item of the latter."""

    class Tokens(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("items",)

        def forward(self, tokens: Tensor) -> SpannedOutput:
            is_end = tokens == EOS
            length = torch.where(is_end.any(1), is_end.long().argmax(1), tokens.shape[1])
            last = {"last": tokens[:, -1], "ended": is_end.any(1).long()}
            return SpannedOutput({"items": tokens * 10}, {"items": from_lengths(length)}, last)

    tokens = torch.tensor([[4, 5, EOS, 0], [1, 2, 3, 4]])
    run = compiled(
        Tokens(),
        on,
        copies={"items": lifetime},
        stop_check=lambda rows: StopCheck(stops=[row for row in rows if rows[row]["ended"] or rows[row]["last"] == 4]),
    )
    with run.launch(tokens, rows=["ended", "capped"]) as step:
        assert values(step.rows()) == {"ended": [40, 50], "capped": [10, 20, 30, 40]}
        assert step.stops == {"ended", "capped"}


@LIFETIMES
@BACKENDS
def test_an_end_token_empties_the_span_on_the_device(on: str, lifetime: str) -> None:
    """The check then only stops; both together are no different."""
    x, n, token = speech(EOS, 2, 3)
    for check in (at_eos, lambda rows: StopCheck(stops=at_eos(rows).stops)):
        with compiled(Ended(), on, copies={"audio": lifetime}, stop_check=check).launch(x, n, token) as step:
            assert values(step.rows()) == {1: (x * 2)[1, :4].tolist(), 2: (x * 2)[2, :4].tolist()}
            assert step.stops == {0}


# The end marker may come first of all, in all rows: on the host, on the device, on both.
@pytest.mark.parametrize("model", [Talker, Ended])
@BACKENDS
def test_an_end_marker_at_step_0(on: str, model: type[nn.Module]) -> None:
    """K32: every row withheld, legal and without an error."""
    x, n, token = speech(EOS, EOS)
    run = compiled(model(), on, stop_check=at_eos)
    for _ in range(2):
        with run.launch(x, n, token) as step:
            assert step.stops == {0, 1}
            assert values(step.rows("audio")) == {}
            assert len(step.rows("audio")) == 0
        assert values(run(x, n, token)["audio"]) == {}


@BACKENDS
def test_rows_of_one_sample_go_on_and_empty_ones_are_absent(on: str) -> None:
    """K31: an empty last chunk breaks stack, cat and cross-fade."""
    x, n, token = speech(1, 2, EOS, 4, lengths=(0, 1, 3, 1))
    rows = talker(on, at_eos)(x, n, token, rows=list("abcd"))["audio"]
    assert list(rows) == ["b", "d"]
    assert torch.equal(torch.stack([*rows.values()]), x[[1, 3], :1] * 2)
    assert torch.equal(torch.cat([*rows.values()]), x[[1, 3], 0] * 2)


@BACKENDS
def test_an_aborted_row_stays_withheld_and_its_garbage_is_nobody_s_error(on: str) -> None:
    """K30: launch [A, B, C], abort B, read; and C's bad span goes with the check."""
    x, n, token = speech(1, 2, EOS, lengths=(3, 2, -1))
    with talker(on, at_eos).launch(x, n, token, rows=list("ABC")) as step:
        step.withhold("B")
        assert values(step.rows("audio")) == {"A": (x * 2)[0, :3].tolist()}
        assert step.stops == {"C"}
    with talker(on, lambda rows: StopCheck()).launch(x, n, token) as step, pytest.raises(SpanError, match="row 2 of"):
        list(step.rows("audio"))


# ---- errors --------------------------------------------------------------------------------------------------------


@BACKENDS
def test_a_check_that_raises_is_run_again_at_the_next_read(on: str) -> None:
    calls: list[int] = []

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        calls.append(1)
        if len(calls) < 3:
            raise ZeroDivisionError(f"call {len(calls)}")
        return at_eos(rows)

    with talker(on, check).launch(*speech(1, EOS)) as step:
        for i, read in enumerate((step.result, lambda: step.stops)):
            with pytest.raises(ZeroDivisionError, match=f"call {i + 1}"):
                read()
        assert list(step.rows("audio")) == [0]
        assert step.stops == {1}
    assert len(calls) == 3


# Each names what is wrong, and withholds nothing though it also names a row and an output that there are.
@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        (None, InputError, r"the stop check returned None: expected StopCheck\(stops, withheld\)"),
        (["a"], InputError, r"the stop check returned \['a'\]"),
        (StopCheck(["z"], ["a"]), RowLookupError, r"names rows \['z'\].*its rows are \['a', 'b'\]"),
        (StopCheck(withheld=["a", "y"]), RowLookupError, r"names rows \['y'\]"),
        (StopCheck(withheld={"a": ["audio"], "x": ["audio"]}), RowLookupError, r"names rows \['x'\]"),
        (StopCheck(["b"], {"a": ["audio", "video"]}), RowLookupError, r"no spanned output for 'video'; this step has"),
    ],
)
def test_a_check_must_return_rows_and_outputs_of_the_step(found: Any, error: type[Exception], message: str) -> None:
    answers = [found, StopCheck()]
    with talker("inline", lambda rows: answers.pop(0)).launch(*speech(1, 2), rows=["a", "b"]) as step:
        with pytest.raises(error, match=message):
            step.wait()
        assert list(step.rows("audio")) == ["a", "b"]
        assert step.stops == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stops": "abc"}, r"stops is the string 'abc': expected a collection, e.g. \['abc'\]"),
        ({"stops": 3}, "stops is 3: expected a collection"),
        ({"stops": [["a"]]}, "expected a collection of keys .unhashable type"),
        ({"withheld": "a"}, "withheld is the string 'a'"),
        ({"withheld": {"a": "audio"}}, r"withheld\['a'\] is the string 'audio'"),
        ({"withheld": {"a": None}}, r"withheld\['a'\] is None"),
    ],
)
def test_a_stop_check_is_made_of_collections(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StopCheck(**arguments)
    assert StopCheck(stops=iter(["a", "b", "a"])).stops == {"a", "b"}


def test_a_check_is_a_function() -> None:
    with pytest.raises(InputError, match=r"stop_check=StopCheck\(.*expected a function of the row values"):
        compiled(Talker(), stop_check=StopCheck())


# ---- graphs that are captured by hand ------------------------------------------------------------------------------


@LIFETIMES
def test_a_stager_s_steps_are_checked(lifetime: str) -> None:
    device = SimulatedDevice()
    copies = {"audio": Copy(lifetime, capacity=1024)} if lifetime != "view" else None
    stager = SpanStager(
        {"audio": Span()}, max_rows=3, row_values=["token"], copies=copies, device=device, stop_check=at_eos
    )
    x, n, token = speech(3, EOS, 5)
    graph = device.new_graph()
    with device.graph(graph):
        tail = stager.stage(SpannedOutput({"audio": x * 2}, {"audio": from_lengths(n)}, {"token": token.clone()}))
    for row, ended in ((1, {"b"}), (0, {"a"}), (2, set())):  # the third is padding
        token.fill_(1)
        token[row] = EOS
        with tail.step(list("ab"), num_rows=2) as step:
            graph.replay()
        with step:
            assert step.stops == ended
            expected = {name: (x * 2)[i, :4].tolist() for i, name in enumerate("ab") if name not in ended}
            assert values(step.rows()) == expected
