"""Causal linear attention by its definition: keep every prefix sum of outer products."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_attention_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, T, H, D] of the same shape and dtype as q, k, v; elu + 1 is applied to q and k here.

    o_t = sum_{s<=t} (phi(q_t).phi(k_s)) v_s / max(sum_{s<=t} phi(q_t).phi(k_s), 1e-6).
    Source: Katharopoulos et al., Transformers are RNNs (arXiv 2006.16236), eqs. 9 and 10.
    """
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)  # [B, T, H, D, D]
    mass = k.cumsum(1)  # [B, T, H, D]
    numerator = torch.einsum("bthd,bthde->bthe", q, state)
    denominator = (q * mass).sum(-1, keepdim=True).clamp(min=1e-6)  # [B, T, H, 1]
    return (numerator / denominator).type_as(v)
