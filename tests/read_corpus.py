"""Forwards with known hazards: a comment says what the line does in `EXAMPLES`, and how often.

READ: reads device values on the host. COPY: copies pageable memory. MIXED: host and device tensors meet. WRITE: writes
an input. Lines without such a comment look similar, and do none of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

# Each: a module, and its inputs.
EXAMPLES: list[tuple[nn.Module, tuple[Tensor, ...]]] = []
X, N = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([3, 2])


def example(cls: type[nn.Module]) -> type[nn.Module]:
    EXAMPLES.append((cls(), (X.clone(), N.clone())))
    return cls


# ---- forms of reading ------------------------------------------------------------------------------------------------


@example
class Scalars(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Any:
        a = n[0].item()  # READ 1
        b = int(n[1]) + float(x[0, 0])  # READ 2
        c = n.tolist()  # READ 1
        d = x.numpy()  # READ 1
        e = np.asarray(x) + np.concatenate([x, x])[:2]  # READ 3
        f = x.detach().cpu()  # READ 1
        g = f.numpy() + f.sum().item() + len(f.tolist())
        h = n.to("cpu").tolist()  # READ 1
        i = n.to(torch.device("cpu"), torch.int32)  # READ 1
        j = n.to(x.device).to(torch.int32).to(x)
        k = f"{x.sum()} {x.shape} {a}"  # READ 1
        m = str(x)  # READ 1
        o = math.floor(x[0, 0]) + complex(x[0, 1]).real  # READ 2
        q = torch.tensor([n[0], n[1]])  # READ 1
        r = x.numel() + x.dim() + len(x) + n.shape[0]
        s = copy.deepcopy(x)
        return a, b, c, d, e, g, h, i, j, k, m, o, q, r, s


@example
class Truth(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Any:
        if x.max() > 0:  # READ 1
            x = x + 1
        if n is None or x.shape[0] == 0 or x.dtype is torch.int64 or x.is_cuda:
            x = x - 1
        x = x * 2 if (n > 2).any() else x  # READ 1
        assert (x > 0).all()  # READ 1
        while bool(x.sum() > 50):  # READ 2
            x = x / 10
        high = max(x[0, 0], x[0, 1])  # READ 1
        torch._check(bool((n >= 0).all()))  # READ 1
        found = 3 in n  # READ 1
        same = torch.equal(x, x) and torch.allclose(x, x)  # READ 2
        both = (x > 0) & (x < 9)
        return high, found, same, both.logical_not(), torch.maximum(x[0, 0], x[0, 1]), x.isnan().any()


@example
class Sizes(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Any:
        a = x[:, : n[1]]  # READ 1
        b = x.view(n[1], -1)  # READ 1
        c = F.pad(x, (0, int(n[1])))  # READ 1
        d = F.pad(x, (n[0], n[1]))  # READ 2
        e = torch.split(x, n.tolist()[1], 1)  # READ 1
        f = x.narrow(1, 0, n[1].item())  # READ 1
        g = torch.arange(n.max(), device=x.device)  # READ 1
        h = [list(range(k)) for k in n]  # READ 2
        i = torch.linspace(0, x[0, 0], 3)  # READ 1
        j = x[n[1] - 1], x[:, n[1] - 1]  # READ 2
        j += x[:, n - 1], x.index_select(1, n - 1), [row for row in x]
        k = x[:, : len(n)], F.pad(x, (0, x.shape[1])), torch.arange(3, device=x.device), x.gather(1, n[:, None] - 1)
        return a, b, c, d, e, f, g, h, i, j, k


@example
class Masks(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Any:
        mask = x > 2
        a = x[mask]  # READ 1
        b = mask.nonzero(), torch.where(mask), torch.argwhere(mask)  # READ 3
        c = torch.masked_select(x, mask)  # READ 1
        d = torch.unique(n), torch.unique_consecutive(n), torch.bincount(n)  # READ 3
        e = n.repeat_interleave(n), torch.repeat_interleave(x, n, 0)  # READ 2
        f = F.one_hot(n)  # READ 1
        y = x.clone()
        y[mask] = x[0, 0].expand(int(mask.shape[0]) + 2)  # READ 1
        y[~mask] = 0
        y = y.masked_fill(mask, 1.0) + torch.where(mask, x, 0) + y.masked_scatter(mask, x)
        g = torch.repeat_interleave(x, n, 0, output_size=5), x.repeat_interleave(2, 1), F.one_hot(n, 4)
        h = torch.nonzero_static(mask, size=2), torch.multinomial(x, 1), torch.quantile(x, 0.5), x.topk(2)
        return a, b, c, d, e, f, g, h, y


@example
class Hidden(nn.Module):
    """Reads inside library calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.ones(8))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        spectrum = torch.stft(x.repeat(1, 8), 8, window=self.window, return_complex=True)
        a = torch.istft(spectrum, 8, window=self.window)  # READ 1
        b = torch.linalg.inv(x @ x.T + torch.eye(2, device=x.device)), torch.linalg.svd(x)  # READ 2
        c = rnn.pack_padded_sequence(x[..., None], n.cpu(), batch_first=True)  # READ 1
        d = rnn.pad_packed_sequence(c, batch_first=True)
        e = rnn.pack_padded_sequence(x[..., None], n, batch_first=True)  # READ 1
        f = rnn.pad_sequence([x[0], x[1]]), torch.linalg.norm(x), torch.cdist(x, x)
        return a, b, d, e.data, f


# ---- where the line is -----------------------------------------------------------------------------------------------


def _deep(x: Tensor) -> float:
    return _deeper(x) + 1


