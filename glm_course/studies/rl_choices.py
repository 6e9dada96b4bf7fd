"""Study `rl-choices`: eight RL settings at equal rollouts, the original's screen.

Every arm has 128 rollouts from the small checkpoint. The original ran one seed and judged on dev;
here every arm also runs on confirm and on a split that nothing else has opened.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.plots import COLOURS
from glm_course.stats import holm
from glm_course.studies.rl_arms import PILOT, compare, pilot, solved

MINUTES = 6
SEEDS = (31415, 27182, 16180, 1, 2, 3, 4, 5, 6, 7)
BASELINE = "baseline"
ARMS = {
    BASELINE: PILOT,
    "fraction of tests": replace(PILOT, fraction=True),
    "invalid 0": replace(PILOT, invalid_reward=0.0),
    "invalid -1": replace(PILOT, invalid_reward=-1.0),
    "temperature 0.20": replace(PILOT, temperature=0.2),
    "temperature 0.80": replace(PILOT, temperature=0.8),
    "group 4": replace(PILOT, group_size=4, groups=32),
    "group 16": replace(PILOT, group_size=16, groups=8),
}
SPLITS = {"dev": 20, "confirm": 40, "fresh": 40}


def run(seed: int, folder: Path) -> dict[str, Any]:
    """All arms at one RL seed."""
    return pilot(ARMS, seed, folder)


def table(runs: list[dict[str, Any]]) -> str:
    """Means over seeds by arm, then each arm against the baseline on fresh tasks.

    p: the smallest of the seeds' exact McNemar p, Holm-corrected over arms and seeds.
    """
    lines = [f"{len(runs)} seeds, means"]
    lines.append(f"{'':<20} {'passing':>8} {'updates':>8}" + "".join(f"{s:>9}" for s in SPLITS))
    for arm in ARMS:
        rows = [run["arms"][arm] for run in runs]
        numbers = [sum(row[n] for row in rows) / len(rows) for n in ("passing", "updates")]
        counts = [sum(sum(solved(run, arm, s)) for run in runs) / len(runs) for s in SPLITS]
        lines.append(
            f"{arm:<20}"
            + "".join(f"{n:>9.1f}" for n in numbers)
            + "".join(f"{c:>9.1f}" for c in counts)
        )
    others = [arm for arm in ARMS if arm != BASELINE]
    found = {arm: compare(runs, arm, BASELINE, "fresh") for arm in others}
    adjusted = holm([p for arm in others for p in found[arm]["p"]]).reshape(len(others), -1)
    lines.append(
        "\nless the baseline, share of fresh tasks solved (95%, clusters of tasks), Holm p"
    )
    for arm, p in zip(others, adjusted, strict=True):
        low, high = found[arm]["interval"]
        gap = found[arm]["difference"]
        lines.append(f"{arm:<20} {gap:+.3f} ({low:+.3f} to {high:+.3f})  p = {p.min():.3f}")
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Fresh tasks solved by arm, a dot a seed."""
    fig = Figure(figsize=(6, 3.2), layout="constrained")
    ax = fig.subplots()
    for row, arm in enumerate(ARMS):
        counts = [sum(solved(run, arm, "fresh")) for run in runs]
        ax.plot(counts, [row] * len(counts), "o", color=COLOURS[0], alpha=0.5)
        ax.plot(sum(counts) / len(counts), row, "|", color=COLOURS[1], markersize=16)
    ax.set_yticks(range(len(ARMS)), list(ARMS))
    ax.invert_yaxis()
    ax.set(xlabel="fresh tasks solved greedily, of 40", xlim=(-1, 41))
    return fig
