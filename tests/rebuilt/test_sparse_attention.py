"""Sparse attention rebuilt from the text of chapter 04, without looking at its code."""

from dataclasses import replace

import pytest
import torch

from glm_course.config import BASE, STUDY_MINI
from glm_course.layers import sparse_attention as library
from glm_course.layers.rotary import rotary_table


def turn(x, positions, theta=10000.0):
    """Turn channels 2i and 2i+1 of x [B, T, H, D] by position times theta ** (-2i / D)."""
    width = x.shape[-1]
    speeds = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions[..., None, None] * speeds  # [..., T, 1, D / 2], in fp64
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def project(x, weight, heads, positions):
    """Queries, keys and values [B, T, H, D]; queries and keys are turned."""
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in (x @ weight.T).chunk(3, -1))
    return turn(q, positions), turn(k, positions), v


def sees(t, s, window, stride):
    """Whether a query at t sees a key at s, equation sparse-set."""
    return (s >= 0) & (s <= t) & ((s > t - window) | (s % stride == 0))


def attend(q, k, v, visible):
    """Softmax attention of q [B, T, H, D] over the keys where visible [.., T, S] is true."""
    scores = torch.einsum("bthd,bshd->bhts", q, k).float() / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1).to(v.dtype), v)


def masked(q, k, v, window, stride):
    """All scores at once, those outside the set thrown away."""
    t = torch.arange(q.shape[1])
    return attend(q, k, v, sees(t[:, None], t[None], window, stride))


def blocked(q, k, v, window, stride):
    """One block of queries after the other: keys of two blocks, and the anchors before them."""
    parts = []
    for start in range(0, q.shape[1], window):
        stop, first = min(start + window, q.shape[1]), max(0, start - window)
        near = torch.arange(first, stop)
        far = torch.arange(0, first, stride)  # anchors in the two blocks are among `near`
        keys = torch.cat((far, near))
        t = torch.arange(start, stop)
        visible = sees(t[:, None], keys[None], window, stride)
        parts.append(attend(q[:, start:stop], k[:, keys], v[:, keys], visible))
    return torch.cat(parts, 1)


def layer(x, weight_in, weight_out, heads, window, stride, mix=masked):
    """The whole layer on x [B, T, W]."""
    q, k, v = project(x, weight_in, heads, torch.arange(x.shape[1]))
    return mix(q, k, v, window, stride).flatten(-2) @ weight_out.T


