"""Slots that are filled, containers and modes that change after the trace are noticed at a launch soon after."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spangraph import SpannedOutput, StaleGraphError

from .toys import Spanned, batch, compiled, cut, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])


@pytest.fixture(autouse=True)
def _as_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under debugging every launch checks all tensors."""
    monkeypatch.setenv("SPANGRAPH_DEBUG", "0")


class Scale:
    """An object that is no module."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


class Optional(Spanned):
    """Slots that may be filled later: a bias, a cache, an adapter, a list, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)
        self.register_buffer("cache", None)
        self.register_module("adapter", None)
        self.late: nn.Module | None = None
        self.net = nn.Sequential(nn.ReLU())
        self.plain = torch.ones(1)
        self.listed = [torch.ones(1)]
        self.deep = {"a": (Scale(torch.ones(1)),)}
        self.register_buffer("base", torch.ones(1))
        self.alias, self.aliases = self.base, [self.base]

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        y = self.net(x * self.plain * self.listed[0] * self.deep["a"][0].scale * self.alias * self.aliases[0])
        for added in (self.bias, self.cache):
            y = y if added is None else y + added
        for module in (self.adapter, self.late):
            y = y if module is None else module(y)
        return self.spanned(y, n)


FILLED = {
    "bias was replaced": lambda m: setattr(m, "bias", nn.Parameter(torch.ones(1))),
    "cache was replaced": lambda m: setattr(m, "cache", torch.ones(1)),
    "adapter was replaced": lambda m: setattr(m, "adapter", nn.Tanh()),
    "late was added": lambda m: setattr(m, "late", nn.Tanh()),
    r"net\.1 was added": lambda m: m.net.append(nn.Tanh()),
    "plain was replaced": lambda m: setattr(m, "plain", torch.full((1,), 4.0)),
    r"listed\[0\] was replaced": lambda m: m.listed.__setitem__(0, torch.full((1,), 4.0)),
    "listed was replaced": lambda m: setattr(m, "listed", [torch.full((1,), 4.0)]),
    r"deep\.a\[0\]\.scale was replaced": lambda m: setattr(m.deep["a"][0], "scale", torch.full((1,), 4.0)),
    r"deep\.a was replaced": lambda m: m.deep.update(a=(Scale(torch.full((1,), 4.0)),)),
    "alias was replaced": lambda m: setattr(m, "alias", torch.full((1,), 4.0)),
    r"aliases\[0\] was replaced": lambda m: m.aliases.__setitem__(0, torch.full((1,), 4.0)),
    "deep was replaced": lambda m: setattr(m, "deep", {"a": (Scale(torch.full((1,), 4.0)),)}),
}


@BACKENDS
@pytest.mark.parametrize("what", FILLED)
def test_what_was_none_or_not_there_is_noticed(on: str, what: str) -> None:
    """And recaptured where that is asked for. The mirrored case: a plain attribute that is written in place."""
    model = Optional()
    x, n = batch((3, 5))
    refusing, recapturing = compiled(model, on, "export"), compiled(model, on, "export", on_stale="recapture")
    for run in (refusing, recapturing):
        run(x, n)
        run(x, n)
    FILLED[what](model)
    expected = values(compiled(model)(x, n)["audio"])
    assert values(recapturing(x, n)["audio"]) == expected
    with pytest.raises(StaleGraphError, match=f"^{what} after the trace"):
        refusing(x, n)


class Structured(Spanned):
    """Containers whose order, length and keys the forward goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([nn.Tanh(), nn.Sigmoid()])
        self.net = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        self.named = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Sigmoid()})
        self.scales = nn.ParameterDict({"a": torch.full((1,), 2.0), "b": torch.full((1,), 3.0)})
        self.post = nn.Tanh()
        self.register_buffer("shift", torch.full((3,), 0.5))

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        for module in [*self.listed, *self.net, *self.named.values()]:
            x = module(x)
        for scale in self.scales.values():
            x = x * scale
        x = self.post(x) if hasattr(self, "post") else x
        return self.spanned(x + self.shift.mean() if hasattr(self, "shift") else x, n)


LAYER = nn.Hardtanh(0.1, 0.2)  # built beforehand: nothing is registered while it is put in
RESTRUCTURED: dict[str, Callable[[Any], Any]] = {
    "insert into a list": lambda m: m.listed.insert(0, LAYER),
    "del of a list": lambda m: m.listed.__delitem__(0),
    "insert into a sequence": lambda m: m.net.insert(1, LAYER),
    "pop of a sequence": lambda m: m.net.pop(0),
    "pop of a dict": lambda m: m.named.pop("a"),
    "clear of a dict": lambda m: m.named.clear(),
    "pop of parameters": lambda m: m.scales.pop("a"),
    "del of a module": lambda m: delattr(m, "post"),
    "del of a buffer": lambda m: delattr(m, "shift"),
    "resize of a buffer": lambda m: m.shift.resize_(1).fill_(7),
}


@BACKENDS
@pytest.mark.parametrize("what", RESTRUCTURED)
def test_a_structure_that_changes_past_the_hooks_is_noticed(on: str, what: str) -> None:
    """graphs of the old structure were replayed for ever."""
    model = Structured()
    x, n = batch((3, 3), 3)
    refusing, recapturing = compiled(model, on, "export"), compiled(model, on, "export", on_stale="recapture")
    for run in (refusing, recapturing):
        run(x, n)
    RESTRUCTURED[what](model)
    assert values(recapturing(x, n)["audio"]) == cut(model(x, n)["audio"], [3, 3])
    for _ in range(2):
        with pytest.raises(StaleGraphError, match="after the trace"):
            refusing(x, n)


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda m: m.named._modules.update(a=m.named._modules.pop("a")), r"named\._modules was reordered"),
        (lambda m: m.listed._modules.update({"2": LAYER}), r"listed\.2 was added"),
        (lambda m: m.listed._modules.update({"0": LAYER}), r"listed\.0 was replaced"),
        (lambda m: m._modules.pop("post"), "post was replaced"),
    ],
)
def test_a_write_into_the_modules_is_noticed_within_a_round(write: Callable[[Any], Any], what: str) -> None:
    model = Structured()
    run = compiled(model, "inline", "export")
    x, n = batch((3, 3), 3)
    run(x, n)
    write(model)
    for _ in range(6):
        with contextlib.suppress(StaleGraphError):
            run(x, n)
    with pytest.raises(StaleGraphError, match=what):
        run(x, n)


@BACKENDS
def test_a_switch_of_mode_is_noticed(on: str) -> None:
    """Dropout would go on in a graph that was traced in train mode."""
    model = Optional().train()
    x, n = batch((3, 5))
    refusing, recapturing = compiled(model, on, "export"), compiled(model, on, "export", on_stale="recapture")
    for run in (refusing, recapturing):
        run(x, n)
    model.eval()
    recapturing(x, n)
    assert recapturing.counts.reasons["weights replaced"] == 1
    for _ in range(2):
        with pytest.raises(StaleGraphError, match=r"^the model was switched to eval mode after the trace"):
            refusing(x, n)
    model.train()
    refusing(x, n)
