"""Window-and-anchor attention by its definition: list each position's keys, gather them, attend."""

import torch
from torch import Tensor


def attended_positions(t: int, window: int, stride: int) -> list[int]:
    """Positions that t attends to: the last `window` ones and anchors 0, stride, ... up to t."""
    recent = range(max(0, t - window + 1), t + 1)
    anchors = range(0, t + 1, stride)
    return sorted({*recent, *anchors})


def sparse_attention_plain(q: Tensor, k: Tensor, v: Tensor, window: int, stride: int) -> Tensor:
    """[B, T, H, D] from q, k, v of that shape: softmax attention over the listed keys only."""
    length, head_dim = q.shape[1], q.shape[3]
    lists = [attended_positions(t, window, stride) for t in range(length)]
    longest = max(map(len, lists))
    index = torch.tensor([row + [0] * (longest - len(row)) for row in lists])  # [T, M]
    real = torch.tensor([[m < len(row) for m in range(longest)] for row in lists])  # [T, M]
    keys, values = k[:, index], v[:, index]  # [B, T, M, H, D]
    scores = torch.einsum("bthd,btmhd->bhtm", q, keys) / head_dim**0.5
    scores = scores.masked_fill(~real, float("-inf"))
    at_least_fp32 = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=at_least_fp32).type_as(v)  # [B, H, T, M]
    return torch.einsum("bhtm,btmhd->bthd", weights, values)
