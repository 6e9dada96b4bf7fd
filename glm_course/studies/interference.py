"""Study `interference`: what RL on three families costs the others, and what holds it off.

The main run from its checkpoint at several RL seeds: as it is, with a KL penalty to the start, and
with replay of pretraining examples.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.plots import COLOURS
from glm_course.stats import prediction_interval
from glm_course.studies.rl_arms import full
from glm_course.train.rl import RLSettings

MINUTES = 12
SEEDS = (31415, 27182, 16180, 1, 2)
MAIN = RLSettings(milestones=(), dev_tasks=1, dev_samples=1)
ARMS = {
    "none": MAIN,
    "kl 0.1": replace(MAIN, kl=0.1),
    "replay 0.1": replace(MAIN, replay=0.1),
}
TRAINED = RLSettings.families
OTHERS = ("square", "list_sum")  # what the start already does, and nobody trains


def run(seed: int, folder: Path) -> dict[str, Any]:
    """All arms at one RL seed."""
    return full(ARMS, seed, folder)


def change(run: dict[str, Any], arm: str, families: tuple[str, ...]) -> float:
    """Mean change of the exact rate over families, in points, from the start to an arm's end."""
    start, end = (run["arms"][name]["confirm"] for name in ("start", arm))
    return 100 * sum(end[f] - start[f] for f in families) / (64 * len(families))


def table(runs: list[dict[str, Any]]) -> str:
    """Mean change in points by arm, on trained families and on others; 95% for one more seed."""
    lines = [f"{len(runs)} seeds, change of the exact rate in points"]
    lines.append(f"{'':<12} {'trained families':>26} {'square and list_sum':>28}")
    for arm in ARMS:
        cells = []
        for families in (TRAINED, OTHERS):
            values = [change(run, arm, families) for run in runs]
            cell = f"{sum(values) / len(values):+.1f}"
            if len(values) > 1:
                low, high = prediction_interval(values, low=-100, high=100)
                cell += f" ({low:+.1f} to {high:+.1f})"
            cells.append(cell)
        lines.append(f"{arm:<12} {cells[0]:>26} {cells[1]:>28}")
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Gain on the trained families against loss on the others: a dot a seed."""
    fig = Figure(figsize=(5, 3.2), layout="constrained")
    ax = fig.subplots()
    for colour, arm in zip(COLOURS, ARMS, strict=False):
        x, y = ([change(run, arm, f) for run in runs] for f in (TRAINED, OTHERS))
        ax.plot(x, y, "o", color=colour, label=arm)
    ax.axhline(0, color=COLOURS[-1], linewidth=0.8)
    ax.set(xlabel="trained families, points", ylabel="square and list_sum, points")
    ax.legend(frameon=False, fontsize="small")
    return fig
