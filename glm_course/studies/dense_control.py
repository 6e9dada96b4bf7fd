"""Study `dense-control`: the same 100 steps by a plain transformer of equal active parameters.

What does the hybrid of linear and sparse attention, experts and four streams buy or cost? Beside it
train, from the same seed on the same data, softmax attention with dense MLPs (DENSE_CONTROL), and
the hybrid on one residual stream.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.config import BASE, DENSE_CONTROL
from glm_course.data.tasks import frozen_tasks
from glm_course.evaluate import evaluate_greedy
from glm_course.model import LanguageModel
from glm_course.plots import COLOURS
from glm_course.stats import prediction_interval
from glm_course.studies.runner import run_or_resume
from glm_course.tokenizer import ByteTokenizer
from glm_course.train.pretrain import PretrainSettings, load_model, pretrain
from glm_course.train.rl import score

MINUTES = 12
SEEDS = (42, 1, 2)
STEPS = 100
ARMS = {
    "hybrid": PretrainSettings(),
    "dense": PretrainSettings(model=DENSE_CONTROL),
    "one stream": PretrainSettings(model=replace(BASE, streams=1)),
}


def held_out(model: LanguageModel) -> dict[str, Any]:
    """Loss in nats a byte of the reference bodies of dev, 8 tasks a family, and tasks solved."""
    tasks, tokenizer = frozen_tasks("dev", 8), ByteTokenizer()
    bodies = [tokenizer.encode(task.completion, eos=True) for task in tasks]
    scores = score(model, [task.prompt for task in tasks], bodies)
    nats = -sum(s.sum().item() for s in scores) / sum(map(len, bodies))
    return {"body_loss": nats, "solved": evaluate_greedy(model, tasks)["total"]["solved"]}


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Train every arm to step 100 with the seed's weights and data, and measure each on dev."""
    arms = {}
    for name, settings in ARMS.items():
        where = folder / name.replace(" ", "_")
        settings = replace(settings, seed=seed, steps=STEPS, milestones=(STEPS,))
        rows = run_or_resume(pretrain, settings, folder=where)["rows"]
        arms[name] = {
            "loss": [row["loss"] for row in rows],
            "gradient_norm": [row["gradient_norm"] for row in rows],
            "load_balance": [row["load_balance"] for row in rows],
            "held_out": held_out(load_model(where / f"step_{STEPS:04d}", device="cpu")),
        }
    return {"arms": arms}


def headline(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By arm: mean training loss of the last 10 steps, held-out body loss, dev tasks solved."""
    return {
        name: {"loss": sum(arm["loss"][-10:]) / 10} | arm["held_out"]
        for name, arm in run["arms"].items()
    }


def differences(runs: list[dict[str, Any]], arm: str, number: str) -> list[float]:
    """Arm less hybrid, seed by seed."""
    rows = [headline(run) for run in runs]
    return [row[arm][number] - row["hybrid"][number] for row in rows]


def table(runs: list[dict[str, Any]]) -> str:
    """One line an arm: each number's mean over seeds, and its difference from the hybrid.

    Range: the 95% prediction interval of that difference for one more seed.
    """
    lines = [f"{len(runs)} seeds: {', '.join(str(run['seed']) for run in runs)}"]
    lines.append(f"{'':<18} {'loss 91-100':>12} {'body loss':>10} {'solved/64':>10}   less hybrid")
    for name in ARMS:
        rows = [headline(run)[name] for run in runs]
        means = [sum(row[n] for row in rows) / len(rows) for n in ("loss", "body_loss", "solved")]
        line = f"{name:<18} {means[0]:>12.4f} {means[1]:>10.4f} {means[2]:>10.1f}"
        if name != "hybrid" and len(runs) > 1:
            values = differences(runs, name, "loss")
            interval = prediction_interval(values)
            mean = sum(values) / len(values)
            line += f"   {mean:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"
        lines.append(line)
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Training loss less the hybrid's of the same seed, by step: a line an arm and seed."""
    fig = Figure(figsize=(6, 3), layout="constrained")
    ax = fig.subplots()
    for colour, name in zip(COLOURS, list(ARMS)[1:], strict=False):
        for i, run in enumerate(runs):
            loss, base = run["arms"][name]["loss"], run["arms"]["hybrid"]["loss"]
            gap = [a - b for a, b in zip(loss, base, strict=True)]
            ax.plot(range(1, len(gap) + 1), gap, color=colour, label=None if i else name)
    ax.axhline(0, color=COLOURS[-1], linewidth=0.8)
    ax.set(xlabel="step", ylabel="loss less the hybrid's, nats a byte")
    ax.legend(frameon=False, fontsize="small")
    return fig
