"""AdamW through master weights: torch's own in fp32, and nothing lost to rounding in bf16."""

import pytest
import torch

from glm_course.checkpoint import weights_hash
from glm_course.data.tasks import pretraining_batches
from glm_course.model import LanguageModel
from glm_course.train.optimizer import AdamWSettings, MasterAdamW
from glm_course.train.pretrain import new_model, next_byte_loss
from glm_course.train.rl import freeze_all_but_last_block

SETTINGS = AdamWSettings(learning_rate=3e-3, betas=(0.8, 0.9), weight_decay=0.2, clip=0.5)


def batch(step: int) -> list[list[int]]:
    return next(pretraining_batches(2, 0, start=step))


def gradients(model: LanguageModel, step: int) -> None:
    next_byte_loss(model, batch(step))[0].backward()


def torch_run(model: LanguageModel, steps: int, **form) -> list[float]:
    """The same training with torch's optimiser and clipping; returns the norms."""
    adamw = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.8, 0.9), weight_decay=0.2, **form
    )
    norms = []
    for step in range(steps):
        gradients(model, step)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        adamw.step()
        adamw.zero_grad()
    return norms


def our_run(model: LanguageModel, steps: int, dtype=torch.float32) -> tuple[MasterAdamW, list]:
    optimizer = MasterAdamW(model, dtype, SETTINGS)
    norms = []
    for step in range(steps):
        gradients(model, step)
        norms.append(optimizer.step())
    return optimizer, norms


def constant_run(optimizer: MasterAdamW, name: str, steps: int) -> None:
    """Steps of one gradient, constant and of one sign, on one parameter alone."""
    parameter = dict(optimizer.model.named_parameters())[name]
    for _ in range(steps):
        parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()


# --- fp32 ----------------------------------------------------------------------------------------


def test_in_fp32_it_is_torchs_fused_adamw_and_clipping_to_the_bit(tiny):
    ours, torchs = new_model(tiny, 1), new_model(tiny, 1)
    optimizer, norms = our_run(ours, 4)
    assert norms == torch_run(torchs, 4, fused=True)
    assert max(norms) > 0.5, "nothing was clipped"
    assert weights_hash(optimizer.weights()) == weights_hash(torchs.state_dict())
    assert weights_hash(ours.state_dict()) == weights_hash(torchs.state_dict())


