"""Study `group-size`: groups of 8 against groups of 4 at equal rollouts.

The original's confirmation of its screen's dev winner, at its three RL seeds; here also at others.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.studies import pairs
from glm_course.studies.rl_arms import pilot
from glm_course.studies.rl_choices import ARMS as SCREEN

MINUTES = 2
SEEDS = (31415, 27182, 16180, 1, 2, 3, 4, 5, 6, 7)
ARMS = {"group 8": SCREEN["baseline"], "group 4": SCREEN["group 4"]}


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Both arms at one RL seed."""
    return pilot(ARMS, seed, folder)


def table(runs: list[dict[str, Any]]) -> str:
    """A line a seed, then the mean difference with its interval, by split."""
    return pairs.table(runs, "group 4", "group 8")


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Tasks solved by both arms, a line a seed."""
    return pairs.figure(runs, "group 4", "group 8")
