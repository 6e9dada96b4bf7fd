"""Decoding with the cache: many prompts, several samples of each, one batched step a token.

A row is one completion in the making. Prompts are read once, whatever the number of samples; rows
that have ended are dropped from the batch. Every random number is drawn before decoding starts, one
a row and position, so what a row becomes does not depend on its batch mates.

Left out: beam search, top-k and nucleus sampling, repetition penalties.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_course.data.batches import pad_behind
from glm_course.model import LanguageModel
from glm_course.tokenizer import EOS, FIRST_BYTE, ByteTokenizer

NEWLINE = FIRST_BYTE + ord("\n")
ROWS = 512  # rows decoded at once; bounds memory


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt."""

    text: str
    ids: tuple[int, ...]  # the sampled tokens, eos included where it was sampled
    log_probs: tuple[float, ...]  # of each token, under the distribution it was sampled from
    stopped: str  # "eos"; "complete": the stopping rule held; "length": the limit


def allowed_ids(vocab_size: int, device: torch.device | str) -> Tensor:
    """Which ids may be sampled: bool [V], eos and every byte; never pad, bos, sep or image ids."""
    ids = torch.arange(vocab_size, device=device)
    return (ids == EOS) | ((ids >= FIRST_BYTE) & (ids < ByteTokenizer.vocab_size))


def sampling_log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [..., V] that tokens are sampled with: masked, at `temperature` above 0.

    Below a temperature of 1e-6, where logits would overflow, the likeliest token is certain anyway.
    """
    blocked = ~allowed_ids(logits.shape[-1], logits.device)
    return (logits.masked_fill(blocked, -torch.inf) / max(temperature, 1e-6)).log_softmax(-1)


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverse distribution function: log_probs [B, V], uniform [B] in [0, 1); ids [B].

    The id is the first whose cumulated probability exceeds the drawn number: never one of zero
    probability.
    """
    cumulated = log_probs.exp().cumsum(-1)
    return torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)[:, 0]


def encode_prompts(
    model: LanguageModel, prompts: Sequence[str], max_new_tokens: int
) -> list[list[int]]:
    """Ids of the prompts, bos before each; ValueError where one leaves too little room."""
    encoded = [ByteTokenizer().encode(prompt, bos=True) for prompt in prompts]
    longest, limit = max(map(len, encoded)), model.config.max_length
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"prompt of {longest} tokens and {max_new_tokens} new ones exceed max_length {limit}"
        )
    return encoded


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[str],
    *,
    samples: int = 1,
    temperature: float = 0.35,
    max_new_tokens: int = 48,
    seed: int = 0,
    is_complete: Callable[[int, str], bool] | None = None,
) -> list[list[Completion]]:
    """`samples` completions of each prompt; temperature 0 is greedy decoding.

    is_complete(i, text) is asked after every newline whether `text` completes prompts[i]; true ends
    the row. It is an oracle where it knows the task: measure without it too. Log-probabilities of
    greedy tokens are those at temperature 1. Deterministic for a seed, machine and thread count.

    Raises ValueError for a negative temperature, counts below one, no prompts, or a prompt that
    with the new tokens would exceed the model's max_length.
    """
    if temperature < 0 or not temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive number, got {temperature}")
    if samples < 1 or max_new_tokens < 1:
        raise ValueError(f"need at least 1 sample and 1 token, got {samples} and {max_new_tokens}")
    if not prompts:
        raise ValueError("need at least one prompt")
    encoded = encode_prompts(model, prompts, max_new_tokens)
    noise = torch.rand(
        len(prompts), samples, max_new_tokens, generator=torch.Generator().manual_seed(seed)
    )
    per_batch = max(1, ROWS // samples)
    completions = []
    for first in range(0, len(prompts), per_batch):
        batch = slice(first, first + per_batch)
        ask = (
            None
            if is_complete is None
            else lambda i, text, first=first: is_complete(first + i, text)
        )
        completions += _generate_batch(model, encoded[batch], noise[batch], temperature, ask)
    return completions


def _generate_batch(
    model: LanguageModel,
    prompts: list[list[int]],
    noise: Tensor,
    temperature: float,
    is_complete: Callable[[int, str], bool] | None,
) -> list[list[Completion]]:
    """`generate` for encoded prompts that fit one batch; noise [prompts, samples, new tokens]."""
    device, (_, samples, steps) = model.embedding.weight.device, noise.shape
    tokenizer = ByteTokenizer()
    logits, cache = model.prefill(*pad_behind(prompts, device))
    cache, logits = cache.expand(samples), logits.repeat_interleave(samples, 0)
    noise = noise.flatten(0, 1).to(device)  # [R, steps]
    ids: list[list[int]] = [[] for _ in noise]
    log_probs: list[list[float]] = [[] for _ in noise]
    stopped = ["length"] * len(noise)
    rows = list(range(len(noise)))  # the completion each batch row belongs to
    for t in range(steps):
        log_p = sampling_log_probs(logits, temperature or 1.0)  # [R, V]
        token = draw(log_p, noise[:, t]) if temperature else log_p.argmax(-1)
        chosen = log_p.gather(1, token[:, None])[:, 0]
        alive = []  # batch rows that go on
        # One transfer a step, for all rows.
        for b, (new, log_prob) in enumerate(zip(token.tolist(), chosen.tolist(), strict=True)):
            row = rows[b]
            if stopped[row] != "length":
                continue
            ids[row].append(new)
            log_probs[row].append(log_prob)
            if new == EOS:
                stopped[row] = "eos"
            elif (
                new == NEWLINE
                and is_complete
                and is_complete(row // samples, tokenizer.decode(ids[row]))
            ):
                stopped[row] = "complete"
            else:
                alive.append(b)
        if not alive or t == steps - 1:
            break
        if len(alive) <= 0.75 * len(rows):  # dropping rows copies the cache: not at every end
            keep = torch.tensor(alive, device=device)
            rows = [rows[b] for b in alive]
            cache, noise, token = cache.select(keep), noise[keep], token[keep]
        logits = model.step(token, cache)
    done = [
        Completion(tokenizer.decode(ids[r]), tuple(ids[r]), tuple(log_probs[r]), stopped[r])
        for r in range(len(ids))
    ]
    return [done[i : i + samples] for i in range(0, len(done), samples)]
