"""facenet-pytorch's MTCNN proposal network on zero-padded images: two outputs, spans along height and width.

With the shipped weights. All convolutions are unpadded, so a cell whose receptive field lies inside the image does not
see padding. Reference: each image alone, cut to the cells of whole pooling windows (the pool rounds up, and would see
a part of a window at an odd edge).
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spangraph
from spangraph import Span

from .common import Workload, load_module, pad_rows

SIZES = [(96, 128), (60, 50), (33, 127), (128, 128)]
GRID = Span(dims=(-2, -1))

T = TypeVar("T", int, Tensor)


def num_cells(size: T) -> T:
    """Output cells along an axis of `size` pixels: conv 3, whole windows of pool 2, conv 3, conv 3."""
    return (size - 2) // 2 - 4


class Proposals(nn.Module):
    """Face probability [bs, 1, h, w], boxes [bs, 4, h, w] and the cells of each image [bs, 2]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        boxes, probability = self.net(images)
        return probability[:, 1:], boxes, num_cells(sizes)


@functools.cache
def _pnet() -> nn.Module:
    """PNet alone: the package's __init__ and detect_face want torchvision, which this class does not."""
    package = importlib.util.find_spec("facenet_pytorch")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'facenet_pytorch'")
    models = Path(package.submodule_search_locations[0]) / "models"
    stubs = {name: ModuleType(f"_mtcnn{name}") for name in ("", ".utils", ".utils.detect_face")}
    stubs[""].__path__ = stubs[".utils"].__path__ = []  # packages
    vars(stubs[".utils.detect_face"]).update(detect_face=None, extract_face=None)
    sys.modules.update({stub.__name__: stub for stub in stubs.values()})
    try:
        return load_module("_mtcnn.mtcnn", models / "mtcnn.py").PNet(pretrained=True).eval()
    finally:
        for stub in stubs.values():
            del sys.modules[stub.__name__]


def _cells(out: tuple[Tensor, ...], images: Tensor, sizes: Tensor) -> Tensor:
    return spangraph.from_lengths(out[2])


def build() -> Workload:
    generator = torch.Generator().manual_seed(0)
    coarse = [torch.randn(1, 3, 9, 9, generator=generator) for _ in SIZES]
    images = [F.interpolate(c, size, mode="bicubic")[0].clamp(-1, 1) for c, size in zip(coarse, SIZES, strict=True)]
    model = Proposals(_pnet()).eval()
    return Workload(
        model=spangraph.declare(model, {"0": _cells, "1": _cells}, spans={"0": GRID, "1": GRID}),
        inputs=(pad_rows(images, 128, 128), torch.tensor(SIZES)),
        spans={"0": GRID, "1": GRID},
        padded=lambda out, *inputs: {name: (out[int(name)], _cells(out, *inputs)) for name in ("0", "1")},
        atol=1e-5,
    )


def reference(inputs: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    rows: dict[str, list[Tensor]] = {"0": [], "1": []}
    for image, (height, width) in zip(inputs[0], inputs[1].tolist(), strict=True):
        boxes, probability = _pnet()(image[None, :, :height, :width])
        cells = (slice(None), slice(num_cells(height)), slice(num_cells(width)))
        rows["0"].append(probability[0, 1:][cells])
        rows["1"].append(boxes[0][cells])
    return rows
