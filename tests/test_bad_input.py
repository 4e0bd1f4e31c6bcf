"""What bad input gets from a compiled model, end to end: a clear error, and nothing lost; on both CPU backends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import SpannedOutput, from_lengths
from spangraph.testing import SimulatedDevice

# Both ways of running a step: on the caller's thread with fresh outputs, and captured with static ones.
pytestmark = pytest.mark.parametrize("device", [lambda: "cpu", SimulatedDevice], ids=["inline", "simulated"])

MakeDevice = Callable[[], Any]


class Tone(nn.Module):
    """`[bs, T]` -> `[bs, 2 T]`; row i is valid in `[0, 2 lengths[i])`."""

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, x: Tensor, lengths: Tensor) -> SpannedOutput:
        return SpannedOutput({"audio": self.audio(x)}, {"audio": self.spans(lengths)})

    def audio(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, 1) + 1

    def spans(self, lengths: Tensor) -> Tensor:
        return from_lengths(2 * lengths)


def expected(x: Tensor, lengths: list[int]) -> list[Tensor]:
    """Plain indexing of what `Tone` returns."""
    return [(x[i].repeat_interleave(2) + 1)[: 2 * n] for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (lambda n: {}, None),  # none at all is legal
        (lambda n: {"a": from_lengths(n)}, r"returned spans for \['a'\] but declares \['a', 'b'\]"),
        (lambda n: {k: from_lengths(n) for k in "abc"}, r"returned spans for \['c'\], which it does not declare"),
        (lambda n: {k: from_lengths(n).float() for k in "ab"}, r"are torch.float32, expected torch.int64; .*from_len"),
        (lambda n: {k: from_lengths(n).int() for k in "ab"}, r"are torch.int32, .*convert with .to\(torch.int64\)"),
        (lambda n: {k: from_lengths(n)[0] for k in "ab"}, r"have shape \[2\], expected \[3, 2\]"),
        (lambda n: {k: from_lengths(n).to("meta") for k in "ab"}, r"on meta, the output is on cpu"),
    ],
)
@pytest.mark.parametrize("trace", ["export", "opaque"])
def test_spans_that_do_not_fit(device: MakeDevice, trace: str, spans: Any, message: str | None) -> None:
    class Two(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("a", "b")

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            return SpannedOutput({"a": x + 1, "b": x * 2, "c": x - 1}, spans(n))

    x, n = torch.randn(3, 5), torch.tensor([1, 5, 2])
    with spangraph.compile(Two(), trace=trace, backend=device()) as compiled:
        if message is None:
            assert torch.equal(compiled(x, n)["a"], x + 1)
        else:
            with pytest.raises(spangraph.DeclarationError, match=message):
                compiled(x, n)


@pytest.mark.parametrize(
    ("bad", "message"),
    [((3, 1), r"\[6, 2\)"), ((0, 6), r"\[0, 12\) does not fit .* <= 10"), ((-1, 4), r"\[-2, 8\)")],
)
def test_one_bad_row_does_not_take_the_good_ones(device: MakeDevice, bad: tuple[int, int], message: str) -> None:
    """start > end, end > width, start < 0: that row alone raises; iteration yields the others first."""

    class Ranges(Tone):
        def spans(self, lengths: Tensor) -> Tensor:
            return 2 * lengths

    x = torch.randn(3, 5)
    with spangraph.compile(Ranges(), backend=device()) as compiled:
        rows = compiled(x, torch.tensor([[0, 2], bad, [1, 5]]), rows=["a", "b", "c"])["audio"]
    padded = x.repeat_interleave(2, 1) + 1
    assert torch.equal(rows["a"], padded[0, :4])
    assert torch.equal(rows["c"], padded[2, 2:10])
    with pytest.raises(spangraph.SpanError, match=message):
        rows["b"]
    seen: list[str] = []
    with pytest.raises(spangraph.SpanError, match="row 'b'") as raised:
        seen.extend(rows)
    assert seen == ["a", "c"]
    assert raised.value.rows == ("b",)


def test_nan_in_padding_rows(device: MakeDevice) -> None:
    """K7: padding rows hold NaN and whatever the last batch left; they never surface."""
    x = torch.randn(4, 5)
    with spangraph.compile(Tone(), backend=device()) as compiled:
        assert len(compiled(x, torch.tensor([5, 5, 5, 5]))["audio"]) == 4
        x[1:] = float("nan")
        rows = compiled(x, torch.tensor([3, 5, 2**40, -7]), rows=["only"], num_rows=1)["audio"]
    assert list(rows) == ["only"]
    assert torch.equal(rows["only"], expected(x, [3])[0])


@pytest.mark.parametrize("lengths", [[], [4], [0], [0, 0, 0]])
def test_empty_batch_batch_of_one_and_all_withheld(device: MakeDevice, lengths: list[int]) -> None:
    """K32: every row withheld, or none there, is legal."""
    x = torch.randn(len(lengths), 5)
    with spangraph.compile(Tone(), backend=device()) as compiled:
        rows = compiled(x, torch.tensor(lengths, dtype=torch.int64))["audio"]
    want = {i: row for i, row in enumerate(expected(x, lengths)) if row.numel()}
    assert list(rows) == list(want)
    assert all(torch.equal(rows[i], want[i]) for i in want)


def test_forward_that_raises_at_warm_up_works_next_time(device: MakeDevice) -> None:
    """K27: a failed trace or capture leaves nothing behind."""

    class Once(Tone):
        fail = True

        def audio(self, x: Tensor) -> Tensor:
            if Once.fail:
                raise ZeroDivisionError("first time")
            return super().audio(x)

    x, lengths = torch.randn(2, 5), torch.tensor([5, 2])
    with spangraph.compile(Once(), backend=device(), trace="opaque") as compiled:
        with pytest.raises(ZeroDivisionError, match="first time"):
            compiled(x, lengths)
        Once.fail = False
        for i, row in enumerate(expected(x, [5, 2])):
            assert torch.equal(compiled(x, lengths)["audio"][i], row)


def test_forward_that_raises_mid_step(device: MakeDevice) -> None:
    """K43: a launch or kernel that raises half-way; all later steps are right, and open ones stay readable."""
    backend = device()

    class Fragile(Tone):
        fail = False

        def audio(self, x: Tensor) -> Tensor:
            if Fragile.fail:
                raise ZeroDivisionError("mid step")
            return super().audio(x)

    x, lengths = torch.randn(2, 5), torch.tensor([5, 2])
    with spangraph.compile(Fragile(), backend=backend, trace="opaque", depth=2) as compiled:
        compiled(x, lengths)
        before = compiled.launch(x, lengths)
        if isinstance(backend, SimulatedDevice):
            backend.fail_next("replay", ZeroDivisionError("mid step"))
        Fragile.fail = True
        with pytest.raises(ZeroDivisionError, match="mid step"):
            compiled.launch(x * 2, lengths)
        Fragile.fail = False
        for scale in (3, 4, 5):
            rows = compiled(x * scale, lengths)["audio"]
            assert all(torch.equal(rows[i], row) for i, row in enumerate(expected(x * scale, [5, 2])))
        assert torch.equal(before.rows()[1], expected(x, [5, 2])[1])
        before.release()


def test_inputs_of_another_shape_and_dtype(device: MakeDevice) -> None:
    """Another signature is traced for itself; an input that cannot be taken is refused."""
    with spangraph.compile(Tone(), backend=device()) as compiled:
        for x in (torch.randn(2, 5), torch.randn(3, 4), torch.randn(2, 5).double(), torch.randn(2, 5)):
            lengths = list(range(1, x.shape[0] + 1))
            rows = compiled(x, torch.tensor(lengths))["audio"]
            assert all(torch.equal(rows[i], row) for i, row in enumerate(expected(x, lengths)))
        with pytest.raises(spangraph.InputError, match="an input is on meta, the model runs on cpu"):
            compiled(torch.randn(2, 5, device="meta"), torch.tensor([1, 2]))
        with pytest.raises(spangraph.InputError, match="type object can be neither copied in nor baked"):
            compiled(object(), torch.tensor([1, 2]))
        with pytest.raises(TypeError, match="cannot be called like this"):
            compiled(torch.randn(2, 5))


def test_launch_after_close_and_stale_step(device: MakeDevice) -> None:
    x, lengths = torch.randn(2, 5), torch.tensor([5, 2])
    compiled = spangraph.compile(Tone(), backend=device())
    step = compiled.launch(x, lengths)
    first, second = step.rows("audio"), step.rows("audio")
    assert all(torch.equal(first[i], second[i]) for i in range(2))  # reading a live step twice gives the same rows
    step.release()
    for read in (lambda: step.rows("audio"), lambda: first[0], step.result):
        with pytest.raises(spangraph.StaleStepError, match=r"rows.own\(\)"):
            read()
    compiled.close()
    with pytest.raises(spangraph.ClosedError, match="compile the model again"):
        compiled.launch(x, lengths)


def test_full_ring(device: MakeDevice) -> None:
    """K17: launching twice without a release is refused, and says what to do."""
    x, lengths = torch.randn(2, 5), torch.tensor([5, 2])
    with spangraph.compile(Tone(), backend=device(), depth=1) as compiled:
        step = compiled.launch(x, lengths, rows=["a", "b"])
        with pytest.raises(spangraph.RingFullError, match=r"depth=1 .*'a', 'b'.*own\(\).*wait=True"):
            compiled.launch(x, lengths)
        assert torch.equal(step.rows()["b"], expected(x, [5, 2])[1])


@pytest.mark.parametrize(
    ("rows", "num_rows", "message"),
    [
        (["a", "a"], None, "hold one id twice"),
        (["a"], None, "1 row ids for 2 real rows: give one id per real row"),
        (["a", "b", "c"], None, "3 row ids for 2 real rows"),
        (["a", "b"], 1, "2 row ids for 1 real rows"),
        (None, 3, "num_rows=3 of a batch of 2"),
        (None, -1, "num_rows=-1 of a batch of 2"),
        ("ab", None, "is one string"),
        ([[1], [2]], None, "cannot be keys"),
    ],
)
def test_row_ids(device: MakeDevice, rows: Any, num_rows: int | None, message: str) -> None:
    with spangraph.compile(Tone(), backend=device()) as compiled:
        with pytest.raises(spangraph.InputError, match=message):
            compiled.launch(torch.randn(2, 5), torch.tensor([5, 2]), rows=rows, num_rows=num_rows)
        assert len(compiled(torch.randn(2, 5), torch.tensor([5, 2]))["audio"]) == 2  # nothing was reserved


def test_plain_calls_read_at_the_end(device: MakeDevice) -> None:
    """K39: `[model(x) for x in xs]` looks safe on CPU and is wrong on CUDA, where outputs are static."""
    xs, lengths = [torch.randn(2, 5) for _ in range(6)], torch.tensor([5, 2])
    with spangraph.compile(Tone(), backend=device()) as compiled:
        results = [compiled(x, lengths) for x in xs]
    for x, result in zip(xs, results, strict=True):
        assert all(torch.equal(result["audio"][i], row) for i, row in enumerate(expected(x, [5, 2])))


def test_input_overwritten_while_it_is_read(device: MakeDevice) -> None:
    """K41: the caller reuses one input tensor for two launches while the device is held."""
    backend = device()
    x, lengths = torch.zeros(2, 5), torch.tensor([5, 2])
    with spangraph.compile(Tone(), backend=backend, depth=2) as compiled:
        compiled(x, lengths)
        if isinstance(backend, SimulatedDevice):
            backend.hold()
        steps, wanted = [], []
        for value in (1.0, 2.0):
            x.fill_(value)
            wanted.append(expected(x.clone(), [5, 2]))
            steps.append(compiled.launch(x, lengths))
        x.fill_(9.0)
        if isinstance(backend, SimulatedDevice):
            backend.resume()
        for step, rows in zip(steps, wanted, strict=True):
            assert all(torch.equal(step.rows()[i], row) for i, row in enumerate(rows))


def test_a_span_per_row_decides_where_it_ends(device: MakeDevice) -> None:
    """K4: one row ended by its end token, which is dropped, one by its length cap, which ends in a real item. A blind
    `[:-1]` would drop that item."""

    class Tokens(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("tokens",)

        def forward(self, tokens: Tensor) -> SpannedOutput:
            is_end = tokens == 0
            first_end = torch.where(is_end.any(1), is_end.to(torch.int8).argmax(1), tokens.shape[1])
            return SpannedOutput({"tokens": tokens + 0}, {"tokens": from_lengths(first_end)})

    tokens = torch.tensor([[5, 6, 0, 9], [1, 2, 3, 4]])
    with spangraph.compile(Tokens(), backend=device()) as compiled:
        rows = compiled(tokens)["tokens"]
    assert [row.tolist() for row in rows.values()] == [[5, 6], [1, 2, 3, 4]]
