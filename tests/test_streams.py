"""Streams: what each request has produced over steps; withheld outputs are neither in them nor counted."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spangraph import (
    RowLookupError,
    Span,
    SpanError,
    SpannedOutput,
    StaleStepError,
    Step,
    StepStateError,
    StopCheck,
    Streams,
    from_lengths,
    withhold,
)

from .toys import compiled

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
LIFETIMES = pytest.mark.parametrize("lifetime", ["view", "device", "host"])

EOS = 7


class Decoder(nn.Module):
    """A chunk of `audio` and a `pitch` per frame, up to `n`; the end marker empties both on the device."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio", "pitch")

    def forward(self, x: Tensor, n: Tensor, token: Tensor) -> SpannedOutput:
        frames = from_lengths(n)
        if self.training:
            frames = withhold(frames, token == EOS)
        audio = x.repeat_interleave(2, 1)
        return SpannedOutput({"audio": audio, "pitch": x + 1}, {"audio": frames * 2, "pitch": frames}, {"token": token})


def at_eos(rows: Any) -> StopCheck:
    ended = [row for row in rows if rows[row]["token"] == EOS]
    return StopCheck(ended, ended)


class Loop:
    """Launches steps of a compiled decoder, and remembers what each request must be given."""

    def __init__(self, on: str = "inline", *, on_device: bool = False, lifetime: str = "view", depth: int = 1) -> None:
        self.on_device = on_device
        check = (lambda rows: StopCheck(at_eos(rows).stops)) if on_device else at_eos
        copies = {"audio": lifetime, "pitch": lifetime}
        model = Decoder().train(on_device)
        self.run = compiled(model, on, "opaque", depth=depth, copies=copies, stop_check=check)
        self.expected: dict[Any, list[Tensor]] = {}

    def launch(self, tokens: dict[Any, int], lengths: Sequence[int] | None = None) -> Step:
        x, n = torch.randn(len(tokens), 4), torch.tensor(lengths or [3] * len(tokens))
        for i, (row, token) in enumerate(tokens.items()):
            chunks = self.expected.setdefault(row, [])
            if token != EOS and n[i] > 0:
                chunks.append(x[i, : n[i]].repeat_interleave(2))
        return self.run.launch(x, n, torch.tensor(list(tokens.values())), rows=list(tokens))


def assert_streams(streams: Streams, expected: dict[Any, list[Tensor]]) -> None:
    assert list(streams) == list(expected)
    for row, chunks in expected.items():
        items = streams[row].items("audio")
        assert len(items) == len(chunks) == streams[row].counts.get("audio", 0)
        for item, chunk in zip(items, chunks, strict=True):
            assert torch.equal(item, chunk)


@LIFETIMES
@BACKENDS
@pytest.mark.parametrize("on_device", [False, True])
def test_chunks_of_a_request_add_up_and_its_end_marker_is_none(on: str, lifetime: str, on_device: bool) -> None:
    """Withheld by the check or by the span: the step of the end marker adds no item, and ends the request. Requests
    come, change places and go; a row may deliver nothing and go on (K31)."""
    loop, streams = Loop(on, on_device=on_device, lifetime=lifetime), Streams("audio")
    for tokens, lengths in (
        ({"a": 1, "b": 2}, [3, 1]),
        ({"b": 1, "a": 2, "c": 3}, [0, 4, 2]),
        ({"c": 4, "b": EOS, "a": 5}, [1, 4, 2]),
        ({"a": EOS, "c": 1}, [3, 3]),
    ):
        with loop.launch(tokens, lengths) as step:
            streams.feed(step)
    assert_streams(streams, loop.expected)
    assert {row: stream.num_items for row, stream in streams.items()} == {"a": 3, "b": 1, "c": 3}
    assert {row: stream.is_finished for row, stream in streams.items()} == {"a": True, "b": True, "c": False}
    whole = torch.cat(streams["a"].items("audio"), -1)  # owned: the steps are released
    assert torch.equal(whole, torch.cat(loop.expected["a"]))
    assert torch.equal(torch.stack(streams["b"].items()), torch.stack(loop.expected["b"]))


@BACKENDS
@pytest.mark.parametrize("on_device", [False, True])
def test_an_end_marker_first_of_all_makes_a_finished_stream_without_items(on: str, on_device: bool) -> None:
    """K32."""
    loop, streams = Loop(on, on_device=on_device), Streams()
    streams.feed(loop.launch({"a": EOS, "b": EOS}))
    for stream in streams.values():
        assert stream.is_finished
        assert stream.items("audio") == stream.items("pitch") == []
        assert stream.num_items == 0
    assert len(streams) == 2


