"""Study `ordering`: the same 88 structures interleaved, in blocks, or after a start with 8.

Interleaved and blocked see the same 4,800 examples in another order. The curriculum spends its
first half on 8 structures, so it is compared with 88 and with 8 throughout.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.data.programs import structures
from glm_course.studies import programs
from glm_course.studies.programs import blocked, curriculum, interleaved

MINUTES = 2
SEEDS = tuple(range(11, 111, 11))
TRAINING = structures()[0]
ARMS = {
    "interleaved": interleaved(TRAINING),
    "blocked": blocked(TRAINING),
    "8, then 88": curriculum(TRAINING[:8], TRAINING),
    "8 throughout": interleaved(TRAINING[:8]),
}
PAIRS = [
    ("interleaved", "blocked"),
    ("interleaved", "8, then 88"),
    ("8, then 88", "8 throughout"),
]


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Every arm on every model, from the initial weights of `seed`."""
    return programs.run_arms(ARMS, seed)


def table(runs: list[dict[str, Any]]) -> str:
    """Mean accuracy by model, arm and update, then each comparison with its exact p."""
    return programs.table(runs, ARMS, PAIRS)


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Differences in accuracy, seed by seed."""
    return programs.figure(runs, PAIRS)
