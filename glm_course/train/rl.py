"""Reinforcement learning with an executable reward: RLOO on groups of completions of one prompt.

A group of G completions is sampled, each is run on the task's hidden tests, and its reward is
compared with the mean of the others' (leave one out):

    A_i = r_i - mean_{j != i} r_j,    loss = -(1/G) sum_i A_i log p_i

with log p_i the completion's mean token log-probability at temperature 1, unmasked. Where all
rewards are equal every advantage is zero, and the group is skipped. Sampling is masked and at
temperature 0.35, so the gradient is that of another distribution than the one sampled from; and the
mean, not the sum, makes tokens of long completions count less. Both are the original's choices, and
`RLSettings` has the others beside them. Two penalties hold the model near where it started: `kl`,
to the starting checkpoint, and `replay`, the pretraining loss on fresh examples.

Only the last block, the final norm and the tied embedding learn. The embedding learns at both its
ends, as output matrix and through the bytes read in, so the graph runs through the frozen blocks:
they pass gradients on and compute none for their own weights. Cutting the graph before the last
block would save a third of the time, and was tried: in the first 24 groups 27 to 36 of 384 rollouts
pass, against 116.

Source: Kool et al. 2019; Ahmadian et al. (arXiv 2402.14740), eq. 8.
"""

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm_course import checkpoint, receipt
from glm_course.data.batches import pad_behind
from glm_course.data.tasks import CodingTask, frozen_tasks, pretraining_batches
from glm_course.device import pick_device, pick_dtype
from glm_course.evaluate import complete_tasks, evaluate_sampled
from glm_course.generate import Completion, encode_prompts, sampling_log_probs
from glm_course.model import LanguageModel, Packing
from glm_course.tokenizer import EOS, ByteTokenizer
from glm_course.train.loop import Row, progress, run_steps, step_name, to_json
from glm_course.train.optimizer import AdamWSettings, MasterAdamW
from glm_course.train.pretrain import CODE as PRETRAIN_CODE
from glm_course.train.pretrain import load_model, next_byte_loss, pretrained
from glm_course.verifier import reward, verify

AGREE = 1e-4  # fp32: largest `sampler_scorer_gap`; rounding makes 4e-5, a wrong token 1e-2

GRADIENTS = ("plain", "sampler", "weighted")
REPLAY = 16  # examples

CODE = (*PRETRAIN_CODE, "evaluate.py", "generate.py", "train/rl.py", "verifier.py")


