"""Verdicts a second, on completions as reinforcement learning meets them."""

from statistics import median

from glm_course.data.tasks import frozen_tasks
from glm_course.verifier import verify
from tests.benchmarks.measure import Result, clock

WRONG = ("\n    return 0\n", "\n    return x if x x 0 else x\n", "\n    import os\n", "")


def run(quick: bool) -> list[Result]:
    """Every task of two per family with its reference body and four wrong ones."""
    tasks = frozen_tasks("dev", 2)
    candidates = [(task, text) for task in tasks for text in (task.completion, *WRONG)]
    repeats, rounds = (2, 3) if quick else (20, 9)

    def judge() -> None:
        for _ in range(repeats):
            for task, text in candidates:
                verify(task, text)

    judge()
    verdicts = repeats * len(candidates)
    rates = [verdicts / clock(judge)[0] for _ in range(rounds)]
    statuses = [verify(task, text).status for task, text in candidates]
    mix = {status: statuses.count(status) for status in ("passed", "failed", "invalid")}
    return [Result("verdicts", median(rates), min(rates), max(rates), "1/s", detail=mix)]
