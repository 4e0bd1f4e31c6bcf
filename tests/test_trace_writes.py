"""What is written after a mark: spans that are written again are snapshotted, overwritten values are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spangraph import DeclarationError, SpannedOutput, from_lengths

from .toys import Spanned, Toy, batch, compiled, cut, line_of, plain, values

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])
BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
aten = torch.ops.aten


class Filling(Spanned):
    """Fills its own buffers with spans and row values, and returns the buffers."""

    def __init__(self, how: Callable[[Tensor, Tensor], Any] = Tensor.copy_) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("spans", torch.zeros(2, 2, dtype=torch.int64))
        self.register_buffer("token", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        self.how(self.spans, from_lengths(n))
        self.how(self.token, n * 10)
        return SpannedOutput({"audio": x * 2}, {"audio": self.spans}, {"token": self.token})


def _through_a_view(buffer: Tensor, spans: Tensor) -> None:
    buffer.view(-1).copy_(spans.reshape(-1))


def _element_by_element(buffer: Tensor, spans: Tensor) -> None:
    for i in range(2):
        buffer[i] = spans[i]


def _without_blocks(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    return net(x, n)["audio"], net(x + 1, n - 1)["audio"]


def _in_one_autocast(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x, n)["audio"], net(x + 1, n - 1)["audio"]


def _in_two_autocasts(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = net(x, n)["audio"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return first, net(x + 1, n - 1)["audio"]


def _nested(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = net(x, n)["audio"]
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            return first, net(x + 1, n - 1)["audio"]


def _in_grad_mode(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.enable_grad():
        return net(x, n)["audio"], net(x + 1, n - 1)["audio"]


# Both calls in one graph, and in graphs inside the graph: there the write of the second call is inside as well.
@TRACES
@pytest.mark.parametrize("how", [Tensor.copy_, _through_a_view, _element_by_element])
@pytest.mark.parametrize("calls", [_without_blocks, _in_one_autocast, _in_two_autocasts, _nested, _in_grad_mode])
def test_a_buffer_of_spans_written_by_two_calls(
    calls: Callable[..., Any], how: Callable[[Tensor, Tensor], Any], trace: str
) -> None:
    """Both marks name one buffer: a tail node staged the second call's spans for both, with no error."""
    model = plain(lambda self, x, n: calls(self.net, x, n), net=Filling(how))
    x, n = batch((3, 5))
    with compiled(model, trace=trace).launch(x, n) as step:
        first, second = step.result()
        assert values(first) == cut(x * 2, [3, 5])
        assert values(second) == cut((x + 1) * 2, [2, 4])
        assert values(step.rows("net.audio")) == cut(x * 2, [3, 5])
        assert step.row_values("net.token").tolist() == [30, 50]
        assert step.row_values("net[1].token").tolist() == [20, 40]


@BACKENDS
def test_a_buffer_of_spans_written_by_one_call_needs_no_snapshot(on: str) -> None:
    """The mirrored case: written before the mark and not after it; staged as it is, at every step."""
    run = compiled(plain(lambda self, x, n: self.net(x, n)["audio"], net=Filling()), on, "export")
    for lengths in ([3, 5], [1, 0]):
        x, n = batch(lengths)
        assert values(run(x, n)) == cut(x * 2, lengths)
    (signature,) = run._by_key.values()
    assert aten.clone.default not in [node.target for node in signature.instances[0].gm.graph.nodes]


@TRACES
@BACKENDS
def test_spans_overwritten_by_the_parent_are_snapshotted(trace: str, on: str) -> None:
    """K5, in the graph."""

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        out = self.toy(x, n)
        spans = out.output_spans["audio"]
        spans.zero_()
        return out["audio"], spans.clone()

    x, n = batch((3, 5))
    rows, spans = compiled(plain(forward, toy=Toy()), on, trace)(x, n)
    assert values(rows) == cut(x * 2 + 1, [3, 5])
    assert spans.tolist() == [[0, 0], [0, 0]]


# ---- SG109 -----------------------------------------------------------------------------------------------------------


def _zero(y: Tensor) -> Any:
    return y.zero_()  # writes


def _relu(y: Tensor) -> Any:
    return torch.relu_(y)  # writes


def _slice(y: Tensor) -> Any:
    y[:, 1:] = 0  # writes


def _view(y: Tensor) -> Any:
    return y.view(-1).mul_(2)  # writes


def _out(y: Tensor) -> Any:
    return torch.add(y, 1, out=y)  # writes


WRITES = pytest.mark.parametrize("write", [_zero, _relu, _slice, _view, _out])


def _overwriting(write: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = self.toy(x, n)["audio"]
        write(y)
        return y

    return forward


def _overwriting_in_autocast(write: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.toy(x, n)["audio"]
            write(y)
            return y + 1

    return forward


@TRACES
@WRITES
@pytest.mark.parametrize("make", [_overwriting, _overwriting_in_autocast])
def test_a_value_that_is_overwritten_later_is_refused(
    make: Callable[..., Any], write: Callable[[Tensor], Any], trace: str
) -> None:
    """Its rows would hold the later values; inside an autocast block they did."""
    with pytest.raises(DeclarationError, match=r"SG109 .*audio' .*is overwritten after its submodule returned it"):
        compiled(plain(make(write), toy=Toy()), trace=trace).launch(*batch())


def test_the_refusal_names_the_line_that_writes() -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = self.toy(x, n)["audio"]
        y.zero_()  # here
        return y

    with pytest.raises(DeclarationError, match="SG109") as caught:
        compiled(plain(forward, toy=Toy()), trace="export").launch(*batch())
    assert line_of(forward, "# here") in str(caught.value)
    assert line_of(Toy, "def forward") in str(caught.value)


@TRACES
@WRITES
def test_a_clone_may_be_overwritten(write: Callable[[Tensor], Any], trace: str) -> None:
    """The mirrored case."""

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = self.toy(x, n)["audio"]
        write(y.clone())
        write(y.to(torch.float64))  # another tensor: an alias by its schema alone
        return y

    x, n = batch((3, 5))
    assert values(compiled(plain(forward, toy=Toy()), trace=trace)(x, n)) == cut(x * 2 + 1, [3, 5])


@TRACES
def test_a_value_written_before_its_submodule_returns_is_fine(trace: str) -> None:
    """The mirrored case."""

    class InPlace(Spanned):
        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            y = x * 2
            y[:, 1:].add_(1)
            return self.spanned(y.relu_(), n)

    x, n = batch((3, 5))
    y = x * 2
    y[:, 1:] += 1
    assert values(compiled(InPlace(), trace=trace)(x, n)["audio"]) == cut(y.relu(), [3, 5])


@TRACES
def test_a_value_in_a_buffer_that_the_next_call_fills_is_refused(trace: str) -> None:
    class Reusing(Spanned):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("out", torch.zeros(2, 5))

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            return self.spanned(self.out.copy_(x), n)

    twice = plain(lambda self, x, n: (self.net(x, n)["audio"], self.net(x + 1, n)["audio"]), net=Reusing())
    with pytest.raises(DeclarationError, match="SG109"):
        compiled(twice, trace=trace).launch(*batch())
    once = plain(lambda self, x, n: self.net(x, n)["audio"], net=Reusing())
    run = compiled(once, trace=trace, depth=2)
    x, n = batch((3, 5))
    first, second = run.launch(x, n), run.launch(x + 1, n)
    assert values(first.result()) == cut(x, [3, 5])  # a copy: the second step has filled the buffer again
    assert values(second.result()) == cut(x + 1, [3, 5])
