"""Inductor itself: its C++ takes seconds to compile, so a few models show all there is."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import spangraph
from spangraph import Compiled, Rows
from spangraph.testing import SimulatedDevice

from .compiler_rig import Recorder, recorded
from .toys import Spanned, batch, cut, plain, tracer_of, values

LENGTHS = [3, 5]


class Codec(Spanned):
    """A convolution and an attention over a cache of what it has seen; a token per row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv1d(1, 4, 3, padding=1)
        self.register_buffer("keys", torch.zeros(2, 8, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        hidden = self.net(x[:, None]).tanh()
        self.keys.index_copy_(1, self.position, hidden.mean(-1, keepdim=True).mT)
        self.position.add_(1)
        weights = (self.keys @ hidden).softmax(1)
        audio = (self.keys.mT @ weights).sum(1) + x
        out = self.spanned(audio, n, keys=self.keys)
        out.row_values = {"token": n * 2 + self.position}
        return out


def _model() -> nn.Module:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        out = self.codec(x, n)
        return {"wave": out["audio"].relu()[:, None], "keys": out["keys"]}

    torch.manual_seed(0)
    return plain(forward, codec=Codec())


@pytest.fixture(scope="module")
def inductor(one_thread: None) -> Any:
    with recorded("inductor") as recorder:
        yield recorder


def _run(recorder: Recorder, run: Compiled, model: nn.Module) -> None:
    """Rows are cut from what the compiled code returned, bit for bit; and this is what the eager model returns."""
    twin, seen = _model(), len(recorder.calls)
    for i in range(3):
        x, n = batch(LENGTHS)
        x = x if i < 2 else x.T.contiguous().T  # other strides than those that were compiled for
        with run.launch(x, n) as step:
            result = step.result()
            assert isinstance(result["wave"], Rows)
            expected = twin(x, n)
            torch.testing.assert_close(result["keys"], expected["keys"])
            padded = [out for out in recorder.calls[-1][1] if out.shape == (2, 1, 5)]
            assert len(padded) == 1
            torch.testing.assert_close(padded[0], expected["wave"].detach())
            delivered = {row_id: row[0].tolist() for row_id, row in result["wave"].items()}
            assert delivered == cut(padded[0][:, 0], LENGTHS)
            assert step.row_values("token").tolist() == [2 * k + i + 1 for k in LENGTHS]
        assert model.codec.position.item() == i + 1
    assert len(recorder.calls) > seen


def test_rows_buffers_and_row_values_inline(inductor: Recorder) -> None:
    model = _model()
    run = spangraph.compile(model, backend=inductor.name)
    _run(inductor, run, model)
    with torch.no_grad():
        model.codec.net.weight.mul_(2)
    x, n = batch(LENGTHS)
    run(x, n)
    twin = _model()
    twin.load_state_dict(model.state_dict())
    twin.codec.position.sub_(1)
    torch.testing.assert_close(inductor.calls[-1][1][0], twin(x, n)["wave"].detach())


def test_rows_buffers_and_row_values_on_a_simulated_device(inductor: Recorder) -> None:
    model, device = _model(), SimulatedDevice(compiler=inductor.name)
    run = spangraph.compile(model, backend=device, depth=2)
    _run(inductor, run, model)
    assert ", uncaptured, " in run.explain()


def test_every_tracer_and_inductor_deliver_the_same_rows(one_thread: None) -> None:
    given = [batch(LENGTHS) for _ in range(2)]
    results = {}
    for trace, compiler in (("export", None), ("opaque", None), ("dynamo", None), ("dynamo", "inductor")):
        run = spangraph.compile(_model(), trace=trace, backend=SimulatedDevice(compiler=compiler), depth=2)
        steps = [run.launch(x, n) for x, n in given]
        results[trace, compiler] = [(values(step.rows("audio")), step.row_values("token")) for step in steps]
        assert tracer_of(run) == (trace if compiler is None else "dynamo")
    assert results["export", None][0][0] == results["opaque", None][0][0] == results["dynamo", None][0][0]
    for found in results.values():
        for (rows, token), (expected, expected_token) in zip(found, results["export", None], strict=True):
            assert list(rows) == list(expected)
            for row_id in rows:
                torch.testing.assert_close(torch.tensor(rows[row_id]), torch.tensor(expected[row_id]))
            assert token.equal(expected_token)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks(kind: type[nn.RNNBase], one_thread: None) -> None:
    class Recurrent(Spanned):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(1, 3, batch_first=True)

        def forward(self, x: Tensor, n: Tensor) -> Any:
            return self.spanned(self.rnn(x[..., None])[0].sum(-1), n)

    model, (x, n) = Recurrent(), batch(LENGTHS)
    rows = spangraph.compile(model, trace="dynamo", backend="inductor")(x, n)["audio"]
    expected = model(x, n)["audio"].detach()
    for i, length in enumerate(LENGTHS):
        torch.testing.assert_close(rows[i], expected[i, :length])
