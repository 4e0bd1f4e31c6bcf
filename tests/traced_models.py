"""Small models of the kinds that people compile, and what must be delivered of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spangraph
from spangraph import Span, SpannedOutput, from_lengths

from .toys import Spanned, Toy, plain

LENGTHS = [3, 0, 5, 1]
WIDTH = 5
Delivered = dict[str, dict[int, Any]]


class Conv(Spanned):
    """Two channels that are upsampled by two: spans count samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.up = nn.ConvTranspose1d(4, 2, 2, stride=2)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        return self.spanned(self.up(F.gelu(self.first(x[:, None]))).tanh(), n * 2)


class Recurrent(Spanned):
    """An LSTM or a GRU over the positions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(1, 3, batch_first=True)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        return self.spanned(self.rnn(x[..., None])[0].movedim(1, 2), n)


class Attention(Spanned):
    """Masked attention over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(1, 12)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        q, k, v = self.project(x[..., None]).chunk(3, -1)
        mask = (torch.arange(x.shape[1]) <= n[:, None])[:, None]
        return self.spanned(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum(-1), n)


class Box(nn.Module):
    """Spanned on two dims."""

    def spanned_outputs(self, walk: str) -> dict[str, Span]:
        return {"image": Span(dims=(-2, -1))}

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        image = x[:, :, None] * x[:, None] + 1
        one = torch.stack((torch.zeros_like(n), n), -1)
        return SpannedOutput({"image": image}, {"image": torch.stack((one, one), 1)})


class Voices(nn.Module):
    """Two spans a row, the second of which is empty in every other row."""

    def spanned_outputs(self, walk: str) -> dict[str, Span]:
        return {"voice": Span(max_spans=2)}

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        first = torch.stack((torch.zeros_like(n), n // 2), -1)
        second = torch.stack((n // 2, torch.where(n > 2, n, n // 2)), -1)
        return SpannedOutput({"voice": x.exp()}, {"voice": torch.stack((first, second), 1)})


class Talker(Spanned):
    """Rows with a value each, and another output that derives from them."""

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        out = self.spanned(x * 3, n)
        out.row_values = {"token": n * 10}
        return out


class Decoder(nn.Module):
    """Declared from outside, through a method, and returns a dict."""

    def decode(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"wave": x.sin(), "other": x}


def _cut(padded: Tensor, lengths: list[int]) -> dict[int, Tensor]:
    return {i: padded[i, ..., :n] for i, n in enumerate(lengths) if n}


@dataclass(frozen=True)
class Case:
    """A model, and what must be delivered for `x` and `LENGTHS`, computed from what the eager model returns."""

    make: Callable[[], nn.Module]
    expected: Callable[[nn.Module, Tensor, Tensor], Delivered]


def _audio(scale: int = 1) -> Callable[[nn.Module, Tensor, Tensor], Delivered]:
    return lambda model, x, n: {"audio": _cut(model(x, n)["audio"], [scale * k for k in LENGTHS])}


def _two() -> nn.Module:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        first = self.toy(x, n)["audio"]
        with torch.no_grad():
            second = self.talker(first.relu(), n)["audio"]
        return {"first": first, "derived": second[:, None].half(), "constant": 3}

    return plain(forward, toy=Toy(), talker=Talker())


def _expect_two(model: Any, x: Tensor, n: Tensor) -> Delivered:
    first = model.toy(x, n)["audio"]
    return {
        "toy.audio": _cut(first, LENGTHS),
        "talker.audio": _cut(first.relu() * 3, LENGTHS),
    }


def _twice() -> nn.Module:
    return plain(lambda self, x, n: self.toy(self.toy(x, n)["audio"], n)["audio"], toy=Toy())


def _expect_twice(model: Any, x: Tensor, n: Tensor) -> Delivered:
    once = model.toy(x, n)["audio"]
    return {"toy.audio": _cut(once, LENGTHS), "toy[1].audio": _cut(model.toy(once, n)["audio"], LENGTHS)}


def _adapted() -> nn.Module:
    decoder = spangraph.declare(
        Decoder(),
        wave=lambda out, x: from_lengths((x > -9).sum(-1) - 1),
        method="decode",
        row_values={"size": lambda out, x: (x > 0).sum(-1)},
    )
    return plain(lambda self, x, n: self.decoder.decode(x)["wave"], decoder=decoder)


CASES = {
    "conv": Case(Conv, _audio(2)),
    "lstm": Case(lambda: Recurrent(nn.LSTM), _audio()),
    "gru": Case(lambda: Recurrent(nn.GRU), _audio()),
    "attention": Case(Attention, _audio()),
    "two dims": Case(
        Box,
        lambda m, x, n: {"image": {i: m(x, n)["image"][i, :k, :k] for i, k in enumerate(LENGTHS) if k}},
    ),
    "two spans": Case(
        Voices,
        lambda m, x, n: {
            "voice": {
                i: tuple(x[i].exp()[a:b] for a, b in ((0, k // 2), (k // 2, k if k > 2 else k // 2)) if a < b)
                for i, k in enumerate(LENGTHS)
                if k > 1
            }
        },
    ),
    "two submodules": Case(_two, _expect_two),
    "two calls": Case(_twice, _expect_twice),
    "adapted": Case(_adapted, lambda m, x, n: {"wave": _cut(x.sin(), [WIDTH - 1] * len(LENGTHS))}),
}


def inputs() -> tuple[Tensor, Tensor]:
    """Fresh `x`, and the lengths."""
    return torch.randn(len(LENGTHS), WIDTH), torch.tensor(LENGTHS)


def assert_delivers(step: Any, expected: Delivered, **tolerance: float) -> None:
    """The step's rows are those, bit for bit unless told otherwise."""
    for name, rows in expected.items():
        found = step.rows(name)
        assert list(found) == list(rows), name
        for row_id, row in rows.items():
            mine = found[row_id]
            pairs = zip(mine, row, strict=True) if isinstance(row, tuple) else [(mine, row)]
            for a, b in pairs:
                torch.testing.assert_close(a, b.detach(), **({"rtol": 0, "atol": 0} | tolerance))
