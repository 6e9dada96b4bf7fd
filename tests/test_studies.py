"""Studies: seeds run once each into one file, and what the study of seeds makes of its results."""

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch

from glm_course import receipt
from glm_course.checkpoint import load
from glm_course.data.tasks import FAMILIES, frozen_tasks
from glm_course.evaluate import evaluate_greedy, evaluate_sampled
from glm_course.studies import runner, seeds
from glm_course.studies.runner import run_study
from glm_course.train.pretrain import PretrainSettings, pretrain
from glm_course.train.rl import RLSettings

# Results are numbers that follow from the seed; what ran is told by files beside the module.
STUDY = '''
"""A study that takes no time."""
import random
import time
from pathlib import Path

import torch

HERE, MINUTES = Path(__file__).parent, 1


def run(seed, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (HERE / f"ran_{seed}").touch()
    resumed = (folder / "half").exists()
    (folder / "half").touch()
    if seed == 13:
        raise RuntimeError("seed 13 fails")
    time.sleep(0.1)
    numbers = random.Random(seed)
    threads = torch.get_num_threads()
    return {"value": numbers.random(), "resumed": resumed, "threads": threads}
'''


@pytest.fixture
def study(tmp_path, monkeypatch, one_thread):
    """A study module, importable in worker processes too."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "quick_study.py").write_text(STUDY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "quick_study", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which running a study sets
    return import_module("quick_study")


def ran(study) -> set[int]:
    return {int(file.name.removeprefix("ran_")) for file in study.HERE.glob("ran_*")}


def test_unfinished_seeds_of_an_earlier_run_are_left_for_a_later_one(study, tmp_path):
    output = tmp_path / "study.json"
    unfinished = tmp_path / "study.json.unfinished" / "seed_2"
    unfinished.mkdir(parents=True)
    (unfinished / "half").touch()
    list(run_study(study, [1], output))
    assert (unfinished / "half").exists()
    [run] = run_study(study, [2], output)
    assert run["resumed"]
    assert not unfinished.parent.exists()


def values(output: Path) -> dict[int, float]:
    return {run["seed"]: run["value"] for run in receipt.read(output)["runs"]}


# --- running -------------------------------------------------------------------------------------


def test_every_seed_is_saved_before_it_is_yielded(study, tmp_path):
    output = tmp_path / "results.json"
    for i, run in enumerate(run_study(study, [3, 1, 2], output)):
        assert len(values(output)) == i + 1
        assert values(output)[run["seed"]] == run["value"]
    assert ran(study) == {1, 2, 3}


def test_results_are_sorted_by_seed_and_say_where_they_come_from(study, tmp_path):
    output = tmp_path / "results.json"
    yielded = list(run_study(study, [3, 1, 2], output))
    assert [run["seed"] for run in yielded] == [3, 1, 2]
    results = receipt.read(output)
    assert results["study"] == "quick_study"
    assert [run["seed"] for run in results["runs"]] == [1, 2, 3]
    assert results["runs"] == sorted(yielded, key=lambda run: run["seed"])
    for run in results["runs"]:
        assert run["environment"]["torch"] == torch.__version__
        assert run["environment"]["threads"] == 1


def test_seeds_in_the_file_are_not_run_again(study, tmp_path):
    output = tmp_path / "results.json"
    list(run_study(study, [1, 3], output))
    for file in study.HERE.glob("ran_*"):
        file.unlink()
    assert [run["seed"] for run in run_study(study, [1, 2, 3, 4], output)] == [2, 4]
    assert ran(study) == {2, 4}
    assert list(values(output)) == [1, 2, 3, 4]
    before = output.read_bytes()
    assert list(run_study(study, [3, 1], output)) == []
    assert output.read_bytes() == before


def test_a_study_that_is_stopped_keeps_what_is_done(study, tmp_path):
    output = tmp_path / "results.json"
    runs = run_study(study, [1, 2, 3], output)
    next(runs)
    runs.close()
    assert list(values(output)) == [1]
    assert [run["seed"] for run in run_study(study, [1, 2, 3], output)] == [2, 3]


def test_a_seed_that_fails_keeps_the_others_and_its_own_folder(study, tmp_path):
    output = tmp_path / "results.json"
    with pytest.raises(RuntimeError, match="seed 13 fails"):
        list(run_study(study, [1, 13, 2], output))
    assert list(values(output)) == [1]
    study.run, run = lambda seed, folder: run(seed % 13, folder), study.run
    resumed = {r["seed"]: r["resumed"] for r in run_study(study, [13, 2], output)}
    assert resumed == {13: True, 2: False}


def test_nothing_but_the_results_is_left(study, tmp_path):
    (tmp_path / "out").mkdir()
    list(run_study(study, [1, 2], tmp_path / "out" / "results.json"))
    assert [child.name for child in (tmp_path / "out").iterdir()] == ["results.json"]


def test_a_folder_that_was_there_is_left_alone(study, tmp_path):
    """A run folder, say, that has the name of the results file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "receipt.json").write_text("precious")
    list(run_study(study, [1], tmp_path / "run.json"))
    assert (tmp_path / "run" / "receipt.json").read_text() == "precious"


