"""A model runner in the style of serving engines, which captures its own graphs: one per bucket and step in flight.

The next batch is launched while the last one still runs. What a step delivers is read afterwards, by request id: no
host read in the model, no padded copies. Runs on CUDA where there is a GPU, on the simulated device elsewhere.
"""

from typing import Any

import torch
from torch import Tensor, nn

from spangraph import Span, SpannedOutput, SpanStager, Step, Tail, from_lengths
from spangraph.testing import SimulatedDevice

BUCKETS = (1, 2, 4, 8)
DEPTH = 2  # steps in flight


class Vocoder(nn.Module):
    """Three samples per frame."""

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        audio = mel.repeat_interleave(3, -1) * 0.5
        return SpannedOutput({"audio": audio}, {"audio": from_lengths(frames * 3)}, {"is_last": (frames < 4).long()})


class ModelRunner:
    """Static inputs, captured graphs, and one stager for all of them."""

    def __init__(self, model: nn.Module, max_frames: int) -> None:
        if torch.cuda.is_available():
            self.new_graph, self.capture, device = torch.cuda.CUDAGraph, torch.cuda.graph, "cuda"
        else:
            simulated = SimulatedDevice()
            self.new_graph, self.capture, device = simulated.new_graph, simulated.graph, simulated
        rows = max(BUCKETS)
        # Before any capture: it pins memory.
        self.stager = SpanStager({"audio": Span()}, max_rows=rows, row_values=["is_last"], depth=DEPTH, device=device)
        self.backend = self.stager.backend
        self.model = model.to(self.backend.device)
        self.mel = torch.zeros(rows, max_frames, device=self.backend.device)
        self.frames = torch.zeros(rows, dtype=torch.int64, device=self.backend.device)
        self.num_launches = 0
        self.graphs = {bs: [self.capture_graph(bs) for _ in range(DEPTH)] for bs in reversed(BUCKETS)}

    @torch.inference_mode()
    def capture_graph(self, bs: int) -> tuple[Any, Tail]:
        mel, frames = self.mel[:bs], self.frames[:bs]
        self.stager.stage(self.model(mel, frames))  # warm-up, a dry run
        self.backend.synchronize()
        graph: Any = self.new_graph()
        with self.capture(graph):
            tail = self.stager.stage(self.model(mel, frames))
        return graph, tail

    def launch(self, requests: dict[str, Tensor]) -> Step:
        """Start a step for these requests, and return at once."""
        bs = next(bs for bs in BUCKETS if bs >= len(requests))
        graph, tail = self.graphs[bs][self.num_launches % DEPTH]
        self.num_launches += 1
        mel = nn.utils.rnn.pad_sequence(list(requests.values()), batch_first=True)
        frames = torch.tensor([len(frames) for frames in requests.values()])
        with tail.step(rows=list(requests), num_rows=len(requests)) as step:
            self.backend.copy_in(self.mel[: len(mel), : mel.shape[1]], mel)  # behind the last replay, in stream order
            self.backend.copy_in(self.frames[: len(mel)], frames)
            graph.replay()
        return step


def deliver(step: Step) -> None:
    """Print what a step delivers. It may be launched into again at the end of the block."""
    with step:
        audio, is_last = step.rows("audio"), step.row_values("is_last").tolist()
        print(f"step {step.generation}: {len(step.row_ids)} rows, {len(audio)} delivered")
        for row_id, last in zip(step.row_ids, is_last, strict=True):
            samples = audio.get(row_id)
            what = "withheld" if samples is None else f"{len(samples)} samples, sum {samples.sum():.1f}"
            print(f"  {row_id}: {what}{', last chunk' if last else ''}")


def main() -> None:
    runner = ModelRunner(Vocoder(), max_frames=8)
    print(f"captured buckets {list(runner.graphs)} on the {runner.backend.name} backend")
    lengths = [[5, 8, 3], [1], [4, 0, 7, 7, 2, 6], [8, 8]]
    in_flight: list[Step] = []
    for batch, frames in enumerate(lengths):
        requests = {f"req-{batch}.{i}": torch.full((n,), float(n)) for i, n in enumerate(frames)}
        in_flight.append(runner.launch(requests))
        if len(in_flight) == DEPTH:
            deliver(in_flight.pop(0))
    for step in in_flight:
        deliver(step)
    runner.stager.close()


if __name__ == "__main__":
    main()
