"""Causal linear attention: a feature map replaces softmax, and the past fits in a matrix a head.

    o_t = sum_{s<=t} (phi(q_t) . phi(k_s)) v_s / max(sum_{s<=t} phi(q_t) . phi(k_s), 1e-6)

with phi(x) = elu(x) + 1. The numerator is phi(q_t) S_t with S_t = sum_{s<=t} phi(k_s) v_s^T, a
[D, D] matrix that can be carried: decoding costs the same at byte 10 and at byte 10,000. Three
forms of one sum: `parallel` (a masked [T, T] product, best while T is short), `chunked` (parallel
inside a chunk, the carried matrix between chunks; time linear in T) and `step` (one token).

Source: Katharopoulos et al. (arXiv 2006.16236), eq. 8 to 12. Left out: decay and the delta rule.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm_course.device import at_least_fp32
from glm_course.layers.projection import Attention

EPS = 1e-6  # least denominator
CHUNK = 64


def feature(x: Tensor) -> Tensor:
    """elu(x) + 1, positive everywhere; fp32 or wider out, whatever comes in."""
    return F.elu(at_least_fp32(x)) + 1


def parallel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Masked quadratic form. q, k, v: [B, T, H, D], before the feature map; returns [B, T, H, D].

    Holds [B, H, T, T] products: the cheapest form up to a few hundred positions.
    """
    q, k = feature(q).transpose(1, 2), feature(k).transpose(1, 2)  # [B, H, T, D]
    scores = (q @ k.mT).tril()  # [B, H, T, T]
    total = scores.sum(-1, keepdim=True).clamp(min=EPS)  # [B, H, T, 1]
    out = (scores @ v.transpose(1, 2).to(scores.dtype)) / total
    return out.transpose(1, 2).to(v.dtype)


def chunked(q: Tensor, k: Tensor, v: Tensor, chunk: int = CHUNK) -> Tensor:
    """The same in time and memory linear in T: [B, T, H, D] in and out.

    Between chunks one [D, D] matrix and one [D] sum a head are carried, never one a position.
    """
    T, dtype = q.shape[1], v.dtype
    pad = -T % chunk  # empty positions behind: a zero feature adds nothing
    q, k = feature(q), feature(k)
    q, k, v = (
        F.pad(x.to(q.dtype), (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)).transpose(2, 3)
        for x in (q, k, v)
    )  # [B, C, H, chunk, D]
    # Once here, or every product below makes, and keeps for backward, a copy of its own.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    states = F.pad((k.mT @ v).cumsum(1), (0, 0, 0, 0, 0, 0, 1, 0))  # sums over chunks, first empty
    sums = F.pad(k.sum(-2).cumsum(1), (0, 0, 0, 0, 1, 0))
    states, sums = states[:, :-1], sums[:, :-1]  # [B, C, H, D, D] and [B, C, H, D]
    scores = (q @ k.mT).tril()  # [B, C, H, chunk, chunk]
    total = scores.sum(-1) + (q @ sums[..., None]).squeeze(-1)  # [B, C, H, chunk]
    out = (scores @ v + q @ states) / total.clamp(min=EPS)[..., None]
    return out.transpose(2, 3).flatten(1, 2)[:, :T].to(dtype)


def step(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor) -> Tensor:
    """Recurrent form, one token: q, k, v [B, H, D]; S [B, H, D, D], z [B, H, D] change in place."""
    q, k, wide = feature(q), feature(k), v.to(S.dtype)
    S.add_(k[..., None] * wide[..., None, :])
    z.add_(k)
    total = (q * z).sum(-1, keepdim=True).clamp(min=EPS)  # [B, H, 1]
    return ((q[..., None, :] @ S).squeeze(-2) / total).to(v.dtype)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention by whichever form is faster at this length: [B, T, H, D] in and out."""
    return parallel(q, k, v) if q.shape[1] <= 2 * CHUNK else chunked(q, k, v)


class LinearAttention(Attention):
    """Linear attention as a layer. State: [S [B, H, D, D], z [B, H, D]], fp32, its size fixed."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, T, H, D] in and out."""
        return linear_attention(q, k, v)

    def absorb(self, k: Tensor, v: Tensor, lengths: Tensor) -> list[Tensor]:
        """Sums over the first lengths[b] positions: S = sum phi(k) v^T, z = sum phi(k)."""
        real = torch.arange(k.shape[1], device=k.device) < lengths[:, None]  # [B, T]
        k = feature(k) * real[..., None, None]
        return [torch.einsum("bthd,bthe->bhde", k, v.to(k.dtype)), k.sum(1)]

    def mix_step(
        self, q: Tensor, k: Tensor, v: Tensor, state: list[Tensor], position: Tensor
    ) -> Tensor:
        """[B, H, D] in and out; adds this token to the state first, so it attends to itself."""
        return step(q, k, v, *state)
