"""Study `temperature`: rollouts at temperature 0.20 against 0.35, the original's open lead.

Fixed before any run: RL seeds 1 to 20, all of them run, none added; metric: greedy tasks solved on
split `fresh` (40 tasks), opened for this and the screen alone; test: exact sign-flip on the paired
differences of the 20 seeds, two-sided, at 5%. A seed's difference scatters by about 2 tasks, so 20
seeds find a true difference of 1.3 tasks with a chance of 80%.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.studies import pairs
from glm_course.studies.rl_arms import pilot
from glm_course.studies.rl_choices import ARMS as SCREEN

MINUTES = 2
SEEDS = tuple(range(1, 21))
ARMS = {"T 0.35": SCREEN["baseline"], "T 0.20": SCREEN["temperature 0.20"]}


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Both arms at one RL seed."""
    return pilot(ARMS, seed, folder)


def table(runs: list[dict[str, Any]]) -> str:
    """A line a seed, then the mean difference with its interval, by split."""
    return pairs.table(runs, "T 0.20", "T 0.35")


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Tasks solved by both arms, a line a seed."""
    return pairs.figure(runs, "T 0.20", "T 0.35")
