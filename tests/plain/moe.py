"""Mixture of experts by its definition: expert by expert, find its tokens, run, add back."""

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu_plain(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """[n, W] to the same: (silu(gate) * value) down, [gate, value] = x up [W, 2F]; down [F, W]."""
    gate, value = (x @ up).chunk(2, dim=-1)  # [n, F] each
    return (F.silu(gate) * value) @ down


def moe_plain(
    x: Tensor,
    router: Tensor,
    up: Tensor,
    down: Tensor,
    shared_up: Tensor,
    shared_down: Tensor,
    top_k: int,
) -> Tensor:
    """[N, W] -> [N, W]: each token's top_k experts, weighted, plus the shared expert.

    router [E, W], up [E, W, 2F], down [E, F, W]; shared_up [2F, W] and shared_down [W, F] are
    nn.Linear weights.
    """
    top, chosen = (x @ router.T).topk(top_k)  # [N, K] both
    at_least_fp32 = torch.promote_types(top.dtype, torch.float32)
    weights = top.softmax(-1, dtype=at_least_fp32)  # [N, K]
    y = swiglu_plain(x, shared_up.T, shared_down.T)
    for expert in range(len(up)):
        token, slot = torch.where(chosen == expert)  # [n] both
        out = swiglu_plain(x[token], up[expert], down[expert]) * weights[token, slot, None]
        y = y.index_add(0, token, out.type_as(y))
    return y
