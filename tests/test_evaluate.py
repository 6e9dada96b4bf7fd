"""Counts, families and pass@k, by hand and on a model that solves some tasks."""

import json
from math import comb

import pytest

from glm_course import receipt
from glm_course.checkpoint import weights_hash
from glm_course.data.tasks import FAMILIES, frozen_tasks, make_task
from glm_course.evaluate import (
    combine,
    complete_tasks,
    evaluate_greedy,
    evaluate_sampled,
    judge,
)
from glm_course.tokenizer import EOS
from glm_course.verifier import is_complete, verify

RIGHT = "\n    return x + 1\n"
WRONG = "\n    return x + 2\n"  # no test passes
INVALID = "\n    return x.real\n"
TASKS = frozen_tasks("dev", 1)


@pytest.fixture(scope="module")
def judged():
    tasks = [make_task("increment", i, 1) for i in range(2)] + [make_task("absolute", 0, 1)]
    completions = [
        [RIGHT, WRONG, INVALID, RIGHT],
        [WRONG, INVALID, INVALID, WRONG],
        ["\n    return x\n", "\n    return -x\n", "", "\n    return abs(x)\n"],
    ]
    return tasks, completions, judge(tasks, completions)


def test_counts_are_those_made_by_hand(judged):
    _, _, result = judged
    assert result["by_family"] == {
        "increment": {
            "tasks": 2,
            "solved": 1,
            "exact": 2,
            "completions": 8,
            "tests_passed": 6,
            "tests": 24,
            "invalid": 3,
        },
        "absolute": {  # x: 0 and 9 are right; -x: -7 and 0; nothing at all does not parse
            "tasks": 1,
            "solved": 1,
            "exact": 1,
            "completions": 4,
            "tests_passed": 7,
            "tests": 12,
            "invalid": 1,
        },
    }
    assert result["total"] == {
        "tasks": 3,
        "solved": 2,
        "exact": 3,
        "completions": 12,
        "tests_passed": 13,
        "tests": 36,
        "invalid": 4,
    }


def test_every_completion_is_kept_with_its_verdict(judged):
    tasks, completions, result = judged
    assert [row["completions"] for row in result["tasks"]] == completions
    assert [row["task"] for row in result["tasks"]] == [task.entry_point for task in tasks]
    assert [row["description"] for row in result["tasks"]] == [task.description for task in tasks]
    assert [row["passed"] for row in result["tasks"]] == [
        [True, False, False, True],
        [False] * 4,
        [False, False, False, True],
    ]


def test_as_many_completions_as_tasks_are_asked_for():
    with pytest.raises(ValueError, match="zip"):
        judge(TASKS[:2], [[RIGHT]])


def test_families_add_up_to_the_total(judged):
    _, _, result = judged
    assert combine(result, ["increment", "absolute"]) == result["total"]
    assert combine(result, ["absolute"]) == result["by_family"]["absolute"]


def test_an_unknown_family_cannot_be_combined(judged):
    with pytest.raises(KeyError, match="square"):
        combine(judged[2], ["increment", "square"])


# --- with a model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled(model):
    return evaluate_sampled(model, TASKS, samples=6, seed=1)


def test_an_evaluation_holds_solved_and_unsolved_tasks(sampled):
    """What the tests below rest on."""
    assert 0 < sampled["total"]["solved"] < 8
    assert 0 < sampled["total"]["invalid"] < 48
    assert list(sampled["by_family"]) == list(FAMILIES)


def test_pass_at_k_is_the_share_of_subsets_of_k_that_hold_a_pass(sampled):
    passes = [sum(row["passed"]) for row in sampled["tasks"]]
    assert list(sampled["pass_at_k"]) == ["1", "2", "3", "4", "5", "6"]
    for k, value in sampled["pass_at_k"].items():
        wanted = [1 - comb(6 - c, int(k)) / comb(6, int(k)) for c in passes]
        assert value == pytest.approx(sum(wanted) / 8, abs=1e-12)


def test_pass_at_all_samples_is_the_share_of_solved_tasks(sampled):
    assert sampled["pass_at_k"]["6"] == sampled["total"]["solved"] / 8
    assert sampled["pass_at_k"]["1"] == pytest.approx(sampled["total"]["exact"] / 48)


def test_results_are_json_and_come_back_equal(sampled, model, tmp_path):
    assert json.loads(json.dumps(sampled)) == sampled
    receipt.write(tmp_path / "result.json", {"greedy": evaluate_greedy(model, TASKS[:1])})


def test_greedy_judges_the_likeliest_completion_of_each_task(model):
    result = evaluate_greedy(model, TASKS, max_new_tokens=30)
    likeliest = complete_tasks(model, TASKS, samples=1, temperature=0, max_new_tokens=30)
    assert [row["completions"] for row in result["tasks"]] == [[c.text] for [c] in likeliest]
    assert result["total"]["completions"] == 8
    assert result["total"]["exact"] == result["total"]["solved"]
    assert "pass_at_k" not in result


def test_an_evaluation_repeats_and_leaves_the_model_alone(model, sampled):
    before = weights_hash(model.state_dict())
    assert evaluate_sampled(model, TASKS, samples=6, seed=1) == sampled
    assert weights_hash(model.state_dict()) == before


def test_another_seed_samples_anew_at_the_same_settings(model, sampled):
    other = evaluate_sampled(model, TASKS, samples=6, seed=2)
    assert [r["completions"] for r in other["tasks"]] != [
        r["completions"] for r in sampled["tasks"]
    ]


def test_the_temperature_and_the_limit_reach_the_sampler(model):
    cold = evaluate_sampled(model, TASKS, samples=3, temperature=1e-3, max_new_tokens=9)
    greedy = evaluate_greedy(model, TASKS, max_new_tokens=9)
    for row, likeliest in zip(cold["tasks"], greedy["tasks"], strict=True):
        assert row["completions"] == likeliest["completions"] * 3


@pytest.mark.parametrize("rule", [True, False])
def test_only_the_rule_ends_a_completion_as_complete(model, rule):
    greedy = evaluate_greedy(model, TASKS, stop_when_valid=rule)
    sampled = evaluate_sampled(model, TASKS, samples=4, stop_when_valid=rule)
    for result in (greedy, sampled):
        assert sum(result["stopped"].values()) == result["total"]["completions"]
        assert (result["stopped"]["complete"] > 0) == rule


def test_a_completion_ended_by_the_rule_is_valid_and_holds_no_eos(model):
    groups = complete_tasks(model, TASKS, samples=6, temperature=0.35)
    ended = [
        (t, c) for t, g in zip(TASKS, groups, strict=True) for c in g if c.stopped == "complete"
    ]
    assert ended
    for task, completion in ended:
        assert EOS not in completion.ids
        assert is_complete(task, completion.text)
        assert verify(task, completion.text).status != "invalid"
