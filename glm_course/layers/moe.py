"""Mixture of experts: a router sends each token to k of E small networks, one more serves them all.

An expert is a bias-free SwiGLU. Tokens are sorted by expert, so each expert multiplies one
contiguous batch and the work is exactly k experts a token, whatever E is.

Two remedies for uneven load, both off unless a run asks for them: `balance_loss`, which has a
gradient, and a bias on the selection alone, moved by `update_bias`. With no routed expert
(`experts` = 0) the shared one is a plain dense MLP.

Source: Shazeer et al. (arXiv 1701.06538), section 2.1, and GLU variants (arXiv 2002.05202), eq. 5;
Fedus et al. (arXiv 2101.03961), eqs. 4 to 6; Wang et al. (arXiv 2408.15664), algorithm 1.
Left out: capacity limits and dropped tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from glm_course.config import ModelConfig

# On a CPU, oneDNN compiles a bf16 product anew for every size it has not seen, about 2 ms each, and
# loads are never twice the same. Rounded up there are some 30 sizes. In fp32, MKL compiles nothing.
ROWS = 64


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * value, both gradients written into one buffer.

    Autograd's own graph computes the same numbers, keeps silu(gate) for backward, and then joins
    the gradients of the two halves by a copy: 1.2 times the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, value = x.chunk(2, -1)
        return F.silu(gate).mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, value = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dvalue = dx.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(dy * value, gate, grad_input=dgate)
        torch.mul(dy, F.silu(gate), out=dvalue)
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * value for x [..., 2F] = [gate, value]; [..., F] back."""
    return _SwiGLU.apply(x)


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


def route(logits: Tensor, top_k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Expert weights and ids, both [N, k], of tokens with router logits [N, E].

    The weights are a softmax, in fp32, over the k chosen logits alone. A bias [E] takes part in
    the choice and not in the weights.
    """
    if bias is None:
        chosen, experts = logits.topk(top_k, dim=-1)
    else:
        experts = (logits + bias).topk(top_k, dim=-1).indices
        chosen = logits.gather(-1, experts)
    return chosen.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)), experts


def balance_loss(logits: Tensor, top_k: int) -> Tensor:
    """E sum_i f_i P_i for router logits [N, E]: 1 where load and probabilities are even.

    f_i is the share of the N k choices that fell on expert i: counts, so no gradient. P_i is the
    mean probability of expert i, which has one, and is lowered most where f_i is high. A scalar,
    fp32 or wider. Source: Fedus et al. (arXiv 2101.03961), eqs. 4 to 6, for k experts a token.
    """
    experts = logits.shape[-1]
    share = logits.topk(top_k, dim=-1).indices.flatten().bincount(minlength=experts)
    mean = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).mean(0)
    return experts * (share / share.sum() * mean).sum()


@torch.no_grad()
def update_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Raise the selection bias [E] of experts with less than the mean load [E], lower the others'.

    In place, by `rate` each, whatever the distance: no gradient takes part.
    Source: Wang et al. (arXiv 2408.15664), algorithm 1.
    """
    load = load.to(bias.dtype)
    bias += rate * (load.mean() - load).sign()


def pad_groups(source: Tensor, load: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fill every group of rows up to a multiple of ROWS.

    source [n] names the token in each row, load [E] the rows of each group. Returns the longer
    source (empty rows name token 0, and nothing reads what becomes of them), the row [n] where each
    old row now stands, and the new group sizes [E].
    """
    sizes = (load + ROWS - 1) // ROWS * ROWS
    empty = sizes - load
    row = torch.arange(len(source), device=source.device)
    row += (empty.cumsum(0) - empty).repeat_interleave(load)
    return source.new_zeros(int(sizes.sum())).index_copy(0, row, source), row, sizes


class MixtureOfExperts(nn.Module):
    """Routed experts and a shared one. up: [E, W, 2F] (gate, then value); down: [E, F, W].

    `load` [E] is how many tokens each routed expert got in the last call; None before it. With
    `keep_logits` set, `logits` holds the router's logits [N, E] of the last call, graph included.
    `bias` [E] is None without `config.selection_bias`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k, self.load = config.top_k, None
        self.keep_logits, self.logits = False, None
        width, hidden = config.width, config.expert_hidden
        if config.experts:
            self.router = nn.Linear(width, config.experts, bias=False)
            experts = [
                (nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False))
                for _ in range(config.experts)
            ]  # torch draws as if each expert were a module of its own
            self.up = nn.Parameter(torch.stack([up.weight.detach().T for up, _ in experts]))
            self.down = nn.Parameter(torch.stack([down.weight.detach().T for _, down in experts]))
            bias = torch.zeros(config.experts) if config.selection_bias else None
            self.register_buffer("bias", bias)
        self.shared_up = nn.Linear(width, 2 * hidden, bias=False)
        self.shared_down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, W] to [N, W]. Padding is the caller's to leave out."""
        x = x.to(self.shared_up.weight.dtype)
        routed = self.routed(x) if self.top_k else None
        shared = self.shared_down(swiglu(self.shared_up(x)))
        return shared if routed is None else routed + shared

    def routed(self, x: Tensor) -> Tensor:
        """The routed experts' part, [N, W] to [N, W]."""
        logits = self.router(x)
        if self.keep_logits:
            self.logits = logits
        gates, experts = route(logits, self.top_k, self.bias)  # [N, k] each
        order = experts.flatten().argsort(stable=True)  # [N k], token copies by expert
        self.load = experts.flatten().bincount(minlength=len(self.up))
        source, place, sizes = order // self.top_k, order.argsort(), self.load
        many = len(source) > ROWS * len(self.up)
        if many and x.dtype == torch.bfloat16 and x.device.type == "cpu":
            source, row, sizes = pad_groups(source, self.load)
            place = row[place]
        copies = x.index_select(0, source)  # [N k, W], or longer
        hidden = swiglu(grouped_matmul(copies, self.up, sizes))
        done = grouped_matmul(hidden, self.down, sizes)
        back = done.index_select(0, place).unflatten(0, (-1, self.top_k))  # [N, k, W]
        return (back * gates[..., None].to(back.dtype)).sum(1)