def test_from_the_same_gradients_torchs_unfused_adamw_comes_to_the_same(tiny):
    ours, torchs = new_model(tiny, 1), new_model(tiny, 1)
    optimizer = MasterAdamW(ours, torch.float32, SETTINGS)
    adamw = torch.optim.AdamW(
        torchs.parameters(), 3e-3, (0.8, 0.9), weight_decay=0.2, fused=False, foreach=False
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for p, q in zip(ours.parameters(), torchs.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(torchs.parameters(), 0.5).item()
        assert optimizer.step() == pytest.approx(norm, rel=1e-6) and norm > 0.5
        adamw.step()
    for name, weight in torchs.state_dict().items():
        assert (ours.state_dict()[name] - weight).abs().max() < 1e-6, name


def test_the_norm_is_that_of_all_gradients_together_before_clipping(tiny):
    model = new_model(tiny, 1)
    optimizer = MasterAdamW(model, torch.float32, SETTINGS)
    gradients(model, 0)
    squares = [p.grad.double().square().sum() for p in model.parameters()]
    wanted = torch.stack(squares).sum().sqrt().item()
    assert optimizer.step() == pytest.approx(wanted, rel=1e-5)


def test_a_step_clears_the_gradients(tiny):
    for dtype in (torch.float32, torch.bfloat16):
        model = new_model(tiny, 1)
        optimizer, _ = our_run(model, 1, dtype)
        assert all(p.grad is None for p in model.parameters())
        assert all(p.grad is None for p in optimizer.master.values())


# --- frozen parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_keep_every_bit_and_have_no_state(tiny, dtype):
    model = new_model(tiny, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    freeze_all_but_last_block(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    optimizer, _ = our_run(model, 2, dtype)
    after = optimizer.weights()
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    assert len(optimizer.adamw.state) == len(trained) < len(before)


# --- bf16 ----------------------------------------------------------------------------------------


def test_in_bf16_the_model_is_the_rounded_copy_of_the_masters(tiny):
    model = new_model(tiny, 1)
    optimizer, _ = our_run(model, 3, torch.bfloat16)
    for name, p in model.named_parameters():
        master = optimizer.master[name]
        assert master.dtype == torch.float32
        assert p.dtype == (torch.bfloat16 if p.ndim >= 2 else torch.float32)
        assert torch.equal(p, master.to(p.dtype)), name
        if p.ndim >= 2:
            assert not torch.equal(p.float(), master), name


def test_small_updates_add_up_where_bf16_numbers_would_not_move(tiny):
    """bf16 numbers just below 1 lie 2^-8 apart, so a step of 1e-4 rounds back to where it was."""
    name = "blocks.0.attention.out.weight"
    model = new_model(tiny, 1)
    with torch.no_grad():
        model.get_parameter(name).fill_(1.0)
    settings = AdamWSettings(learning_rate=1e-4, weight_decay=0.0)
    optimizer = MasterAdamW(model, torch.bfloat16, settings)
    weight = model.get_parameter(name)
    constant_run(optimizer, name, 5)
    assert torch.all(weight == 1), "one step is too small to see"
    constant_run(optimizer, name, 95)
    assert optimizer.master[name].mean().item() == pytest.approx(1 - 100e-4, abs=1e-4)
    assert torch.all((weight.float() - 0.99).abs() < 2**-8)

    direct = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    adamw = torch.optim.AdamW([direct], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        direct.grad = torch.full_like(direct, 0.01)
        adamw.step()
    assert torch.all(direct == 1), "without masters every step is lost"


def test_vectors_stay_fp32_and_still_learn_in_bf16(tiny):
    model = new_model(tiny, 1)
    before = model.norm.weight.detach().clone()
    our_run(model, 1, torch.bfloat16)
    assert model.norm.weight.dtype == torch.float32
    assert not torch.equal(model.norm.weight, before)


# --- weights and state ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_models_in_name_and_order_and_fp32(tiny, dtype):
    model = new_model(tiny, 1)
    wanted = {name: p.shape for name, p in model.state_dict().items()}
    weights = MasterAdamW(model, dtype, SETTINGS).weights()
    assert {name: p.shape for name, p in weights.items()} == wanted
    assert list(weights) == list(wanted)
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in weights.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_optimizer_goes_on_to_the_same_bits(tiny, dtype, one_thread):
    whole, _ = our_run(new_model(tiny, 1), 4, dtype)
    half, _ = our_run(new_model(tiny, 1), 2, dtype)
    weights = {name: p.clone() for name, p in half.weights().items()}
    other = MasterAdamW(new_model(tiny, 2), dtype, SETTINGS)
    other.load(weights, half.adamw.state_dict())
    for step in (2, 3):
        gradients(other.model, step)
        other.step()
    assert weights_hash(other.weights()) == weights_hash(whole.weights())
    assert weights_hash(other.model.state_dict()) == weights_hash(whole.model.state_dict())


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": -1e-4}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}]
)
def test_hyperparameters_that_are_none_are_refused(tiny, wrong):
    with pytest.raises(ValueError, match="Invalid"):
        MasterAdamW(new_model(tiny, 1), torch.float32, AdamWSettings(**wrong))


def test_warm_up_raises_the_rate_in_a_line_and_survives_saving(tiny):
    settings = AdamWSettings(learning_rate=1e-3, warmup=4)
    optimizer, rates = MasterAdamW(new_model(tiny, 1), torch.float32, settings), []
    for step in range(6):
        if step == 2:
            saved = optimizer.weights(), optimizer.adamw.state_dict()
            optimizer = MasterAdamW(new_model(tiny, 2), torch.float32, settings)
            optimizer.load(*saved)
        gradients(optimizer.model, step)
        optimizer.step()
        rates.append(optimizer.adamw.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("decay_all", [True, False])
def test_decay_of_matrices_leaves_vectors_and_the_embedding(tiny, decay_all):
    model = new_model(tiny, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = AdamWSettings(learning_rate=0.1, weight_decay=0.5, decay_all=decay_all)
    optimizer = MasterAdamW(model, torch.float32, settings)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # so that decay alone moves anything
    optimizer.step()
    for name, p in model.named_parameters():
        decayed = decay_all or (p.ndim > 1 and name != "embedding.weight")
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if decayed else 1))


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ValueError, match="warmup must not be negative"):
        AdamWSettings(warmup=-1)
