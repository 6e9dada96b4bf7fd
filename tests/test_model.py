"""The language model against the plain code, its cache, the future, padding and known numbers."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from glm_course.config import BASE, STUDY_MINI, VISION_MINI, ModelConfig
from glm_course.data.tasks import frozen_tasks, pretraining_batches
from glm_course.generate import generate
from glm_course.model import LanguageModel, parameter_counts
from glm_course.tokenizer import EOS, PAD, ByteTokenizer
from glm_course.train.optimizer import AdamWSettings, MasterAdamW
from glm_course.train.pretrain import load_model, new_model, next_byte_loss
from tests.reference import (
    forward_plain,
    generate_plain,
    optimizer_plain,
    pad_plain,
    plain_initial_weights,
    training_step_plain,
)

SMALL = ModelConfig(
    vocab_size=50,
    width=24,
    layers=4,
    heads=3,
    expert_hidden=16,
    experts=4,
    streams=3,
    window=5,
    stride=7,
    max_length=64,
    sparse_every=2,
)
few = settings(max_examples=12)


def build(config: ModelConfig, seed: int = 0, spread: float = 1.0) -> LanguageModel:
    """A model from one seed; spread > 1 makes its layers matter more than initial weights do."""
    torch.manual_seed(seed)
    model = LanguageModel(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(spread)
    return model


def draw_ids(config: ModelConfig, batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


@pytest.fixture(scope="module")
def small() -> LanguageModel:
    return build(SMALL, spread=5.0)


@pytest.fixture(scope="module")
def base() -> LanguageModel:
    return build(BASE, seed=42)


# --- known numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (BASE, 25_730_592, 9_805_344),
        (ModelConfig(vocab_size=263), 25_731_168, None),
        (STUDY_MINI, 248_412, None),
        (VISION_MINI, 42_500 - 6_720, None),  # the direct-patch baseline less its patch layer
    ],
    ids=["base", "base with image ids", "study mini", "vision mini"],
)
def test_parameter_counts_are_exact(config, total, active):
    model = LanguageModel(config)
    counts = parameter_counts(model)
    assert counts["total"] == total == sum(p.numel() for p in model.parameters())
    assert active is None or counts["active"] == active
    parts = [n for name, n in counts.items() if name not in ("total", "active")]
    assert sum(parts) == total


@pytest.mark.parametrize("config", [SMALL, STUDY_MINI, VISION_MINI], ids=["small", "study", "eye"])
@pytest.mark.parametrize("seed", [0, 11])
def test_initial_weights_are_the_originals_to_the_bit(config, seed):
    torch.manual_seed(seed)
    state, plain = LanguageModel(config).state_dict(), plain_initial_weights(config, seed)
    assert state.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(state[name], tensor), name


def test_base_has_the_originals_initial_weights(base):
    state, plain = base.state_dict(), plain_initial_weights(BASE, 42)
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())


def test_first_three_updates_give_the_originals_losses_and_gradient_norms():
    model = new_model(BASE, 42)
    optimizer = MasterAdamW(model, torch.float32, AdamWSettings())
    losses, norms = [], []
    for batch in islice(pretraining_batches(32, 42), 3):
        loss, _ = next_byte_loss(model, batch)
        loss.backward()
        norms.append(optimizer.step())
        losses.append(loss.item())
    assert losses == pytest.approx([5.5500, 4.9452, 4.6899], abs=1e-4)
    assert norms == pytest.approx([3.544, 2.869, 2.585], abs=1e-3)


# --- the plain code ------------------------------------------------------------------------------


def to_double(model: LanguageModel) -> LanguageModel:
    """fp64 weights and exact fp64 rotations; fp32 angles alone would differ by 1e-7."""
    model, config = model.double(), model.config
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    position = torch.arange(config.max_length, dtype=torch.float64)
    angle = position[:, None] * config.rope_theta**-pairs
    model.table = torch.stack((angle.cos(), angle.sin()), dim=-1)
    return model


@few
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    seed=st.integers(0, 1000),
    layers=st.integers(1, 3),
    window=st.integers(1, 9),
    stride=st.integers(1, 9),
    streams=st.integers(1, 4),
    top_k=st.integers(1, 3),
)
def test_logits_and_gradients_equal_plain(
    batch, length, seed, layers, window, stride, streams, top_k
):
    config = ModelConfig(
        vocab_size=20,
        width=12,
        layers=layers,
        heads=3,
        expert_hidden=6,
        experts=3,
        top_k=top_k,
        streams=streams,
        window=window,
        stride=stride,
        max_length=40,
        sparse_every=2,
    )
    model = to_double(build(config, seed, spread=10.0))
    state = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
    ids = draw_ids(config, batch, length, seed)
    weight = torch.randn(batch, length, 20, dtype=torch.float64)
    fast, plain = model(ids), forward_plain(state, config, ids)
    assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    (fast * weight).sum().backward()
    (plain * weight).sum().backward()
    for name, p in model.named_parameters():
        assert_close(p.grad, state[name].grad, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: n + m)


def test_base_equals_plain_on_real_text(base):
    ids = pad_plain(next(pretraining_batches(2, 42)))
    with torch.no_grad():
        plain = forward_plain(base.state_dict(), BASE, ids)
        assert_close(base(ids), plain, rtol=0, atol=1e-5)
        fast = base(ids, ids != PAD)
    assert_close(fast[ids != PAD], plain[ids != PAD], rtol=0, atol=1e-5)


def test_a_training_step_equals_the_plain_one(tiny):
    model = build(tiny, spread=8.0)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    fast, plain = MasterAdamW(model, torch.float32, AdamWSettings()), optimizer_plain(state)
    for batch in islice(pretraining_batches(4, 1), 4):
        loss, _ = next_byte_loss(model, batch)
        loss.backward()
        norm = fast.step()
        assert (loss.item(), norm) == pytest.approx(
            training_step_plain(state, tiny, plain, batch), rel=1e-5
        )
        assert norm > 1.5  # so that clipping counts


@pytest.mark.parametrize("temperature", [0, 0.35, 1.5])
def test_decoding_gives_the_ids_that_plain_decoding_gives(trained, tiny, temperature):
    model = load_model(trained, device="cpu")
    noise = torch.rand(1, 6, 30, generator=torch.Generator().manual_seed(9))[0]
    task = frozen_tasks("dev", 1)[3]
    [fast] = generate(
        model, [task.prompt], samples=6, temperature=temperature, max_new_tokens=30, seed=9
    )
    prompt = ByteTokenizer().encode(task.prompt, bos=True)
    plain = generate_plain(model.state_dict(), tiny, prompt, noise, temperature).tolist()
    assert (len({tuple(row) for row in plain}) == 1) == (temperature == 0)
    for completion, row in zip(fast, plain, strict=True):
        end = row.index(EOS) + 1 if EOS in row else len(row)
        assert list(completion.ids) == row[:end]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns, backward included."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_matrix_for_every_position_is_held_in_forward_or_backward(base):
    B, T = 4, 128
    with Largest() as largest:
        base(draw_ids(BASE, B, T)).sum().backward()
    base.zero_grad()
    assert largest.elements < B * T * BASE.heads * BASE.head_dim**2 / 2


# --- the future, padding, the cache --------------------------------------------------------------


@few
@given(st.integers(1, 64), st.integers(0, 1000), st.data())
def test_the_future_changes_no_logit(small, length, seed, data):
    cut = data.draw(st.integers(1, length))
    ids = draw_ids(SMALL, 2, length, seed)
    other = torch.cat((ids[:, :cut], draw_ids(SMALL, 2, length - cut, seed + 1)), dim=1)
    with torch.no_grad():
        assert_close(small(other)[:, :cut], small(ids)[:, :cut], rtol=0, atol=1e-6)


def test_the_future_changes_no_logit_of_base(base):
    ids = draw_ids(BASE, 1, 150)
    other = torch.cat((ids[:, :90], draw_ids(BASE, 1, 60, seed=1)), dim=1)
    with torch.no_grad():
        before, after = base(ids), base(other)
    assert_close(after[:, :90], before[:, :90], rtol=0, atol=1e-6)
    assert (after[:, 90:] - before[:, 90:]).abs().amax() > 0.01


def test_every_past_byte_within_reach_can_change_a_logit(small):
    ids = draw_ids(SMALL, 1, 40)
    others = ids.repeat(39, 1)
    position = torch.arange(39)
    others[position, position] = (others[position, position] + 1) % SMALL.vocab_size
    with torch.no_grad():
        moved = (small(others)[:, -1] - small(ids)[:, -1]).abs().amax(-1)
    assert moved.min() > 1e-6


@few
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 1000))
def test_padding_changes_nothing(small, lengths, seed):
    longest = max(lengths)
    ids = draw_ids(SMALL, len(lengths), longest, seed)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        padded = small(ids.where(mask, PAD), mask)
        assert torch.equal(padded, small(ids.where(mask, 7), mask))
        for row, length in enumerate(lengths):
            alone = small(ids[row : row + 1, :length])[0]
            assert_close(padded[row, :length], alone, rtol=0, atol=1e-5)
            assert (padded[row, length:] == 0).all()


def test_padding_gets_and_gives_no_gradient(small):
    ids = draw_ids(SMALL, 2, 20)
    mask = torch.arange(20) < torch.tensor([[20], [11]])
    grads = []
    for fill in (PAD, 7):
        x = small.embed(ids.where(mask, fill)).detach().requires_grad_()
        small.zero_grad()
        small.forward_embeddings(x, mask).square().sum().backward()
        assert (x.grad[~mask] == 0).all() and x.grad[mask].abs().min() > 0
        grads.append([p.grad.clone() for p in small.parameters() if p.grad is not None])
    small.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def steps(model: LanguageModel, ids: Tensor, cache, start: Tensor) -> Tensor:
    """Logits [B, n, V] of feeding ids[b, start[b]:start[b] + n], n as large as every row allows."""
    row = torch.arange(len(ids))
    count = ids.shape[1] - int(start.max())
    return torch.stack([model.step(ids[row, start + i], cache) for i in range(count)], dim=1)


@few
@given(st.integers(1, 63), st.integers(0, 1000))
def test_the_cache_gives_the_full_logits_at_every_position(small, prompt, seed):
    ids = draw_ids(SMALL, 2, 64, seed)
    with torch.no_grad():
        full = small(ids)
    last, cache = small.prefill(ids[:, :prompt])
    assert_close(last, full[:, prompt - 1], rtol=0, atol=1e-5)
    later = steps(small, ids, cache, torch.tensor([prompt, prompt]))
    assert_close(later, full[:, prompt:], rtol=0, atol=1e-5)


def test_the_cache_gives_the_full_logits_of_base_to_its_last_position(base):
    ids = draw_ids(BASE, 1, BASE.max_length, seed=5)
    with torch.no_grad():
        full = base(ids)
    last, cache = base.prefill(ids[:, :45])
    assert_close(last, full[:, 44], rtol=0, atol=1e-5)
    later = steps(base, ids, cache, torch.tensor([45]))
    assert_close(later, full[:, 45:], rtol=0, atol=1e-5)


@few
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 1000))
def test_prompts_of_different_lengths_decode_as_each_would_alone(small, lengths, seed):
    ids, start = draw_ids(SMALL, len(lengths), 50, seed), torch.tensor(lengths)
    with torch.no_grad():
        full = small(ids)
    longest = int(start.max())
    prompts = ids[:, :longest].where(torch.arange(longest) < start[:, None], PAD)
    last, cache = small.prefill(prompts, start)
    row = torch.arange(len(lengths))
    assert_close(last, full[row, start - 1], rtol=0, atol=1e-5)
    for i, logits in enumerate(steps(small, ids, cache, start).unbind(1)):
        assert_close(logits, full[row, start + i], rtol=0, atol=1e-5)


def test_a_group_shares_one_prompt_and_then_goes_its_own_ways(base):
    tokenizer = ByteTokenizer()
    prompts = [tokenizer.encode(t.prompt, bos=True) for t in frozen_tasks("dev", 1)[:2]]
    lengths = torch.tensor([len(p) for p in prompts])
    padded = pad_plain(prompts, int(lengths.max()))
    _, one = base.prefill(padded, lengths)
    before = [part.clone() for state in one.states for part in state]
    group, branches = (
        one.expand(3),
        draw_ids(BASE, 6, 12, seed=8),
    )  # rows 0-2 prompt 0, 3-5 prompt 1
    got = steps(base, branches, group, torch.zeros(6, dtype=torch.long))
    for row in range(6):
        prompt = torch.tensor(prompts[row // 3])
        with torch.no_grad():
            full = base(torch.cat((prompt, branches[row]))[None])[0, len(prompt) :]
        assert_close(got[row], full, rtol=0, atol=1e-5)
    assert all(
        torch.equal(a, b) for a, b in zip(before, [p for s in one.states for p in s], strict=True)
    )
    assert one.position.tolist() == lengths.tolist()


def test_selected_rows_of_a_cache_decode_as_before(small):
    ids = draw_ids(SMALL, 3, 30)
    _, cache = small.prefill(ids[:, :20])
    rows = torch.tensor([2, 0, 2])
    got = small.step(ids[rows, 20], cache.select(rows))
    assert_close(got, small.step(ids[:, 20], cache)[rows], rtol=0, atol=1e-6)


def test_the_state_of_a_sequence_does_not_grow_with_its_length(base):
    def size(length: int) -> int:
        _, cache = base.prefill(draw_ids(BASE, 1, length))
        return sum(part.numel() for state in cache.states for part in state)

    linear = 9 * BASE.heads * BASE.head_dim * (BASE.head_dim + 1)
    assert size(1) == size(40) == size(192)
    assert size(192) < linear + 3 * 2 * BASE.width * 50  # 32 recent keys, 6 anchors, some slack


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 50])
def test_an_id_outside_the_vocabulary_is_one_clear_error(small, bad):
    ids = torch.tensor([[3, bad]])
    _, cache = small.prefill(torch.tensor([[3]]))
    for call in (
        lambda: small(ids),
        lambda: small.prefill(ids),
        lambda: small.step(ids[:, 1], cache),
    ):
        with pytest.raises(ValueError, match=f"{bad}.*vocabulary"):
            call()


def test_a_sequence_beyond_the_maximum_is_one_clear_error(small):
    ids = draw_ids(SMALL, 2, SMALL.max_length + 1)
    _, cache = small.prefill(ids[:, :-1])
    for call in (
        lambda: small(ids),
        lambda: small.prefill(ids),
        lambda: small.step(ids[:, -1], cache),
    ):
        with pytest.raises(ValueError, match="max_length 64"):
            call()
