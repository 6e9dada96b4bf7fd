"""Rotary position embedding: turn each pair of channels by an angle that grows with position.

Rotating q at position t and k at position s leaves their dot product dependent on t - s only, so
attention learns distances, not addresses. Left out: scaled variants for contexts longer than those
trained on.

Source: Su et al., RoFormer (arXiv 2104.09864), eq. 34. Pairs are interleaved (channels 0-1, 2-3,
...), as in the paper; many implementations pair channel i with i + D/2, the same up to a
permutation of channels.
"""

import torch
from torch import Tensor

from glm_course.device import at_least_fp32


def rotary_table(length: int, head_dim: int, theta: float = 10_000.0, *, device=None) -> Tensor:
    """Angles as unit complex numbers, complex64 [length, head_dim / 2].

    Row t, column i is exp(i t theta^(-2i / head_dim)). Raises ValueError for an odd head_dim:
    channels turn in pairs.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even to rotate channels in pairs, got {head_dim}")
    speed = theta ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)  # [D/2], radians
    angle = torch.arange(length, device=device)[:, None] * speed  # [T, D/2]
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the channel pairs of x [B, T, H, D] by table [T, D/2] or [B, T, D/2]; same dtype back.

    One complex product instead of four real ones and a stack: at [32, 128, 6, 32] on two CPU cores
    8.8x less time forward, 3.5 to 4x with backward. Products are taken in fp32 (fp64 for fp64).
    """
    pairs = torch.view_as_complex(at_least_fp32(x).unflatten(-1, (-1, 2)))  # [B, T, H, D/2]
    return torch.view_as_real(pairs * table.unsqueeze(-2)).flatten(-2).type_as(x)
