"""Learning to read digits from pictures: two small models from random weights, and one large pilot.

The loss covers the answer, one byte, and nothing else: the cross-entropy after `Digit: `. So does
the evaluation on held-out pictures, where an answer is correct when its byte has the largest logit
of the whole vocabulary. Runs take seconds and write a receipt, never weights.

Left out: augmentation, schedules, text beside pictures, so a pilot forgets what else it could do.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glm_course import checkpoint
from glm_course.config import BASE, VISION_MINI, ModelConfig
from glm_course.data.digits import DIGITS, digit_images
from glm_course.device import pick_device
from glm_course.model import LanguageModel
from glm_course.tokenizer import ByteTokenizer
from glm_course.train.loop import Row, run_steps, to_json
from glm_course.train.optimizer import AdamWSettings, MasterAdamW
from glm_course.train.rl import freeze_all_but_last_block
from glm_course.vision import IMAGE_END, DirectPatchModel, TowerConfig, VisionLanguageModel

MODELS = ("faithful", "baseline")
PROMPT = "Digit: "
SMOKE = {"steps": 40, "batch_size": 20, "held_out": 100}  # caps of a smoke test

SeeingModel = VisionLanguageModel | DirectPatchModel


@dataclass(frozen=True)
class VisionSettings:
    """A vision run. The seed draws initial weights and pictures."""

    model: str = "faithful"  # the tower, or "baseline": direct patches
    language: ModelConfig = VISION_MINI
    tower: TowerConfig = TowerConfig()  # of the faithful model
    steps: int = 120
    batch_size: int = 40  # pictures a step
    label_step: int = 1  # picture i of step n, both from 0, shows (i + label_step n) mod 10
    seed: int = 42  # step n has the pictures of seed + n
    held_out: int = 200  # pictures to evaluate on
    held_out_offset: int = 10_000  # their seed, less `seed`
    max_seconds: float | None = None  # after which training stops, and is evaluated
    optimizer: AdamWSettings = field(
        default_factory=lambda: AdamWSettings(2e-3, betas=(0.9, 0.999), weight_decay=0.01)
    )

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model must be {' or '.join(MODELS)}, got {self.model!r}")
        if min(self.steps, self.batch_size, self.held_out) < 1:
            raise ValueError(
                f"need at least 1: steps {self.steps}, batch {self.batch_size}, held-out "
                f"{self.held_out}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.steps > self.held_out_offset:
            raise ValueError(
                f"after {self.held_out_offset} steps the pictures would be those held out, got "
                f"{self.steps}"
            )
        if self.max_seconds is not None and not 0 < self.max_seconds < float("inf"):
            raise ValueError(f"max_seconds must be a positive number, got {self.max_seconds}")


PILOT = VisionSettings(
    language=replace(BASE, vocab_size=IMAGE_END + 1),
    tower=TowerConfig(projector_hidden=128),
    steps=40,
    batch_size=10,
    label_step=3,
    seed=73,
    held_out=100,
    held_out_offset=100_000,
    max_seconds=540.0,
    optimizer=AdamWSettings(1e-3, betas=(0.9, 0.999), weight_decay=0.01),
)


def smoke_test(settings: VisionSettings) -> VisionSettings:
    """The same run, cut to at most 40 steps of 20 pictures and 100 held out."""
    return replace(settings, **{k: min(getattr(settings, k), most) for k, most in SMOKE.items()})


def new_vision_model(settings: VisionSettings) -> SeeingModel:
    """A model with the initial weights of `settings.seed`, on the CPU, whatever was drawn before.

    The language model draws first, twice as always, then what sees.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        language = LanguageModel(settings.language)
        if settings.model == "baseline":
            return DirectPatchModel(language, settings.tower.image)
        return VisionLanguageModel(language, settings.tower)


def pilot_model(settings: VisionSettings, start: Path | None) -> SeeingModel:
    """The course's language model with a tower, on the CPU, all frozen that a pilot does not train.

    Drawn as `new_vision_model`; then the checkpoint folder `start`, if any, replaces the language
    model's weights, and its configuration that of the settings. Only the rows of the embedding
    that a checkpoint without image ids lacks stay as drawn, from N(0, 0.02): that is how all its
    rows began, the seed rebuilds them, and they differ, so that start and end of an image do.
    Raises CheckpointError, one sentence, for anything wrong with the folder.
    """
    if start is None:
        model = new_vision_model(settings)
    else:
        saved, name = checkpoint.load(start), "embedding.weight"
        vocab_size = max(saved.config.vocab_size, IMAGE_END + 1)
        config = replace(saved.config, vocab_size=vocab_size)
        model = new_vision_model(replace(settings, language=config))
        drawn = model.embedding.weight.detach()[saved.config.vocab_size :]
        rows = torch.cat((saved.weights[name], drawn))
        widened = replace(saved, weights=saved.weights | {name: rows})
        checkpoint.load_into(model.language, widened)
    freeze_all_but_last_block(model.language)
    return model


def answer_ids(labels: list[int]) -> Tensor:
    """The byte of each digit as an id, int64 [B]."""
    return torch.tensor([ByteTokenizer().encode(str(label))[0] for label in labels])


