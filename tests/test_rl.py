"""RLOO: advantages, the order of tasks, what learns, and that scores are those of the sampler."""

import itertools
import json
import random
import warnings
from dataclasses import replace
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm_course import checkpoint, receipt
from glm_course.config import BASE
from glm_course.data.tasks import frozen_tasks, pretraining_batches
from glm_course.evaluate import complete_tasks, evaluate_sampled
from glm_course.generate import generate, sampling_log_probs
from glm_course.model import LanguageModel
from glm_course.tokenizer import BOS, EOS, PAD, SEP, ByteTokenizer
from glm_course.train import rl as module
from glm_course.train.optimizer import AdamWSettings
from glm_course.train.pretrain import load_model, new_model, next_byte_loss
from glm_course.train.rl import (
    RLSettings,
    advantages,
    completion_logits,
    freeze_all_but_last_block,
    improved,
    mean_kl,
    policy_loss,
    rloo,
    rloo_loss,
    sampler_scorer_gap,
    schedule,
    score,
)
from glm_course.verifier import Verdict, reward, verify

TASKS = frozen_tasks("rl", 32, ("increment", "double", "even"))
PROMPTS = [task.prompt for task in frozen_tasks("dev", 1)]
RATE = AdamWSettings(1e-3, betas=(0.9, 0.999), weight_decay=0.0)
SMALL = RLSettings(
    families=("increment", "nonnegative"),
    tasks_per_family=2,
    groups=5,
    group_size=6,
    max_new_tokens=40,
    seed=1,
    milestones=(0, 2, 5),
    dev_tasks=1,
    dev_samples=2,
    optimizer=RATE,
)
TRAINED = ("blocks.1.", "norm.", "embedding.")  # of the two layers of the tiny model
# The head takes the mean of the streams, so how the last block shares out its output is all one:
# its gradient is zero but for rounding.
IDLE = "blocks.1.mixer.output_logits"


def encode(prompt: str) -> list[int]:
    return ByteTokenizer().encode(prompt, bos=True)


def by_text(text: str) -> Verdict:
    """Stands in for the verifier where rewards must differ whatever the model has learned."""
    return Verdict("passed" if sum(map(ord, text)) % 2 else "failed", 0, "")


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    """Rows and folder of a finished run from the trained tiny model."""
    folder = tmp_path_factory.mktemp("rl") / "run"
    return list(rloo(SMALL, trained, output=folder, device="cpu")), folder


@pytest.fixture(scope="module")
def group(precise):
    """A sampled group of one prompt."""
    [done] = generate(precise, PROMPTS[:1], samples=6, temperature=0.35, seed=3)
    return done


# --- advantages and loss -------------------------------------------------------------------------


def test_advantages_by_hand():
    assert advantages([1.0, 0.0, 0.0, 0.0]).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages([1.0, 0.0]).tolist() == [1, -1]
    assert advantages([1.0, 0.0, -0.1]).tolist() == pytest.approx([1.05, -0.45, -0.6])


rewards = st.lists(st.sampled_from([1.0, 0.0, -0.1, -1.0]), min_size=2, max_size=32)


@given(rewards | st.lists(st.floats(-100, 100), min_size=2, max_size=32))
def test_an_advantage_is_the_reward_less_the_mean_of_the_others(rewards):
    found = advantages(rewards)
    assert found.dtype == torch.float32 and found.shape == (len(rewards),)
    for i, advantage in enumerate(found.tolist()):
        others = rewards[:i] + rewards[i + 1 :]
        assert advantage == pytest.approx(rewards[i] - mean(others), rel=1e-6, abs=1e-5)


@given(rewards)
def test_advantages_sum_to_zero_and_vanish_where_rewards_are_equal(rewards):
    assert abs(advantages(rewards).sum().item()) < 1e-5
    if len(set(rewards)) == 1:
        assert advantages(rewards).abs().max() < 1e-6


