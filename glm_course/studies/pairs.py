"""Table and figure of two arms run at the same RL seeds."""

from typing import Any

from matplotlib.figure import Figure

from glm_course.plots import COLOURS
from glm_course.stats import sign_flip
from glm_course.studies.rl_arms import compare, solved

SPLITS = ("confirm", "fresh")  # 40 tasks each


def differences(runs: list[dict[str, Any]], arm: str, other: str, split: str) -> list[int]:
    """Tasks that `arm` solves less those that `other` solves, seed by seed."""
    return [sum(solved(run, arm, split)) - sum(solved(run, other, split)) for run in runs]


def table(runs: list[dict[str, Any]], arm: str, other: str) -> str:
    """A line a seed with exact McNemar p; then by split the mean difference and two answers.

    The sign-flip p treats seeds as the sample; the interval resamples clusters of tasks.
    """
    lines = [f"{'seed':>8}" + "".join(f"{f'{s}: {arm} vs {other}, p':>34}" for s in SPLITS)]
    found = {split: compare(runs, arm, other, split) for split in SPLITS}
    for i, run in enumerate(runs):
        cells = [
            f"{sum(solved(run, arm, s))} vs {sum(solved(run, other, s))}, {found[s]['p'][i]:.3f}"
            for s in SPLITS
        ]
        lines.append(f"{run['seed']:>8}" + "".join(f"{cell:>34}" for cell in cells))
    for split in SPLITS:
        gaps, (low, high) = differences(runs, arm, other, split), found[split]["interval"]
        lines.append(
            f"{split}: {arm} less {other} {sum(gaps) / len(gaps):+.2f} tasks of 40; share "
            f"{found[split]['difference']:+.3f} ({low:+.3f} to {high:+.3f}, clusters), "
            f"sign-flip p over seeds {sign_flip(gaps):.4f}"
        )
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]], arm: str, other: str) -> Figure:
    """Tasks solved under `other`, then under `arm`: a line a seed, a panel a split."""
    fig = Figure(figsize=(5.5, 3), layout="constrained")
    for ax, split in zip(fig.subplots(1, 2, sharey=True), SPLITS, strict=True):
        for run in runs:
            counts = [sum(solved(run, name, split)) for name in (other, arm)]
            ax.plot([0, 1], counts, "o-", color=COLOURS[0], alpha=0.4)
        ax.set_xticks([0, 1], [other, arm])
        ax.set(title=split, xlim=(-0.3, 1.3), ylim=(-1, 41))
    fig.axes[0].set_ylabel("tasks solved greedily, of 40")
    return fig
