"""RL studies: arms run from one checkpoint, and what tables and comparisons make of them."""

from dataclasses import replace

import pytest

from glm_course.data.tasks import FAMILIES, frozen_tasks
from glm_course.studies import (
    group_size,
    interference,
    pairs,
    rl_arms,
    rl_choices,
    rl_estimator,
    temperature,
)
from glm_course.studies.rl_arms import FIVE, PILOT, compare
from glm_course.train.rl import RLSettings

PILOTS = (rl_choices, group_size, temperature)
FULL = (interference, rl_estimator)
SMALL = {"groups": 1, "group_size": 3, "tasks_per_family": 1, "max_new_tokens": 32}


@pytest.fixture
def start(trained, monkeypatch):
    """The trained tiny model in place of the checkpoints that the studies start from."""
    monkeypatch.setattr(rl_arms, "small_checkpoint", lambda: trained)
    monkeypatch.setattr(rl_arms, "large_checkpoint", lambda: trained)


def made_up(study, seeds=(1, 2)) -> list[dict]:
    """Runs of a pilot study in which arm number n solves every (n + 2)th task."""
    runs = []
    for seed in seeds:
        arms = {}
        for n, arm in enumerate(study.ARMS):
            arms[arm] = {"passing": n, "updates": n}
            for split, per_family in (("dev", 4), ("confirm", 8), ("fresh", 8)):
                tasks = [
                    {
                        "family": task.family,
                        "description": task.description,
                        "passed": [i % (n + 2) == 0],
                    }
                    for i, task in enumerate(frozen_tasks(split, per_family, FIVE))
                ]
                arms[arm][split] = {"tasks": tasks}
        runs.append({"seed": seed, "arms": arms})
    return runs


def made_up_full(study) -> list[dict]:
    runs = []
    for seed in (1, 2):
        counts = {family: 10 + seed for family in FAMILIES}
        arm = {"passing": 5, "updates": 3, "confirm": counts, "without_oracle": counts}
        arms = dict.fromkeys(study.ARMS, arm)
        runs.append({"seed": seed, "arms": {"start": {"confirm": counts}, **arms}})
    return runs


def test_every_arm_of_a_pilot_has_128_rollouts_from_40_tasks():
    for study in PILOTS:
        for settings in study.ARMS.values():
            assert settings.groups * settings.group_size == 128
            assert settings.families == FIVE and settings.tasks_per_family == 8
    assert len(set(map(str, rl_choices.ARMS.values()))) == 8


def test_arms_of_the_full_length_differ_from_the_main_run_in_one_thing():
    for study in FULL:
        for settings in list(study.ARMS.values())[1:]:
            main = vars(interference.MAIN)
            assert sum(main[name] != value for name, value in vars(settings).items()) == 1
    assert replace(interference.MAIN, milestones=RLSettings.milestones).groups == 96


def test_a_pilot_measures_every_arm_on_three_splits(start, tmp_path, monkeypatch):
    arms = {"one": replace(PILOT, **SMALL), "two": replace(PILOT, **SMALL, temperature=1.0)}
    result = rl_arms.pilot(arms, 7, tmp_path)["arms"]
    assert list(result) == ["one", "two"]
    assert [len(result["one"][s]["tasks"]) for s in ("dev", "confirm", "fresh")] == [20, 40, 40]
    assert 0 <= result["one"]["passing"] <= 3
    again = rl_arms.pilot(arms, 7, tmp_path)["arms"]  # goes on with what is finished
    assert again == result


def test_a_full_arm_is_measured_with_the_oracle_and_without(start, tmp_path, monkeypatch):
    arms = {"main": replace(interference.MAIN, **SMALL)}
    result = rl_arms.full(arms, 7, tmp_path)["arms"]
    assert set(result["start"]["confirm"]) == set(FAMILIES)
    assert set(result["main"]) == {"passing", "updates", "confirm", "without_oracle"}
    assert all(0 <= n <= 64 for n in result["main"]["without_oracle"].values())


def test_a_comparison_counts_tasks_and_resamples_clusters():
    runs = made_up(group_size)  # group 8 solves every second task, group 4 every third
    found = compare(runs, "group 4", "group 8", "fresh")
    assert found["difference"] == pytest.approx((14 - 20) / 40)
    assert len(found["p"]) == 2 and found["interval"].low < found["difference"]
    assert pairs.differences(runs, "group 4", "group 8", "fresh") == [-6, -6]


@pytest.mark.parametrize("study", PILOTS)
def test_tables_and_figures_of_the_pilots_name_every_arm(study):
    runs = made_up(study)
    text, figure = study.table(runs), study.figure(runs)
    assert all(arm in text for arm in study.ARMS)
    assert figure.axes


@pytest.mark.parametrize("study", FULL)
def test_tables_and_figures_of_the_full_runs_name_every_arm(study):
    runs = made_up_full(study)
    assert all(arm in study.table(runs) for arm in study.ARMS)
    assert all(arm in study.table(runs[:1]) for arm in study.ARMS)
    assert study.figure(runs).axes


def test_interference_is_counted_in_points_of_the_exact_rate():
    [run, _] = made_up_full(interference)
    end = {family: 11 + 16 * (family == "square") for family in FAMILIES}
    run["arms"]["none"] = run["arms"]["none"] | {"confirm": end}
    assert interference.change(run, "none", interference.OTHERS) == pytest.approx(100 * 16 / 128)
    assert interference.change(run, "none", interference.TRAINED) == 0