def test_the_loss_by_hand():
    """Means over tokens, whatever their number; then the mean over the group, negated."""
    log_probs = [torch.tensor([-1.0, -3.0]), torch.tensor([-5.0])]
    assert rloo_loss(log_probs, torch.tensor([1.0, -1.0])).item() == -(1 * -2 + -1 * -5) / 2


# --- schedule ------------------------------------------------------------------------------------


def test_the_main_run_takes_its_96_tasks_once_in_the_original_order():
    wanted = list(TASKS)
    random.Random(31415).shuffle(wanted)
    assert schedule(TASKS, 96, 31415) == wanted
    assert sorted(t.entry_point for t in wanted) == sorted(t.entry_point for t in TASKS)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 10**6))
def test_every_epoch_is_the_family_order_shuffled_by_its_own_seed(tasks, groups, seed):
    tasks = TASKS[:tasks]
    order = schedule(tasks, groups, seed)
    assert len(order) == groups
    for epoch in range(groups // len(tasks) + 1):
        wanted = list(tasks)
        random.Random(seed + 1009 * epoch).shuffle(wanted)
        got = order[epoch * len(tasks) : (epoch + 1) * len(tasks)]
        assert got == wanted[: len(got)]


def test_the_defaults_are_those_of_the_main_run():
    assert RLSettings() == RLSettings(
        families=("increment", "double", "even"),
        tasks_per_family=32,
        groups=96,
        group_size=16,
        temperature=0.35,
        max_new_tokens=48,
        invalid_reward=-0.1,
        seed=31415,
        milestones=(0, 24, 48, 72, 96),
        dev_tasks=4,
        dev_samples=8,
        optimizer=AdamWSettings(5e-5, (0.9, 0.999), 0.0, 1.0),
    )


# --- what learns ---------------------------------------------------------------------------------


def test_2190152_parameters_of_the_base_model_learn():
    with torch.device("meta"):
        base = LanguageModel(BASE)
    assert freeze_all_but_last_block(base) == 2_190_152
    learning = {name for name, p in base.named_parameters() if p.requires_grad}
    wanted = ("blocks.11.", "norm.weight", "embedding.weight")
    assert learning == {name for name, _ in base.named_parameters() if name.startswith(wanted)}


def test_frozen_parameters_keep_every_bit_and_the_others_move(run, trained):
    rows, folder = run
    assert any(row["updated"] for row in rows)
    before = checkpoint.load(trained).weights
    after = checkpoint.load(folder / "step_0005").weights
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed | {IDLE} == {name for name in before if name.startswith(TRAINED)}


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.35, 1.0])
def test_scores_are_the_samplers_log_probabilities(precise, temperature):
    """Prompts and completions of all lengths together, padding and batch mates included."""
    groups = generate(precise, PROMPTS, samples=3, temperature=temperature, seed=2)
    pairs = [(p, c) for p, g in zip(PROMPTS, groups, strict=True) for c in g]
    assert len({len(c.ids) for _, c in pairs}) > 5
    scored = score(
        precise,
        [p for p, _ in pairs],
        [c.ids for _, c in pairs],
        temperature=temperature,
        masked=True,
    )
    for tokens, (_, c) in zip(scored, pairs, strict=True):
        assert tokens.tolist() == pytest.approx(list(c.log_probs), abs=1e-9)


completions = st.lists(
    st.tuples(st.integers(0, 7), st.lists(st.integers(2, 259), min_size=1, max_size=30)),
    min_size=1,
    max_size=5,
)


@given(completions)
def test_batch_mates_and_padding_change_no_score(precise, pairs):
    prompts, ids = [PROMPTS[p] for p, _ in pairs], [c for _, c in pairs]
    for prompt, c, tokens in zip(prompts, ids, score(precise, prompts, ids), strict=True):
        assert tokens.shape == (len(c),)
        assert tokens.tolist() == pytest.approx(score(precise, [prompt], [c])[0].tolist(), abs=1e-9)


