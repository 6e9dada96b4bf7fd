"""Pretraining: the loss, the data it is taken on, the weights that come of it, and their cache."""

import math
import random
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from glm_course import checkpoint, receipt
from glm_course.checkpoint import CheckpointError, weights_hash
from glm_course.config import DENSE_CONTROL
from glm_course.data.batches import pad_behind, shifted
from glm_course.data.tasks import pretraining_batches
from glm_course.tokenizer import PAD
from glm_course.train import pretrain as module
from glm_course.train.optimizer import AdamWSettings
from glm_course.train.pretrain import (
    PretrainSettings,
    load_balance,
    load_model,
    new_model,
    next_byte_loss,
    pretrain,
    pretrained,
)
from tests.reference import optimizer_plain, plain_initial_weights, training_step_plain

CPU = torch.device("cpu")
rows_of_ids = st.lists(
    st.lists(st.integers(0, 259), min_size=2, max_size=12), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def small(tiny) -> PretrainSettings:
    return PretrainSettings(model=tiny, steps=4, batch_size=3, seed=5, milestones=(2, 4))


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Rows and folder of a finished run."""
    folder = tmp_path_factory.mktemp("pretrain") / "run"
    return list(pretrain(small, output=folder, device="cpu")), folder


def examples(step: int = 0, batch_size: int = 3) -> list[list[int]]:
    return next(pretraining_batches(batch_size, 5, start=step))


# --- batches -------------------------------------------------------------------------------------


@given(rows_of_ids)
def test_padding_stands_behind_the_tokens_and_nowhere_else(rows):
    ids, lengths = pad_behind(rows, CPU)
    assert ids.dtype == torch.int64 and ids.shape == (len(rows), max(map(len, rows)))
    assert lengths.tolist() == [len(row) for row in rows]
    assert [row[:n] for row, n in zip(ids.tolist(), lengths, strict=True)] == rows
    assert all(i == PAD for row, n in zip(ids.tolist(), lengths, strict=True) for i in row[n:])


@given(rows_of_ids)
def test_labels_are_the_inputs_one_byte_later_and_the_mask_holds_each_once(rows):
    inputs, labels, mask = shifted(rows, CPU)
    pairs = [(a, b) for row in rows for a, b in zip(row, row[1:], strict=False)]
    assert list(zip(inputs[mask].tolist(), labels[mask].tolist(), strict=True)) == pairs
    assert inputs.shape == labels.shape == mask.shape
    assert mask.dtype == torch.bool and mask.sum(1).tolist() == [len(row) - 1 for row in rows]


# --- loss ----------------------------------------------------------------------------------------


def alone(model, ids: list[int]) -> torch.Tensor:
    """Summed loss of one example without padding."""
    logits = model(torch.tensor([ids[:-1]]))[0]
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")


def test_the_loss_is_the_mean_over_all_bytes_of_examples_taken_alone(model):
    batch = examples(batch_size=6) + [[1, 2], [1, 70, 71, 2]]
    assert len({len(ids) for ids in batch}) > 3
    loss, tokens = next_byte_loss(model, batch)
    assert tokens == sum(len(ids) - 1 for ids in batch)
    wanted = sum(alone(model, ids) for ids in batch) / tokens
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)


def test_the_gradient_is_that_of_examples_taken_alone(tiny):
    padded, single, batch = new_model(tiny, 0), new_model(tiny, 0), examples()
    next_byte_loss(padded, batch)[0].backward()
    (sum(alone(single, ids) for ids in batch) / sum(len(ids) - 1 for ids in batch)).backward()
    for (name, p), q in zip(padded.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_bos_is_read_and_never_predicted_while_eos_is_predicted(model):
    loss, tokens = next_byte_loss(model, [[1, 50, 2]])
    assert tokens == 2
    log_p = model(torch.tensor([[1, 50]]))[0].log_softmax(-1)
    assert loss.item() == pytest.approx(-(log_p[0, 50] + log_p[1, 2]).item() / 2, abs=1e-6)


def test_three_steps_are_those_of_the_plain_model_and_optimizer(tiny):
    state = plain_initial_weights(tiny, 5)
    optimizer, stream = optimizer_plain(state), pretraining_batches(3, 5)
    plain = [training_step_plain(state, tiny, optimizer, next(stream)) for _ in range(3)]
    settings = PretrainSettings(model=tiny, steps=3, batch_size=3, seed=5, milestones=())
    ours = [(row["loss"], row["gradient_norm"]) for row in pretrain(settings, device="cpu")]
    for a, b in zip(ours, plain, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


# --- seeds ---------------------------------------------------------------------------------------


def final_weights(settings: PretrainSettings, folder, **how) -> str:
    for _ in pretrain(settings, output=folder, device="cpu", **how):
        pass
    return receipt.read(folder / "receipt.json")["weights"]


def test_one_seed_gives_the_same_weights_to_the_byte(small, run, tmp_path, one_thread):
    first, again, other = (
        final_weights(replace(small, seed=seed), tmp_path / name)
        for seed, name in ((5, "first"), (5, "again"), (6, "other"))
    )
    assert first == again != other
    files = [tmp_path / name / "step_0004" / "model.safetensors" for name in ("first", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_how_often_a_run_saves_changes_no_weight(small, tmp_path, dtype, one_thread):
    often = final_weights(small, tmp_path / "often", save_every=1, dtype=dtype)
    never = final_weights(small, tmp_path / "never", save_every=100, dtype=dtype)
    unwatched = replace(small, milestones=())
    assert often == never == final_weights(unwatched, tmp_path / "unwatched", dtype=dtype)


def test_initial_weights_depend_on_the_seed_alone(tiny):
    wanted = weights_hash(new_model(tiny, 7).state_dict())
    torch.manual_seed(123)
    torch.rand(17)
    random.seed(9)
    assert weights_hash(new_model(tiny, 7).state_dict()) == wanted
    assert weights_hash(new_model(tiny, 8).state_dict()) != wanted
    assert weights_hash(plain_initial_weights(tiny, 7)) == wanted


def test_the_global_random_states_are_left_alone(small):
    torch.manual_seed(4)
    states = torch.get_rng_state(), random.getstate()
    for _ in pretrain(small, device="cpu"):
        pass
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


# --- rows and receipt ----------------------------------------------------------------------------


def test_a_row_a_step_with_what_it_says(run, small):
    rows, _ = run
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for i, row in enumerate(rows):
        assert set(row) == {"step", "loss", "gradient_norm", "tokens", "load_balance", "seconds"}
        assert row["tokens"] == sum(len(ids) - 1 for ids in examples(i))
        assert 1 <= row["load_balance"] <= small.model.experts
        assert row["gradient_norm"] > 0 and row["seconds"] > 0
    assert rows[0]["loss"] == pytest.approx(math.log(260), abs=0.1)


def test_the_loss_and_the_norm_are_those_before_the_update(run, small):
    model = new_model(small.model, small.seed)
    loss, _ = next_byte_loss(model, examples())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    rows, _ = run
    assert rows[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert rows[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_the_receipt_holds_rows_settings_sums_and_hashes(run, small):
    rows, folder = run
    report = receipt.read(folder / "receipt.json")
    assert (report["kind"], report["status"], report["steps"]) == ("pretrain", "finished", 4)
    assert report["rows"] == rows
    assert report["settings"]["model"] == asdict(small.model)
    assert report["settings"]["milestones"] == [2, 4]
    assert report["environment"]["dtype"] == "torch.float32"
    assert report["summary"]["tokens"] == sum(row["tokens"] for row in rows)
    assert report["summary"]["final_loss"] == rows[-1]["loss"]
    assert report["seconds"] >= sum(row["seconds"] for row in rows) - 0.01
    assert report["peak_memory_bytes"] > 2**20


def test_the_data_hash_is_of_the_batches_trained_on_in_their_order(small, tmp_path, monkeypatch):
    seen = []
    loss = module.next_byte_loss
    monkeypatch.setattr(module, "next_byte_loss", lambda m, b: seen.append(b) or loss(m, b))
    final_weights(small, tmp_path / "run")
    assert seen == [examples(i) for i in range(4)]
    summary = receipt.read(tmp_path / "run" / "receipt.json")["summary"]
    assert summary["data_hash"] == receipt.data_hash(seen) != receipt.data_hash(seen[::-1])


def test_milestones_are_checkpoints_with_the_hashes_the_receipt_gives(run, small):
    _, folder = run
    report = receipt.read(folder / "receipt.json")
    assert {child.name for child in folder.iterdir()} == {"receipt.json", "step_0002", "step_0004"}
    for entry, name in zip(report["milestones"], ("step_0002", "step_0004"), strict=True):
        saved = checkpoint.load(folder / name, small.model)
        assert saved.hash == entry["weights"]
        assert entry["step"] == int(name[-4:])
        loaded = load_model(folder / name, device="cpu")
        assert weights_hash(loaded.state_dict()) == saved.hash
    assert report["milestones"][1]["weights"] == report["weights"]
    assert report["milestones"][0]["weights"] != report["weights"]


def test_without_an_output_nothing_is_written(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(list(pretrain(small, device="cpu"))) == 4
    assert list(tmp_path.iterdir()) == []


def test_load_balance_is_1_when_even_and_the_number_of_experts_when_one_does_all(tiny):
    model = new_model(tiny, 0)
    for block in model.blocks:
        block.moe.load = torch.tensor([5, 5, 5, 5])
    assert load_balance(model) == pytest.approx(1)
    model.blocks[0].moe.load = torch.tensor([0, 20, 0, 0])
    assert load_balance(model) == pytest.approx((4 + 1) / 2)


# --- balancing -----------------------------------------------------------------------------------


def balances(settings: PretrainSettings) -> list[float]:
    return [row["load_balance"] for row in pretrain(settings, device="cpu")]


def test_balance_loss_and_selection_bias_even_out_the_load(tiny):
    plain = PretrainSettings(model=tiny, steps=40, batch_size=8, seed=3, milestones=())
    biased = replace(tiny, selection_bias=True)
    alone = balances(plain)[-1]
    assert balances(replace(plain, balance_loss=0.1))[-1] < alone - 0.1
    assert balances(replace(plain, model=biased, bias_rate=0.02))[-1] < alone - 0.1


def test_a_run_with_a_selection_bias_saves_it_and_resumes_to_the_same_weights(tiny, tmp_path):
    settings = PretrainSettings(
        model=replace(tiny, selection_bias=True),
        steps=3,
        batch_size=2,
        milestones=(3,),
        bias_rate=0.1,
    )
    list(pretrain(settings, output=tmp_path / "whole", device="cpu"))
    run = pretrain(settings, output=tmp_path / "cut", device="cpu")
    next(run), next(run)
    run.close()
    list(pretrain(settings, output=tmp_path / "cut", device="cpu", resume=True))
    whole, cut = (checkpoint.load(tmp_path / name / "step_0003") for name in ("whole", "cut"))
    assert whole.hash == cut.hash
    assert whole.weights["blocks.0.moe.bias"].abs().max() > 0
    model = load_model(tmp_path / "whole" / "step_0003", device="cpu")
    assert torch.equal(model.blocks[0].moe.bias, whole.weights["blocks.0.moe.bias"])


def test_balancing_that_cannot_be_is_refused(tiny):
    with pytest.raises(ValueError, match="go together"):
        PretrainSettings(model=tiny, bias_rate=0.1)
    with pytest.raises(ValueError, match="go together"):
        PretrainSettings(model=replace(tiny, selection_bias=True))
    with pytest.raises(ValueError, match="must not be negative"):
        PretrainSettings(model=tiny, balance_loss=-1.0)
    with pytest.raises(ValueError, match="needs routed experts"):
        PretrainSettings(model=DENSE_CONTROL, balance_loss=0.1)


def test_a_model_without_routed_experts_pretrains_and_reports_even_load(tiny):
    dense = replace(tiny, experts=0, top_k=0, sparse_every=1)
    rows = list(
        pretrain(PretrainSettings(model=dense, steps=12, batch_size=4, milestones=()), device="cpu")
    )
    assert {row["load_balance"] for row in rows} == {1.0}
    assert rows[-1]["loss"] < rows[0]["loss"]


# --- bf16 ----------------------------------------------------------------------------------------


def test_a_bf16_run_learns_and_saves_weights_that_bf16_cannot_hold(tiny, tmp_path):
    settings = PretrainSettings(
        model=tiny, steps=25, batch_size=4, milestones=(), optimizer=AdamWSettings(1e-2)
    )
    rows = list(pretrain(settings, output=tmp_path / "run", device="cpu", dtype="bf16"))
    assert rows[0]["loss"] == pytest.approx(math.log(260), abs=0.1)
    assert rows[-1]["loss"] < 4 < rows[0]["loss"]
    report = receipt.read(tmp_path / "run" / "receipt.json")
    assert report["environment"]["dtype"] == "torch.bfloat16"
    weights = checkpoint.load(tmp_path / "run" / "step_0025").weights
    for name, w in weights.items():
        assert w.dtype == torch.float32
        if w.ndim >= 2:
            assert not torch.equal(w, w.bfloat16().float()), name


def test_bf16_starts_like_fp32(small):
    losses = [next(pretrain(small, device="cpu", dtype=d))["loss"] for d in ("fp32", "bf16")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch_size": 0}, {"seed": -1}])
def test_settings_that_cannot_be_are_refused(small, wrong):
    with pytest.raises(ValueError, match="steps and batch of at least 1|seed must not be negative"):
        replace(small, **wrong)


@pytest.mark.parametrize("milestones", [(5,), (-1, 4)])
def test_milestones_outside_the_run_are_refused_before_anything_is_written(
    small, tmp_path, milestones
):
    settings = replace(small, milestones=milestones)
    with pytest.raises(ValueError, match="milestones must lie between 0 and 4"):
        list(pretrain(settings, output=tmp_path / "run", device="cpu"))
    assert list(tmp_path.iterdir()) == []


def test_examples_too_long_for_the_model_are_refused_before_anything_is_written(small, tmp_path):
    settings = replace(small, model=replace(small.model, max_length=64))
    with pytest.raises(ValueError, match="max_length 64"):
        list(pretrain(settings, output=tmp_path / "run", device="cpu"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_loss_is_no_number_stops_and_says_so(small, tmp_path, monkeypatch):
    loss = module.next_byte_loss

    def broken(model, batch):
        mean, tokens = loss(model, batch)
        return mean * math.nan, tokens

    monkeypatch.setattr(module, "next_byte_loss", broken)
    with pytest.raises(ValueError, match="nan"):
        list(pretrain(small, output=tmp_path / "run", device="cpu", save_every=1))
    assert receipt.read(tmp_path / "run" / "receipt.json")["status"] == "failed"


# --- loading and the cache -----------------------------------------------------------------------


def test_a_checkpoint_of_another_configuration_is_refused(run, small):
    _, folder = run
    with pytest.raises(CheckpointError, match="window 32, where 16 is asked for"):
        load_model(folder / "step_0002", device="cpu", config=replace(small.model, window=16))
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(folder / "step_0003", device="cpu")


def test_a_pretrained_model_is_trained_once_and_then_found(small, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM_COURSE_CACHE", str(tmp_path))
    folder = pretrained(small, device="cpu")
    report = receipt.read(folder / "receipt.json")
    assert report["status"] == "finished" and (folder / "step_0002").is_dir()

    def train_again(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "pretrain", train_again)
    assert pretrained(small, device="cpu") == folder
    for other, dtype in ((replace(small, steps=5, milestones=()), "fp32"), (small, "bf16")):
        with pytest.raises(AssertionError, match="trained again"):
            pretrained(other, device="cpu", dtype=dtype)
    monkeypatch.setattr(module.receipt, "code_hash", lambda *_: "other code")
    with pytest.raises(AssertionError, match="trained again"):
        pretrained(small, device="cpu")