def test_a_request_that_is_only_capped_keeps_its_last_item() -> None:
    """K4: a blind drop of the last item is right for the row that ended by its end marker alone."""
    run = compiled(Decoder(), stop_check=lambda rows: StopCheck(list(rows), at_eos(rows).withheld))
    streams, x = Streams("pitch"), torch.randn(2, 4)
    with run.launch(x, torch.tensor([2, 2]), torch.tensor([EOS, 3]), rows=["ended", "capped"]) as step:
        streams.feed(step)
    assert streams["ended"].items() == []
    assert torch.equal(streams["capped"].items()[0], x[1, :2] + 1)
    assert all(stream.is_finished for stream in streams.values())


def test_ignoring_the_end_marker_withholds_it_and_goes_on() -> None:
    loop, streams = Loop(), Streams("audio")
    loop.run._ring.stop_checks._check = lambda rows: StopCheck(withheld=at_eos(rows).withheld)  # type: ignore[union-attr]
    for token in (1, EOS, 2):
        with loop.launch({"a": token}) as step:
            streams.feed(step)
    assert_streams(streams, loop.expected)
    assert streams["a"].num_items == 2
    assert not streams["a"].is_finished


def test_named_outputs_are_withheld_and_counted_alone() -> None:
    run = compiled(Decoder(), stop_check=lambda rows: StopCheck(withheld={"a": ["audio"]}))
    streams = Streams()
    with run.launch(torch.randn(2, 4), torch.tensor([2, 3]), torch.tensor([1, 2]), rows=["a", "b"]) as step:
        streams.feed(step)
    assert streams["a"].counts == {"audio": 0, "pitch": 1}
    assert streams["b"].counts == {"audio": 1, "pitch": 1}
    assert streams["a"].num_items == 1
    assert repr(streams["a"]) == "<Stream {'audio': 0, 'pitch': 1}>"
    assert streams["a"].items("audio") == []
    with pytest.raises(RowLookupError, match=r"no output for one name in this stream; it has \['audio', 'pitch'\]"):
        streams["a"].items()
    with pytest.raises(RowLookupError, match="no output for 'video'"):
        streams["a"].pop("video")


def test_an_aborted_row_is_passed_over() -> None:
    """K30: also where it had a stream, and where it never had one."""
    loop, streams = Loop(depth=2), Streams("audio")
    streams.feed(loop.launch({"a": 1, "b": 1}))
    step = loop.launch({"a": 1, "b": 1, "c": 1})
    step.withhold("b")
    step.withhold("c")
    streams.feed(step)
    assert list(streams) == ["a", "b"]
    assert [streams[row].num_items for row in "ab"] == [2, 1]
    assert not streams["b"].is_finished


# ---- what is refused -----------------------------------------------------------------------------------------------


@BACKENDS
def test_a_bad_span_loses_its_own_row_alone(on: str) -> None:
    """The good rows are there, before it raises once; of the bad row not even its good outputs are."""

    class Half(Decoder):
        def forward(self, x: Tensor, n: Tensor, token: Tensor) -> SpannedOutput:
            out = super().forward(x, n.clamp(max=3), token)
            return SpannedOutput(out.outputs, {**out.output_spans, "pitch": from_lengths(n)}, out.row_values)

    x, streams = torch.randn(4, 4), Streams()
    run = compiled(Half(), on, "opaque", stop_check=lambda rows: StopCheck(["c"]))
    with run.launch(x, torch.tensor([3, 9, 2, 9]), torch.ones(4, dtype=torch.int64), rows=list("abcd")) as step:
        with pytest.raises(SpanError, match=r"row 'b' of 'pitch'.*\nrow 'd' of 'pitch'") as caught:
            streams.feed(step)
        assert caught.value.rows == ("b", "d")
        with pytest.raises(StepStateError, match="was fed to these streams already"):
            streams.feed(step)
    assert {row: stream.counts for row, stream in streams.items()} == {
        row: dict.fromkeys(("audio", "pitch"), count) for row, count in (("a", 1), ("b", 0), ("c", 1), ("d", 0))
    }
    assert torch.equal(streams["c"].items("pitch")[0], x[2, :2] + 1)
    assert [row for row in streams if streams[row].is_finished] == ["c"]


def test_a_step_is_fed_once() -> None:
    loop, streams, others = Loop(), Streams("audio"), Streams("pitch")
    step = loop.launch({"a": 1})
    streams.feed(step)
    others.feed(step)
    with pytest.raises(StepStateError, match=r"<step 1 .*was fed to these streams already"):
        streams.feed(step)
    assert_streams(streams, loop.expected)


