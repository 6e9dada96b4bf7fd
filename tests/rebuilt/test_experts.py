"""Mixture of experts rebuilt from the text of chapter 05, without looking at its code."""

import pytest
import torch

from glm_course.config import BASE, STUDY_MINI, ModelConfig
from glm_course.layers.moe import MixtureOfExperts, balance_loss, update_bias


def silu(u):
    """The gate: u / (1 + e^-u)."""
    return u / (1 + torch.exp(-u))


def run_expert(x, up, down):
    """One SwiGLU expert: x [n, W], up [W, 2F] with the gate first, down [F, W]."""
    gate, value = (x @ up).chunk(2, dim=-1)
    return (silu(gate) * value) @ down


def choose(logits, k, bias=None):
    """The k experts of every token and their weights, [N, k] each; a bias moves the choice only."""
    scores = logits if bias is None else logits + bias
    chosen = scores.topk(k, dim=-1).indices
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.gather(-1, chosen).softmax(dim=-1, dtype=wide)
    return chosen, weights


def route_plainly(x, chosen, weights, up, down):
    """The routed sum, expert after expert, x [N, W]."""
    y, weights = torch.zeros_like(x), weights.to(x.dtype)
    for e in range(len(up)):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        y.index_add_(0, token, weights[token, slot, None] * run_expert(x[token], up[e], down[e]))
    return y