@pytest.mark.parametrize(("temperature", "masked"), [(1.0, False), (0.5, False), (0.5, True)])
def test_scores_are_the_log_softmax_of_the_full_forward(precise, group, temperature, masked):
    start = encode(PROMPTS[0])
    ids = [c.ids for c in group]
    scored = score(precise, PROMPTS[:1] * 6, ids, temperature=temperature, masked=masked)
    for c, tokens in zip(ids, scored, strict=True):
        logits = precise(torch.tensor([start + list(c)]))[0, len(start) - 1 : -1] / temperature
        if masked:
            logits[:, [PAD, BOS, SEP]] = -torch.inf
        wanted = logits.log_softmax(-1)[torch.arange(len(c)), list(c)]
        assert tokens.tolist() == pytest.approx(wanted.tolist(), abs=1e-9)


def test_the_gradient_is_that_of_the_whole_model_restricted_to_what_learns(trained, group):
    """Embedding at both its ends, last block and norm: as if nothing had been frozen or packed."""
    ours, whole = (load_model(trained, device="cpu").double() for _ in range(2))
    freeze_all_but_last_block(ours)
    weights = advantages([1.0, 0.0, -0.1, 0.0, 1.0, 0.0])
    rloo_loss(score(ours, PROMPTS[:1] * 6, [c.ids for c in group]), weights).backward()

    start, means = encode(PROMPTS[0]), []
    for c in group:
        logits = whole(torch.tensor([start + list(c.ids)]))[0, len(start) - 1 : -1]
        means.append(logits.log_softmax(-1)[torch.arange(len(c.ids)), list(c.ids)].mean())
    (-(weights * torch.stack(means)).sum() / 6).backward()
    for (name, p), q in zip(ours.named_parameters(), whole.named_parameters(), strict=True):
        if name.startswith(TRAINED):
            torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-7, atol=1e-10, msg=name)
            assert p.grad.abs().max() > 1e-6 or name == IDLE, name
        else:
            assert p.grad is None and q[1].grad is not None, name


# --- sampler and scorer --------------------------------------------------------------------------


def test_the_gap_is_the_largest_difference(precise, group):
    assert sampler_scorer_gap(precise, PROMPTS[0], group, 0.35) < 1e-6
    shifted = [replace(c) for c in group]
    log_probs = list(shifted[2].log_probs)
    log_probs[1] -= 0.25
    shifted[2] = replace(shifted[2], log_probs=tuple(log_probs))
    gap = sampler_scorer_gap(precise, PROMPTS[0], shifted, 0.35)
    assert gap == pytest.approx(0.25, abs=1e-9)
    assert sampler_scorer_gap(precise, PROMPTS[0], group, 1.0) > 0.01  # of another temperature


def test_a_run_whose_sampler_and_scorer_disagree_stops_before_it_learns(
    trained, tmp_path, monkeypatch
):
    def off(*arguments, masked=False, **options):
        return [t - 1e-2 * masked for t in score(*arguments, masked=masked, **options)]

    monkeypatch.setattr(module, "score", off)
    with pytest.raises(RuntimeError, match="sampler and scorer differ by 1.00e-02"):
        list(rloo(SMALL, trained, output=tmp_path / "run", device="cpu"))
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert report["status"] == "failed" and report["rows"] == []
    assert not (tmp_path / "run" / "step_0002").exists()


@pytest.mark.parametrize("temperature", [0.1, 0.35, 1.0])
def test_rounding_alone_stops_no_run(trained, temperature):
    settings = replace(
        SMALL, families=("double", "even", "reverse"), groups=1, group_size=16, milestones=()
    )
    for seed in range(6):
        once = replace(settings, seed=seed, temperature=temperature)
        [row] = rloo(once, trained, device="cpu")
        assert row["sampler_scorer_gap"] < 1e-4


