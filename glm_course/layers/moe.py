"""Mixture of experts: a router sends each token to k of E small networks, one more serves them all.

An expert is a bias-free SwiGLU. Tokens are sorted by expert, so each expert multiplies one
contiguous batch and the work is exactly k experts a token, whatever E is.

Source: Shazeer et al. (arXiv 1701.06538), section 2.1, and GLU variants (arXiv 2002.05202), eq. 5.
Left out: capacity limits and dropped tokens; a balancing loss (the router here is trained by the
language loss alone).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from glm_course.config import ModelConfig


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * value for x [..., 2F] = [gate, value]; [..., F] back."""
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


class _GroupedMatmul(torch.autograd.Function):
    """One product a group, each written where it belongs.

    Autograd's own graph for `split`, `@` and `cat` does the same products, and then copies every
    result and every gradient once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        y = x.new_empty(len(x), weight.shape[2])
        for rows, matrix, out in zip(x.split(sizes), weight, y.split(sizes), strict=True):
            torch.mm(rows, matrix, out=out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx, dweight = (
            torch.empty_like(t) if needed else None
            for t, needed in zip((x, weight), ctx.needs_input_grad, strict=False)
        )
        dy_groups = dy.split(ctx.sizes)
        if dx is not None:
            for dy_rows, matrix, out in zip(dy_groups, weight, dx.split(ctx.sizes), strict=True):
                torch.mm(dy_rows, matrix.T, out=out)
        if dweight is not None:
            for rows, dy_rows, out in zip(x.split(ctx.sizes), dy_groups, dweight, strict=True):
                torch.mm(rows.T, dy_rows, out=out)
        return dx, dweight, None


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of x [N, K], grouped by expert, each group by its matrix in weight [E, K, M]: [N, M].

    counts: [E] rows a group, int64. On CUDA one kernel takes all groups and the counts stay on the
    card. Elsewhere a loop over experts is as fast, and also serves fp64 and MPS.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight, offs=counts.cumsum(0).to(torch.int32))
    return _GroupedMatmul.apply(x, weight, counts.tolist())


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Expert weights and ids, both [N, k], of tokens x [N, W] under router [E, W].

    The weights are a softmax, in fp32, over the k largest logits alone.
    """
    logits, experts = F.linear(x, router).topk(top_k, dim=-1)
    return logits.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)), experts


class MixtureOfExperts(nn.Module):
    """Routed experts and a shared one. up: [E, W, 2F] (gate, then value); down: [E, F, W].

    `load` [E] is how many tokens each routed expert got in the last call; None before it.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k, self.load = config.top_k, None
        width, hidden = config.width, config.expert_hidden
        self.router = nn.Linear(width, config.experts, bias=False)
        experts = [
            (nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False))
            for _ in range(config.experts)
        ]  # torch draws as if each expert were a module of its own
        self.up = nn.Parameter(torch.stack([up.weight.detach().T for up, _ in experts]))
        self.down = nn.Parameter(torch.stack([down.weight.detach().T for _, down in experts]))
        self.shared_up = nn.Linear(width, 2 * hidden, bias=False)
        self.shared_down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, W] to [N, W]. Padding is the caller's to leave out."""
        x = x.to(self.up.dtype)
        gates, experts = route(x, self.router.weight, self.top_k)  # [N, k] each
        order = experts.flatten().argsort(stable=True)  # [N k], token copies by expert
        self.load = experts.flatten().bincount(minlength=len(self.up))
        copies = x.index_select(0, order // self.top_k)  # [N k, W]
        hidden = swiglu(grouped_matmul(copies, self.up, self.load))
        done = grouped_matmul(hidden, self.down, self.load)
        back = done.index_select(0, order.argsort()).unflatten(0, (-1, self.top_k))  # [N, k, W]
        routed = (back * gates[..., None].to(back.dtype)).sum(1)
        return routed + self.shared_down(swiglu(self.shared_up(x)))
