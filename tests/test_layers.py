"""Every layer against the plain code, against itself in its other forms, and against the future."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from glm_course.config import BASE, ModelConfig
from glm_course.layers import linear_attention as linear
from glm_course.layers import moe as moe_module
from glm_course.layers import sparse_attention as sparse
from glm_course.layers.moe import (
    ROWS,
    MixtureOfExperts,
    balance_loss,
    pad_groups,
    route,
    swiglu,
    update_bias,
)
from glm_course.layers.norm import RMSNorm
from glm_course.layers.rotary import rotary_table, rotate
from glm_course.layers.streams import StreamMixer
from tests.reference import (
    attended_positions,
    linear_attention_plain,
    moe_plain,
    rms_norm_plain,
    rotate_plain,
    sparse_attention_plain,
)

SHAPES = st.tuples(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 3), st.sampled_from([2, 4, 6])
)  # B, T, H, D
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=40)


def draw_qkv(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """q, k, v and a weight for the output: four fp64 tensors of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]


def output_and_gradients(function, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """function(*inputs), then the gradient of (output * weight).sum() for each input."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), inputs)]


def assert_same(fast: list[Tensor], plain: list[Tensor]) -> None:
    for a, b in zip(fast, plain, strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention by `step`, one position after another."""
    B, T, H, D = q.shape
    S, z = q.new_zeros(B, H, D, D), q.new_zeros(B, H, D)
    return torch.stack([linear.step(q[:, t], k[:, t], v[:, t], S, z) for t in range(T)], dim=1)


@few
@given(SHAPES, SEEDS, st.integers(1, 17))
def test_linear_forms_equal_plain_in_output_and_gradients(shape, seed, chunk):
    *qkv, weight = draw_qkv(shape, seed)
    plain = output_and_gradients(linear_attention_plain, qkv, weight)
    assert_same(output_and_gradients(linear.parallel, qkv, weight), plain)
    assert_same(
        output_and_gradients(lambda *x: linear.chunked(*x, chunk=chunk), qkv, weight), plain
    )
    assert_same([recurrent(*qkv)], plain[:1])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200, 256, 300])
def test_linear_attention_equals_plain_on_both_sides_of_its_switches(length):
    *qkv, weight = draw_qkv((1, length, 2, 4), length)
    fast = output_and_gradients(linear.linear_attention, qkv, weight)
    assert_same(fast, output_and_gradients(linear_attention_plain, qkv, weight))


def test_linear_attention_clamps_small_denominators_like_plain():
    q, k, v, weight = draw_qkv((2, 20, 2, 4), 3)
    qkv = [q - 8, k - 8, v]  # features near e^-8: sums cross 1e-6 within the sequence
    features = [torch.nn.functional.elu(x) + 1 for x in qkv[:2]]
    total = torch.einsum("bthd,bthd->bth", features[0], features[1].cumsum(1))
    assert (total < 1e-6).any() and (total > 1e-6).any()
    plain = output_and_gradients(linear_attention_plain, qkv, weight)
    for form in (linear.parallel, lambda *x: linear.chunked(*x, chunk=8)):
        assert_same(output_and_gradients(form, qkv, weight), plain)


@few
@given(SHAPES, SEEDS, st.integers(1, 12), st.integers(1, 12), st.integers(1, 24))
def test_sparse_forms_equal_plain_in_output_and_gradients(shape, seed, window, stride, span):
    *qkv, weight = draw_qkv(shape, seed)
    plain = output_and_gradients(lambda *x: sparse_attention_plain(*x, window, stride), qkv, weight)
    for form in (sparse.masked, sparse.blocked):
        with mock.patch.object(sparse, "SPAN", span):
            fast = output_and_gradients(lambda *x, f=form: f(*x, window, stride), qkv, weight)
        assert_same(fast, plain)


@pytest.mark.parametrize("length", [255, 256, 257, 300])
def test_sparse_attention_equals_plain_on_both_sides_of_its_switch(length):
    *qkv, weight = draw_qkv((1, length, 2, 4), length)
    fast = output_and_gradients(lambda *x: sparse.sparse_attention(*x, 32, 32), qkv, weight)
    plain = output_and_gradients(lambda *x: sparse_attention_plain(*x, 32, 32), qkv, weight)
    assert_same(fast, plain)


