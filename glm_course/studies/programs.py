"""What the data studies share: the small model trained on composed programs, and its accuracy.

An arm is an order in which structures are shown. Every arm of a seed has the same initial weights,
and every example its own number, so two arms differ in nothing but which structure it has.

In a model this small some expert is idle in most batches: no token chooses it. The original keeps
each expert's matrices as parameters of their own, which then have no gradient and stay as they are.
In our stacked matrices an idle expert has a gradient of zero, and AdamW would still decay it and
move it by its momentum. So the optimiser gets one parameter an expert here. The original also lets
padding choose experts, and so do we: an expert that only padding chose counts as used.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from glm_course import checkpoint, receipt
from glm_course.config import STUDY_MINI, ModelConfig
from glm_course.data.batches import shifted
from glm_course.data.programs import Structure, make_program, structures
from glm_course.layers.moe import MixtureOfExperts
from glm_course.model import LanguageModel
from glm_course.plots import QUIET
from glm_course.stats import sign_flip
from glm_course.tokenizer import PAD, ByteTokenizer
from glm_course.train.pretrain import CODE as PRETRAIN_CODE
from glm_course.train.pretrain import new_model

UPDATES, BATCH, LENGTH = 200, 24, 128
MEASURED = (50, 100, 200)  # updates after which held-out accuracy is taken
CODE = (*PRETRAIN_CODE, "studies/programs.py")
MODELS = {
    "mini": STUDY_MINI,  # top-1: its router never learns; three layers: none is sparse
    "top-2": replace(STUDY_MINI, top_k=2),
    "4 layers": replace(STUDY_MINI, layers=4),
}

Example = tuple[Structure, int]  # a structure and the number of the example


def interleaved(pool: Sequence[Structure]) -> list[Example]:
    """Example i has structure i mod the size of the pool."""
    return [(pool[i % len(pool)], i) for i in range(UPDATES * BATCH)]


def blocked(pool: Sequence[Structure]) -> list[Example]:
    """The same examples, structure by structure."""
    position = {structure: p for p, structure in enumerate(pool)}
    return sorted(interleaved(pool), key=lambda example: (position[example[0]], example[1]))


def curriculum(first: Sequence[Structure], then: Sequence[Structure]) -> list[Example]:
    """`first` alone for half of the run, all of `then` after it; numbers run on."""
    half = UPDATES * BATCH // 2
    return interleaved(first)[:half] + interleaved(then)[half:]


def encode(example: Example, seed: int) -> tuple[list[int], int]:
    """Ids of one example with bos and eos, and how many of them stand before the answer."""
    program, tokenizer = make_program(*example, seed), ByteTokenizer()
    prompt = tokenizer.encode(program.prompt, bos=True)
    return prompt + tokenizer.encode(program.answer, eos=True), len(prompt)


@torch.no_grad()
def held_out(model: LanguageModel, seed: int) -> dict[str, int]:
    """Answer tokens of the 32 held-out structures: all, those the model has as its likeliest.

    Teacher-forced: each token is predicted from the true ones before it. Also how many whole
    answers are right.
    """
    examples = [(structure, 100_000 + j) for j, structure in enumerate(structures()[1])]
    rows = [encode(example, seed + 999) for example in examples]
    inputs, labels, mask = shifted([ids for ids, _ in rows], model.embedding.weight.device)
    answer = mask & (
        torch.arange(mask.shape[1]) >= torch.tensor([start - 1 for _, start in rows])[:, None]
    )
    right = (model(inputs, mask).argmax(-1) == labels) & answer
    return {
        "tokens": int(answer.sum()),
        "right": int(right.sum()),
        "exact": int((right.sum(1) == answer.sum(1)).sum()),
    }


def loss(model: LanguageModel, rows: list[list[int]]) -> Tensor:
    """Mean cross-entropy in nats over all next bytes of the rows, padded to LENGTH."""
    inputs, labels, mask = shifted(rows, model.embedding.weight.device)
    logits = model(F.pad(inputs, (0, LENGTH - 1 - inputs.shape[1]), value=PAD))
    return F.cross_entropy(logits[:, : labels.shape[1]][mask], labels[mask])


class ExpertAdamW:
    """AdamW that leaves idle experts alone. `model` is trained in place; fp32."""

    def __init__(self, model: LanguageModel):
        self.model = model
        self.experts = [  # a stack, its experts as parameters on the same memory, who counts them
            (stack, [matrix.requires_grad_() for matrix in stack.detach().unbind()], moe)
            for moe in model.modules()
            if isinstance(moe, MixtureOfExperts)
            for stack in (moe.up, moe.down)
        ]
        stacks = {id(stack) for stack, _, _ in self.experts}
        trained: list[Tensor] = [p for p in model.parameters() if id(p) not in stacks]
        trained += [matrix for _, matrices, _ in self.experts for matrix in matrices]
        self.adamw = torch.optim.AdamW(
            trained, lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self) -> None:
        """One update from the model's gradients, clipped to norm 1, which it clears."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for stack, matrices, moe in self.experts:
            for matrix, gradient, load in zip(matrices, stack.grad, moe.load, strict=True):
                matrix.grad = gradient if load else None
        self.adamw.step()
        self.model.zero_grad()