def test_bf16_reports_the_gap_without_stopping_and_learns(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "verify", lambda _, text: by_text(text))
    monkeypatch.setattr(module, "sampler_scorer_gap", lambda *_: 0.01)
    settings = replace(SMALL, groups=2, milestones=())
    rows = list(rloo(settings, trained, output=tmp_path / "run", device="cpu", dtype="bf16"))
    assert rows[0]["sampler_scorer_gap"] == 0.01
    assert any(row["updated"] for row in rows)
    before, after = checkpoint.load(trained), checkpoint.load(tmp_path / "run" / "step_0002")
    assert before.hash != after.hash
    frozen = "blocks.0.attention.qkv.weight"
    assert torch.equal(before.weights[frozen], after.weights[frozen]), "rounded to bf16"


# --- a run ---------------------------------------------------------------------------------------


def test_a_row_a_group_with_what_it_says(run):
    rows, _ = run
    order = schedule(frozen_tasks("rl", 2, SMALL.families), 5, SMALL.seed)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["task"] for row in rows] == [task.entry_point for task in order]
    for row, task in zip(rows, order, strict=True):
        verdicts = [verify(task, text) for text in row["rollouts"]]
        assert row["rewards"] == [reward(v, -0.1) for v in verdicts] and len(verdicts) == 6
        assert row["passing"] == sum(v.status == "passed" for v in verdicts)
        assert row["invalid"] == sum(v.status == "invalid" for v in verdicts)
        assert row["updated"] == (len(set(row["rewards"])) > 1)
        assert (row["loss"] is None) == (row["gradient_norm"] is None) == (not row["updated"])
        assert row["tokens"] >= sum(
            len(text.encode()) for text in row["rollouts"] if "�" not in text
        )
    assert {row["updated"] for row in rows} >= {True}
    json.dumps(rows, allow_nan=False)


def test_groups_are_sampled_as_the_settings_say_and_the_loss_is_theirs(run, trained):
    """The first group again, by hand, from the weights before the first update."""
    rows, _ = run
    row, model = rows[0], load_model(trained, device="cpu")
    task = schedule(frozen_tasks("rl", 2, SMALL.families), 5, SMALL.seed)[0]
    [group] = module.complete_tasks(
        model,
        [task],
        samples=6,
        temperature=0.35,
        max_new_tokens=40,
        seed=SMALL.seed * 1_000_003,
    )
    assert [c.text for c in group] == row["rollouts"]
    assert row["tokens"] == sum(len(c.ids) for c in group)
    assert row["updated"], "the first group teaches nothing: no test"
    loss = rloo_loss(
        score(model, [task.prompt] * 6, [c.ids for c in group]), advantages(row["rewards"])
    )
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_every_group_has_random_numbers_of_its_own(trained):
    one_task = replace(SMALL, families=("increment",), tasks_per_family=1, milestones=())
    frozen = replace(one_task, optimizer=replace(RATE, learning_rate=0.0))
    rows = list(rloo(frozen, trained, device="cpu"))
    assert len({row["task"] for row in rows}) == 1
    assert len({tuple(row["rollouts"]) for row in rows}) == 5


def test_milestones_evaluate_the_weights_they_save_on_dev(run, trained):
    _, folder = run
    report = receipt.read(folder / "receipt.json")
    assert [m["step"] for m in report["milestones"]] == [0, 2, 5]
    folders = [trained, folder / "step_0002", folder / "step_0005"]
    for entry, path in zip(report["milestones"], folders, strict=True):
        result = evaluate_sampled(
            load_model(path, device="cpu"),
            frozen_tasks("dev", 1, SMALL.families),
            samples=2,
            temperature=0.35,
            max_new_tokens=40,
        )
        assert entry["dev"] == result["total"]
        assert entry["dev_by_family"] == result["by_family"]
        if entry["step"]:
            assert entry["weights"] == checkpoint.load(path).hash


def test_the_receipt_sums_up_the_rows_and_names_the_start_by_its_hash(run, trained):
    rows, folder = run
    report = receipt.read(folder / "receipt.json")
    assert (report["kind"], report["status"], report["steps"]) == ("rl", "finished", 5)
    assert report["rows"] == rows
    assert report["settings"]["start"] == checkpoint.load(trained).hash
    model = new_model(checkpoint.load(trained).config, 0)
    assert report["summary"] == {
        "updates": sum(row["updated"] for row in rows),
        "passing": sum(row["passing"] for row in rows),
        "rollouts": 30,
        "trainable_parameters": freeze_all_but_last_block(model),
        "sampler_scorer_gap": rows[0]["sampler_scorer_gap"],
    }
    assert str(trained) not in json.dumps(report)


