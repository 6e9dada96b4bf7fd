"""Decoding without a cache: run the whole prefix again for every new token of every sample."""

import torch
from torch import Tensor

from glm_course.config import ModelConfig
from glm_course.tokenizer import BOS, PAD, SEP
from tests.plain.model import State, forward_plain


@torch.no_grad()
def generate_plain(
    state: State,
    config: ModelConfig,
    prompt: list[int],
    noise: Tensor,
    temperature: float,
    blocked: tuple[int, ...] = (PAD, BOS, SEP),
) -> Tensor:
    """Ids [N, n] after one prompt, from noise [N, n] in [0, 1): one number a token.

    A token is the first id whose cumulated probability exceeds its number; at temperature 0 the
    likeliest id. Never one of `blocked`; runs on past eos, so that all samples do the same work.
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
