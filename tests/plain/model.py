"""The language model over a dict of weights, and its initial weights drawn module by module."""

import torch
from torch import Tensor, nn

from glm_course.config import ModelConfig
from tests.plain.linear_attention import linear_attention_plain
from tests.plain.moe import moe_plain
from tests.plain.sparse_attention import sparse_attention_plain

State = dict[str, Tensor]


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate_plain(x: Tensor, theta: float) -> Tensor:
    """Turn channels (2i, 2i + 1) of x [B, T, H, D] at position t by t theta^(-2i / D) radians."""
    length, head_dim = x.shape[1], x.shape[3]
    speed = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # [D/2]
    angle = torch.arange(length, dtype=torch.float64)[:, None] * speed  # [T, D/2]
    cos, sin = (f(angle)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))  # [T, 1, D/2]
    even, odd = x[..., 0::2], x[..., 1::2]  # [B, T, H, D/2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def attention_plain(
    x: Tensor, qkv: Tensor, out: Tensor, config: ModelConfig, sparse: bool
) -> Tensor:
    """[B, T, W] -> [B, T, W]; qkv [3W, W] holds rows for q, k, v in turn, out is [W, W]."""
    heads = (config.heads, config.head_dim)
    q, k, v = (part.unflatten(-1, heads) for part in (x @ qkv.T).chunk(3, dim=-1))  # [B, T, H, D]
    q, k = rotate_plain(q, config.rope_theta), rotate_plain(k, config.rope_theta)
    if sparse:
        y = sparse_attention_plain(q, k, v, config.window, config.stride)
    else:
        y = linear_attention_plain(q, k, v)
    return y.flatten(-2) @ out.T


def block_plain(x: Tensor, w: State, config: ModelConfig, sparse: bool) -> Tensor:
    """[B, T, W] -> [B, T, W]: attention, then experts, each after a norm and added to its input."""
    qkv, out = w["attention.qkv.weight"], w["attention.out.weight"]
    normed = rms_norm_plain(x, w["attention_norm.weight"], config.norm_eps)
    x = x + attention_plain(normed, qkv, out, config, sparse)

    normed = rms_norm_plain(x, w["moe_norm.weight"], config.norm_eps)
    y = moe_plain(
        normed.flatten(0, 1),  # [B T, W]
        w["moe.router.weight"],
        w["moe.up"],
        w["moe.down"],
        w["moe.shared_up.weight"],
        w["moe.shared_down.weight"],
        config.top_k,
    )
    return x + y.view_as(x)


def embeddings_to_logits_plain(state: State, config: ModelConfig, x: Tensor) -> Tensor:
    """[B, T, W] embeddings to [B, T, V] logits."""
    streams = x.unsqueeze(2).repeat(1, 1, config.streams, 1)  # [B, T, S, W]
    for layer in range(config.layers):
        prefix = f"blocks.{layer}."
        w = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        read = w["mixer.input_logits"].softmax(0)[:, None]  # [S, 1]
        write = w["mixer.output_logits"].softmax(0)[:, None]  # [S, 1]
        y = block_plain((streams * read).sum(2), w, config, config.is_sparse(layer))
        streams = streams + y.unsqueeze(2) * write
    final = rms_norm_plain(streams.mean(2), state["norm.weight"], config.norm_eps)
    return final @ state["embedding.weight"].T


def forward_plain(state: State, config: ModelConfig, ids: Tensor) -> Tensor:
    """Logits [B, T, V] for ids [B, T]; the output matrix is the embedding."""
    return embeddings_to_logits_plain(state, config, state["embedding.weight"][ids])


def plain_initial_weights(config: ModelConfig, seed: int) -> State:
    """The original's initial weights, float32, from the draws its constructor makes.

    Every module is drawn twice in one order: by torch's default as it is constructed, then from
    N(0, 0.02). The output matrix comes last and is tied: its second draw becomes the embedding.
    """
    torch.manual_seed(seed)
    width, hidden = config.width, config.expert_hidden

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False)

    def expert() -> tuple[nn.Linear, nn.Linear]:
        return linear(width, 2 * hidden), linear(hidden, width)

    embedding = nn.Embedding(config.vocab_size, width)
    layers = []  # tuples are evaluated left to right, so modules are drawn in the order written
    for _ in range(config.layers):
        attention = (linear(width, 3 * width), linear(width, width))
        router = linear(width, config.experts)
        experts = [expert() for _ in range(config.experts)]
        layers.append((attention, router, experts, expert()))
    output = linear(width, config.vocab_size)
    output.weight = embedding.weight

    drawn = [embedding]
    for attention, router, experts, shared in layers:
        drawn += [*attention, router, *(m for pair in experts for m in pair), *shared]
    for module in [*drawn, output]:
        nn.init.normal_(module.weight, std=0.02)

    state = {"embedding.weight": embedding.weight}
    for i, ((qkv, out), router, experts, (shared_up, shared_down)) in enumerate(layers):
        state |= {
            f"blocks.{i}.attention_norm.weight": torch.ones(width),
            f"blocks.{i}.attention.qkv.weight": qkv.weight,
            f"blocks.{i}.attention.out.weight": out.weight,
            f"blocks.{i}.moe_norm.weight": torch.ones(width),
            f"blocks.{i}.moe.router.weight": router.weight,
            f"blocks.{i}.moe.up": torch.stack([up.weight.T for up, _ in experts]),
            f"blocks.{i}.moe.down": torch.stack([down.weight.T for _, down in experts]),
            f"blocks.{i}.moe.shared_up.weight": shared_up.weight,
            f"blocks.{i}.moe.shared_down.weight": shared_down.weight,
            f"blocks.{i}.mixer.input_logits": torch.linspace(0.1, -0.1, config.streams),
            f"blocks.{i}.mixer.output_logits": torch.linspace(-0.1, 0.1, config.streams),
        }
    state["norm.weight"] = torch.ones(width)
    return {name: tensor.detach().clone() for name, tensor in state.items()}