def answer_logits(model: SeeingModel, images: Tensor) -> Tensor:
    """Logits [B, V] of the byte after the prompt, for images [B, 3, H, W] on any device."""
    device = model.embedding.weight.device
    ids = torch.tensor([model.prompt(PROMPT)], device=device).expand(len(images), -1)
    return model(images.to(device), ids)[:, -1]


def answer_loss(model: SeeingModel, images: Tensor, labels: list[int]) -> tuple[Tensor, int]:
    """Mean cross-entropy in nats of the answers' bytes, and how many of them are the likeliest."""
    logits = answer_logits(model, images)
    wanted = answer_ids(labels).to(logits.device)
    return F.cross_entropy(logits, wanted), int((logits.argmax(-1) == wanted).sum())


def training_batch(settings: VisionSettings, step: int) -> tuple[Tensor, list[int]]:
    """Images [B, 3, 32, 32] and labels of step `step`, counted from 0."""
    first = settings.label_step * step
    labels = [(i + first) % len(DIGITS) for i in range(settings.batch_size)]
    return digit_images(labels, settings.seed + step), labels


def held_out_batch(settings: VisionSettings) -> tuple[Tensor, list[int]]:
    """Images [held_out, 3, 32, 32] and labels that no step trains on."""
    labels = [i % len(DIGITS) for i in range(settings.held_out)]
    return digit_images(labels, settings.seed + settings.held_out_offset), labels


@torch.no_grad()
def evaluate(model: SeeingModel, images: Tensor, labels: list[int]) -> dict[str, Any]:
    """Correct answers, of how many, and their mean cross-entropy in nats."""
    loss, correct = answer_loss(model, images, labels)
    return {"correct": correct, "of": len(labels), "loss": loss.item()}


def train_vision(
    settings: VisionSettings = VisionSettings(),
    model: SeeingModel | None = None,
    *,
    output: Path | None = None,
    device: str = "auto",
) -> Iterator[Row]:
    """Train a model in place, yielding a row a step; see train/loop.py for what is written.

    The model is `new_vision_model(settings)` unless given, and is moved to the device. Rows: step,
    loss (before the step's update), correct (of the batch, likewise), gradient_norm (before
    clipping), seconds. Milestones hold the evaluation before and after, and the summary both again.
    In fp32 on every device. Raises ValueError and FileExistsError as `run_steps`.
    """
    if model is None:
        model = new_vision_model(settings)
    return _train("vision", settings, model, output, device, {})


def pilot(
    settings: VisionSettings = PILOT,
    start: Path | None = None,
    model: SeeingModel | None = None,
    *,
    output: Path | None = None,
    device: str = "auto",
) -> Iterator[Row]:
    """`train_vision` of `pilot_model(settings, start)`, or of the model given, made by it.

    The tower learns, and of the language model last block, final norm and tied embedding. The
    receipt's settings say whether it began from a checkpoint, and from which.
    """
    if model is None:
        model = pilot_model(settings, start)
    origin = "random weights" if start is None else f"checkpoint {checkpoint.load(start).hash}"
    return _train("vision-pilot", settings, model, output, device, {"start": origin})


def _train(
    kind: str,
    settings: VisionSettings,
    model: SeeingModel,
    output: Path | None,
    device: str,
    origin: dict[str, str],
) -> Iterator[Row]:
    """The loop of both, over what of the model is not frozen."""
    # The receipt tells of the model that is trained, which the settings need not describe.
    sees = {"model": "baseline"}
    if isinstance(model, VisionLanguageModel):
        sees = {"model": "faithful", "tower": model.tower.config}
    settings = replace(settings, language=model.language.config, **sees)
    optimizer = MasterAdamW(model.to(pick_device(device)), torch.float32, settings.optimizer)
    images, labels = held_out_batch(settings)
    evaluate(model, images[:1], labels[:1])  # what cannot run is refused before a file is written
    milestones: list[Row] = []

    def step(i: int) -> Row:
        loss, correct = answer_loss(model, *training_batch(settings, i))
        loss.backward()
        return {"loss": loss.item(), "correct": correct, "gradient_norm": optimizer.step()}

    def at_milestone(_: int) -> Row:
        milestones.append(evaluate(model, images, labels))
        return milestones[-1]

    def summarise(rows: list[Row]) -> dict[str, Any]:
        before, after = milestones[0], milestones[-1]
        return {
            "before": before,
            "after": after,
            "learned": after["correct"] > before["correct"],
            "images": len(rows) * settings.batch_size,
            "held_out_hash": checkpoint.weights_hash({"images": images}),
            "parameters": sum(p.numel() for p in model.parameters()),
            "trainable_parameters": sum(p.numel() for _, p in optimizer.trained),
            "stopped_by_time": len(rows) < settings.steps,
        }

    return run_steps(
        kind,
        to_json(asdict(settings)) | origin,
        optimizer,
        settings.steps,
        step,
        output=output,
        milestones=(0,),
        at_milestone=at_milestone,
        summarise=summarise,
        keep_weights=False,
        max_seconds=settings.max_seconds,
    )