def route_sorted(x, chosen, weights, up, down):
    """The routed sum with the copies sorted by expert, x [N, W]."""
    k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(up)).tolist()
    groups = x[order // k].split(counts)
    done = torch.cat([run_expert(g, up[e], down[e]) for e, g in enumerate(groups)])
    copies = done[order.argsort()].view(len(x), k, -1)
    return (copies * weights[..., None].to(x.dtype)).sum(dim=1)


def run_layer(x, router, up, down, shared_up, shared_down, k, bias=None, route=route_sorted):
    """The whole layer, x [..., W]; the shared matrices are [out, in], as nn.Linear keeps them."""
    rows = x.reshape(-1, x.shape[-1])
    chosen, weights = choose(rows @ router.T, k, bias)
    y = run_expert(rows, shared_up.T, shared_down.T) + route(rows, chosen, weights, up, down)
    return y.view_as(x)


def count_shares(chosen, experts):
    """The share of every expert among all k N choices, [E]."""
    return chosen.flatten().bincount(minlength=experts) / chosen.numel()


def lose_by_imbalance(logits, chosen):
    """The balance loss that can be felt, E sum f_e P_e, from logits [N, E]."""
    experts = logits.shape[-1]
    mean_probability = logits.softmax(dim=-1).mean(dim=0)
    return experts * (count_shares(chosen, experts) * mean_probability).sum()


def imbalance_gradient(logits, chosen):
    """The gradient of the balance loss in the logits, by the chapter's formula."""
    tokens, experts = logits.shape
    p, f = logits.softmax(dim=-1), count_shares(chosen, experts)
    return experts / tokens * p * (f - (f * p).sum(dim=-1, keepdim=True))


def nudge(bias, chosen, rate):
    """The bias after one step: up where an expert got too few tokens, down where too many."""
    counts = chosen.flatten().bincount(minlength=len(bias)).float()
    return bias + rate * torch.sign(counts.mean() - counts)


SMALL = ModelConfig(width=24, heads=3, expert_hidden=40)
SIZES = [
    BASE,
    STUDY_MINI,
    SMALL,
    ModelConfig(width=24, heads=3, expert_hidden=6, experts=64, top_k=16),
    ModelConfig(width=24, heads=3, expert_hidden=40, experts=3, top_k=3),
]


def draw(config, tokens, seed=0):
    """The library's layer with fresh weights, and tokens to give it."""
    torch.manual_seed(seed)
    return MixtureOfExperts(config), torch.randn(tokens, config.width)


def rebuild(layer, x, route=route_sorted):
    """Our output for x with the weights of the library's layer."""
    shared = layer.shared_up.weight, layer.shared_down.weight
    experts = layer.router.weight, layer.up, layer.down, *shared
    return run_layer(x, *experts, layer.top_k, layer.bias, route)


@pytest.mark.parametrize("tokens", [1, 7, 600])
@pytest.mark.parametrize("route", [route_plainly, route_sorted])
@pytest.mark.parametrize("config", SIZES)
def test_the_layer_is_the_one_the_text_describes(config, route, tokens):
    """Both routes agree with the library, also with one token and with idle experts."""
    layer, x = draw(config, tokens)
    with torch.no_grad():
        assert torch.allclose(rebuild(layer, x, route), layer(x), rtol=0, atol=1e-5)


def test_groups_filled_up_in_bf16_give_what_groups_of_their_own_size_give():
    """The rows the library adds in bf16 on a CPU change no output."""
    layer, x = draw(SMALL, 600)  # 1,200 copies: enough for the library to fill groups up
    layer, x = layer.bfloat16(), x.bfloat16()
    with torch.no_grad():
        assert torch.allclose(rebuild(layer, x), layer(x), rtol=0, atol=1e-2)


@pytest.mark.parametrize("route", [route_plainly, route_sorted])
@pytest.mark.parametrize("config", [SMALL, SIZES[3]])
def test_the_gradients_are_those_of_the_text(config, route):
    """The library's hand-written backward passes give autograd's gradients."""
    layer, x = draw(config, 50)
    x.requires_grad_()
    direction = torch.randn_like(x)
    inputs = [x, *layer.parameters()]
    ours = torch.autograd.grad((rebuild(layer, x, route) * direction).sum(), inputs)
    theirs = torch.autograd.grad((layer(x) * direction).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_bias_moves_the_choice_and_not_the_weights():
    """With a bias, other experts are chosen and weighed by the logits without it."""
    layer, x = draw(ModelConfig(width=24, heads=3, expert_hidden=40, selection_bias=True), 200)
    with torch.no_grad():
        before = layer(x)
        layer.bias.copy_(torch.randn(8))
        after = layer(x)
        assert not torch.allclose(before, after, rtol=0, atol=1e-3)
        assert torch.allclose(rebuild(layer, x), after, rtol=0, atol=1e-5)


def test_a_token_alone_gives_what_it_gives_in_company():
    """A row does not depend on the rows beside it."""
    layer, x = draw(SMALL, 30)
    with torch.no_grad():
        alone = torch.cat([rebuild(layer, row[None]) for row in x])
        assert torch.allclose(alone, layer(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_balance_loss_and_its_gradient_are_those_of_the_text(top_k):
    """The counts are constants; the gradient is the closed formula."""
    torch.manual_seed(1)
    logits = torch.randn(40, 8, requires_grad=True)
    chosen, _ = choose(logits, top_k)
    theirs = balance_loss(logits, top_k)
    (gradient,) = torch.autograd.grad(theirs, logits)
    assert torch.allclose(lose_by_imbalance(logits, chosen), theirs, rtol=0, atol=1e-6)
    assert torch.allclose(imbalance_gradient(logits, chosen), gradient, rtol=0, atol=1e-7)


def test_the_bias_takes_the_steps_of_the_text():
    """Fifty steps of the rule on fixed logits end at the same bias."""
    torch.manual_seed(2)
    logits = torch.randn(100, 8) + torch.linspace(0, 3, 8)
    ours, theirs = torch.zeros(8), torch.zeros(8)
    for _ in range(50):
        chosen, _ = choose(logits, 2, ours)
        update_bias(theirs, chosen.flatten().bincount(minlength=8), 0.02)
        ours = nudge(ours, chosen, 0.02)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_an_expert_with_the_mean_load_keeps_its_bias():
    """The sign of zero is zero."""
    bias, chosen = torch.zeros(4), torch.tensor([[0, 1], [1, 2], [1, 3], [0, 2]])
    update_bias(bias, torch.tensor([2, 3, 2, 1]), 0.5)
    assert torch.equal(bias, nudge(torch.zeros(4), chosen, 0.5))
    assert torch.equal(bias, torch.tensor([0.0, -0.5, 0.0, 0.5]))