def test_a_results_file_may_have_any_name(study, tmp_path):
    list(run_study(study, [1], tmp_path / "results"))
    assert list(values(tmp_path / "results")) == [1]


def test_several_jobs_give_the_results_of_one(study, tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    list(run_study(study, [1, 2, 3], one))
    assert sorted(run["seed"] for run in run_study(study, [3, 1, 2], two, jobs=2)) == [1, 2, 3]
    assert receipt.read(two) == receipt.read(one)
    assert not (tmp_path / "two").exists()


def test_workers_end_with_a_study_that_is_killed(study, tmp_path):
    slow = STUDY.replace("time.sleep(0.1)", "time.sleep(600)")
    slow = slow.replace('f"ran_{seed}").touch()', 'f"ran_{seed}").write_text(str(os.getpid()))')
    (study.HERE / "quick_study.py").write_text(slow.replace("import random", "import os, random"))
    script = tmp_path / "main.py"
    script.write_text(
        "from pathlib import Path\n"
        "import quick_study\n"
        "from glm_course.studies.runner import run_study\n"
        "if __name__ == '__main__':\n"
        f"    list(run_study(quick_study, [1, 2], Path({str(tmp_path / 'out.json')!r}), jobs=2))\n"
    )
    paths = os.pathsep.join([str(study.HERE), *filter(None, sys.path)])
    main = subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": paths})
    try:
        wait_for(lambda: sum(bool(f.read_text()) for f in study.HERE.glob("ran_*")) == 2)
        workers = [int(file.read_text()) for file in study.HERE.glob("ran_*")]
    finally:
        main.kill()
        main.wait()
    wait_for(lambda: not any(alive(worker) for worker in workers))


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_failure_among_several_jobs_starts_no_further_seed(study, tmp_path):
    with pytest.raises(RuntimeError, match="seed 13 fails"):
        list(run_study(study, [13, *range(20, 40)], tmp_path / "results.json", jobs=2))
    assert len(ran(study)) < 15


def test_threads_are_shared_out_among_jobs(study, tmp_path, monkeypatch):
    """Without workers: what a job is told, whatever it then does."""
    told = []

    class Pool:
        def __init__(self, jobs, **_):
            told.append(jobs)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def shutdown(self, **_):
            return None

        def submit(self, function, *arguments):
            told.append(arguments[-1])

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(runner, "as_completed", lambda futures: iter(()))
    for threads, jobs, share in ((8, 2, 4), (8, 3, 2), (1, 2, 1)):
        told.clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        list(run_study(study, [1], tmp_path / "results.json", jobs))
        assert told == [jobs, share]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "jobs", "complaint"),
    [
        ([1, 2, 1], 1, "seeds must be different"),
        ([1, -2], 1, "not negative"),
        ([1], 0, "jobs must be at least 1"),
    ],
)
def test_seeds_and_jobs_that_cannot_be_are_refused(study, tmp_path, wanted, jobs, complaint):
    with pytest.raises(ValueError, match=complaint):
        list(run_study(study, wanted, tmp_path / "results.json", jobs))
    assert ran(study) == set() and not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("text", ['{"study": "seeds", "runs": []}', '{"kind": "rl"}', "[]", "no"])
