"""Matmul rate at the model's sizes, and the arithmetic that a training step cannot avoid."""

from collections.abc import Callable

import torch

from glm_course.config import BASE, ModelConfig
from tests.reference import attended_positions


def products(config: ModelConfig, tokens: int) -> dict[str, tuple[int, int, int, int]]:
    """The model's weight products in one forward pass: name -> (how many, rows, inner, columns).

    Routed tokens are taken to spread evenly over the experts. The router is left out: 0.1% of the
    work, and so thin that its rate would only pull the machine's down.
    """
    width, hidden, layers = config.width, config.expert_hidden, config.layers
    rows = tokens * config.top_k // config.experts
    return {
        "qkv": (layers, tokens, width, 3 * width),
        "attention out": (layers, tokens, width, width),
        "routed up": (layers * config.experts, rows, width, 2 * hidden),
        "routed down": (layers * config.experts, rows, hidden, width),
        "shared up": (layers, tokens, width, 2 * hidden),
        "shared down": (layers, tokens, hidden, width),
        "output": (1, tokens, width, config.vocab_size),
    }


def matmul_floor(dtype: torch.dtype, tokens: int) -> tuple[Callable[[], None], float]:
    """A run of all those products with their two backward products, nothing else; and its FLOPs.

    Each of x w, g w^T and x^T g is 2 rows inner columns FLOPs. Operands are allocated once, here.
    """
    work, flops = [], 0.0
    for count, rows, inner, columns in products(BASE, tokens).values():
        x, g = torch.randn(rows, inner).to(dtype), torch.randn(rows, columns).to(dtype)
        w = torch.randn(inner, columns).to(dtype)
        work.append((count, x, w, g, torch.empty_like(g), torch.empty_like(x), torch.empty_like(w)))
        flops += 3 * 2 * count * rows * inner * columns

    def run() -> None:
        for count, x, w, g, y, dx, dw in work:
            for _ in range(count):
                torch.mm(x, w, out=y)
                torch.mm(g, w.T, out=dx)
                torch.mm(x.T, g, out=dw)

    return run, flops


def step_flops(config: ModelConfig, lengths: list[int]) -> float:
    """Model FLOPs of one training step on sequences of `lengths` input tokens, padding excluded.

    2 FLOPs a multiply-add, times 3 for forward and the two products of backward. Multiply-adds of
    one token, with width W, hidden F, head width D, V ids, k of E experts and one shared:
    layers (4 W^2 + W E + (k + 1) 3 W F) + linear layers 2 W D + sparse layers 2 W n + W V,
    where n is how many keys its position attends to. Linear attention is counted in its recurrent
    form, the least; norms, streams, softmax and the optimiser are not counted.
    """
    width = config.width
    sparse = sum(config.is_sparse(i) for i in range(config.layers))
    weights = 4 * width**2 + width * config.experts
    weights += (config.top_k + 1) * 3 * width * config.expert_hidden
    token = config.layers * weights + width * config.vocab_size
    token += (config.layers - sparse) * 2 * width * config.head_dim
    keys = [len(attended_positions(t, config.window, config.stride)) for t in range(max(lengths))]
    macs = sum(n * token + sparse * 2 * width * sum(keys[:n]) for n in lengths)
    return 2 * 3 * macs
