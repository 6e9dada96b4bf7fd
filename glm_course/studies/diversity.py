"""Study `diversity`: 8 training structures repeated, or all 88, at the same number of examples.

The original's question, on its small model; then with a router that learns (top-2), and with a
fourth layer, which is sparse: the small model has neither.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.data.programs import structures
from glm_course.studies import programs
from glm_course.studies.programs import interleaved

MINUTES = 1
SEEDS = tuple(range(11, 111, 11))
TRAINING = structures()[0]
ARMS = {"8 structures": interleaved(TRAINING[:8]), "88 structures": interleaved(TRAINING)}
PAIRS = [("88 structures", "8 structures")]


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Every arm on every model, from the initial weights of `seed`."""
    return programs.run_arms(ARMS, seed)


def table(runs: list[dict[str, Any]]) -> str:
    """Mean accuracy by model, arm and update, then each comparison with its exact p."""
    return programs.table(runs, ARMS, PAIRS)


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Differences in accuracy, seed by seed."""
    return programs.figure(runs, PAIRS)