def train(config: ModelConfig, examples: Sequence[Example], seed: int) -> dict[str, Any]:
    """Train from the initial weights of `seed`; loss by update, held-out counts by MEASURED."""
    model = new_model(config, seed)
    optimizer, losses, counts = ExpertAdamW(model), [], {}
    for update in range(UPDATES):
        batch = examples[update * BATCH : (update + 1) * BATCH]
        found = loss(model, [encode(e, seed)[0] for e in batch])
        found.backward()
        optimizer.step()
        losses.append(found.item())
        if update + 1 in MEASURED:
            counts[str(update + 1)] = held_out(model, seed)
    return {"loss": losses, "held_out": counts}


def trained(config: ModelConfig, examples: Sequence[Example], seed: int) -> dict[str, Any]:
    """What `train` returns, from the cache or trained now.

    The studies have arms in common, and one that was stopped goes on at the arm it was in.
    """
    key = {
        "name": f"programs-{seed}",
        "code": receipt.code_hash(*CODE),
        "config": asdict(config),
        "examples": hashlib.sha256(repr(list(examples)).encode()).hexdigest(),
        "updates": [UPDATES, *MEASURED],
        "threads": torch.get_num_threads(),
    }

    def make(folder: Path) -> None:
        receipt.write(folder / "run.json", train(config, examples, seed))

    return receipt.read(checkpoint.cached(key, make) / "run.json")


def accuracy(run: dict[str, Any], model: str, arm: str, update: int = UPDATES) -> float:
    """Share of held-out answer tokens that an arm of a seed had right after some updates."""
    counts = run["models"][model][arm]["held_out"][str(update)]
    return counts["right"] / counts["tokens"]


def run_arms(arms: dict[str, Sequence[Example]], seed: int) -> dict[str, Any]:
    """Train every arm on every model from the initial weights of `seed`."""
    return {
        "models": {
            name: {arm: trained(config, examples, seed) for arm, examples in arms.items()}
            for name, config in MODELS.items()
        }
    }


def differences(
    runs: list[dict[str, Any]], model: str, pair: tuple[str, str], update: int = UPDATES
) -> list[int]:
    """Answer tokens right by the first arm less those by the second, seed by seed."""
    counts = [
        [run["models"][model][arm]["held_out"][str(update)]["right"] for arm in pair]
        for run in runs
    ]
    return [first - second for first, second in counts]


def table(runs: list[dict[str, Any]], arms: Sequence[str], pairs: list[tuple[str, str]]) -> str:
    """Mean accuracy by model, arm and update, then each comparison's mean, wins and exact p."""
    lines = [f"held-out answer tokens right, mean of {len(runs)} seeds"]
    lines.append(f"{'':<28}" + "".join(f"{update:>10}" for update in MEASURED))
    for model in MODELS:
        for arm in arms:
            means = [
                sum(accuracy(run, model, arm, update) for run in runs) / len(runs)
                for update in MEASURED
            ]
            lines.append(f"{model + ', ' + arm:<28}" + "".join(f"{mean:>10.1%}" for mean in means))
    lines.append("\ndifference in points, seeds in which it is positive, exact paired sign-flip p")
    for model in MODELS:
        for pair in pairs:
            for update in MEASURED:
                found = differences(runs, model, pair, update)
                tokens = runs[0]["models"][model][pair[0]]["held_out"][str(update)]["tokens"]
                points = 100 * sum(found) / len(found) / tokens
                wins = sum(d > 0 for d in found)
                lines.append(
                    f"{model}, {pair[0]} less {pair[1]}, {update} updates: {points:+.2f}, "
                    f"{wins} of {len(found)}, p = {sign_flip(found):.4f}"
                )
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]], pairs: list[tuple[str, str]]) -> Figure:
    """Differences in accuracy after the last update: a panel a comparison, a column a model."""
    fig = Figure(figsize=(2.4 * len(pairs) + 1, 3), layout="constrained")
    axes = fig.subplots(1, len(pairs), sharey=True, squeeze=False)[0]
    for ax, pair in zip(axes, pairs, strict=True):
        for column, model in enumerate(MODELS):
            tokens = runs[0]["models"][model][pair[0]]["held_out"][str(UPDATES)]["tokens"]
            points = [100 * d / tokens for d in differences(runs, model, pair)]
            ax.plot([column] * len(points), points, "o", alpha=0.6)
        ax.axhline(0, color=QUIET, linewidth=0.8)
        ax.set_xticks(range(len(MODELS)), list(MODELS), rotation=30)
        ax.set_title(f"{pair[0]} less\n{pair[1]}", fontsize="small")
    axes[0].set_ylabel("points of accuracy")
    return fig
