"""Judging a model on a frozen split: greedy pass@1, and sampled pass@k with its unbiased estimator.

A result is a plain dict, ready for JSON: settings, totals, the same by family, and every
completion with its verdict, so that nothing has to be re-run to be re-analysed.
"""

from collections.abc import Sequence
from typing import Any

from glm_course.data.tasks import CodingTask
from glm_course.generate import Completion, generate
from glm_course.model import LanguageModel
from glm_course.stats import pass_at_k
from glm_course.verifier import is_complete, verify


def complete_tasks(
    model: LanguageModel,
    tasks: Sequence[CodingTask],
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int = 48,
    seed: int = 0,
    stop_when_valid: bool = True,
) -> list[list[Completion]]:
    """`samples` completions of each task's prompt.

    With stop_when_valid a row also ends as soon as prompt and completion are a valid candidate that
    ends in a newline. That asks the verifier's syntax check, an oracle no user would have.
    """
    return generate(
        model,
        [task.prompt for task in tasks],
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        is_complete=(lambda i, text: is_complete(tasks[i], text)) if stop_when_valid else None,
    )


def judge(tasks: Sequence[CodingTask], completions: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Verdicts on `completions` (as many for each task), counted in all and by family.

    Counts: tasks; solved (tasks with a passing completion); exact (passing completions) of
    completions; tests_passed of tests; invalid completions.
    """
    rows = []
    for task, texts in zip(tasks, completions, strict=True):
        verdicts = [verify(task, text) for text in texts]
        rows.append(
            {
                "task": task.entry_point,
                "family": task.family,
                "description": task.description,
                "passed": [v.status == "passed" for v in verdicts],
                "tests_passed": sum(v.tests_passed for v in verdicts),
                "invalid": sum(v.status == "invalid" for v in verdicts),
                "tests": len(task.tests) * len(verdicts),
                "completions": list(texts),
            }
        )
    families = dict.fromkeys(row["family"] for row in rows)
    by_family = {f: _totals([row for row in rows if row["family"] == f]) for f in families}
    return {"total": _totals(rows), "by_family": by_family, "tasks": rows}


def _totals(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {
        "tasks": len(rows),
        "solved": sum(any(row["passed"]) for row in rows),
        "exact": sum(sum(row["passed"]) for row in rows),
        "completions": sum(len(row["passed"]) for row in rows),
        "tests_passed": sum(row["tests_passed"] for row in rows),
        "tests": sum(row["tests"] for row in rows),
        "invalid": sum(row["invalid"] for row in rows),
    }


def combine(result: dict[str, Any], families: Sequence[str]) -> dict[str, int]:
    """Totals of `judge` over some families only. Raises KeyError for a family not in it."""
    parts = [result["by_family"][family] for family in families]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def evaluate_greedy(
    model: LanguageModel,
    tasks: Sequence[CodingTask],
    *,
    max_new_tokens: int = 48,
    stop_when_valid: bool = True,
) -> dict[str, Any]:
    """Greedy pass@1: `judge` of the likeliest completion of each task."""
    done = complete_tasks(
        model,
        tasks,
        samples=1,
        temperature=0,
        max_new_tokens=max_new_tokens,
        stop_when_valid=stop_when_valid,
    )
    return _report(tasks, done)


def evaluate_sampled(
    model: LanguageModel,
    tasks: Sequence[CodingTask],
    *,
    samples: int = 8,
    temperature: float = 0.35,
    max_new_tokens: int = 48,
    seed: int = 0,
    stop_when_valid: bool = True,
) -> dict[str, Any]:
    """Sampled evaluation: `judge` of `samples` completions a task, and pass@k for k to `samples`.

    pass_at_k[k] is the mean over tasks of the unbiased estimate (Chen et al., 2107.03374, eq. 1)
    that one of k samples passes; at k = samples it is the share of tasks solved.
    """
    done = complete_tasks(
        model,
        tasks,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop_when_valid=stop_when_valid,
    )
    result = _report(tasks, done)
    result["pass_at_k"] = {
        str(k): sum(pass_at_k(samples, sum(r["passed"]), k) for r in result["tasks"]) / len(tasks)
        for k in range(1, samples + 1)
    }
    return result


def _report(
    tasks: Sequence[CodingTask], completions: Sequence[Sequence[Completion]]
) -> dict[str, Any]:
    result = judge(tasks, [[c.text for c in group] for group in completions])
    stops = [c.stopped for group in completions for c in group]
    result["stopped"] = {how: stops.count(how) for how in ("eos", "complete", "length")}
    return result
