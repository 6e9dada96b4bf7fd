"""The recorded results say what the chapters and claims say they do."""

import pytest

from glm_course import claims, receipt
from glm_course.data.tasks import frozen_tasks
from glm_course.evaluate import combine, judge
from glm_course.studies import seeds

RESULTS = claims.CLAIMS.parent / "results"
FROM_STUDY = {name: c for name, c in claims.load().items() if c.study}


def test_the_study_holds_enough_draws():
    runs = receipt.read(RESULTS / "seeds.json")["runs"]
    assert len({run["seed"] for run in runs}) == len(runs) >= 5
    assert all(len(run["loss"]) == 100 for run in runs)


@pytest.mark.parametrize("name", FROM_STUDY)
def test_a_claim_has_the_interval_of_its_study(name):
    claim = FROM_STUDY[name]
    study, _, number = claim.study.partition(": ")
    assert study == "seeds"
    low, high = seeds.intervals(receipt.read(RESULTS / "seeds.json")["runs"])[number]
    assert (claim.low, claim.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.parametrize("name", FROM_STUDY)
def test_a_claim_can_fail(name):
    claim = FROM_STUDY[name]
    number = claim.study.partition(": ")[2]
    limit = next((n for prefix, n in seeds.LIMITS.items() if number.startswith(prefix)), None)
    assert limit is None or (claim.low, claim.high) != (0, limit)


def test_every_number_of_the_study_has_a_claim_unless_the_draws_allow_any_value():
    claimed = {claim.study.partition(": ")[2] for claim in FROM_STUDY.values()}
    # The first steps have claims of their own, tighter ones: these draws differ in the weights.
    claimed |= {"loss_10", "loss_20", "loss_50"}
    for number, interval in seeds.intervals(receipt.read(RESULTS / "seeds.json")["runs"]).items():
        limit = next((n for prefix, n in seeds.LIMITS.items() if number.startswith(prefix)), None)
        assert (number in claimed) != (tuple(interval) == (0, limit)), number


@pytest.mark.parametrize("name", ["pretrain", "rl"])
def test_main_runs_are_finished_and_carry_their_provenance(name):
    run = receipt.read(RESULTS / f"{name}.json")
    assert run["status"] == "finished"
    assert len(run["rows"]) == run["steps"]
    assert len(run["environment"]["git_commit"]) == 40, "not from a clean checkout"


def test_the_recorded_loss_follows_the_published_curve():
    rows = receipt.read(RESULTS / "pretrain.json")["rows"]
    published = claims.original()["pretraining"]["loss_by_step"]
    for step, value in published.items():
        if step != "kind" and step <= 100:
            assert abs(rows[step - 1]["loss"] - value) <= (0.02 if step <= 20 else 0.1)


def test_rl_started_from_the_recorded_checkpoint_and_trained_what_it_should():
    milestones = receipt.read(RESULTS / "pretrain.json")["milestones"]
    [start] = [m["weights"] for m in milestones if m["step"] == 100]
    rl = receipt.read(RESULTS / "rl.json")
    assert rl["settings"]["start"] == start
    assert rl["summary"]["trainable_parameters"] == 2_190_152
    assert rl["summary"]["rollouts"] == 1536
    assert rl["summary"]["updates"] == sum(row["updated"] for row in rl["rows"])


@pytest.mark.parametrize("split", ["dev", "confirm"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_recorded_verdicts_are_what_the_verifier_says_today(split, when):
    result = receipt.read(RESULTS / f"{split}_{when}_rl.json")
    tasks = frozen_tasks(split, result["settings"]["per_family"])
    for kind in ("greedy", "sampled"):
        again = judge(tasks, [row["completions"] for row in result[kind]["tasks"]])
        assert again["total"] == result[kind]["total"]
        assert combine(again, seeds.TRAINED) == combine(result[kind], seeds.TRAINED)


def test_the_readme_gives_the_recorded_speeds():
    results = {r["name"]: r for r in receipt.read(RESULTS / "benchmarks.json")["results"]}

    def value(begins: str) -> float:
        [found] = [r["value"] for name, r in results.items() if name.startswith(begins)]
        return found

    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    for row, begins in (
        ("training step, fp32", "training step, fp32"),
        ("training step, bf16", "training step, bf16"),
        ("decoding a group", "decoding 16 x 48 tokens after 80"),
    ):
        [line] = [line for line in readme.splitlines() if line.startswith(f"| {row}")]
        for kind in ("wall", "cpu"):
            assert f"{value(f'{begins}, {kind} time'):#.3g}x" in line
    assert f"{value('linear attention at T = 2048, peak memory'):#.3g}x less" in readme
    assert f"| T^{value('linear attention, time'):.2f} |" in readme
    assert f"| T^{value('sparse attention, time'):.2f} |" in readme
    assert f"reaches {value('model FLOPs of the fast step, fp32'):.0f}% of the rate" in readme
