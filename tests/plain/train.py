"""One training step with nothing fused: pad, forward, mean loss, backward, clip, AdamW."""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm_course.config import ModelConfig
from glm_course.tokenizer import PAD
from tests.plain.model import State, forward_plain


def pad_plain(batch: list[list[int]], length: int = 128) -> Tensor:
    """Ids [B, length], padded on the right."""
    return torch.tensor([ids + [PAD] * (length - len(ids)) for ids in batch])


def loss_plain(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean nats a byte of predicting ids[:, 1:] from logits[:, :-1]; pad labels do not count."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=PAD
    )


def optimizer_plain(state: State) -> torch.optim.AdamW:
    """The pretraining optimiser over the weights of `state`, one tensor at a time."""
    for tensor in state.values():
        tensor.requires_grad_()
    return torch.optim.AdamW(
        state.values(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False
    )


def training_step_plain(
    state: State,
    config: ModelConfig,
    optimizer: torch.optim.AdamW,
    batch: list[list[int]],
    bf16: bool = False,
) -> tuple[float, float]:
    """Update `state` in place; returns the loss and the gradient norm before clipping to 1."""
    ids = pad_plain(batch)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = forward_plain(state, config, ids)
    loss = loss_plain(logits, ids)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(state.values(), 1.0, foreach=False)
    optimizer.step()
    return loss.item(), norm.item()
