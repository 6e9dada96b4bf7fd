"""The chapters' plain code put to work: what tests and benchmarks hold the library to.

The definitions stand in the chapters; here they only meet a batch, an optimiser and a sampler.
"""

import torch
from torch import Tensor

from glm_course.config import ModelConfig
from glm_course.plain import plain
from glm_course.tokenizer import BOS, PAD, SEP

linear_attention_plain = plain("03_linear_attention").linear_attention_plain
rotate_plain = plain("03_linear_attention").rotate_plain
attended_positions = plain("04_sparse_attention").attended_positions
sparse_attention_plain = plain("04_sparse_attention").sparse_attention_plain
moe_plain = plain("05_experts").moe_plain
rms_norm_plain = plain("06_streams").rms_norm_plain
forward_plain = plain("07_whole_model").forward_plain
plain_initial_weights = plain("07_whole_model").plain_initial_weights
loss_plain = plain("09_pretraining").loss_plain

State = dict[str, Tensor]


def pad_plain(batch: list[list[int]], length: int = 128) -> Tensor:
    """Ids [B, length], padded on the right."""
    return torch.tensor([ids + [PAD] * (length - len(ids)) for ids in batch])


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
    """Pad, forward, mean loss, backward, clip to 1, AdamW, nothing fused: loss and norm."""
    ids = pad_plain(batch)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = forward_plain(state, config, ids)
    loss = loss_plain(logits[:, :-1].float(), ids[:, 1:])
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(state.values(), 1.0, foreach=False)
    optimizer.step()
    return loss.item(), norm.item()


@torch.no_grad()
def generate_plain(
    state: State,
    config: ModelConfig,
    prompt: list[int],
    noise: Tensor,
    temperature: float,
    blocked: tuple[int, ...] = (PAD, BOS, SEP),
) -> Tensor:
    """Ids [N, n] after one prompt, the whole prefix run again for every token of the group.

    From noise [N, n] in [0, 1), one number a token: the first id whose cumulated probability
    exceeds it; at temperature 0 the likeliest id. Never one of `blocked`; runs on past eos, so that
    all samples do the same work.
    """
    ids = torch.tensor([prompt] * len(noise))  # [N, T]
    for t in range(noise.shape[1]):
        logits = forward_plain(state, config, ids)[:, -1].float()  # [N, V]
        logits[:, list(blocked)] = float("-inf")
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True)  # [N, 1]
        else:
            cumulated = (logits / temperature).softmax(-1).cumsum(-1)
            exceeds = cumulated > noise[:, t, None] * cumulated[:, -1:]  # [N, V]
            token = exceeds.int().argmax(-1, keepdim=True)  # the first
        ids = torch.cat((ids, token), dim=1)
    return ids[:, len(prompt) :]
