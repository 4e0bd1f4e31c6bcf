"""What `ring_machine` drives: graphs captured by hand, or a compiled model; and what their steps must deliver."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import spangraph
from spangraph import Copy, Span, SpannedOutput, SpanStager, Step
from spangraph.ring import Launch, Ring
from spangraph.testing import SimulatedDevice

SPANS = {"audio": Span(), "turns": Span(max_spans=2)}
MAX_ROWS, MAX_WIDTH = 4, 9
_FAR = (-(2**63), 2**63 - 1)


@dataclass(frozen=True)
class Inputs:
    """Of one launch: `x` [bs, width], `spans` [bs, 2], `pairs` [bs, 2, 2] and `token` [bs]."""

    x: Tensor
    spans: Tensor
    pairs: Tensor
    token: Tensor

    @staticmethod
    def draw(rng: random.Random, bs: int, width: int) -> Inputs:
        """Fresh values, some NaN; spans of any kind, some empty, some bad."""

        def span() -> list[int]:
            kind = rng.random()
            if kind < 0.06:
                return rng.choice([[-1, 2], [3, 2], [1, width + 1], [_FAR[0], 1], [0, _FAR[1]], [_FAR[1], _FAR[0]]])
            start, end = sorted((rng.randint(0, width), rng.randint(0, width)))
            return [start, start if kind < 0.2 else width if kind > 0.8 else end]

        x = torch.tensor([[rng.uniform(-1.5, 1.5) for _ in range(width)] for _ in range(bs)])
        if rng.random() < 0.3:
            x[rng.randrange(bs), rng.randrange(width)] = float("nan")
        token = torch.tensor([rng.randint(-(2**62), 2**62) for _ in range(bs)])
        pairs = torch.tensor([[span(), span()] for _ in range(bs)])
        return Inputs(x, torch.tensor([span() for _ in range(bs)]), pairs, token)

    def words(self, name: str) -> list[list[list[int]]]:
        """A declared output's spans, row by row."""
        return self.spans[:, None].tolist() if name == "audio" else self.pairs.tolist()

    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the models take them."""
        return self.x, self.spans, self.pairs, self.token


def forward(x: Tensor, spans: Tensor, pairs: Tensor, token: Tensor, names: Sequence[str]) -> SpannedOutput:
    """The model; its outputs are what plain PyTorch makes of the inputs."""
    outputs = {"audio": x * 2 + 1, "turns": x * 3 - 1}
    columns = {"audio": spans * 1, "turns": pairs * 1}
    return SpannedOutput({n: outputs[n] for n in names}, {n: columns[n] for n in names}, {"token": token * 1})


def to_pcm(tensor: Tensor) -> Tensor:
    """What `Copy(dtype=torch.int16)` promises."""
    return (tensor.nan_to_num(0.0).clamp(-1, 1) * 32767).round().to(torch.int16)


def is_same(delivered: Tensor, value: Tensor) -> bool:
    """Bit for bit."""
    ints = torch.int16 if value.dtype is torch.int16 else torch.int32
    return delivered.dtype is value.dtype and torch.equal(delivered.view(ints), value.view(ints))


class Model(nn.Module):
    """`forward` as a module; with an output that is delivered whole, if asked for."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def spanned_outputs(self, walk: str) -> Mapping[str, Span]:
        return SPANS

    def forward(self, x: Tensor, spans: Tensor, pairs: Tensor, token: Tensor) -> SpannedOutput:
        out = forward(x, spans, pairs, token, list(SPANS))
        if self.whole:
            out.outputs["total"] = x.sum(1)
        return out


