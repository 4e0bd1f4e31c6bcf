"""Several walks in one compiled object: outputs, options and graphs of their own, aliases, one ring."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import DeclarationError, InputError, RingFullError, SpannedOutput, Walk
from spangraph.testing import SimulatedDevice

from .toys import Toy, backend, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])


class Speech(nn.Module):
    """`prefill` returns the hidden states whole and a row value; `decode` audio; `vad` several spans a row."""

    def spanned_outputs(self, walk: str) -> dict[str, spangraph.Span]:
        spans = {"decode": {"audio": spangraph.Span()}, "vad": {"speech": spangraph.Span(max_spans=2)}}
        return spans.get(walk, {})

    def forward(self, x: Tensor, n: Tensor, walk: str) -> Any:
        if walk == "prefill":
            return SpannedOutput({"hidden": x * 10}, row_values={"length": n})
        if walk == "decode":
            return SpannedOutput({"audio": x + 1}, {"audio": spangraph.from_lengths(n)})
        return SpannedOutput({"speech": x}, {"speech": spangraph.from_mask(x > 0, max_spans=2)})


def speech(on: str = "inline", **options: Any) -> spangraph.Compiled:
    return spangraph.compile(Speech(), walk="decode", backend=backend(on), **options)


WALKS = ("prefill", "decode", "vad")


@BACKENDS
def test_each_walk_has_its_own_outputs(on: str) -> None:
    run = speech(on, walks=WALKS, depth=3)
    x, n = torch.tensor([[1.0, -1.0, 2.0]]), torch.tensor([2])
    steps = [run.launch(x, n, walk=walk) for walk in WALKS]
    prefill, decode, vad = steps
    assert values(decode.rows()) == {0: [2.0, 0.0]}
    assert [part.tolist() for part in vad.rows("speech")[0]] == [[1.0], [2.0]]
    assert prefill.row_values("length").tolist() == [2]
    assert torch.equal(prefill.result()["hidden"], x * 10)
    with pytest.raises(spangraph.RowLookupError, match=r"this step has \[\]"):
        prefill.rows("audio")
    for step in steps:
        step.release()
    assert values(run(x, n).outputs["audio"]) == {0: [2.0, 0.0]}  # `walk=` of compile is the default
    assert run.explain().count("of walk") == 3


@BACKENDS
def test_an_alias_replays_the_same_graph(on: str) -> None:
    run = speech(on, walks={"decode": Walk(), "retry": "decode"})
    x, n = torch.randn(1, 3), torch.tensor([2])
    with run.counts.expect(captures=1, launches=2, hits=1, misses=1):
        first = values(run(x, n, walk="retry").outputs["audio"])
        assert values(run(x, n, walk="decode").outputs["audio"]) == first
    assert list(run.statistics()) == [("decode", "")]


@BACKENDS
def test_a_walk_may_have_options_of_its_own(on: str) -> None:
    """Buckets and copies; what a walk leaves out is as for all."""
    run = speech(
        on,
        walks={
            "prefill": Walk(
                buckets={"batch": (3,), "width": (8,)}, dims={"x": {0: "batch", 1: "width"}, "n": {0: "batch"}}
            ),
            "decode": Walk(copies={"audio": "host"}),
        },
        buckets={"batch": (2,)},
        pad_values={"x": 5},
    )
    x, n = torch.randn(1, 3), torch.tensor([2])
    with run.launch(x, n, walk="prefill") as step:
        hidden = step.result()["hidden"]
        assert hidden.shape == (1, 8)
        assert hidden[0, 3:].tolist() == [50.0] * 5
    with run.launch(x, n, walk="decode") as step:
        assert values(step.rows()) == values({0: x[0, :2] + 1})
    assert run.counts.host_bytes == 16
    assert {bucket for _, bucket in run.statistics()} == {"batch=3, width=8", "batch=2"}


def test_walks_share_one_ring_and_its_depth() -> None:
    run = speech(walks=WALKS, depth=1)
    x, n = torch.randn(1, 3), torch.tensor([2])
    step = run.launch(x, n, walk="decode")
    with pytest.raises(RingFullError, match="depth=1 and 1 steps are open or leased: step 1"):
        run.launch(x, n, walk="vad")
    step.release()
    assert run.launch(x, n, walk="vad").generation == 2


def test_walks_whose_outputs_are_all_copied_share_a_memory_pool() -> None:
    device = SimulatedDevice()
    walks = {"decode": Walk(copies={"audio": "host"}), "vad": Walk(copies={"speech": "device"})}
    run = spangraph.compile(Speech(), walk="decode", walks=walks, backend=device)
    x, n = torch.randn(1, 3), torch.tensor([2])
    for walk in walks:
        run(x, n, walk=walk)
    pools = {id(i.graph.pool) for s in run._by_key.values() for i in s.instances}  # type: ignore[union-attr]
    assert len(pools) == 1


def test_the_forward_is_told_the_walk_by_verify_too() -> None:
    assert not spangraph.verify(Speech(), (torch.randn(1, 3), torch.tensor([2])), walk="decode").errors


@pytest.mark.parametrize(
    ("walks", "message"),
    [
        ((), r"walks=\(\): expected names"),
        ("decode", "walks='decode': expected names"),
        (
            {"a": "b", "b": "a"},
            r"walks\['a'\] is 'b': expected a Walk, or the name of another walk that is one \(\[\]\)",
        ),
        ({"a": 3}, r"walks\['a'\] is 3"),
        ({"a": Walk(dims={"x": {0: "batch"}})}, "dims= and pad_values= say how inputs are padded to buckets"),
    ],
)
def test_walks_that_cannot_be(walks: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        speech(walks=walks)


def test_launches_of_no_walk() -> None:
    run = spangraph.compile(Speech(), walks=("decode", "vad"))
    x, n = torch.randn(1, 3), torch.tensor([2])
    with pytest.raises(InputError, match=r"the default walk 'forward' is none of \['decode', 'vad'\]"):
        run.launch(x, n)
    with pytest.raises(InputError, match="walk 'encode' is none of"):
        run(x, n, walk="encode")
    with pytest.raises(InputError, match="walk 'encode' is none of"):
        run.warmup((x, n), walk="encode")


def test_copies_are_checked_walk_by_walk() -> None:
    with pytest.raises(DeclarationError, match=r"copies of \['audio'\], but walk 'vad' declares the spanned outputs"):
        speech(walks=("decode", "vad"), copies={"audio": "host"})


def test_a_forward_without_a_parameter_walk_is_told_nothing() -> None:
    run = spangraph.compile(Toy(), walks=("a", "b"))
    x = torch.randn(1, 3)
    assert values(run(x, torch.tensor([3]), walk="b").outputs["audio"]) == {0: (x[0] * 2 + 1).tolist()}