def test_steps_are_fed_in_launch_order() -> None:
    """For each request; steps of different requests may overtake each other, and nothing of a refused one is added."""
    loop, streams = Loop("simulated", depth=3), Streams("audio")
    first, second, third = loop.launch({"c": 1}), loop.launch({"a": 1, "b": 1}), loop.launch({"b": 1, "c": 1})
    streams.feed(third)
    with pytest.raises(StepStateError, match=r"requests \['b'\] were fed a later step before: feed steps in launch"):
        streams.feed(second)
    assert list(streams) == ["b", "c"]
    assert [streams[row].num_items for row in "bc"] == [1, 1]
    second.withhold("b")
    streams.feed(second)
    assert [streams[row].num_items for row in "abc"] == [1, 1, 1]
    with pytest.raises(StepStateError, match=r"requests \['c'\] were fed a later step"):
        streams.feed(first)


def test_steps_of_other_objects_have_an_order_of_their_own() -> None:
    """A request whose prefill is another model's."""
    prefill, decode, streams = Loop(), Loop(), Streams("audio")
    for _ in range(3):
        prefill.launch({"z": 1}).release()
    for loop in (prefill, decode, decode):
        with loop.launch({"a": 1}) as step:
            streams.feed(step)
    assert streams["a"].num_items == 3


def test_a_finished_request_takes_no_more() -> None:
    """A step that was launched before the end was known: its row is withheld, or refused."""
    loop, streams = Loop("simulated", depth=3), Streams("audio")
    steps = [loop.launch({"a": EOS, "b": 1}), loop.launch({"a": 1, "b": 1}), loop.launch({"a": EOS, "b": 1})]
    streams.feed(steps[0])
    with pytest.raises(StepStateError, match=r"requests \['a'\] are finished: withhold their rows \(step.withhold\)"):
        streams.feed(steps[1])
    assert streams["b"].num_items == 1
    steps[1].withhold("a")
    streams.feed(steps[1])
    streams.feed(steps[2])  # its check withholds the row
    assert (streams["a"].num_items, streams["b"].num_items) == (0, 3)
    assert streams["a"].is_finished


def test_a_step_must_have_the_outputs() -> None:
    loop = Loop()
    step = loop.launch({"a": 1})
    with pytest.raises(RowLookupError, match=r"no spanned output for 'video'; this step has \['audio', 'pitch'\]"):
        Streams("audio", "video").feed(step)
    step.release()
    streams = Streams("audio")
    with pytest.raises(StaleStepError, match="was released"):
        streams.feed(step)
    assert not streams


# ---- memory --------------------------------------------------------------------------------------------------------


def test_what_is_popped_is_forgotten() -> None:
    loop, streams = Loop(), Streams("audio")
    for _ in range(3):
        with loop.launch({"a": 1}) as step:
            streams.feed(step)
    kept = weakref.ref(streams["a"].items()[0])
    assert len(streams["a"].pop()) == 3
    gc.collect()
    assert kept() is None
    assert streams["a"].items() == streams["a"].pop("audio") == []
    with loop.launch({"a": 1}) as step:
        streams.feed(step)
    assert (streams["a"].num_items, len(streams["a"].items())) == (4, 1)
    stream = streams.pop("a")
    assert torch.equal(stream.items()[0], loop.expected["a"][3])
    assert "a" not in streams
    for forgotten in (streams.pop, streams.__getitem__):
        with pytest.raises(RowLookupError, match="no stream of request 'a': no step of it was fed, or it was popped"):
            forgotten("a")


def test_streams_keep_no_step_alive() -> None:
    """And so no lease: neither as fed, nor as the newest of a request."""
    loop, streams = Loop(), Streams()
    step = loop.launch({"a": 1})
    streams.feed(step)
    ticket = weakref.ref(step)
    del step
    gc.collect()
    assert ticket() is None
    streams.feed(loop.launch({"a": 1}))
    assert streams["a"].counts == {"audio": 2, "pitch": 2}


@BACKENDS
def test_items_of_several_spans_are_tuples(on: str) -> None:
    class Speech(nn.Module):
        def spanned_outputs(self, walk: str) -> dict[str, Span]:
            return {"speech": Span(max_spans=2)}

        def forward(self, x: Tensor, spans: Tensor) -> SpannedOutput:
            return SpannedOutput({"speech": x * 2}, {"speech": spans})

    x, streams = torch.randn(2, 6), Streams()
    spans = torch.tensor([[[0, 2], [3, 6]], [[0, 0], [0, 0]]])
    with compiled(Speech(), on).launch(x, spans) as step:
        streams.feed(step)
    ((first, second),) = streams[0].items()
    assert torch.equal(first, x[0, :2] * 2)
    assert torch.equal(second, x[0, 3:] * 2)
    assert (streams[0].num_items, streams[1].num_items) == (1, 0)