def test_the_checkpoint_started_from_is_left_alone(run, trained):
    assert checkpoint.load(trained).hash  # every file is held to its SHA-256


def test_one_seed_gives_the_same_rollouts_and_weights(run, trained, tmp_path, one_thread):
    folders = [tmp_path / "first", tmp_path / "again"]
    texts = []
    for folder in folders:
        rows = rloo(SMALL, trained, output=folder, device="cpu", save_every=2)
        texts.append([row["rollouts"] for row in rows])
    assert texts[0] == texts[1]
    first, again = (receipt.read(folder / "receipt.json") for folder in folders)
    assert first["weights"] == again["weights"]
    other = [row["rollouts"] for row in rloo(replace(SMALL, seed=2), trained, device="cpu")]
    assert other != texts[0]


def test_an_improved_model_is_trained_once_and_then_found(run, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM_COURSE_CACHE", str(tmp_path))
    folder = improved(SMALL, trained, device="cpu")
    report = receipt.read(folder / "receipt.json")
    assert report["status"] == "finished"
    assert [row["rollouts"] for row in report["rows"]] == [row["rollouts"] for row in run[0]]

    def train_again(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "rloo", train_again)
    assert improved(SMALL, trained, device="cpu") == folder
    other = next(
        p for p in run[1].glob("step_*") if checkpoint.load(p).hash != report["settings"]["start"]
    )
    for settings, start in ((replace(SMALL, seed=2), trained), (SMALL, other)):
        with pytest.raises(AssertionError, match="trained again"):
            improved(settings, start, device="cpu")


def test_invalid_completions_get_the_reward_that_is_set(run, trained):
    rows = list(rloo(replace(SMALL, invalid_reward=-0.7), trained, device="cpu"))
    assert rows[0]["rollouts"] == run[0][0]["rollouts"]
    seen = {r for row in rows for r in row["rewards"]}
    assert seen <= {1.0, 0.0, -0.7} and -0.7 in seen


# --- with nothing to learn, and with something easy to learn -------------------------------------


def test_equal_rewards_update_nothing_and_a_warning_says_so(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "verify", lambda *_: Verdict("invalid", 0, ""))
    settings = replace(SMALL, optimizer=AdamWSettings(1e-2, weight_decay=0.5))
    with pytest.warns(UserWarning, match="no group had rewards that differ"):
        rows = list(rloo(settings, trained, output=tmp_path / "run", device="cpu"))
    for row in rows:
        assert (row["updated"], row["loss"], row["gradient_norm"]) == (False, None, None)
        assert row["rewards"] == [-0.1] * 6
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert report["weights"] == checkpoint.load(trained).hash
    assert report["summary"]["updates"] == 0


def test_a_run_that_learns_warns_of_nothing(trained):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert any(row["updated"] for row in rloo(SMALL, trained, device="cpu"))


def test_a_rewarded_byte_becomes_likelier(tiny, tmp_path, monkeypatch):
    """A bandit: one token a completion, paid for when it is a byte below 128."""
    start = tmp_path / "start"
    model = new_model(tiny, 0)
    checkpoint.save(start, model.state_dict(), tiny)

    def paid(_, text: str) -> Verdict:
        return Verdict("passed" if text.isascii() and text else "failed", 0, "")

    def chance(model) -> float:
        logits = model(torch.tensor([encode(task.prompt)]))[0, -1]
        return logits.softmax(-1)[4 : 4 + 128].sum().item()

    monkeypatch.setattr(module, "verify", paid)
    settings = replace(
        SMALL,
        groups=15,
        group_size=16,
        temperature=1.0,
        max_new_tokens=1,
        milestones=(),
        optimizer=replace(RATE, learning_rate=3e-2),
    )
    task = frozen_tasks("confirm", 1, ("square",))[0]  # a prompt it is not trained on
    before = chance(model)
    rows = list(rloo(settings, start, output=tmp_path / "run", device="cpu"))
    after = chance(load_model(tmp_path / "run" / "step_0015", device="cpu"))
    assert before == pytest.approx(128 / 260, abs=0.05)
    assert after > 0.9
    assert sum(r["passing"] for r in rows[-3:]) > sum(r["passing"] for r in rows[:3])


# --- options -------------------------------------------------------------------------------------


def expected_gradient(settings: RLSettings, logits: Tensor, rewards: list[float]) -> Tensor:
    """Mean gradient of the loss over all groups of two one-token completions, sampled exactly."""
    logits = logits.clone().requires_grad_()
    chance = sampling_log_probs(logits.detach(), settings.temperature).exp()
    total = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(len(rewards)), repeat=2):
        if (weight := chance[list(pair)].prod()) > 0:
            advantage = advantages([rewards[token] for token in pair])
            both = logits.expand(2, -1)
            total = total + weight * policy_loss(
                settings, both, torch.tensor(pair), [1, 1], advantage
            )
    return torch.autograd.grad(total, logits)[0]


