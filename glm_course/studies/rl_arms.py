"""What the RL studies share: arms that start from one checkpoint, and what each is measured by.

A study's seed is the RL seed, which orders the tasks and draws the rollouts; every arm of every
seed starts from the same weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm_course.data.tasks import FAMILIES, frozen_tasks
from glm_course.evaluate import evaluate_greedy, evaluate_sampled
from glm_course.model import LanguageModel
from glm_course.stats import Interval, cluster_bootstrap, mcnemar_exact
from glm_course.studies.runner import run_or_resume
from glm_course.studies.seeds import without_texts
from glm_course.train.loop import step_name
from glm_course.train.pretrain import PretrainSettings, load_model, pretrained
from glm_course.train.rl import RLSettings, rloo

# The original's pilots: batch 16, 100 steps, then five families and 128 rollouts an arm.
SMALL = PretrainSettings(batch_size=16, steps=100, milestones=(100,))
FIVE = ("increment", "double", "square", "even", "reverse")
PILOT = RLSettings(
    families=FIVE,
    tasks_per_family=8,
    groups=16,
    group_size=8,
    max_new_tokens=32,
    milestones=(),
    dev_tasks=1,
    dev_samples=1,
)


def small_checkpoint() -> Path:
    """The checkpoint the pilots start from, from the cache or trained now."""
    return pretrained(SMALL, device="cpu") / step_name(100)


def large_checkpoint() -> Path:
    """Step 100 of the main pretraining run, from the cache or trained now."""
    return pretrained(device="cpu") / step_name(100)


def greedy(model: LanguageModel, split: str, per_family: int, tokens: int) -> dict[str, Any]:
    """Greedy pass@1 on the five families of a split, without texts."""
    tasks = frozen_tasks(split, per_family, FIVE)
    return without_texts(evaluate_greedy(model, tasks, max_new_tokens=tokens))


def trained_arms(
    arms: Mapping[str, RLSettings], start: Path, seed: int, folder: Path
) -> Iterator[tuple[str, LanguageModel, dict[str, Any]]]:
    """Run every arm from `start`: its name, its last weights, its passing rollouts and updates."""
    for name, settings in arms.items():
        where = folder / name.replace(" ", "_")
        settings = replace(settings, seed=seed)
        summary = run_or_resume(rloo, settings, start, folder=where)["summary"]
        model = load_model(where / step_name(settings.groups), device="cpu")
        yield name, model, {key: summary[key] for key in ("passing", "updates")}


def pilot(arms: Mapping[str, RLSettings], seed: int, folder: Path) -> dict[str, Any]:
    """Run arms from the small checkpoint; greedy on dev (20 tasks), confirm and fresh (40 each)."""
    return {
        "arms": {
            name: counts
            | {
                split: greedy(model, split, per_family, arms[name].max_new_tokens)
                for split, per_family in (("dev", 4), ("confirm", 8), ("fresh", 8))
            }
            for name, model, counts in trained_arms(arms, small_checkpoint(), seed, folder)
        }
    }


def full(arms: Mapping[str, RLSettings], seed: int, folder: Path) -> dict[str, Any]:
    """Run arms of the main run's length from the large checkpoint; sampled on confirm.

    64 completions a family, with the verifier ending them and without. "start" is the checkpoint.
    """
    start = large_checkpoint()
    results = {"start": {"confirm": sampled(load_model(start, device="cpu"))}}
    for name, model, counts in trained_arms(arms, start, seed, folder):
        results[name] = counts | {
            "confirm": sampled(model),
            "without_oracle": sampled(model, stop_when_valid=False),
        }
    return {"arms": results}


def sampled(model: LanguageModel, *, stop_when_valid: bool = True) -> dict[str, int]:
    """Passing completions of 64 by family of confirm: 8 tasks, 8 samples each."""
    tasks = frozen_tasks("confirm", 8)
    result = evaluate_sampled(model, tasks, stop_when_valid=stop_when_valid)
    return {family: result["by_family"][family]["exact"] for family in FAMILIES}


def solved(run: dict[str, Any], arm: str, split: str) -> list[bool]:
    """Task by task, whether the greedy completion of an arm passed."""
    return [row["passed"][0] for row in run["arms"][arm][split]["tasks"]]


def compare(runs: Sequence[dict[str, Any]], arm: str, other: str, split: str) -> dict[str, Any]:
    """Two arms on a split: exact McNemar p a seed, and the mean difference in solved share.

    Its interval resamples clusters, tasks of one family and description, after the differences are
    averaged over seeds: tasks that differ in seven letters are no independent evidence.
    """
    p = [mcnemar_exact(solved(run, other, split), solved(run, arm, split)).p for run in runs]
    rows = runs[0]["arms"][arm][split]["tasks"]
    clusters = [f"{row['family']}: {row['description']}" for row in rows]
    gaps = [
        [a - b for a, b in zip(solved(run, arm, split), solved(run, other, split), strict=True)]
        for run in runs
    ]
    by_task = [sum(column) / len(runs) for column in zip(*gaps, strict=True)]
    interval: Interval = cluster_bootstrap(by_task, clusters)
    return {"p": p, "difference": sum(by_task) / len(by_task), "interval": interval}
