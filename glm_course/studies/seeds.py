"""Study `seeds`: pretraining to step 100, RL and evaluation from several draws of the weights.

How far does the headline move when nothing but the seed changes? Seed s draws the initial weights
and the pretraining data; RL keeps its own seed, so what differs between runs is where RL starts.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from glm_course import receipt
from glm_course.data.tasks import frozen_tasks
from glm_course.evaluate import combine, evaluate_greedy, evaluate_sampled
from glm_course.model import LanguageModel
from glm_course.train.pretrain import PretrainSettings, load_model, pretrain
from glm_course.train.rl import RLSettings, rloo

MINUTES = 7
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


def finish(rows: Any, folder: Path) -> dict[str, Any]:
    """Exhaust a training loop and return its receipt."""
    for _ in rows:
        pass
    return receipt.read(folder / "receipt.json")


def run_or_resume(loop: Any, settings: Any, *start: Path, folder: Path) -> dict[str, Any]:
    """Receipt of a run in `folder`: the finished one that is there, or trained on to its end."""
    path = folder / "receipt.json"
    if path.exists() and receipt.read(path)["status"] == "finished":
        return receipt.read(path)
    return finish(loop(settings, *start, output=folder, resume=path.exists(), device="cpu"), folder)


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


def headline(run: dict[str, Any]) -> dict[str, int]:
    """The numbers of one seed that the original reports, by name."""
    numbers = {"dev": run["dev_greedy"]["total"]["solved"]}
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
    return numbers | {
        "updates": run["rl_summary"]["updates"],
        "passing": run["rl_summary"]["passing"],
    }


def table(runs: list[dict[str, Any]]) -> str:
    """One line a seed: greedy and sampled results on confirm, trained families, before and after.

    Counts: greedy of 24 tasks, exact of 192 sampled completions, passing of 1,536 rollouts.
    """
    lines = [f"{'seed':>6} {'loss':>7} {'dev':>4} {'greedy':>10} {'exact':>12} {'passing':>8}"]
    for run in runs:
        n = headline(run)
        greedy = f"{n['greedy_before']} -> {n['greedy_after']}"
        exact = f"{n['exact_before']} -> {n['exact_after']}"
        lines.append(
            f"{run['seed']:>6} {run['loss'][-1]:>7.4f} {n['dev']:>4} {greedy:>10} {exact:>12} "
            f"{n['passing']:>8}"
        )
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
