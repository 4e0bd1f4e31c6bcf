"""Wav2Vec2 of Hugging Face transformers, untouched: a masked batch of audio -> hidden states, cut along dim 1.

Declared from outside by a field of its ModelOutput. Attention is masked and padded frames are zeroed, so the reference
is the same model on each row alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import Wav2Vec2Config, Wav2Vec2Model

import spangraph
from spangraph import Span

from .common import Workload, pad_rows

LENGTHS = (8000, 4500, 2161)  # samples


@functools.cache
def _model() -> Any:
    config = Wav2Vec2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conv_dim=(64,) * 7,
        conv_bias=True,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Wav2Vec2Model(config).eval()


def frame_spans(out: Any, audio: Tensor, mask: Tensor) -> Tensor:
    """Spans of the frames that the convolutions make of each row's real samples."""
    length = mask.sum(-1)
    config = _model().config
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        length = torch.div(length - kernel, stride, rounding_mode="floor") + 1
    return spangraph.from_lengths(length)


def build() -> Workload:
    generator = torch.Generator().manual_seed(1)
    audio = [torch.randn(length, generator=generator) for length in LENGTHS]
    mask = [torch.ones(length, dtype=torch.int64) for length in LENGTHS]
    span = Span(dims=(1,))
    return Workload(
        model=spangraph.declare(_model(), last_hidden_state=frame_spans, spans={"last_hidden_state": span}),
        inputs=(pad_rows(audio, 8000), pad_rows(mask, 8000)),
        spans={"last_hidden_state": span},
        padded=lambda out, *inputs: {"last_hidden_state": (out.last_hidden_state, frame_spans(out, *inputs))},
        atol=1e-4,
        reads=True,  # whether the mask is all ones
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    lengths = inputs[1].sum(1).tolist()
    rows = [_model()(row[None, :length]).last_hidden_state[0] for row, length in zip(inputs[0], lengths, strict=True)]
    return {"last_hidden_state": rows}