def _deeper(x: Tensor) -> float:
    return _deepest(x) * 2


def _deepest(x: Tensor) -> float:
    return x.sum().item()  # READ 1


@contextlib.contextmanager
def _checked(x: Tensor) -> Iterator[None]:
    if x.isnan().any():  # READ 1
        raise ValueError
    yield
    x.sum().item()  # READ 1


def _logged(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapped(self: nn.Module, x: Tensor, n: Tensor) -> Any:
        x.abs().max().item()  # READ 1
        return fn(self, x, n)

    return wrapped


def _rows(x: Tensor, n: Tensor) -> Iterator[Tensor]:
    for row, length in zip(x, n, strict=True):
        yield row[:length]  # READ 2


class Peak(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.max().item()  # READ 3


@example
class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = Peak()
        self.inner = nn.Sequential(nn.Identity(), Peak())
        self.norm = lambda x: x * x.norm().item()  # READ 1

    @property
    def gain(self) -> float:
        return float(self.scale)  # READ 1

    scale = torch.tensor(2.0)  # a tensor that is neither parameter nor buffer, but was there before

    def forward(self, x: Tensor, n: Tensor) -> Any:
        x = self.twice(self.twice(x)) + self.inner(x)
        return self.norm(x) * self.gain + _deep(x)


@example
class Flow(nn.Module):
    @_logged
    def forward(self, x: Tensor, n: Tensor) -> Any:
        with _checked(x):
            total = 0.0
            for i in range(3):
                total += x[0, i].item()  # READ 3
        sizes = [int(k) for k in n]  # READ 2
        rows = list(_rows(x, n))
        if x.shape[0] == 2:
            return x * total, sizes, rows
        return x.tolist()


@example
class Traps(nn.Module):
    """Several calls on a line, and calls over several lines."""

    def forward(self, x: Tensor, n: Tensor) -> Any:
        a = torch.stack(
            [x.sum(), x.max()],
        ).tolist()  # READ 1
        b = x.max().item(), x.min().item(), x.shape, x.tolist()  # READ 3
        c, d = sorted(n, key=lambda t: t.item()), sorted(n.shape, key=lambda t: -t)  # READ 2
        return a, b, c, d


# ---- host tensors, copies, writes ------------------------------------------------------------------------------------


@example
class Host(nn.Module):
    """Reading what never was on the device costs nothing."""

    def forward(self, x: Tensor, n: Tensor) -> Any:
        a = torch.tensor([1, 2]).tolist(), torch.arange(3).sum().item(), torch.IntTensor([2])[0].item()
        b = torch.from_numpy(np.ones(2)) * 2
        c = [x[:, :k] for k in torch.IntTensor([1, 2])]
        if (b > 1).all() and torch.zeros(2).eq(0).any():
            b = b[b > 1]
        d = torch.arange(3, device=x.device).sum().item()  # READ 1
        e = torch.zeros_like(x).sum().item() + x.new_zeros(2).max().item()  # READ 2
        f = (torch.tensor(2) * x).sum().item()  # READ 1
        g = torch.arange(3, device="cpu").tolist(), torch.zeros_like(b).tolist(), torch.as_tensor([1]).numpy()
        h = torch.full((2,), 3).to(torch.float32)[0].item() + torch.ones(1).cpu().item()
        i = torch.as_tensor(x).sum().item() + torch.tensor_split(x, torch.tensor([1]))[0].sum().item()  # READ 2
        j = torch.arange(n.max()).tolist()  # READ 1
        j += torch.zeros(2, device="cuda" if x.is_cuda else "cpu").tolist()  # READ 1
        return a, b, c, d, e, f, g, h, i, j


@example
class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        a = torch.tensor([1.0, 2.0, 3.0]).to(x.device)  # COPY 1
        b = torch.tensor([1.0, 2.0, 3.0], device=x.device) + torch.as_tensor([1.0], device=x.device)  # COPY 2
        c = x.new_tensor([1.0, 2.0, 3.0])  # COPY 1
        d = torch.from_numpy(np.ones(3, dtype=np.float32)).to(x)  # COPY 1
        e = x[:, [0, 2]]  # COPY 1
        y = x.clone()
        y[:, :2] = torch.zeros(2, 2)  # COPY 1
        y[0].copy_(torch.zeros(3))  # COPY 1
        y[0, 0] = 5.0
        y[:, 1] = torch.tensor(7.0)
        f = torch.full((3,), 2.0, device=x.device) + torch.zeros(3, device=x.device) + self.table.to(x.device)
        g = x.new_zeros(3) + torch.ones_like(x) + torch.eye(2, 3, device=x.device)
        h = torch.tensor(x.shape) + torch.tensor([1, 2])
        i = (a + b + c + d + f + g + y).sum(), x.to(n.device, torch.float64), x.float().type_as(y)
        j = a.sum().item()  # READ 1
        k = torch.zeros(3)
        k.copy_(x[0])  # READ 1
        return e, h, i, j, k


@example
class Mixed(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Any:
        a = x + torch.ones(3)  # MIXED 1
        b = x[:, torch.tensor([2, 0])]  # MIXED 1
        for _ in range(2):
            b = torch.cat([b, torch.zeros(2, 1)], 1)  # MIXED 2
        c = x * torch.tensor(2.0) + 1 + torch.tensor(3)
        d = torch.where(x > 1, x, torch.tensor(0.0)), torch.ones(3) + torch.arange(3)
        return a, b, c, d


@example
class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        x[0].mul_(2)  # WRITE 1
        n += 1  # WRITE 1
        self.count += 1
        y = x.clone()
        y[0] = 0
        return y + self.count