def test_the_samplers_gradient_is_unbiased_and_the_plain_one_is_not():
    torch.manual_seed(0)
    logits, rewards = torch.randn(8, dtype=torch.float64), [0, 0, 1.0, 0, -0.1, 0, 1.0, 0]
    settings = RLSettings(temperature=0.5, gradient="sampler", log_prob="sum")
    free = logits.clone().requires_grad_()
    mean = (sampling_log_probs(free, 0.5).exp() * torch.tensor(rewards)).sum()
    wanted = -torch.autograd.grad(mean, free)[0]
    torch.testing.assert_close(expected_gradient(settings, logits, rewards), wanted)
    plain = expected_gradient(replace(settings, gradient="plain"), logits, rewards)
    assert (plain - wanted).abs().max() > 0.01


def test_importance_weights_are_ratios_of_whole_completions_that_sum_to_one():
    torch.manual_seed(0)
    logits, tokens, lengths = (
        torch.randn(5, 8, dtype=torch.float64),
        torch.tensor([4, 5, 6, 7, 2]),
        [3, 2],
    )
    settings = RLSettings(temperature=0.5, gradient="weighted", log_prob="sum")
    advantage = torch.tensor([0.5, -0.5])
    p = logits.log_softmax(-1)[torch.arange(5), tokens].split(lengths)
    s = sampling_log_probs(logits, 0.5)[torch.arange(5), tokens].split(lengths)
    w = torch.tensor([(a.sum() - b.sum()).exp() for a, b in zip(p, s, strict=True)])
    w = w / w.sum()
    wanted = -(w[0] * 0.5 * p[0].sum() - w[1] * 0.5 * p[1].sum())
    torch.testing.assert_close(policy_loss(settings, logits, tokens, lengths, advantage), wanted)


def test_mean_and_sum_differ_by_the_length():
    tokens = [torch.tensor([-1.0, -3.0]), torch.tensor([-2.0])]
    advantage = torch.tensor([1.0, -1.0])
    assert rloo_loss(tokens, advantage).item() == pytest.approx(-(-2 + 2) / 2)
    assert rloo_loss(tokens, advantage, "sum").item() == pytest.approx(-(-4 + 2) / 2)