@dataclass(eq=False)
class Lane:
    """One graph, or one signature with its graphs.

    Attributes:
        names: the spanned outputs that its steps have.
        num_graphs: how many steps may lease outputs of it.
        start: launches; the last argument is what happens in the block.
        replay: replays it with nobody's inputs, reserved by nobody.
    """

    names: tuple[str, ...]
    bs: int
    width: int
    copies: Mapping[str, Copy]
    num_graphs: int
    start: Callable[..., Step]
    replay: Callable[[], None] | None = None
    whole: bool = False
    leases_more: bool = False  # than rows that are views

    def copied(self) -> list[str]:
        """Spanned outputs whose rows are copied."""
        return [name for name in self.names if self.copies[name].to != "view"]

    @property
    def holds(self) -> bool:
        """Whether its steps lease outputs."""
        return self.leases_more or len(self.copied()) < len(self.names)

    def itemsize(self, name: str) -> int:
        """Bytes of a delivered item."""
        return 2 if self.copies[name].dtype is torch.int16 else 4

    def _room(self, name: str) -> int:
        return -(-(self.copies[name].capacity or 1 << 20) // 16) * 16

    @property
    def may_overflow(self) -> bool:
        """Whether some batch could be too large for the copies."""
        worst = {n: self.bs * SPANS[n].max_spans * -(-self.width * self.itemsize(n) // 16) * 16 for n in self.names}
        return any(self._room(name) < worst[name] for name in self.copied())

    def overflows(self, inputs: Inputs, num_rows: int) -> bool:
        """Whether this batch is."""
        for name in self.copied():
            rows = [row for row in inputs.words(name)[:num_rows] if self.is_good(row)]
            sizes = [-(-(end - start) * self.itemsize(name) // 16) * 16 for row in rows for start, end in row]
            if sum(sizes) > self._room(name):
                return True
        return False

    def is_good(self, row: Sequence[Sequence[int]]) -> bool:
        """Whether a row's spans are."""
        return all(0 <= start <= end <= self.width for start, end in row)


@dataclass(eq=False)
class Flight:
    """What the oracle knows of one launch."""

    lane: Lane
    inputs: Inputs
    ids: list[Hashable]
    num_rows: int
    step: Step | None
    launch: Launch
    is_excused: bool
    may_be_lost: bool  # its staging node, with those of steps behind it
    overflows: bool
    slots: tuple[int | None, int | None]
    withheld: set[tuple[Hashable, str]] = field(default_factory=set)
    is_read: bool = False
    end: str = ""  # "released", "cancelled", "dropped", "failed"
    error: type[BaseException] | None = None

    @staticmethod
    def of(lane: Lane, inputs: Inputs, ids: list[Hashable], step: Step, is_excused: bool, may_be_lost: bool) -> Flight:
        """A launch that has just been made."""
        launch, overflows = step._launch, lane.overflows(inputs, len(ids))
        slots = launch.slot, launch.copy_slot
        return Flight(lane, inputs, ids, len(ids), step, launch, is_excused, may_be_lost, overflows, slots)

    @property
    def is_live(self) -> bool:
        """Whether it counts towards the depth."""
        is_leased = self.lane.holds or bool(self.lane.copied())
        return not self.end and not (self.is_read and not is_leased)

    def is_done(self) -> bool:
        """Whether the device is done with it, or says that it failed."""
        event: Any = self.launch.event
        return event._reached.is_set() or event.fail is not None

    def expected(self, name: str) -> tuple[dict[Hashable, list[Tensor]], list[Hashable], dict[Hashable, int]]:
        """Good rows' parts by id, bad rows, and NaNs by row."""
        padded = forward(*self.inputs.leaves(), [name]).outputs[name]
        good: dict[Hashable, list[Tensor]] = {}
        bad: list[Hashable] = []
        nans: dict[Hashable, int] = {}
        casts = self.lane.copies[name].dtype is torch.int16
        for i, (row_id, spans) in enumerate(zip(self.ids, self.inputs.words(name)[: self.num_rows], strict=True)):
            if (row_id, name) in self.withheld:
                continue
            if not self.lane.is_good(spans):
                bad.append(row_id)
            elif parts := [padded[i, start:end] for start, end in spans if start < end]:
                nans[row_id] = sum(int(part.isnan().sum()) for part in parts) if casts else 0
                good[row_id] = [to_pcm(part) if casts else part.clone() for part in parts]
        return good, bad, nans


@dataclass(frozen=True)
class Engine:
    """What an example drives."""

    ring: Ring
    lanes: Sequence[Lane]
    close: Callable[[], None]
    counts: Callable[[], spangraph.Counts] | None = None


def draw_copies(rng: random.Random, *, sized: bool) -> dict[str, Copy]:
    """Lifetimes, for a stager with capacities (`sized`); some too small, some cast."""
    copies = {}
    for name, span in SPANS.items():
        to = rng.choice(["view", "device", "host"])
        worst = MAX_ROWS * span.max_spans * 48
        capacity = rng.choice([16, 48, 96]) if rng.random() < 0.35 else worst if sized else None
        dtype = torch.int16 if rng.random() < 0.3 else None
        copies[name] = Copy("view") if to == "view" else Copy(to, dtype=dtype, capacity=capacity)
    return copies


def captured_by_hand(device: SimulatedDevice, rng: random.Random, depth: int, wait: str) -> Engine:
    """Several graphs of one `SpanStager`: buckets, with some or all or none of its spanned outputs."""
    copies = draw_copies(rng, sized=True)
    stager = SpanStager(
        SPANS, max_rows=MAX_ROWS, row_values=["token"], copies=copies, depth=depth, device=device, wait=wait
    )
    shared = device.new_pool()
    lanes = []
    for _ in range(rng.randint(2, depth + 2)):
        names = rng.choice([("audio", "turns"), ("audio", "turns"), ("audio",), ("turns",), ()])
        lanes.append(_capture(device, stager, names, copies, shared, rng.randint(1, MAX_ROWS), rng.choice([6, 9])))
    return Engine(stager._core.ring, lanes, stager.close, lambda: stager.counts)


def _capture(
    device: SimulatedDevice,
    stager: SpanStager,
    names: tuple[str, ...],
    copies: Mapping[str, Copy],
    shared: Any,
    bs: int,
    width: int,
) -> Lane:
    static = Inputs.draw(random.Random(bs), bs, width).leaves()
    graph = device.new_graph()

    def start(
        inputs: Inputs, ids: Sequence[Hashable] | None, num_rows: int, wait: bool, timeout: float, body: str
    ) -> Step:
        given = inputs.leaves()
        with tail.step(ids, num_rows=num_rows, wait=wait, timeout=timeout) as step:
            if body == "raise":
                raise Raised(step)
            device.launch(lambda: [into.copy_(value) for into, value in zip(static, given, strict=True)])
            if body != "forget":
                graph.replay()
            if body == "raise late":
                raise Raised(step)
        return step

    lane = Lane(names, bs, width, copies, 1, start, graph.replay)
    with device.graph(graph, pool=None if lane.holds or lane.may_overflow else shared):
        tail = stager.stage(forward(*static, names), names=names or None, inputs=static)
    return lane


class Raised(Exception):
    """What a launch's body raises; holds its step."""

    def __init__(self, step: Step) -> None:
        super().__init__("the body raised")
        self.step = step


def compiled(device: SimulatedDevice, rng: random.Random, depth: int, wait: str) -> Engine:
    """A compiled model with two signatures, both captured."""
    copies, whole = draw_copies(rng, sized=False), rng.random() < 0.3
    trace = rng.choice(["opaque", "export"])
    if rng.random() < 0.4:  # one graph for all steps in flight: nothing is leased, unless a copy is too small
        whole, trace, room = False, "export", rng.choice([None, None, 48])
        copies = {name: Copy(rng.choice(["device", "host"]), capacity=room) for name in SPANS}
    run = spangraph.compile(Model(whole=whole), depth=depth, copies=copies, trace=trace, backend=device, wait=wait)

    def start(
        inputs: Inputs, ids: Sequence[Hashable] | None, num_rows: int, wait: bool, timeout: float, body: str
    ) -> Step:
        given = [leaf.clone() for leaf in inputs.leaves()]
        step = run.launch(*given, rows=ids, num_rows=num_rows, wait=wait, timeout=timeout)
        for leaf in given:
            leaf.fill_(7)  # host memory is the caller's again as soon as the launch returns
        return step

    lanes = [Lane(tuple(SPANS), bs, width, copies, depth, start, whole=whole) for bs, width in ((4, 6), (3, 9))]
    for lane in lanes:
        if rng.random() < 0.2:
            device.fail_next("capture")
            try:
                start(Inputs.draw(rng, lane.bs, lane.width), None, lane.bs, False, 60, "")
            except RuntimeError as error:
                assert "simulated capture failure" in str(error)  # noqa: PT017
        start(Inputs.draw(rng, lane.bs, lane.width), None, lane.bs, False, 60, "").wait(60).release()
    for lane, signature in zip(lanes, run._by_key.values(), strict=True):
        # Whole outputs are leased; an opaque trace has some where export finds them in the slot.
        lane.leases_more = signature.tails[0].holds_outputs
        lane.num_graphs = depth if lane.holds else 1
    return Engine(run._ring, lanes, run.close, lambda: run.counts)
