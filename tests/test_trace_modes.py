"""Autocast, grad and inference modes at trace and launch, threads, and models that torch warns about."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import spangraph
from spangraph import from_lengths
from spangraph.testing import SimulatedDevice

from .toys import Spanned, Toy, batch, compiled, cut, plain, tracer_of, values

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])
BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])


class Net(Spanned):
    """A product that autocast makes half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        return self.spanned(self.linear(x), n)


# ---- blocks inside the model -----------------------------------------------------------------------------------------


def _autocast(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x, n)["audio"]


def _no_grad(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.no_grad():
        return net(x, n)["audio"]


def _enable_grad(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.enable_grad():
        return net(x, n)["audio"]


def _nested(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = x + 1
        with torch.enable_grad():
            y = net(x, n)["audio"]
        return y


def _off_inside(net: nn.Module, x: Tensor, n: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        return net(x, n)["audio"]


BLOCKS = pytest.mark.parametrize("block", [_autocast, _no_grad, _enable_grad, _nested, _off_inside])


@TRACES
@BLOCKS
def test_marks_inside_blocks_are_found(block: Any, trace: str) -> None:
    """They land in a graph inside the graph, where a scan of the outer one finds none."""
    model = plain(lambda self, x, n: block(self.net, x, n), net=Net())
    x, n = batch((3, 5))
    with torch.no_grad():
        padded = model(x, n)
    with compiled(model, trace=trace).launch(x, n) as step:
        assert values(step.result()) == cut(padded, [3, 5])
        assert step.result()[0].dtype is padded.dtype
        assert values(step.rows("audio")) == cut(padded, [3, 5])


@TRACES
@BLOCKS
def test_values_that_only_a_mark_needs_leave_their_block(block: Any, trace: str) -> None:
    model = plain(lambda self, x, n: block(self.net, x, n).sum().float(), net=Net())
    x, n = batch((3, 5))
    with torch.no_grad():
        padded = block(model.net, x, n)
    with compiled(model, trace=trace).launch(x, n) as step:
        assert values(step.rows("audio")) == cut(padded, [3, 5])


@BLOCKS
def test_blocks_of_which_nothing_is_used_stay(block: Any) -> None:
    """A graph in the graph without used results was dropped as dead code, and with it marks and writes."""

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        block(self.net, x, n)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.count.add_(1)
        return x + self.count

    model = plain(forward, net=Net())
    model.register_buffer("count", torch.zeros(1))
    x, n = batch((3, 5))
    with torch.no_grad():
        padded = block(model.net, x, n)
    run = compiled(model, trace="export")
    for count in (1, 2):
        with run.launch(x, n) as step:
            assert values(step.rows("audio")) == cut(padded, [3, 5])
            assert step.result().equal(x + count)


def test_outputs_that_derive_after_a_block_are_cut() -> None:
    model = plain(lambda self, x, n: _autocast(self.net, x, n).float() * 2, net=Net())
    x, n = batch((3, 5))
    with torch.no_grad():
        padded = model(x, n)
    assert values(compiled(model, trace="export")(x, n)) == cut(padded, [3, 5])


# ---- modes around the model ------------------------------------------------------------------------------------------


@TRACES
@BACKENDS
def test_the_autocast_of_the_trace_is_entered_again(trace: str, on: str) -> None:
    """Export does not record it, and the graph would follow the caller's."""
    model, (x, n) = Net(), batch((3, 5))
    with torch.no_grad():
        plain_padded = model(x, n)["audio"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half_padded = model(x, n)["audio"]
    half, full = compiled(model, on, trace), compiled(model, on, trace)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert values(half(x, n)["audio"]) == cut(half_padded, [3, 5])
    assert values(full(x, n)["audio"]) == cut(plain_padded, [3, 5])
    assert values(half(x, n)["audio"]) == cut(half_padded, [3, 5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert values(full(x, n)["audio"]) == cut(plain_padded, [3, 5])
    assert not torch.is_autocast_enabled("cpu")


class Counting(Spanned):
    """Has a buffer that each step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        self.count.add_(1)
        return self.spanned(x * self.gain + self.count, n)


# Where the model is made, where it is first launched, and where it is launched again: inside inference mode or not.
@TRACES
@BACKENDS
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_inference_mode_both_ways(made: bool, first: bool, again: bool, trace: str, on: str) -> None:
    """K29: an inference tensor is written inside inference mode alone, whoever launches; inputs are of either kind."""
    with torch.inference_mode(made):
        model = Counting()
        run = compiled(model, on, trace)
    for step, mode in enumerate([first, again, first, again], 1):
        with torch.inference_mode(mode):
            x, n = batch((3, 5))
            rows = run(x, n)["audio"]
            assert values(rows) == cut(x.clone() * 2 + step, [3, 5])
    rows = run(*batch((3, 5)))["audio"]
    rows[0].add_(1)  # owned rows are the caller's, whose mode it may be
    assert model.count.is_inference() is made
    assert model.count.item() == 5


@TRACES
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_that_is_delivered_requires_grad(grad: bool, trace: str) -> None:
    x, n = batch((3, 5))
    with torch.set_grad_enabled(grad), compiled(Net(), trace=trace).launch(x.requires_grad_(grad), n) as step:
        assert not step.rows("audio")[0].requires_grad
        assert torch.is_grad_enabled() is grad


# ---- threads ---------------------------------------------------------------------------------------------------------


def _in_threads(jobs: list[Any]) -> None:
    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result(timeout=60)


def test_models_may_be_traced_by_several_threads_at_once() -> None:
    """torch.export changes the state of the process: parallel exports broke each other."""

    def job(gain: float, on: str) -> None:
        model = Toy()
        model.gain.data.fill_(gain)
        x, n = batch((3, 5))
        assert values(compiled(model, on, "export")(x, n)["audio"]) == cut(x * gain + 1, [3, 5])

    _in_threads([lambda g=g: job(float(g), ("inline", "simulated")[g % 2]) for g in range(6)])


def test_one_compiled_model_may_be_launched_by_several_threads() -> None:
    run = compiled(Toy(), "simulated", depth=4)

    def job() -> None:
        for width in (3, 4):
            x, n = batch((3, 1), width)
            step = run.launch(x, n, wait=True)
            with step:
                assert values(step.rows("audio")) == cut(x * 2 + 1, [3, 1])

    _in_threads([job] * 4)


def test_hooks_ignore_a_thread_that_runs_the_model_meanwhile() -> None:
    """Its marks are not ours."""
    toy = Toy()
    x, n = batch((3, 5))

    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        thread = threading.Thread(target=lambda: toy(x * 0, n * 0))
        thread.start()
        thread.join()
        return self.toy(x, n)["audio"]

    with compiled(plain(forward, toy=toy), trace="opaque").launch(x, n) as step:
        assert values(step.rows("audio")) == cut(x * 2 + 1, [3, 5])


# ---- models that torch warns about -----------------------------------------------------------------------------------


class Recurrent(Spanned):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        return self.spanned(self.lstm(x)[0].mT, n)


@TRACES
@BACKENDS
def test_an_lstm_is_traced_without_a_warning(trace: str, on: str, recwarn: pytest.WarningsRecorder) -> None:
    """Export warns of `_flat_weights`. And it must leave the module as it was."""
    model = Recurrent()
    x, n = torch.randn(2, 6, 3), torch.tensor([4, 6])
    run = compiled(model, on, trace)
    rows = run(x, n)["audio"]
    assert tracer_of(run) == trace
    padded = model(x, n)["audio"].detach()
    torch.testing.assert_close(rows[0], padded[0, :, :4])
    torch.testing.assert_close(rows[1], padded[1])
    assert not recwarn.list
    assert all(
        weight is getattr(model.lstm, name)
        for weight, name in zip(model.lstm._flat_weights, model.lstm._flat_weights_names, strict=True)
    )


def test_a_warning_of_the_model_itself_is_shown_when_it_runs() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        warnings.warn("look here", stacklevel=1)
        return x + 1

    with pytest.warns(UserWarning, match="look here"):
        compiled(plain(forward), trace="opaque").launch(torch.ones(2))


def test_checkpoint_jit_trace_and_custom_functions_export() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    class Parts(Spanned):
        def __init__(self) -> None:
            super().__init__()
            with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
                self.traced = torch.jit.trace(nn.Linear(5, 5), torch.ones(2, 5))

        def forward(self, x: Tensor, n: Tensor) -> Any:
            y = torch.utils.checkpoint.checkpoint(self.traced, x, use_reentrant=False)
            return self.spanned(Double.apply(y), n)

    model, (x, n) = Parts(), batch((3, 5))
    run = compiled(model)
    rows = run(x, n)["audio"]
    assert values(rows) == cut(model(x, n)["audio"].detach(), [3, 5])


def test_several_devices_in_one_process_are_apart() -> None:
    model, (x, n) = Toy(), batch((3, 5))
    runs = [compiled(model, "simulated"), compiled(model, "inline")]
    held = SimulatedDevice()
    blocked = spangraph.compile(model, backend=held)
    blocked(x, n)
    held.hold()
    step = blocked.launch(x, n)
    for run in runs:
        assert values(run(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])
    assert not step.is_done
    held.resume()
    assert values(step.rows("audio")) == cut(x * 2 + 1, [3, 5])


def test_spans_built_under_autocast_stay_int64() -> None:
    class Half(Spanned):
        def forward(self, x: Tensor, n: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.spanned(x @ torch.eye(5), n)

    x, n = batch((3, 5))
    rows = compiled(Half(), trace="export")(x, n.float())["audio"]
    assert [len(row) for row in rows.values()] == [3, 5]
    assert from_lengths(n.float()).dtype is torch.int64


@pytest.mark.parametrize("on", ["inline", "simulated"])
@pytest.mark.parametrize("trace", ["export", "dynamo", "opaque"])
def test_vmap_in_a_forward(on: str, trace: str) -> None:
    """In a graph it is functions that nothing uses the results of; Hugging Face builds masks by it."""
    model = plain(lambda self, x, n: self.toy(torch.vmap(lambda row: row * row.sum())(x), n), toy=Toy())
    x, lengths = batch((3, 5))
    run = compiled(model, on, trace)
    for _ in range(2):
        assert values(run(x, lengths)["audio"]) == cut(model(x, lengths)["audio"], [3, 5])
