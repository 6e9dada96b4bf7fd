"""Pretraining: predict the next byte of synthetic coding tasks, from random weights.

The loss is the mean cross-entropy, in nats, over every byte of an example, eos included. Rate and
weight decay are constant: no warm-up, no schedule, decay on every parameter, as in the original;
`AdamWSettings` has the first and the last as options, for the ablation.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm_course import checkpoint, receipt
from glm_course.config import BASE, ModelConfig
from glm_course.data.batches import shifted
from glm_course.data.tasks import frozen_tasks, pretraining_batches
from glm_course.device import pick_device, pick_dtype
from glm_course.layers.moe import balance_loss, update_bias
from glm_course.model import LanguageModel
from glm_course.train.loop import Row, progress, run_steps, to_json
from glm_course.train.optimizer import AdamWSettings, MasterAdamW

# What pretrained weights depend on: the cache is keyed by these files and folders.
CODE = ("config.py", "data", "device.py", "layers", "model.py", "tokenizer.py") + tuple(
    f"train/{name}.py" for name in ("loop", "optimizer", "pretrain")
)


@dataclass(frozen=True)
class PretrainSettings:
    """A pretraining run. The seed draws the initial weights and the data."""

    model: ModelConfig = BASE
    steps: int = 400
    batch_size: int = 32  # examples a step
    seed: int = 42
    milestones: tuple[int, ...] = (100, 200, 400)
    balance_loss: float = 0.0  # weight, beside the language loss, of `balance_loss` a layer
    bias_rate: float = 0.0  # a step of the selection bias; needs model.selection_bias
    optimizer: AdamWSettings = field(default_factory=AdamWSettings)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"need steps and batch of at least 1: {self.steps}, {self.batch_size}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.balance_loss < 0 or self.bias_rate < 0:
            raise ValueError(
                f"balance_loss and bias_rate must not be negative: "
                f"{self.balance_loss}, {self.bias_rate}"
            )
        if bool(self.bias_rate) != self.model.selection_bias:
            raise ValueError("bias_rate and model.selection_bias go together: one is set alone")
        if self.balance_loss and not self.model.experts:
            raise ValueError("balance_loss needs routed experts, and the model has none")


def new_model(config: ModelConfig, seed: int) -> LanguageModel:
    """A model with the initial weights of `seed`, on the CPU, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(config)


def next_byte_loss(model: LanguageModel, examples: list[list[int]]) -> tuple[Tensor, int]:
    """Mean cross-entropy in nats over all next bytes of the examples, and how many there are."""
    inputs, labels, mask = shifted(examples, model.embedding.weight.device)
    logits = model.forward_packed(model.embed(inputs), mask)
    return F.cross_entropy(logits, labels[mask]), len(logits)


def load_balance(model: LanguageModel) -> float:
    """Experts times the sum of squared load shares, mean over layers: 1 even, experts all in one.

    Reported, not trained on: it is computed from counts, which carry no gradient. 1 for a model
    without routed experts.
    """
    if not model.config.experts:
        return 1.0
    shares = torch.stack([b.moe.load / b.moe.load.sum() for b in model.blocks])  # [layers, E]
    return (model.config.experts * shares.square().sum(1)).mean().item()


def pretrain(
    settings: PretrainSettings,
    *,
    output: Path | None = None,
    resume: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    save_every: int = 50,
) -> Iterator[Row]:
    """Train from random weights, yielding a row a step; see train/loop.py for what is written.

    Rows: step, loss (before the step's update), gradient_norm (before clipping), tokens (labels),
    load_balance, seconds. Raises ValueError and FileExistsError as `run_steps`.
    """
    where = pick_device(device)
    # Inputs: bos, prompt and completion; eos is predicted only.
    longest = 1 + max(len(task.prompt + task.completion) for task in frozen_tasks("rl", 32))
    if longest > settings.model.max_length:
        raise ValueError(
            f"examples of {longest} tokens exceed max_length {settings.model.max_length}"
        )
    optimizer = MasterAdamW(
        new_model(settings.model, settings.seed).to(where),
        pick_dtype(dtype, where),
        settings.optimizer,
    )
    model = optimizer.model
    moes = [block.moe for block in model.blocks]
    for moe in moes:
        moe.keep_logits = settings.balance_loss > 0

    def step(i: int) -> Row:
        examples = next(pretraining_batches(settings.batch_size, settings.seed, start=i))
        loss, tokens = next_byte_loss(model, examples)
        whole = loss
        if settings.balance_loss:
            balance = torch.stack([balance_loss(moe.logits, moe.top_k) for moe in moes])
            whole = loss + settings.balance_loss * balance.mean()
        whole.backward()
        norm = optimizer.step()
        if settings.bias_rate:
            for moe in moes:
                update_bias(moe.bias, moe.load, settings.bias_rate)
        return {
            "loss": loss.item(),
            "gradient_norm": norm,
            "tokens": tokens,
            "load_balance": load_balance(model),
        }

    def summarise(rows: list[Row]) -> dict[str, Any]:
        stream = pretraining_batches(settings.batch_size, settings.seed)
        batches = [next(stream) for _ in rows]
        return {
            "tokens": sum(row["tokens"] for row in rows),
            "data_hash": receipt.data_hash(batches),
            "final_loss": rows[-1]["loss"],
        }

    return run_steps(
        "pretrain",
        to_json(asdict(settings)),
        optimizer,
        settings.steps,
        step,
        output=output,
        resume=resume,
        milestones=settings.milestones,
        save_every=save_every,
        summarise=summarise,
    )


def load_model(
    path: str | Path, *, device: str = "auto", config: ModelConfig | None = None
) -> LanguageModel:
    """The model of a checkpoint folder, in fp32, on the device.

    Raises CheckpointError, one sentence, for anything wrong with the folder.
    """
    saved = checkpoint.load(path, config)
    model = new_model(saved.config, 0)
    checkpoint.load_into(model, saved)
    return model.to(pick_device(device))


def pretrained(
    settings: PretrainSettings = PretrainSettings(), *, device: str = "auto", dtype: str = "auto"
) -> Path:
    """Run folder of a finished pretraining run, from the checkpoint cache or trained now.

    The default settings take a quarter of an hour on two CPU cores.
    """
    where = pick_device(device)
    key = {
        "name": f"pretrain-{settings.seed}",
        "code": receipt.code_hash(*CODE),
        "settings": to_json(asdict(settings)),
        "dtype": str(pick_dtype(dtype, where)),
        "device": where.type,
        "threads": torch.get_num_threads(),
    }

    def make(folder: Path) -> None:
        rows = pretrain(settings, output=folder, device=device, dtype=dtype)
        for _ in progress(rows, settings.steps):
            pass

    return checkpoint.cached(key, make)