def test_a_file_of_something_else_is_refused_and_kept(study, tmp_path, text):
    output = tmp_path / "results.json"
    output.write_text(text)
    with pytest.raises(ValueError, match="results.json"):
        list(run_study(study, [1], output))
    assert output.read_text() == text and ran(study) == set()


# --- the study of seeds --------------------------------------------------------------------------


def counts(tasks: int, solved: int, exact: int, tests: int) -> dict[str, int]:
    return {
        "tasks": tasks,
        "solved": solved,
        "exact": exact,
        "completions": 8 * tasks,
        "tests_passed": tests,
        "tests": 24 * tasks,
        "invalid": 0,
    }


def result(solved: int, exact: int) -> dict:
    """An evaluation in which every family does alike; the trained ones are three of eight."""
    each = counts(8, solved, exact, 3 * exact)
    total = {name: 8 * count for name, count in each.items()}
    return {"total": total, "by_family": dict.fromkeys(FAMILIES, each), "tasks": []}


def made_up(seed: int) -> dict:
    """A run with numbers that tell the seed."""
    return {
        "seed": seed,
        "loss": [5.5 - 0.05 * i + 0.01 * seed for i in range(100)],
        "dev_greedy": {"total": counts(8, seed, seed, seed)},
        "before": {"greedy": result(0, 0), "sampled": result(1, seed)},
        "after": {"greedy": result(5, 5), "sampled": result(6, 30 + seed)},
        "rl_dev": [{"step": s, "exact": s // 2} for s in (0, 24, 48, 72, 96)],
        "rl_summary": {"updates": 70 + seed, "passing": 400 + seed},
    }


def test_headline_numbers_are_those_of_the_trained_families_and_of_all():
    numbers = seeds.headline(made_up(3))
    wanted = {
        "loss_10": 5.5 - 0.45 + 0.03,
        "loss_100": 5.5 - 4.95 + 0.03,
        "dev": 3,
        "greedy_before": 0,
        "greedy_after": 3 * 5,
        "greedy_tests_after": 3 * 15,
        "pass_at_8_before": 3 * 1,
        "pass_at_8_after": 3 * 6,
        "exact_before": 3 * 3,
        "exact_after": 3 * 33,
        "pass_at_8_all_after": 8 * 6,
        "exact_all_after": 8 * 33,
        "tests_all_after": 8 * 99,
        "exact_even_after": 33,
        "rl_dev_24": 12,
        "updates": 73,
        "passing": 403,
    }
    assert {name: numbers[name] for name in wanted} == pytest.approx(wanted)


def test_intervals_hold_the_runs_they_come_from():
    intervals = seeds.intervals([made_up(seed) for seed in range(5)])
    assert set(intervals) == set(seeds.headline(made_up(0)))
    for name, interval in intervals.items():
        values = [seeds.headline(made_up(seed))[name] for seed in range(5)]
        assert 0 <= interval.low <= min(values) and max(values) <= interval.high, name


def limits() -> dict[str, int]:
    """What each count is out of: tasks, completions, tests, groups or rollouts."""
    found = {"dev": 8, "updates": 96, "passing": 96 * 16}
    found |= {f"rl_dev_{step}": 12 * 8 for step in (0, 24, 48, 72, 96)}
    for when in ("before", "after"):
        found |= {f"greedy_{when}": 24, f"greedy_tests_{when}": 24 * 3}
        found |= {f"pass_at_8_{when}": 24, f"pass_at_8_all_{when}": 64}
        found |= {f"exact_{when}": 24 * 8, f"exact_all_{when}": 64 * 8}
        found |= {f"tests_all_{when}": 64 * 8 * 3}
        found |= {f"exact_{family}_{when}": 8 * 8 for family in FAMILIES}
    return found


def test_every_count_is_out_of_what_there_is_to_count(monkeypatch):
    """Counts that scatter over all that is possible show how far that goes."""
    losses = {f"loss_{step}": 1.0 for step in (10, 20, 50, 100)}
    assert set(seeds.headline(made_up(0))) == set(limits()) | set(losses)
    shares = [
        losses | {name: most * half // 2 for name, most in limits().items()} for half in (0, 1, 2)
    ]
    monkeypatch.setattr(seeds, "headline", lambda run: run)
    intervals = seeds.intervals(shares)
    assert {name: intervals[name].high for name in limits()} == limits()
    assert all(intervals[name].low == 0 for name in limits())
    for name, most in limits().items():
        with pytest.raises(ValueError, match=f"0 to {most}"):
            seeds.intervals([{name: 0}, {name: most + 1}])


def test_the_table_has_a_line_a_seed():
    runs = [made_up(seed) for seed in (2, 7)]
    head, first, second, *intervals = seeds.table(runs).splitlines()
    assert head.split() == ["seed", "loss", "dev", "greedy", "exact", "passing"]
    assert " ".join(first.split()) == "2 0.5700 2 0 -> 15 6 -> 96 402"
    assert " ".join(second.split()) == "7 0.6200 7 0 -> 15 21 -> 111 407"
    assert len(intervals) >= len(seeds.headline(runs[0]))
    assert len(seeds.table(runs[:1]).splitlines()) == 2, "one run has no interval"


def test_the_figure_has_a_line_a_seed_from_before_to_after():
    [axes] = seeds.figure([made_up(seed) for seed in (2, 11)]).axes
    assert [line.get_label() for line in axes.lines] == ["seed 2", "seed 11"]
    for line in axes.lines:
        assert list(line.get_xdata()) == [0, 1] and list(line.get_ydata()) == [0, 15]
    assert "24" in axes.get_ylabel()


def test_only_the_texts_are_left_out_of_results(model):
    for evaluation in (evaluate_greedy, evaluate_sampled):
        full = evaluation(model, frozen_tasks("dev", 1, ("even",)))
        short = seeds.without_texts(full)
        assert set(full["tasks"][0]) - set(short["tasks"][0]) == {"completions"}
        assert {k: v for k, v in short.items() if k != "tasks"} == {
            k: v for k, v in full.items() if k != "tasks"
        }
        assert full["tasks"][0]["completions"], "the full result was changed"


def test_a_run_is_trained_once_resumed_if_unfinished_and_else_read(tiny, tmp_path):
    run = PretrainSettings(model=tiny, steps=3, batch_size=2, milestones=())
    rows = pretrain(run, output=tmp_path / "run", device="cpu")
    next(rows)
    rows.close()
    finished = runner.run_or_resume(pretrain, run, folder=tmp_path / "run")
    assert [row["step"] for row in finished["rows"]] == [1, 2, 3]
    assert runner.run_or_resume(None, run, folder=tmp_path / "run") == finished
    assert runner.run_or_resume(pretrain, run, folder=tmp_path / "new")["steps"] == 3


def test_one_seed_from_random_weights_to_table_and_figure(tiny, tmp_path, monkeypatch):
    """The whole study on a tiny model: 100 steps, 96 groups, both evaluations."""
    monkeypatch.setattr(
        seeds, "PretrainSettings", lambda **s: PretrainSettings(tiny, batch_size=1, **s)
    )
    rl = RLSettings(group_size=2, max_new_tokens=1, milestones=(96,), dev_tasks=1, dev_samples=1)
    monkeypatch.setattr(seeds, "RLSettings", lambda: rl)
    measure = seeds.measure
    monkeypatch.setattr(seeds, "measure", lambda model, split, _: measure(model, split, 1))
    run = {"seed": 4} | seeds.run(4, tmp_path / "seed")
    assert len(run["loss"]) == 100 and len(run["rl_passing"]) == 96
    assert run["rl_weights"] == load(tmp_path / "seed" / "rl" / "step_0096").hash
    assert run["pretrain_weights"] == load(tmp_path / "seed" / "pretrain" / "step_0100").hash
    assert set(run["before"]) == set(run["after"]) == {"greedy", "sampled"}
    for when in ("before", "after"):
        assert run[when]["greedy"]["total"]["tasks"] == 8
        assert run[when]["sampled"]["total"]["completions"] == 64
    assert json.loads(json.dumps(run)) == run
    assert len(seeds.table([run]).splitlines()) == 2
    seeds.figure([run])
    pretraining, learning = (
        receipt.read(tmp_path / "seed" / name / "receipt.json")["settings"]
        for name in ("pretrain", "rl")
    )
    assert (pretraining["seed"], pretraining["steps"]) == (4, 100)
    assert (learning["seed"], learning["start"]) == (31415, run["pretrain_weights"])
