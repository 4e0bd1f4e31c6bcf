"""EnCodec of Hugging Face transformers: a padded batch of codes -> waveforms.

The decoder is causal, so right padding changes nothing before it. Reference: `EncodecModel.decode` of each row alone.
(Rows have 7 frames or more: a shorter row alone is zero-extended before its reflect padding, and differs.)

Its convolutions keep kernel size, stride and padding as int64 buffers and read them in the forward, 56 times a decode.
`build` has them as Python ints; `build_published` has them as they are: an export folds them into constants.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncodecConfig, EncodecModel
from transformers.models.encodec.modeling_encodec import EncodecConv1d

import spangraph
from spangraph import Span

from .common import Workload, pad_rows

LENGTHS = (15, 8, 11)  # frames


class Decode(nn.Module):
    """Waveforms [bs, 1, samples], and their lengths [bs]."""

    def __init__(self, codec: Any) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, codes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self.codec.quantizer.decode(codes.transpose(0, 1))
        return self.codec.decoder(embeddings), lengths * self.codec.config.hop_length


@functools.cache
def _codec() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        codec: Any = EncodecModel(EncodecConfig(num_filters=8)).eval()
        for layer in codec.quantizer.layers:  # codebooks start at zero
            layer.codebook.embed.normal_()
    return codec


def _make_static(conv: Any) -> None:
    """Python ints in place of a convolution's int buffers: the same values, and nothing to read on the host."""
    kernel, stride, padding = [int(conv._buffers.pop(name)) for name in ("kernel_size", "stride", "padding_total")]
    conv.kernel_size, conv.stride, conv.padding_total = kernel, stride, padding

    def extra_padding(hidden_states: Tensor) -> int:
        length = hidden_states.shape[-1]
        return -(-(length - kernel + padding) // stride) * stride + kernel - padding - length

    conv._get_extra_padding_for_conv1d = extra_padding


def build() -> Workload:
    codec = copy.deepcopy(_codec())
    for module in codec.modules():
        if isinstance(module, EncodecConv1d):
            _make_static(module)
    return _workload(codec, reads=False)


def build_published() -> Workload:
    return _workload(_codec(), reads=True)


def _workload(codec: Any, *, reads: bool) -> Workload:
    generator = torch.Generator().manual_seed(1)
    codes = [torch.randint(0, 1024, (8, length), generator=generator) for length in LENGTHS]
    model = Decode(codec).eval()
    return Workload(
        model=spangraph.declare(model, {"0": lambda out, codes, lengths: spangraph.from_lengths(out[1])}),
        inputs=(pad_rows(codes, 16), torch.tensor(LENGTHS)),
        spans={"0": Span()},
        padded=lambda out, *inputs: {"0": (out[0], spangraph.from_lengths(out[1]))},
        atol=1e-5,
        reads=reads,
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    codes, lengths = inputs
    decode = _codec().decode
    alone = [row[None, None, :, :length] for row, length in zip(codes, lengths.tolist(), strict=True)]
    return {"0": [decode(row, [None]).audio_values[0] for row in alone]}