def test_kl_is_that_of_the_definition_and_zero_for_equals():
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 7, dtype=torch.float64)
    p, q = a.softmax(-1), b.softmax(-1)
    wanted = (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(mean_kl(a, b), wanted)
    assert mean_kl(a, a).item() == 0


def rows_of(trained, monkeypatch, **options) -> list[dict]:
    monkeypatch.setattr(module, "verify", lambda _, text: by_text(text))
    settings = replace(SMALL, milestones=(), optimizer=replace(RATE, learning_rate=1e-2), **options)
    return list(rloo(settings, trained, device="cpu"))


def test_a_heavier_kl_penalty_holds_the_model_nearer_to_its_start(trained, monkeypatch):
    ends = [rows_of(trained, monkeypatch, kl=weight) for weight in (1e-9, 3.0)]
    loose, tight = ([row["kl"] for row in rows if row["updated"]] for rows in ends)
    assert loose[0] == tight[0] == pytest.approx(0, abs=1e-9)
    assert tight[-1] < 0.5 * loose[-1]


def test_replay_keeps_the_pretraining_loss_down(trained, tmp_path, monkeypatch):
    examples = next(pretraining_batches(64, 999))
    losses = []
    for weight in (0.0, 5.0):
        monkeypatch.setattr(module, "verify", lambda _, text: by_text(text))
        settings = replace(
            SMALL, milestones=(), replay=weight, optimizer=replace(RATE, learning_rate=1e-2)
        )
        list(rloo(settings, trained, output=tmp_path / str(weight), device="cpu"))
        model = load_model(tmp_path / str(weight) / "step_0005", device="cpu")
        losses.append(next_byte_loss(model, examples)[0].item())
    assert losses[1] < losses[0]


def test_the_share_of_tests_can_be_the_reward():
    assert reward(Verdict("failed", 2, ""), tests=3) == pytest.approx(2 / 3)
    assert reward(Verdict("invalid", 0, ""), tests=3) == -0.1
    assert reward(Verdict("passed", 3, ""), tests=3) == 1
    assert reward(Verdict("failed", 2, "")) == 0


def test_without_the_oracle_rollouts_end_at_eos_or_at_the_limit(trained, monkeypatch):
    seen = []

    def complete(*arguments, **options):
        groups = complete_tasks(*arguments, **options)
        seen.extend(c.stopped for group in groups for c in group)
        return groups

    monkeypatch.setattr(module, "complete_tasks", complete)
    rows_of(trained, monkeypatch, stop_when_valid=False)
    assert seen and "complete" not in seen


def test_eos_is_trained_where_the_oracle_stopped(trained, monkeypatch):
    scored = []

    def logits_of(model, prompts, ids):
        scored.append(ids)
        return completion_logits(model, prompts, ids)

    monkeypatch.setattr(module, "completion_logits", logits_of)
    monkeypatch.setattr(module, "sampler_scorer_gap", lambda *_: 0.0)
    counts = []
    for append in (True, False):
        scored.clear()
        rows_of(trained, monkeypatch, append_eos=append)
        counts.append([ids[-1] for ids in scored[0]].count(EOS))  # of the first, the same group
    assert counts[0] > counts[1]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"group_size": 1}, "a group needs 2"),
        ({"groups": 0}, "groups 0"),
        ({"dev_samples": 0}, "samples 0"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"temperature": float("nan")}, "temperature must be a positive number"),
        ({"temperature": float("inf")}, "temperature must be a positive number"),
        ({"seed": -1}, "seed must not be negative"),
        ({"log_prob": "max"}, "log_prob must be mean or sum"),
        ({"gradient": "true"}, "gradient must be plain, sampler, weighted"),
        ({"kl": -1.0}, "kl and replay must not be negative"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, complaint):
    with pytest.raises(ValueError, match=complaint):
        RLSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"families": ("triple",)}, "unknown family 'triple'"),
        ({"tasks_per_family": 0}, "per_family must be at least 1"),
        ({"milestones": (6,)}, "milestones must lie between 0 and 5"),
        ({"max_new_tokens": 500}, "exceed max_length 192"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    trained, tmp_path, wrong, complaint
):
    with pytest.raises(ValueError, match=complaint):
        list(rloo(replace(SMALL, **wrong), trained, output=tmp_path / "run", device="cpu"))
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="does not exist"):
        rloo(SMALL, tmp_path / "nothing", device="cpu")
    assert list(tmp_path.iterdir()) == []
