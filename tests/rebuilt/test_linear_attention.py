"""Linear attention rebuilt from the text of chapter 03, without looking at its code."""

import pytest
import torch

from glm_course.config import BASE, STUDY_MINI
from glm_course.layers import linear_attention as library
from glm_course.layers.rotary import rotary_table

SMALLEST = 1e-6  # no denominator counts as less


def feature(x):
    """Make every channel positive: x + 1 above zero, e^x below; never in less than fp32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def turn(x, start=0):
    """Rotate channels 2i and 2i+1 of x [B, H, T, D] by (start + t) * 10000^(-2i/D)."""
    length, width = x.shape[-2:]
    speeds = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(start, start + length, dtype=torch.float64)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def empty_state(batch, heads, width, dtype=torch.float32):
    """S [B, H, D, D] and z [B, H, D] before any text."""
    return (
        torch.zeros(batch, heads, width, width, dtype=dtype),
        torch.zeros(batch, heads, width, dtype=dtype),
    )


def divide(top, bottom, dtype):
    """Numerator [..., D] over denominator [...], guarded, in the type that came in."""
    return (top / bottom.clamp(min=SMALLEST)[..., None]).to(dtype)


def parallel(q, k, v):
    """All scores at once, [B, H, T, T], with nothing above the diagonal."""
    scores = (feature(q) @ feature(k).mT).tril()
    return divide(scores @ v.to(scores.dtype), scores.sum(-1), v.dtype)


def step(q, k, v, state):
    """One position, q, k, v [B, H, D]: first add it to the state, then read."""
    total, keys = state
    fq, fk = feature(q), feature(k)
    total = total + fk[..., :, None] * v.to(fk.dtype)[..., None, :]
    keys = keys + fk
    top = (fq[..., None, :] @ total).squeeze(-2)
    return divide(top, (fq * keys).sum(-1), v.dtype), (total, keys)


def recurrent(q, k, v):
    """One position after the other, with one state."""
    batch, heads, length, width = q.shape
    state = empty_state(batch, heads, width, feature(q).dtype)
    outputs = []
    for t in range(length):
        out, state = step(q[:, :, t], k[:, :, t], v[:, :, t], state)
        outputs.append(out)
    return torch.stack(outputs, dim=2)


def chunked(q, k, v, chunk=64):
    """Parallel inside a chunk; the state carries what came before it."""
    batch, heads, length, width = q.shape
    fq, fk = feature(q), feature(k)
    values = v.to(fq.dtype)
    total, keys = empty_state(batch, heads, width, fq.dtype)
    outputs = []
    for b in range(0, length, chunk):
        cq, ck, cv = (x[:, :, b : b + chunk] for x in (fq, fk, values))
        scores = (cq @ ck.mT).tril()
        top = cq @ total + scores @ cv
        bottom = (cq @ keys[..., None]).squeeze(-1) + scores.sum(-1)
        outputs.append(divide(top, bottom, v.dtype))
        total = total + ck.mT @ cv
        keys = keys + ck.sum(-2)
    return torch.cat(outputs, dim=2)


def project(x, qkv, heads, start=0):
    """Turned queries, turned keys and values, each [B, H, T, D], of x [B, T, W]."""
    batch, length, channels = x.shape
    parts = (x @ qkv.T).view(batch, length, 3, heads, channels // heads)
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    return turn(q, start), turn(k, start), v


def merge(out, mixing):
    """Set heads [B, H, T, D] side by side again, [B, T, W], and mix them."""
    return out.transpose(1, 2).flatten(-2) @ mixing.T


def layer(x, qkv, mixing, heads, form=parallel):
    """The whole layer on x [B, T, W], with qkv [3W, W] and mixing [W, W]."""
    return merge(form(*project(x, qkv, heads)), mixing)


def decode(x, qkv, mixing, heads, state, position):
    """The whole layer on one position, x [B, 1, W]; returns its output and the new state."""
    q, k, v = (part[:, :, 0] for part in project(x, qkv, heads, start=position))
    out, state = step(q, k, v, state)
    return merge(out[:, :, None], mixing), state


LENGTHS = [1, 65, 128, 129, 192]  # the library changes form past 128, a chunk is 64


def same(ours, theirs, relative=0.0):
    """Whether two tensors have one shape and type and differ by no more than 1e-5."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return torch.allclose(ours, theirs, rtol=relative, atol=1e-5)


def make(config, length, batch=2):
    """The library's layer, its rotations, a random input, and the weights for ours."""
    torch.manual_seed(length)
    module = library.LinearAttention(config)
    table = rotary_table(length, config.head_dim)
    x = torch.randn(batch, length, config.width)
    return module, table, x, (module.qkv.weight, module.out.weight, config.heads)


@pytest.mark.parametrize("form", [parallel, recurrent, chunked])
@pytest.mark.parametrize("config", [BASE, STUDY_MINI], ids=["base", "mini"])
@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_layer_matches_library(length, config, form):
    """Every form gives the library's output, in chunks and past them."""
    module, table, x, weights = make(config, length)
    assert same(layer(x, *weights, form=form), module(x, table))


@pytest.mark.parametrize("prompt", [1, 70])
@torch.no_grad()
def test_decoding_matches_library(prompt):
    """One token after another, from nothing, gives the library's prefill, steps and state."""
    module, table, x, weights = make(BASE, 80)
    expected, theirs = module.prefill(x[:, :prompt], table[:prompt], torch.tensor([prompt] * 2))
    expected = [expected]
    for t in range(prompt, 80):
        out = module.step(x[:, t], table[t].expand(2, -1), theirs, torch.tensor([t, t]))
        expected.append(out[:, None])
    ours, outputs = empty_state(2, BASE.heads, BASE.head_dim), []
    for t in range(80):
        out, ours = decode(x[:, t : t + 1], *weights, ours, t)
        outputs.append(out)
    assert same(torch.cat(outputs, 1), torch.cat(expected, 1))
    for mine, other in zip(ours, theirs, strict=True):
        assert same(mine, other, relative=1e-5)


@pytest.mark.parametrize("down", [0, 8])
def test_forms_match_library_below_the_clamp(down):
    """With features near e^-8 the first denominators fall below the clamp: still the same."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 150, 3, 8, dtype=torch.float64)
    q, k = q - down, k - down
    for theirs in (library.parallel, library.chunked):
        expected = theirs(q, k, v).transpose(1, 2)
        for form in (parallel, recurrent, chunked):
            ours = form(*(x.transpose(1, 2) for x in (q, k, v)))
            assert same(ours, expected)


@pytest.mark.parametrize("length", [40, 140])
def test_gradients_match_library(length):
    """A random weighting of the outputs has the library's gradients for input and weights."""
    module, table, x, weights = make(STUDY_MINI, length)
    wanted = [x.requires_grad_(), *weights[:2]]
    weighting = torch.randn(x.shape)
    expected = torch.autograd.grad((module(x, table) * weighting).sum(), wanted)
    ours = torch.autograd.grad((layer(x, *weights, form=chunked) * weighting).sum(), wanted)
    for mine, other in zip(ours, expected, strict=True):
        assert same(mine, other, relative=1e-5)