class Cache:
    """A ring of the last keys and values, a slot for each anchor, and one for idle writes."""

    def __init__(self, batch, heads, width, window, stride, longest):
        """An empty cache for texts of at most `longest` positions."""
        self.window, self.stride, self.anchors = window, stride, -(-longest // stride)
        slots = window + self.anchors + 1
        self.k = torch.zeros(batch, slots, heads, width)
        self.v = torch.zeros(batch, slots, heads, width)
        self.position = torch.zeros(batch, dtype=torch.long)

    def write(self, k, v):
        """Store one key and value [B, H, D] at each text's own position."""
        row, p = torch.arange(len(k)), self.position
        own = torch.where(p % self.stride == 0, p // self.stride, self.anchors) + self.window
        for slot in (p % self.window, own):
            self.k[row, slot], self.v[row, slot] = k, v

    def visible(self):
        """Which slots the query at the present position sees, [B, slots]."""
        t = self.position[:, None]
        ring = t - (t - torch.arange(self.window)) % self.window  # the position in each slot
        anchor = torch.arange(self.anchors) * self.stride  # seen here once out of the window
        idle = torch.zeros_like(t, dtype=torch.bool)
        return torch.cat((ring >= 0, anchor <= t - self.window, idle), -1)


def step(x, weight_in, weight_out, heads, cache):
    """The layer's output [B, W] for one new vector a text; advances the cache."""
    q, k, v = project(x[:, None], weight_in, heads, cache.position[:, None])
    cache.write(k[:, 0], v[:, 0])
    out = attend(q, cache.k, cache.v, cache.visible()[:, None, None])
    cache.position += 1
    return out[:, 0].flatten(-2) @ weight_out.T


def read(x, lengths, weight_in, heads, cache):
    """Fill an empty cache with the first `lengths` vectors of each text, in one pass."""
    _, k, v = project(x, weight_in, heads, torch.arange(x.shape[1]))
    for t in range(x.shape[1]):
        row = torch.nonzero(lengths > t)[:, 0]
        cache.k[row, t % cache.window], cache.v[row, t % cache.window] = k[row, t], v[row, t]
        if t % cache.stride == 0:
            slot = cache.window + t // cache.stride
            cache.k[row, slot], cache.v[row, slot] = k[row, t], v[row, t]
    cache.position = lengths.clone()


CONFIGS = {
    "base": BASE,
    "mini": STUDY_MINI,
    "short window": replace(STUDY_MINI, window=7, stride=10),
    "long window": replace(STUDY_MINI, window=13, stride=5),
}


def same(ours, theirs, relative=0.0):
    """Whether two tensors have one shape and type and differ by no more than 1e-5."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return torch.allclose(ours, theirs, rtol=relative, atol=1e-5)


def make(config, length, batch=2):
    """The library's layer, its rotations, a random input, and the settings of ours."""
    torch.manual_seed(length)
    module = library.SparseAttention(config)
    x = torch.randn(batch, length, config.width)
    ours = (module.qkv.weight, module.out.weight, config.heads)
    return module, rotary_table(length, config.head_dim), x, ours


@pytest.mark.parametrize("mix", [masked, blocked])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("length", [1, 33, 101, 256, 257, 331])
@torch.no_grad()
def test_layer_matches_library(length, config, mix):
    """Both forms give the library's output, on either side of its switch at 256."""
    module, table, x, ours = make(config, length)
    assert same(layer(x, *ours, config.window, config.stride, mix), module(x, table))


@pytest.mark.parametrize("length", [40, 270])
def test_gradients_match_library(length):
    """A random weighting of the outputs has the library's gradients for input and weights."""
    module, table, x, ours = make(STUDY_MINI, length)
    wanted, weighting = [x.requires_grad_(), *ours[:2]], torch.randn(x.shape)
    expected = torch.autograd.grad((module(x, table) * weighting).sum(), wanted)
    for mix in (masked, blocked):
        out = layer(x, *ours, STUDY_MINI.window, STUDY_MINI.stride, mix)
        mine = torch.autograd.grad((out * weighting).sum(), wanted)
        assert all(same(a, b, relative=1e-5) for a, b in zip(mine, expected, strict=True))


def new_cache(config, batch):
    """An empty cache of ours for the library's sizes."""
    sizes = config.heads, config.head_dim, config.window, config.stride, config.max_length
    return Cache(batch, *sizes)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_decoding_matches_library_after_prompts_of_different_lengths(config):
    """Read at once, then step: the library's state, its steps, and the whole-sequence output."""
    lengths, steps = torch.tensor([1, 20, 32, 71]), 57
    module, table, x, ours = make(config, 128, batch=4)
    prompts = x[:, :71]
    _, state = module.prefill(prompts, table[:71], lengths)
    cache = new_cache(config, 4)
    read(prompts, lengths, ours[0], config.heads, cache)
    for mine, theirs in zip((cache.k, cache.v), state, strict=True):
        assert same(mine, theirs)
    whole = layer(x, *ours, config.window, config.stride)
    row = torch.arange(4)
    for t in lengths + torch.arange(steps)[:, None]:
        theirs = module.step(x[row, t], table[t], state, t)
        mine = step(x[row, t], *ours, cache)
        assert same(mine, theirs)
        assert same(mine, whole[row, t])
    for mine, theirs in zip((cache.k, cache.v), state, strict=True):
        assert same(mine, theirs, relative=1e-5)


@torch.no_grad()
def test_decoding_from_nothing_matches_library_to_the_greatest_length():
    """Every position from 0 to 191 decoded one at a time is the library's output there."""
    module, table, x, ours = make(BASE, BASE.max_length)
    cache = new_cache(BASE, 2)
    mine = torch.stack([step(x[:, t], *ours, cache) for t in range(x.shape[1])], 1)
    assert same(mine, module(x, table))
    assert cache.visible().shape[1] == 32 + 6 + 1
