"""Swin2SR of Hugging Face transformers, twofold: reflect-padded images -> larger images, cut along height and width.

Windowed attention leaks padding inside its windows: the reference is plain indexing. (The model refuses sizes that are
not multiples of its window, so images are padded in any case.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Swin2SRConfig, Swin2SRForImageSuperResolution

import spangraph
from spangraph import Span

from .common import Workload

SIZES = [(32, 32), (24, 30), (17, 32), (32, 17)]
IMAGE = Span(dims=(-2, -1))


class Upscale(nn.Module):
    """Images [bs, 3, 2 * height, 2 * width], and their sizes [bs, 2]."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(pixel_values=images).reconstruction, sizes * self.net.config.upscale


@functools.cache
def _net() -> Any:
    config = Swin2SRConfig(image_size=32, embed_dim=24, depths=[2, 2], num_heads=[2, 2], window_size=8, upscale=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Swin2SRForImageSuperResolution(config).eval()


def build() -> Workload:
    generator = torch.Generator().manual_seed(1)
    images = [
        F.pad(torch.rand(1, 3, height, width, generator=generator), (0, 32 - width, 0, 32 - height), "reflect")
        for height, width in SIZES
    ]
    return Workload(
        model=spangraph.declare(
            Upscale(_net()).eval(), {"0": lambda out, images, sizes: spangraph.from_lengths(out[1])}, spans={"0": IMAGE}
        ),
        inputs=(torch.cat(images), torch.tensor(SIZES)),
        spans={"0": IMAGE},
        padded=lambda out, *inputs: {"0": (out[0], spangraph.from_lengths(out[1]))},
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    images = _net()(pixel_values=inputs[0]).reconstruction
    return {"0": [image[:, : 2 * h, : 2 * w] for image, (h, w) in zip(images, inputs[1].tolist(), strict=True)]}
