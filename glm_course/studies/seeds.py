"""Study `seeds`: pretraining to step 100, RL and evaluation from several draws of the weights.

How far does the headline move when nothing but the seed changes? Seed s draws the initial weights
and the pretraining data; RL keeps its own seed, so what differs between runs is where RL starts.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course.data.tasks import FAMILIES, frozen_tasks
from glm_course.evaluate import combine, evaluate_greedy, evaluate_sampled
from glm_course.model import LanguageModel
from glm_course.stats import Interval, count_interval, prediction_interval
from glm_course.studies.runner import run_or_resume
from glm_course.train.pretrain import PretrainSettings, load_model, pretrain
from glm_course.train.rl import RLSettings, rloo

MINUTES = 7
SEEDS = (42, 1, 2, 3, 4, 5, 6, 7, 8, 9)
STEPS = 100
TRAINED = RLSettings.families


def measure(model: LanguageModel, split: str, per_family: int) -> dict[str, Any]:
    """Greedy and sampled (8 a task, temperature 0.35) results on all families of a split."""
    tasks = frozen_tasks(split, per_family)
    greedy, sampled = evaluate_greedy(model, tasks), evaluate_sampled(model, tasks)
    return {"greedy": without_texts(greedy), "sampled": without_texts(sampled)}


def without_texts(result: dict[str, Any]) -> dict[str, Any]:
    """A result of `evaluate` with verdicts but without the completions, which are most of it."""
    tasks = [{k: v for k, v in row.items() if k != "completions"} for row in result["tasks"]]
    return result | {"tasks": tasks}


def run(seed: int, folder: Path) -> dict[str, Any]:
    """Pretrain with `seed`, then RL; dev and confirm measured before and after."""
    settings = PretrainSettings(seed=seed, steps=STEPS, milestones=(STEPS,))
    base = run_or_resume(pretrain, settings, folder=folder / "pretrain")
    start = folder / "pretrain" / f"step_{STEPS:04d}"
    rl = run_or_resume(rloo, RLSettings(), start, folder=folder / "rl")
    before, after = (
        load_model(path, device="cpu") for path in (start, folder / "rl" / "step_0096")
    )
    return {
        "loss": [row["loss"] for row in base["rows"]],
        "gradient_norm": [row["gradient_norm"] for row in base["rows"]],
        "pretrain_seconds": base["seconds"],
        "pretrain_weights": base["weights"],
        "rl_seconds": rl["seconds"],
        "rl_weights": rl["weights"],
        "rl_summary": rl["summary"],
        "rl_passing": [row["passing"] for row in rl["rows"]],
        "rl_dev": [{"step": m["step"]} | m["dev"] for m in rl["milestones"]],
        "dev_greedy": without_texts(evaluate_greedy(before, frozen_tasks("dev", 1))),
        "before": measure(before, "confirm", 8),
        "after": measure(after, "confirm", 8),
    }


def headline(run: dict[str, Any]) -> dict[str, float]:
    """The numbers of one seed that the original reports, by name; counts unless called loss."""
    numbers = {f"loss_{step}": run["loss"][step - 1] for step in (10, 20, 50, 100)}
    numbers["dev"] = run["dev_greedy"]["total"]["solved"]
    for when in ("before", "after"):
        greedy, sampled = run[when]["greedy"], run[when]["sampled"]
        numbers |= {
            f"greedy_{when}": combine(greedy, TRAINED)["solved"],
            f"greedy_tests_{when}": combine(greedy, TRAINED)["tests_passed"],
            f"pass_at_8_{when}": combine(sampled, TRAINED)["solved"],
            f"exact_{when}": combine(sampled, TRAINED)["exact"],
            f"pass_at_8_all_{when}": sampled["total"]["solved"],
            f"exact_all_{when}": sampled["total"]["exact"],
            f"tests_all_{when}": sampled["total"]["tests_passed"],
        }
        for family, counts in sampled["by_family"].items():
            numbers[f"exact_{family}_{when}"] = counts["exact"]
    numbers |= {f"rl_dev_{m['step']}": m["exact"] for m in run["rl_dev"]}
    return numbers | {
        "updates": run["rl_summary"]["updates"],
        "passing": run["rl_summary"]["passing"],
    }


LIMITS = {  # of counts; a prefix stands for all names that begin with it
    "dev": 8,
    "greedy_tests": 72,
    "greedy": 24,
    "pass_at_8_all": 64,
    "pass_at_8": 24,
    "exact_all": 512,
    "tests_all": 1536,
    **{f"exact_{family}": 64 for family in FAMILIES},
    "exact": 192,
    "rl_dev": 96,
    "updates": 96,
    "passing": 1536,
}


def intervals(runs: list[dict[str, Any]], level: float = 0.95) -> dict[str, Interval]:
    """Prediction interval of each headline number for one more seed, within what is possible."""
    rows = [headline(run) for run in runs]
    found = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        limit = next((LIMITS[prefix] for prefix in LIMITS if name.startswith(prefix)), None)
        found[name] = (
            prediction_interval(values, level, low=0)
            if limit is None
            else count_interval(values, limit, level)
        )
    return found


def table(runs: list[dict[str, Any]]) -> str:
    """One line a seed, on the trained families of confirm, then prediction intervals of all.

    Counts: dev of 8 tasks, greedy of 24, exact of 192 completions, passing of 1,536 rollouts.
    """
    lines = [f"{'seed':>6} {'loss':>7} {'dev':>4} {'greedy':>10} {'exact':>12} {'passing':>8}"]
    for run in runs:
        n = headline(run)
        greedy = f"{n['greedy_before']} -> {n['greedy_after']}"
        exact = f"{n['exact_before']} -> {n['exact_after']}"
        lines.append(
            f"{run['seed']:>6} {n['loss_100']:>7.4f} {n['dev']:>4} {greedy:>10} {exact:>12} "
            f"{n['passing']:>8}"
        )
    if len(runs) > 1:
        lines.append(f"\n95% prediction intervals for one more seed, from {len(runs)}:")
        lines += [f"{n:<28} {i.low:8.2f} to {i.high:8.2f}" for n, i in intervals(runs).items()]
    return "\n".join(lines)


def figure(runs: list[dict[str, Any]]) -> Figure:
    """Greedy pass@1 on the trained families of confirm, before and after RL, a line a seed."""
    fig = Figure(figsize=(5, 3), layout="constrained")
    ax = fig.subplots()
    for run in runs:
        n = headline(run)
        ax.plot([0, 1], [n["greedy_before"], n["greedy_after"]], "o-", label=f"seed {run['seed']}")
    ax.set_xticks([0, 1], ["before RL", "after RL"])
    ax.set(ylabel="tasks solved, of 24", ylim=(-1, 25), xlim=(-0.2, 1.6))
    ax.legend(frameon=False, fontsize="small")
    return fig
