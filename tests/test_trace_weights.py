"""Weights after the trace: in-place updates are followed, replaced tensors are noticed, on every backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spangraph import StaleGraphError

from .toys import Spanned, batch, compiled, cut, plain, values

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])
BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])


class Weighted(Spanned):
    """`x * weight + offset`; the weight is a parameter and the offset a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.tensor([2.0]))
        self.inner.register_buffer("offset", torch.tensor([1.0]))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        return self.spanned(x * self.inner.weight + self.inner.offset, n)


def _check(run: Any, gain: float, offset: float) -> None:
    x, n = batch((3, 5))
    assert values(run(x, n)["audio"]) == cut(x * gain + offset, [3, 5])


def _copy(model: Weighted) -> None:
    with torch.no_grad():
        model.inner.weight.copy_(torch.tensor([5.0]))
        model.inner.offset.fill_(7.0)


def _data_in_place(model: Weighted) -> None:
    model.inner.weight.data.fill_(5.0)
    model.inner.offset.data.copy_(torch.tensor([7.0]))


def _load(model: Weighted) -> None:
    model.load_state_dict({"inner.weight": torch.tensor([5.0]), "inner.offset": torch.tensor([7.0])})


def _optimizer(model: Weighted) -> None:
    model.inner.weight.grad = torch.tensor([-3.0])
    torch.optim.SGD([model.inner.weight], lr=1.0).step()
    model.inner.offset.add_(6.0)


@TRACES
@BACKENDS
@pytest.mark.parametrize("update", [_copy, _data_in_place, _load, _optimizer])
def test_in_place_updates_are_followed(update: Callable[[Weighted], None], trace: str, on: str) -> None:
    model = Weighted()
    run = compiled(model, on, trace)
    _check(run, 2, 1)
    update(model)
    _check(run, 5, 7)


def _data(model: Weighted) -> None:
    model.inner.weight.data = torch.tensor([5.0])


def _assign(model: Weighted) -> None:
    state = {"inner.weight": torch.tensor([5.0]), "inner.offset": torch.tensor([1.0])}
    model.load_state_dict(state, assign=True)


def _parameter(model: Weighted) -> None:
    model.inner.weight = nn.Parameter(torch.tensor([5.0]))


def _registered(model: Weighted) -> None:
    model.inner.register_parameter("weight", nn.Parameter(torch.tensor([5.0])))


def _buffer(model: Weighted) -> None:
    model.inner.offset = torch.tensor([7.0])


def _to_half(model: Weighted) -> None:
    model.to(torch.float16)


def _double_inner(model: Weighted) -> None:
    model.inner.double()


REPLACEMENTS = pytest.mark.parametrize(
    ("replace", "name"),
    [
        (_assign, "inner.weight, inner.offset"),
        (_parameter, "inner.weight"),
        (_registered, "inner.weight"),
        (_buffer, "inner.offset"),
        (_to_half, "inner.weight, inner.offset"),
        (_double_inner, "inner.weight, inner.offset"),
    ],
)


@BACKENDS
@REPLACEMENTS
def test_replaced_tensors_are_noticed(replace: Callable[[Weighted], None], name: str, on: str) -> None:
    """K28: the graph would compute with the old ones; it says so at each launch, and names them."""
    model = Weighted()
    run = compiled(model, on, "export")
    _check(run, 2, 1)
    replace(model)
    for _ in range(2):
        were = "were" if "," in name else "was"
        with pytest.raises(StaleGraphError, match=f"{name} {were} replaced after the trace.*compile again"):
            run.launch(*batch())
    fresh = compiled(model, on, "export")  # as the message says
    x, n = batch((3, 5))
    with torch.no_grad():
        padded = x * model.inner.weight + model.inner.offset
    assert values(fresh(x, n)["audio"]) == cut(padded, [3, 5])


@REPLACEMENTS
def test_a_captured_opaque_forward_notices_too(replace: Callable[[Weighted], None], name: str) -> None:
    model = Weighted()
    run = compiled(model, "simulated", "opaque")
    _check(run, 2, 1)
    replace(model)
    with pytest.raises(StaleGraphError, match=name):
        run.launch(*batch())