@dataclass(frozen=True)
class RLSettings:
    """An RL run: `groups` prompts, one update each at most."""

    families: tuple[str, ...] = ("increment", "double", "even")
    tasks_per_family: int = 32
    groups: int = 96
    group_size: int = 16  # completions a prompt
    temperature: float = 0.35
    max_new_tokens: int = 48
    invalid_reward: float = -0.1
    fraction: bool = False  # reward of a failed completion: the share of tests it passes
    log_prob: str = "mean"  # over a completion's tokens, or "sum"
    gradient: str = "plain"  # of which distribution: see `policy_loss`
    stop_when_valid: bool = True  # the verifier ends a rollout; False: only eos and length do
    append_eos: bool = False  # train eos where the verifier ended a rollout, which then has none
    kl: float = 0.0  # weight of KL(model || start), nats a token, exact over the vocabulary
    replay: float = 0.0  # weight of the pretraining loss on REPLAY fresh examples an update
    seed: int = 31415
    milestones: tuple[int, ...] = (0, 24, 48, 72, 96)
    dev_tasks: int = 4  # a family, sampled at every milestone
    dev_samples: int = 8
    optimizer: AdamWSettings = field(
        default_factory=lambda: AdamWSettings(5e-5, betas=(0.9, 0.999), weight_decay=0.0)
    )

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"a group needs 2 completions to compare, got {self.group_size}")
        if self.groups < 1 or self.dev_samples < 1:
            raise ValueError(f"need at least 1: groups {self.groups}, samples {self.dev_samples}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be a positive number, got {self.temperature}")
        if self.log_prob not in ("mean", "sum"):
            raise ValueError(f"log_prob must be mean or sum, got {self.log_prob!r}")
        if self.gradient not in GRADIENTS:
            raise ValueError(f"gradient must be {', '.join(GRADIENTS)}, got {self.gradient!r}")
        if self.kl < 0 or self.replay < 0:
            raise ValueError(f"kl and replay must not be negative: {self.kl}, {self.replay}")
        if not math.isfinite(self.invalid_reward):
            raise ValueError(f"invalid_reward must be a number, got {self.invalid_reward}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


def advantages(rewards: Sequence[float]) -> Tensor:
    """Each reward less the mean of the others': [G] floats to a float32 tensor [G] of sum zero."""
    r = torch.tensor(rewards, dtype=torch.float64)
    return (r - (r.sum() - r) / (len(r) - 1)).float()


def schedule(tasks: Sequence[CodingTask], groups: int, seed: int) -> list[CodingTask]:
    """The task of each group: passes over `tasks`, epoch e shuffled with seed + 1009 e."""
    order: list[CodingTask] = []
    epoch = 0
    while len(order) < groups:
        shuffled = list(tasks)
        random.Random(seed + 1009 * epoch).shuffle(shuffled)
        order += shuffled
        epoch += 1
    return order[:groups]


def freeze_all_but_last_block(model: LanguageModel) -> int:
    """Let only last block, final norm and tied embedding learn; returns how many parameters."""
    model.requires_grad_(False)
    for part in (model.blocks[-1], model.norm, model.embedding):
        part.requires_grad_(True)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def completion_logits(
    model: LanguageModel, prompts: Sequence[str], completions: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Logits [N, V] before every completion token of a batch, in one forward, and the tokens [N].

    Completion by completion, each after its prompt.
    """
    device = model.embedding.weight.device
    starts = [ByteTokenizer().encode(prompt, bos=True) for prompt in prompts]
    ids, lengths = pad_behind(
        [start + list(c) for start, c in zip(starts, completions, strict=True)], device
    )
    mask = torch.arange(ids.shape[1] - 1, device=device) < lengths[:, None] - 1
    packing = Packing.of(mask, tuple(mask.shape))
    streams = model.run_blocks(model.split(packing.pack(model.embed(ids[:, :-1]))), packing)
    # Position t predicts the id at t + 1: completions begin where their prompts' last id stands.
    first = torch.tensor([len(start) - 1 for start in starts], device=device)
    wanted = (torch.arange(mask.shape[1], device=device) >= first[:, None])[mask]  # [N]
    return model.head(streams[:, wanted]), ids[:, 1:][mask][wanted]


def score(
    model: LanguageModel,
    prompts: Sequence[str],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    masked: bool = False,
) -> list[Tensor]:
    """Log-probabilities of every token of each completion after its prompt, all in one forward.

    With `masked` and a temperature: under the distribution the sampler draws from. Returns a tensor
    [length] a completion.
    """
    logits, tokens = completion_logits(model, prompts, completions)
    if masked:
        log_p = sampling_log_probs(logits, temperature)
    else:
        log_p = (logits / temperature).log_softmax(-1)
    return list(log_p.gather(1, tokens[:, None])[:, 0].split([len(c) for c in completions]))


def rloo_loss(
    log_probs: Sequence[Tensor],
    advantage: Tensor,
    form: str = "mean",
    weights: Tensor | None = None,
) -> Tensor:
    """-sum_i w_i A_i log p_i, log p_i the mean (or sum) over the tokens of completion i.

    weights: [G] that sum to one; 1/G each unless given.
    """
    parts = torch.stack([t.mean() if form == "mean" else t.sum() for t in log_probs])
    signed = advantage.to(parts.device) * parts
    return -(signed.mean() if weights is None else (weights * signed).sum())


def policy_loss(
    settings: RLSettings,
    logits: Tensor,
    tokens: Tensor,
    lengths: Sequence[int],
    advantage: Tensor,
) -> Tensor:
    """RLOO loss of a group from logits [N, V] and tokens [N], completion by completion.

    `settings.gradient` says whose log-probabilities: "plain", temperature 1 and unmasked, as if the
    group had been drawn from it; "sampler", those it was drawn from; "weighted", plain ones with
    importance weights p / p_sampler of whole completions, normalised over the group.
    """
    plain = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].split(lengths)
    if settings.gradient == "plain":
        return rloo_loss(plain, advantage, settings.log_prob)
    sampled = sampling_log_probs(logits, settings.temperature).gather(1, tokens[:, None])[:, 0]
    sampled = sampled.split(lengths)
    if settings.gradient == "sampler":
        return rloo_loss(sampled, advantage, settings.log_prob)
    ratio = [(p - s).sum().detach() for p, s in zip(plain, sampled, strict=True)]
    return rloo_loss(plain, advantage, settings.log_prob, torch.stack(ratio).softmax(0))


def mean_kl(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(p || r) in nats, mean over positions, of logits [N, V] against reference logits [N, V].

    Exact: a sum over the vocabulary, where larger models must estimate it from samples.
    """
    log_p, log_r = logits.log_softmax(-1), reference.log_softmax(-1)
    return (log_p.exp() * (log_p - log_r)).sum(-1).mean()


def sampler_scorer_gap(
    model: LanguageModel, prompt: str, group: Sequence[Completion], temperature: float
) -> float:
    """Largest difference between sampled and scored log-probability of any token of the group.

    In nats, and from 1 nat on relative to the log-probability: rounding grows with it.
    """
    with torch.no_grad():
        scored = score(
            model,
            [prompt] * len(group),
            [c.ids for c in group],
            temperature=temperature,
            masked=True,
        )
    score_of, sampled = (
        torch.cat(scored).cpu(),
        torch.tensor([x for c in group for x in c.log_probs]),
    )
    return ((score_of - sampled).abs() / sampled.abs().clamp(min=1)).max().item()


def rloo(
    settings: RLSettings,
    start: Path,
    *,
    output: Path | None = None,
    resume: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    save_every: int = 24,
) -> Iterator[Row]:
    """Train from the checkpoint folder `start`, yielding a row a group.

    Rows: step, task, rewards, passing (completions), updated, loss and gradient_norm (null without
    an update), rollouts (texts), tokens, seconds. Milestones hold a sampled dev evaluation.

    Raises RuntimeError when sampler and scorer disagree before the first update: then the gradient
    would belong to other tokens than those rewarded.
    """
    where = pick_device(device)
    model = load_model(start, device=where.type)
    reference = load_model(start, device=where.type).requires_grad_(False) if settings.kl else None
    trainable = freeze_all_but_last_block(model)
    optimizer = MasterAdamW(model, pick_dtype(dtype, where), settings.optimizer)
    tasks = frozen_tasks("rl", settings.tasks_per_family, settings.families)
    order = schedule(tasks, settings.groups, settings.seed)
    dev = frozen_tasks("dev", settings.dev_tasks, settings.families)
    encode_prompts(model, [task.prompt for task in tasks + dev], settings.max_new_tokens)
    exact_arithmetic = model.blocks[0].moe.shared_up.weight.dtype == torch.float32

    def step(i: int) -> Row:
        task = order[i]
        [group] = complete_tasks(
            model,
            [task],
            samples=settings.group_size,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed * 1_000_003 + i,  # a group's random numbers are its own
            stop_when_valid=settings.stop_when_valid,
        )
        verdicts = [verify(task, c.text) for c in group]
        tests = len(task.tests) if settings.fraction else None
        rewards = [reward(v, settings.invalid_reward, tests) for v in verdicts]
        row = {
            "task": task.entry_point,
            "passing": sum(v.status == "passed" for v in verdicts),
            "invalid": sum(v.status == "invalid" for v in verdicts),
            "updated": len(set(rewards)) > 1,
            "loss": None,
            "gradient_norm": None,
            "tokens": sum(len(c.ids) for c in group),
            "rewards": rewards,
            "rollouts": [c.text for c in group],
        }
        if i == 0:
            gap = sampler_scorer_gap(model, task.prompt, group, settings.temperature)
            if exact_arithmetic and gap > AGREE:
                raise RuntimeError(
                    f"sampler and scorer differ by {gap:.2e} nats on the first group, more than "
                    f"{AGREE:g}: the gradient would not be that of what was sampled"
                )
            row["sampler_scorer_gap"] = gap
        if row["updated"]:
            ends = settings.append_eos
            ids = [(*c.ids, EOS) if ends and c.stopped == "complete" else c.ids for c in group]
            prompts, lengths = [task.prompt] * len(group), [len(c) for c in ids]
            logits, tokens = completion_logits(model, prompts, ids)
            loss = policy_loss(settings, logits, tokens, lengths, advantages(rewards))
            if reference is not None:
                with torch.no_grad():
                    start_logits, _ = completion_logits(reference, prompts, ids)
                row["kl"] = mean_kl(logits, start_logits)
                loss = loss + settings.kl * row["kl"]
                row["kl"] = row["kl"].item()
            if settings.replay:
                examples = next(pretraining_batches(REPLAY, settings.seed, start=i))
                loss = loss + settings.replay * next_byte_loss(model, examples)[0]
            loss.backward()
            row["loss"], row["gradient_norm"] = loss.item(), optimizer.step()
        return row

    def at_milestone(_: int) -> Row:
        result = evaluate_sampled(
            model,
            dev,
            samples=settings.dev_samples,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
        )
        return {"dev": result["total"], "dev_by_family": result["by_family"]}

    def summarise(rows: list[Row]) -> dict[str, Any]:
        updates = sum(row["updated"] for row in rows)
        if not updates:
            warnings.warn(
                "no group had rewards that differ, so nothing was learned: start from a "
                "checkpoint that sometimes succeeds, or sample at a higher temperature",
                stacklevel=2,
            )
        return {
            "updates": updates,
            "passing": sum(row["passing"] for row in rows),
            "rollouts": settings.group_size * len(rows),
            "trainable_parameters": trainable,
            "sampler_scorer_gap": rows[0]["sampler_scorer_gap"],
        }

    return run_steps(
        "rl",
        to_json(asdict(settings)) | {"start": checkpoint.load(start).hash},
        optimizer,
        settings.groups,
        step,
        output=output,
        resume=resume,
        milestones=settings.milestones,
        at_milestone=at_milestone,
        save_every=save_every,
        summarise=summarise,
    )


def improved(
    settings: RLSettings = RLSettings(),
    start: Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
) -> Path:
    """Run folder of a finished RL run, from the checkpoint cache or run now.

    It starts from the checkpoint folder `start`, step 100 of `pretrained()` unless given. The
    default settings take about two minutes on two CPU cores.
    """
    where = pick_device(device)
    if start is None:
        start = pretrained(device=device, dtype=dtype) / step_name(100)
    key = {
        "name": f"rl-{settings.seed}",
        "code": receipt.code_hash(*CODE),
        "settings": to_json(asdict(settings)),
        "start": checkpoint.load(start).hash,
        "dtype": str(pick_dtype(dtype, where)),
        "device": where.type,
        "threads": torch.get_num_threads(),
    }

    def make(folder: Path) -> None:
        rows = rloo(settings, start, output=folder, device=device, dtype=dtype)
        for _ in progress(rows, settings.groups):
            pass

    return checkpoint.cached(key, make)
