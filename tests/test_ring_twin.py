"""The ring's model against the ring: random schedules, done by both, end in the same slots, records and counters."""

import random
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spangraph import StagingError
from spangraph.backends import InlineBackend
from spangraph.kernels.stage import stage_ref
from spangraph.launch import Launch
from spangraph.tail import StagerCore, Tail

from .rig import Batch, Engine
from .ring_protocol import IDLE, OPEN, Staging, State


class Work:
    """A replay or a kernel in the queue of `SlowBackend`, and the event behind it."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run
        self.is_done = False
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error:
            raise self.error
        return self.is_done

    def synchronize(self) -> None:
        assert self.query(), "the walk waits for what is done"


class SlowBackend(InlineBackend):
    """Runs what is enqueued when told to, in order."""

    static = True
    synchronous = False

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Work] = deque()

    def fill(self, static: torch.Tensor, value: float | bool) -> None:
        self.enqueue(lambda: static.fill_(value))

    def enqueue(self, fn: Callable[[], object]) -> None:
        self.queue.append(Work(fn))

    def record(self, stream: Any = None) -> Any:
        return self.queue[-1] if self.queue else None

    def stream(self) -> Any:
        return 0

    def synchronize(self) -> None:
        assert not self.queue


class Twin:
    """The real ring and the reference kernel, doing what the model says that it did."""

    def __init__(self, model: Staging) -> None:
        self.backend = SlowBackend()
        core = StagerCore(self.backend, depth=model.depth)
        self.ring, widths = core.ring, {"number": 2}
        self.buffer, _ = core.new_buffer(widths, 1)
        self.tails = [
            core.new_tail(widths, self.buffer, num_rows=1, cuts={}, values={}, holds_outputs=not model.shared)
            for _ in range(2 * model.depth + 2)
        ]
        self.launches: list[Launch] = []

    def replay(self, tail: Tail, number: int) -> None:
        column = torch.tensor([[number, number]])
        args = tail.stage_args([column])[:6]
        self.backend.enqueue(lambda: stage_ref(*args))

    def act(self, label: str, before: State, after: State) -> None:
        """One action of the model; those that the code does together with an earlier one are none of its own."""
        ring, queue = self.ring, self.backend.queue
        found = re.search(r"step (\d+)", label)
        number = int(found[1]) if found else 0
        launch = self.launches[number - 1] if 0 < number <= len(self.launches) else None
        if label.startswith("device") and len(after.queue) < len(before.queue):
            work = queue.popleft()
            work.run()
            work.is_done = True
        elif " takes slot " in label and label.startswith("host"):
            self.launches.append(ring.reserve((self.tails[after.steps[-1].graph],), None, 1))
        elif "re-bases, for want" in label:
            ring._reap()
            ring._rebase()
        elif "nobody reserved" in label:
            self.replay(self.tails[after.queue[-1][1]], 0)
        elif "is released" in label:
            graph = next(graph for graph in before.leases if graph not in after.leases)
            occupant = self.tails[graph].occupant
            assert occupant is not None
            ring.release(occupant)
        elif launch is None:
            return
        elif "without its staging node" in label and label.startswith("FAULT"):
            self.backend.enqueue(lambda: None)
            ring.commit(launch, ())
        elif "enqueues" in label or "raises after" in label:
            self.replay(launch.tail, number)
            if "enqueues" in label:
                ring.commit(launch, ())
        elif "aborts" in label:
            ring.abort(launch)
        elif "dropped" in label:
            ring.release(launch)
        elif "the wait for" in label:
            assert isinstance(launch.event, Work)
            launch.event.error, error = RuntimeError("lost"), launch.event.error
            with pytest.raises(RuntimeError, match="lost"):
                ring.wait(launch)
            launch.event.error = error
        elif "StagingError" in label:
            with pytest.raises(StagingError, match="its slot holds generation"):
                ring.wait(launch)
        elif "frees slot" in label or "copies word 2" in label:
            words = ring.wait(launch)
            assert words is not None
            assert words[2:4].tolist() == [number, number]

    def check(self, state: State) -> None:
        """Slots, records and counters are where the model has them."""
        ring = self.ring
        assert tuple(ring._free) == state.free
        assert tuple(entry[1:] for entry in ring._quarantine) == state.quarantine
        assert [self.launches.index(launch) + 1 for launch in ring._dying] == list(state.dying)
        assert (ring._next, ring._done, ring._cursor_in_doubt) == (state.next, state.done, state.in_doubt)
        assert len(self.backend.queue) == len(state.queue)
        assert ring.cursor.item() == state.cursor
        for record, (generation, slot, graph) in zip(ring.control.host.tolist(), state.records, strict=True):
            assert record[0] == generation
            assert not generation or (record[1], record[3]) == (slot, self.tails[graph].graph)
        for i, step in enumerate(state.steps, 1):
            if step.slot >= 0:
                assert (self.launches[i - 1].slot, self.launches[i - 1].generation) == (step.slot, step.generation)
        for words, (first, second, header) in zip(self.buffer.memory.host.tolist(), state.slots, strict=True):
            assert words == [header, 0, first, second]


# Depth 3 has the most ways to go; one graph and one graph per step differ in who holds what until when. Five faults in
# forty launches meet each other, which one fault never does.
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_ring_does_what_its_model_does(
    depth: int, shared: bool, record_property: Callable[[str, object], None]
) -> None:
    model = Staging(depth, num_steps=40, faults=5, shared=shared)
    chance, actions = random.Random(depth), 0
    for _ in range(8):
        twin, state = Twin(model), model.start()
        while moves := [move for move in model.moves(state) if isinstance(move[1], State)]:
            # What the code does at once is not interleaved: a launch's record, a replay, a read.
            begun = "device" if state.device else "reader" if state.reader else "host" if state.host == 1 else ""
            calm = [move for move in moves if not move[0].startswith("FAULT") or chance.random() < 0.1] or moves
            label, after = chance.choice([move for move in moves if move[0].startswith(begun)] if begun else calm)
            twin.act(label, state, after)
            state = after
            actions += 1
            if not state.device and not state.reader and state.host == IDLE:
                twin.check(state)
        assert not any(step.status == OPEN for step in state.steps)
    record_property("counted", f"{actions} actions")


def test_a_lost_staging_node_on_a_shared_graph() -> None:
    """What the search has found in the model, in the code: step 1 delivered the tokens of step 2."""
    engine = Engine(depth=2, lanes=1, spanned=False)
    engine.device.fail_next("staging")
    lost, batch = engine.launch(Batch.random()), Batch.random()
    step = engine.launch(batch)
    engine.device.synchronize()
    with pytest.raises(StagingError, match="its slot holds"):
        lost.row_values("token")
    assert step.row_values("token").equal(batch.token)