@pytest.mark.parametrize("replace", [_assign, _parameter, _registered, _data])
def test_an_opaque_forward_that_runs_each_time_follows(replace: Callable[[Weighted], None]) -> None:
    """The mirrored case: it is the model itself."""
    model = Weighted()
    run = compiled(model, "inline", "opaque")
    _check(run, 2, 1)
    replace(model)
    _check(run, 5, 1)


def test_assigned_data_is_followed_by_a_graph_and_noticed_by_a_capture() -> None:
    """K28: the graph has the Parameter, a capture has the address of its memory."""
    model = Weighted()
    inline, captured = compiled(model, "inline", "export"), compiled(model, "simulated", "export")
    _check(inline, 2, 1)
    _check(captured, 2, 1)
    _data(model)
    _check(inline, 5, 1)
    with pytest.raises(StaleGraphError, match=r"inner\.weight was replaced after the trace"):
        captured.launch(*batch())


@BACKENDS
def test_a_buffer_that_to_rebinds_is_noticed(on: str) -> None:
    """`Module.to` writes the dict of buffers past every hook, and the graph keeps the old one alive."""
    model = plain(lambda self, x: x + self.offset)
    model.register_buffer("offset", torch.tensor([1.0]))
    run = compiled(model, on, "export")
    assert run(torch.ones(2)).tolist() == [2, 2]
    model.double()
    with pytest.raises(StaleGraphError, match="offset was replaced after the trace"):
        run.launch(torch.ones(2))


def test_tensors_replaced_in_another_model_do_not_count() -> None:
    """The mirrored case: what is counted is process-wide, what is compared is this model's."""
    model, other = Weighted(), Weighted()
    run = compiled(model, "simulated", "export")
    _check(run, 2, 1)
    for replace in (_assign, _parameter, _buffer, _to_half):
        replace(other)
        _check(run, 2, 1)


class Padded(Spanned):
    """Pads by a 0-d integer buffer, which the graph holds as a number; and has a batch norm, whose count is one too."""

    def __init__(self, pad: int) -> None:
        super().__init__()
        self.register_buffer("pad", torch.tensor(pad))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        return self.spanned(nn.functional.pad(self.norm(x), (self.pad, 0), value=9.0), n)


@BACKENDS
def test_a_loaded_number_is_noticed(on: str) -> None:
    """The buffer was folded: the graph went on padding by the old number."""
    model = Padded(2).eval()
    run = compiled(model, on, "export")
    x, n = batch((4, 7))
    assert run(x, n)["audio"][0].tolist()[:2] == [9, 9]
    state = Padded(1).state_dict()
    state["norm.num_batches_tracked"].fill_(100)
    model.load_state_dict(state)
    with pytest.raises(StaleGraphError, match=r"buffer 'pad' was 2 at the trace.*is now 1"):
        run.launch(x, n)


@BACKENDS
def test_a_loaded_number_that_the_graph_does_not_hold_is_none_of_its_business(on: str) -> None:
    """The mirrored case: a batch norm's count changes with each checkpoint, and eval mode does not read it."""
    model = Padded(2).eval()
    run = compiled(model, on, "export")
    x, n = batch((4, 7))
    run.launch(x, n).release()
    state = Padded(2).state_dict()
    state["norm.num_batches_tracked"].fill_(100)
    state["norm.bias"].fill_(3.0)
    model.load_state_dict(state)
    padded = nn.functional.pad(model.norm(x).detach(), (2, 0), value=9.0)
    torch.testing.assert_close(run(x, n)["audio"][1], padded[1])


def test_a_script_module_is_checked() -> None:
    """Its dicts of tensors are wrappers without `get`: the check failed as soon as anything was replaced anywhere."""
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.script"):
        script = torch.jit.script(nn.BatchNorm1d(5).eval())
    run = compiled(script, "simulated")
    x = torch.randn(2, 5)
    expected = script(x).detach()
    assert run(x).equal(expected)
    nn.Linear(2, 2)
    assert run(x).equal(expected)
    script.weight = nn.Parameter(torch.zeros(5))
    with pytest.raises(StaleGraphError, match="weight was replaced"):
        run.launch(x)


def test_a_model_without_weights_is_never_stale() -> None:
    run = compiled(plain(lambda self, x: x + 1), "simulated")
    assert run(torch.ones(2)).tolist() == [2, 2]
    nn.Linear(2, 2)
    assert run(torch.ones(2)).tolist() == [2, 2]
