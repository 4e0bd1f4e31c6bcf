"""AutoencoderKL of diffusers inside a larger model: zero-padded latents -> images, cut along height and width.

The model calls the autoencoder's `decode`, not its forward, and that is what is declared, from outside, with extents
read off the latents. Group norm and attention see the whole map, padding included: the reference is plain indexing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

import spangraph
from spangraph import Span

from .common import Workload, pad_rows

SIZES = [(8, 8), (6, 8), (8, 5), (3, 4)]  # latent height and width
SCALE = 8  # pixels per latent


class Decode(nn.Module):
    """Images [bs, 3, height * 8, width * 8] of latents [bs, 4, height, width]."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents / self.vae.config.scaling_factor).sample


def _image_spans(out: Any, latents: Tensor) -> Tensor:
    """Spans [bs, 2, 2] of the images: as far as the latents are not zero."""
    is_valid = (latents != 0).any(1)
    rows, columns = spangraph.from_mask(is_valid.any(2)), spangraph.from_mask(is_valid.any(1))
    return SCALE * torch.stack([rows, columns], 1)


@functools.cache
def _vae() -> Any:
    config: dict[str, Any] = {
        "block_out_channels": (16, 32, 32, 32),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "latent_channels": 4,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoencoderKL(**config).eval()


def build() -> Workload:
    generator = torch.Generator().manual_seed(1)
    span = Span(dims=(-2, -1))
    spangraph.declare(_vae(), sample=_image_spans, spans={"sample": span}, method="decode")
    return Workload(
        model=Decode(_vae()).eval(),
        inputs=(pad_rows([torch.randn(4, *size, generator=generator) for size in SIZES], 8, 8),),
        spans={"sample": span},
        padded=lambda out, latents: {"sample": (out, _image_spans(out, latents))},
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    images = _vae().decode(inputs[0] / _vae().config.scaling_factor).sample
    return {
        "sample": [image[:, : SCALE * h, : SCALE * w] for image, (h, w) in zip(images, SIZES, strict=True)],
    }
