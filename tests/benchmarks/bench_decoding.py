"""Decoding a group after one real prompt: the whole prefix again for every token / the cache."""

from unittest import mock

import torch

import glm_course.generate as generation
from glm_course.config import BASE
from glm_course.data.tasks import frozen_tasks
from glm_course.tokenizer import BOS, EOS, PAD, SEP, ByteTokenizer
from glm_course.train.pretrain import new_model
from tests.benchmarks.measure import Result, ratios, take_turns
from tests.reference import generate_plain


def run(quick: bool) -> list[Result]:
    """16 samples of 48 tokens (4 of 6 when quick), temperature 0.35, BASE from seed 42, fp32.

    Eos is ruled out on both sides, so that every sample has all its tokens. Raises RuntimeError
    when the two sides decode different ids: a ratio of different work would mean nothing.
    """
    samples, tokens, rounds = (4, 6, 2) if quick else (16, 48, 5)
    model = new_model(BASE, 42)
    state = model.state_dict()
    prompt = frozen_tasks("dev", 1)[0].prompt
    encoded = ByteTokenizer().encode(prompt, bos=True)
    noise = torch.rand(1, samples, tokens, generator=torch.Generator().manual_seed(0))[0]
    decoded = {}

    def plain() -> None:
        ids = generate_plain(state, BASE, encoded, noise, 0.35, blocked=(PAD, BOS, SEP, EOS))
        decoded["plain"] = ids.tolist()

    def fast() -> None:
        with mock.patch.object(generation, "EOS", -1):
            [group] = generation.generate(
                model, [prompt], samples=samples, temperature=0.35, max_new_tokens=tokens, seed=0
            )
        decoded["fast"] = [list(completion.ids) for completion in group]

    name = f"decoding {samples} x {tokens} tokens after {len(encoded)}"
    fast()  # the first call pays for threads and allocations
    times = take_turns({"plain": plain, "fast": fast}, rounds)
    if decoded["plain"] != decoded["fast"]:
        raise RuntimeError("plain and cached decoding gave different ids")
    return ratios(name, times["plain"], times["fast"], 20.0)
