"""Autoregressive decoders that keep all state in buffers, what they must deliver, and how an engine runs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import spangraph
from spangraph import Compiled, SpannedOutput

BS, HEADS, DIM, MAX_LEN, VOCAB, CHUNK = 4, 2, 6, 256, 50, 7
BOS, EOS = 1, 0


class Decoder(nn.Module):
    """One step per call: a token and a chunk of audio per row, as long as the token says.

    A row that has drawn EOS emits nothing until it is restarted. Tokens are drawn with numbers that a buffer holds, or,
    with `draws`, from torch's default generator, through dropout too.
    """

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self.draws = draws
        self.embed, self.place = nn.Embedding(VOCAB, HEADS * DIM), nn.Embedding(MAX_LEN, HEADS * DIM)
        self.qkv, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)
        self.head, self.vocoder = nn.Linear(HEADS * DIM, VOCAB), nn.Linear(HEADS * DIM, CHUNK)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("keys", torch.zeros(BS, HEADS, MAX_LEN, DIM))
        self.register_buffer("values", torch.zeros(BS, HEADS, MAX_LEN, DIM))
        self.register_buffer("position", torch.zeros(BS, dtype=torch.int64))
        self.register_buffer("token", torch.full((BS,), BOS))
        self.register_buffer("done", torch.zeros(BS, dtype=torch.bool))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("numbers", torch.randint(2**31, (BS, VOCAB)))
        self.train(draws)

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def reset(self) -> None:
        """Begin anew, in place."""
        for buffer in (self.keys, self.values, self.position, self.done):
            buffer.zero_()
        self.token.fill_(BOS)

    def forward(self, restart: Tensor) -> SpannedOutput:
        self.steps.add_(1)
        self.position.masked_fill_(restart, 0)
        self.token.masked_fill_(restart, BOS)
        self.done.logical_and_(~restart)
        x = self.embed(self.token) + self.place(self.position)
        query, key, value = self.qkv(x).view(BS, 3, HEADS, DIM).unbind(1)
        at = self.position.view(BS, 1, 1, 1).expand(BS, HEADS, 1, DIM)
        self.keys.scatter_(2, at, key.unsqueeze(2))
        self.values.scatter_(2, at, value.unsqueeze(2))
        scores = (self.keys @ query.unsqueeze(3)).squeeze(3) / math.sqrt(DIM)
        unseen = torch.arange(MAX_LEN, device=x.device) > self.position.unsqueeze(1)
        weights = scores.masked_fill(unseen.unsqueeze(1), float("-inf")).softmax(2)
        attended = (weights.unsqueeze(2) @ self.values).flatten(1)
        hidden = self.dropout(x + self.out(attended))
        token = (self.head(hidden) - (-self._uniform().log()).log()).argmax(1)
        token = token.masked_fill(self.done, EOS)
        lengths = (1 + token % CHUNK).masked_fill(token == EOS, 0)
        spoken = {"token": token, "position": self.position.clone()}
        self.position.add_(~self.done)
        self.token.copy_(token)
        self.done.logical_or_(token == EOS)
        return SpannedOutput({"audio": self.vocoder(hidden).tanh()}, {"audio": spangraph.from_lengths(lengths)}, spoken)

    def _uniform(self) -> Tensor:
        if self.draws:
            return torch.rand(BS, VOCAB)
        self.numbers.mul_(1103515245).add_(12345).remainder_(2**31)
        return (self.numbers + 0.5) / 2**31


@dataclass(frozen=True)
class Spoken:
    """What one step delivers: rows by their ids, and row values."""

    rows: dict[str, list[float]]
    values: dict[str, list[int]]


def ids_of(step: int) -> list[str]:
    """The rows of a step, in another order at each."""
    return [f"request-{(step + i) % BS}" for i in range(BS)]


def restarts(num_steps: int) -> list[Tensor]:
    """Which rows each step restarts: all at first, later few."""
    drawn = torch.rand(num_steps, BS, generator=torch.Generator().manual_seed(5)) < 1 / 60
    drawn[0] = True
    return list(drawn)


def eager(model: nn.Module, inputs: Sequence[Any]) -> list[Spoken]:
    """What `model` itself does, step by step; it is changed by it. A callable among the inputs is called."""
    expected = []
    for x in inputs:
        if callable(x):
            x()
            continue
        with torch.no_grad():
            out = model(x)
        lengths = out.output_spans["audio"][:, 1].tolist()
        rows = {
            id_: out["audio"][i, :n].tolist()
            for i, (id_, n) in enumerate(zip(ids_of(len(expected)), lengths, strict=True))
            if n
        }
        expected.append(Spoken(rows, {name: value.tolist() for name, value in out.row_values.items()}))
    return expected


def read(step: spangraph.Step) -> Spoken:
    """What a step delivers."""
    with step:
        rows = {id_: row.tolist() for id_, row in step.rows("audio").items()}
        return Spoken(rows, {name: step.row_values(name).tolist() for name in ("token", "position")})


def run(compiled: Compiled, inputs: Sequence[Tensor], first: int = 0) -> list[Spoken]:
    """What the compiled model delivers, each step read while the next one runs; `first` is the first step's number."""
    found = []
    behind = None
    for i, x in enumerate(inputs):
        step = compiled.launch(x, rows=ids_of(first + i))
        if behind is not None:
            found.append(read(behind))
        behind = step
    return [*found, read(behind)] if behind is not None else found