@few
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12))
def test_reach_is_the_listed_positions(length, window, stride):
    mask = sparse.reach(length, window, stride)
    for t in range(length):
        assert mask[t].nonzero().flatten().tolist() == attended_positions(t, window, stride)


@few
@given(SHAPES, SEEDS, st.data())
def test_no_attention_form_looks_ahead(shape, seed, data):
    cut = data.draw(st.integers(0, shape[1] - 1))
    *qkv, _ = draw_qkv(shape, seed)
    *other, _ = draw_qkv(shape, seed + 1)
    changed = [x.clone() for x in qkv]
    for x, y in zip(changed, other, strict=True):
        x[:, cut + 1 :] = 5 * y[:, cut + 1 :]
    for form in (
        linear.parallel,
        lambda *x: linear.chunked(*x, chunk=8),
        lambda *x: sparse.masked(*x, 5, 7),
        lambda *x: sparse.blocked(*x, 5, 7),
    ):
        before, after = form(*qkv)[:, : cut + 1], form(*changed)[:, : cut + 1]
        assert_close(after, before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", [linear.LinearAttention, sparse.SparseAttention])
def test_stepping_from_prompts_of_different_lengths_equals_the_whole_sequence(layer):
    config = ModelConfig(width=24, heads=3, window=5, stride=7, max_length=40)
    torch.manual_seed(0)
    attention, table = layer(config), rotary_table(40, config.head_dim)
    x = torch.randn(4, 40, 24)
    lengths = torch.tensor([1, 6, 13, 20])
    with torch.no_grad():
        whole = attention(x, table)
        prompts, state = attention.prefill(x[:, :20], table[:20], lengths)
        for row, length in enumerate(lengths):
            assert_close(prompts[row, :length], whole[row, :length], rtol=0, atol=1e-6)
        row = torch.arange(4)
        for i in range(20):
            at = lengths + i
            y = attention.step(x[row, at], table[at], state, at)
            assert_close(y, whole[row, at], rtol=0, atol=1e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns, backward included."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def largest_tensor(attend, length: int) -> int:
    q, k, v = (torch.randn(1, length, 2, 32, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        attend(q, k, v).sum().backward()
    return largest.elements


def test_attention_never_holds_a_matrix_for_every_position():
    one_matrix_each = 32  # [B, T, H, D, D] is D times as large as q
    for length in (100, 2048):
        q_size = length * 2 * 32
        assert largest_tensor(linear_attention_plain, length) == one_matrix_each * q_size
        assert largest_tensor(linear.linear_attention, length) <= 4 * q_size
        assert largest_tensor(lambda *x: sparse.sparse_attention(*x, 32, 32), length) <= 8 * q_size


@few
@given(
    st.integers(1, 30), st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), SEEDS, st.data()
)
def test_experts_equal_plain_in_output_and_gradients(tokens, half, hidden, experts, seed, data):
    top_k = data.draw(st.integers(1, experts))
    config = ModelConfig(
        width=2 * half, heads=1, expert_hidden=hidden, experts=experts, top_k=top_k
    )
    torch.manual_seed(seed % 2**31)
    moe = MixtureOfExperts(config).double()
    x, weight = torch.randn(2, tokens, 2 * half, dtype=torch.float64)
    names = ["router.weight", "up", "down", "shared_up.weight", "shared_down.weight"]
    weights = [moe.get_parameter(name) for name in names]

    def fast(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(moe, dict(zip(names, weights, strict=True)), x)

    plain = output_and_gradients(lambda *a: moe_plain(*a, top_k), [x, *weights], weight)
    assert_same(output_and_gradients(fast, [x, *weights], weight), plain)
    assert moe.load.sum() == tokens * top_k
    assert moe.load.max() <= tokens


def test_a_token_goes_through_the_experts_alone():
    torch.manual_seed(0)
    moe = MixtureOfExperts(ModelConfig(width=12, heads=2, expert_hidden=8, experts=5)).double()
    x = torch.randn(9, 12, dtype=torch.float64)
    together = moe(x)
    alone = torch.cat([moe(row[None]) for row in x])
    assert_close(together, alone, rtol=0, atol=1e-12)


def test_with_one_expert_a_token_the_router_gets_no_gradient():
    torch.manual_seed(0)
    moe = MixtureOfExperts(ModelConfig(width=12, heads=2, expert_hidden=8, experts=4, top_k=1))
    moe(torch.randn(9, 12)).square().sum().backward()
    assert moe.router.weight.grad.abs().max() == 0
    assert moe.up.grad.abs().max() > 0


@few
@given(st.integers(0, 7), st.integers(1, 9), SEEDS)
def test_swiglu_equals_its_formula_in_output_and_gradients(rows, hidden, seed):
    *_, x, weight = draw_qkv((rows, 2 * hidden), seed)

    def formula(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return gate / (1 + (-gate).exp()) * value

    weight = weight[:, :hidden]
    fast = output_and_gradients(swiglu, [x], weight)
    assert_same(fast, output_and_gradients(formula, [x], weight))


def test_a_selection_bias_changes_the_choice_and_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    gates, experts = route(logits, 2, bias=torch.tensor([0.0, -5.0, 0.0, 0.0]))
    assert experts.tolist() == [[0, 2]]
    assert_close(gates, torch.tensor([[2.0, 0.0]]).softmax(-1))
    for ours, plain in zip(route(logits, 2, torch.zeros(4)), route(logits, 2), strict=True):
        assert_close(ours, plain)


@few
@given(st.integers(1, 30), st.integers(1, 6), SEEDS, st.data())
def test_balance_loss_is_1_when_even_and_its_gradient_lowers_the_busiest_expert(
    tokens, experts, seed, data
):
    top_k = data.draw(st.integers(1, experts))
    even = torch.zeros(tokens, experts, dtype=torch.float64)
    assert balance_loss(even, top_k).item() == pytest.approx(1)
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    loss = balance_loss(logits, top_k)
    share = torch.zeros(experts)
    for row in logits:
        share[row.topk(top_k).indices] += 1 / (tokens * top_k)
    assert_close(loss, experts * (share * logits.softmax(-1).mean(0)).sum())
    loss.backward()
    lower = logits.detach() - 1e-3 * logits.grad
    after = (share * lower.softmax(-1).mean(0)).sum()
    assert after <= (share * logits.softmax(-1).mean(0)).sum() + 1e-7


def test_the_bias_rises_for_idle_experts_and_falls_for_busy_ones():
    bias = torch.tensor([0.5, 0.0, 0.0])
    update_bias(bias, torch.tensor([10, 5, 0]), 0.01)
    assert_close(bias, torch.tensor([0.49, 0.0, 0.01]))


@few
@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), SEEDS)
def test_padded_groups_hold_the_same_rows_and_end_at_multiples(load, seed):
    load = torch.tensor(load)
    source = torch.randint(50, (int(load.sum()),), generator=torch.Generator().manual_seed(seed))
    padded, row, sizes = pad_groups(source, load)
    assert (sizes % ROWS == 0).all() and (sizes - load < ROWS).all() and len(padded) == sizes.sum()
    assert torch.equal(padded[row], source)
    expert = torch.arange(len(load)).repeat_interleave(sizes)
    assert torch.equal(expert[row], torch.arange(len(load)).repeat_interleave(load))


def test_padding_the_groups_in_bf16_changes_neither_output_nor_gradients(monkeypatch):
    torch.manual_seed(0)
    config = ModelConfig(width=32, heads=2, expert_hidden=16, experts=4)
    moe = MixtureOfExperts(config).bfloat16()
    x, weight = torch.randn(2, 400, 32).bfloat16()
    names = ["router.weight", "up", "down", "shared_up.weight", "shared_down.weight"]

    def results() -> list[Tensor]:
        def run(x: Tensor, *weights: Tensor) -> Tensor:
            return torch.func.functional_call(moe, dict(zip(names, weights, strict=True)), x)

        return output_and_gradients(run, [x, *map(moe.get_parameter, names)], weight)

    padded = results()
    calls = mock.Mock(side_effect=pad_groups)
    monkeypatch.setattr(moe_module, "pad_groups", calls)
    results()
    assert calls.called
    monkeypatch.setattr(moe_module, "ROWS", 1000)  # too few tokens to be padded
    for one, other in zip(padded, results(), strict=True):
        assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_without_routed_experts_the_layer_is_the_shared_mlp():
    torch.manual_seed(0)
    moe = MixtureOfExperts(ModelConfig(width=12, heads=2, expert_hidden=8, experts=0, top_k=0))
    x = torch.randn(9, 12)
    gate, value = moe.shared_up(x).chunk(2, -1)
    assert_close(moe(x), moe.shared_down(gate * gate.sigmoid() * value))
    assert [name for name, _ in moe.named_parameters()] == [
        "shared_up.weight",
        "shared_down.weight",
    ]


def test_router_logits_are_kept_on_request():
    torch.manual_seed(0)
    moe = MixtureOfExperts(ModelConfig(width=12, heads=2, expert_hidden=8, experts=5))
    x = torch.randn(9, 12)
    moe(x)
    assert moe.logits is None
    moe.keep_logits = True
    moe(x)
    balance_loss(moe.logits, moe.top_k).backward()
    assert moe.router.weight.grad.abs().max() > 0


@few
@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 8), SEEDS)
def test_rotation_equals_plain(length, heads, pairs, seed):
    *_, x, weight = draw_qkv((2, length, heads, 2 * pairs), seed)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * 10_000.0 ** -(
        torch.arange(0, 2 * pairs, 2, dtype=torch.float64) / (2 * pairs)
    )
    exact = torch.polar(torch.ones_like(angle), angle)
    assert_same(
        output_and_gradients(lambda x: rotate(x, exact), [x], weight),
        output_and_gradients(lambda x: rotate_plain(x, 10_000.0), [x], weight),
    )
    # fp32 angles: rounding of an angle below 64 radians is below 4e-6
    assert_close(rotary_table(length, 2 * pairs).to(exact.dtype), exact, rtol=0, atol=1e-5)


def test_rotated_products_depend_on_distance_alone():
    q, k, *_ = draw_qkv((1, 1, 1, 16), 5)
    table = rotary_table(60, 16).to(torch.complex128)
    q, k = (rotate(x.expand(1, 60, 1, 16), table)[0, :, 0] for x in (q, k))  # [60, 16]
    products = q @ k.T
    for distance in range(-59, 60):
        diagonal = products.diagonal(distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    assert products.std() > 0.1


def test_an_odd_head_cannot_be_rotated():
    with pytest.raises(ValueError, match="even"):
        rotary_table(4, 5)


@few
@given(st.integers(1, 5), st.integers(1, 9), SEEDS)
def test_norm_equals_plain(rows, width, seed):
    x, scale, weight, _ = draw_qkv((rows, width), seed)
    norm = RMSNorm(width, 1e-6).double()

    def fast(x: Tensor, scale: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": scale}, x)

    assert_same(
        output_and_gradients(fast, [x, scale[0]], weight),
        output_and_gradients(lambda x, s: rms_norm_plain(x, s, 1e-6), [x, scale[0]], weight),
    )


def test_streams_start_as_stated_and_share_out_one_unit():
    mixer = StreamMixer(4)
    assert_close(mixer.input_logits.detach(), torch.tensor([0.1, 1 / 30, -1 / 30, -0.1]))
    assert_close(mixer.output_logits.detach(), torch.tensor([-0.1, -1 / 30, 1 / 30, 0.1]))
    x, y = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    same = x.expand(4, 5, 8)
    assert_close(mixer.read(same), x)  # an average of copies is the copy
    added = mixer.write(same, y) - same
    assert_close(added.sum(0), y)  # shares of the output sum to one
    assert (added[3].abs() > added[0].abs()).all()  # the last stream gets most


def test_the_course_model_has_nine_linear_and_three_sparse_layers():
    assert [i for i in range(BASE.layers) if BASE.is_sparse(i)] == [3, 7, 11]
