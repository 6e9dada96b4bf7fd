"""Study `rl-estimator`: choices in the estimator that a reader of the code would question.

Each is switched alone against the main run: the verifier ending rollouts while sampling; no eos in
what it ended; the mean, not the sum, of token log-probabilities; a gradient taken at temperature 1,
unmasked, for rollouts drawn at 0.35.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.plots import COLOURS
from glm_course.stats import prediction_interval
from glm_course.studies.interference import MAIN, TRAINED
from glm_course.studies.rl_arms import full

MINUTES = 18
SEEDS = (31415, 27182, 16180, 1, 2)
ARMS = {
    "as the original": MAIN,
    "no oracle": replace(MAIN, stop_when_valid=False),
    "eos appended": replace(MAIN, append_eos=True),
    "sum": replace(MAIN, log_prob="sum"),
    "sampler's gradient": replace(MAIN, gradient="sampler"),
    "importance weights": replace(MAIN, gradient="weighted"),
}


def run(seed: int, folder: Path) -> dict[str, Any]:
    """All arms at one RL seed."""
    return full(ARMS, seed, folder)


def exact(run: dict[str, Any], arm: str, how: str = "confirm") -> int:
    """Passing completions of 192 on the trained families."""
    return sum(run["arms"][arm][how][family] for family in TRAINED)


def table(runs: list[dict[str, Any]]) -> str:
    """Means over seeds by arm; the difference from the first arm with 95% for one more seed."""
    lines = [f"{len(runs)} seeds, passing completions of 192 on the trained families"]
    lines.append(f"{'':<20} {'passing rollouts':>17} {'exact':>7} {'no oracle':>10}   less first")
    first = next(iter(ARMS))
    for arm in ARMS:
        passing = sum(run["arms"][arm]["passing"] for run in runs) / len(runs)
        means = [
            sum(exact(run, arm, how) for run in runs) / len(runs)
            for how in ("confirm", "without_oracle")
        ]
        line = f"{arm:<20} {passing:>17.0f} {means[0]:>7.1f} {means[1]:>10.1f}"
        if arm != first and len(runs) > 1:
            gaps = [exact(run, arm) - exact(run, first) for run in runs]
            low, high = prediction_interval(gaps)
            line += f"   {sum(gaps) / len(gaps):+.1f} ({low:+.1f} to {high:+.1f})"
        lines.append(line)
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Passing completions by arm: a dot a seed, filled with the oracle, open without."""
    fig = Figure(figsize=(6, 3), layout="constrained")
    ax = fig.subplots()
    for row, arm in enumerate(ARMS):
        for how, face in (("confirm", COLOURS[0]), ("without_oracle", "none")):
            counts = [exact(run, arm, how) for run in runs]
            ax.plot(counts, [row] * len(counts), "o", color=COLOURS[0], markerfacecolor=face)
    ax.set_yticks(range(len(ARMS)), list(ARMS))
    ax.invert_yaxis()
    ax.set(xlabel="passing completions of trained families, of 192", xlim=(-4, 196))
    return fig
