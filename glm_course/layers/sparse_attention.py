"""Causal sparse attention: each position sees a short window behind it and a few fixed anchors.

Position t attends to the window {t - w + 1 .. t} united with the anchors {0, s, 2s, ...} <= t:
scaled dot product, softmax over those keys only. Three forms of one sum: `masked` (dense scores
under a mask, best while T is short), `blocked` (queries in blocks of w against two blocks of keys
and the anchors; T (2w + T/s) scores instead of T^2) and one token against `SparseAttention`'s
cache, which holds only keys that later positions can still reach.

The anchors' share, T^2 / 2s scores, is quadratic by definition, with a small constant; the
window's share is linear. Source: Child et al. (arXiv 1904.10509), section 4.2. Left out: learned
selection of keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm_course.config import ModelConfig
from glm_course.device import at_least_fp32
from glm_course.layers.projection import Attention

SHORT = 256  # up to this length dense scores under a mask are the faster form
SPAN = 1024  # positions whose scores the blocked form holds at once


def reach(length: int, window: int, stride: int, *, device=None) -> Tensor:
    """Which keys a query sees: bool [T, T], row t true at the window and anchors of position t."""
    t = torch.arange(length, device=device)
    query, key = t[:, None], t[None, :]
    return (key <= query) & ((query - key < window) | (key % stride == 0))


def masked(q: Tensor, k: Tensor, v: Tensor, window: int, stride: int) -> Tensor:
    """Dense form: all T^2 scores, those out of reach masked. [B, T, H, D] in and out."""
    mask, dtype = reach(q.shape[1], window, stride, device=q.device), v.dtype
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, D]
    if q.device.type == "cpu":  # where torch's kernel takes 4 times as long in bf16, casts included
        q, k, v = at_least_fp32(q), at_least_fp32(k), at_least_fp32(v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).to(dtype)


def _blocks(x: Tensor, window: int) -> Tensor:
    """[B, T, H, D] to blocks of `window` positions, [B, H, N, w, D], zeros filled in behind."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % window))
    return x.unflatten(1, (-1, window)).permute(0, 3, 1, 2, 4)


def blocked(q: Tensor, k: Tensor, v: Tensor, window: int, stride: int) -> Tensor:
    """Block form for long sequences: [B, T, H, D] in and out.

    A query in block n finds its window in blocks n - 1 and n, and sees anchors before its window
    beside it; one softmax (fp32 or wider) runs over both.
    """
    T, device = q.shape[1], q.device
    wide = torch.promote_types(q.dtype, torch.float32)
    anchors = [x[:, ::stride].transpose(1, 2) for x in (k, v)]  # [B, H, A, D]
    q = _blocks(q * q.shape[-1] ** -0.5, window)  # [B, H, N, w, D]
    k, v = (_blocks(x, window) for x in (k, v))
    pair = [torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], 3) for x in (k, v)]  # [..2w, D]
    i, j = (torch.arange(n, device=device) for n in (window, 2 * window))
    inside = (j > i[:, None]) & (j <= i[:, None] + window)  # [w, 2w], keys within the window
    per_span = max(1, SPAN // window)
    out = []
    for first in range(0, q.shape[2], per_span):  # anchors stop at the span's end: causal halves
        span = slice(first, first + per_span)
        here = q[:, :, span]  # [B, H, n, w, D]
        n = here.shape[2]
        t = torch.arange(first * window, (first + n) * window, device=device).view(n, window, 1)
        near = (here @ pair[0][:, :, span].mT).to(wide)  # [B, H, n, w, 2w]
        exists = t - i[:, None] + j - window >= 0  # no block before the first
        near = near.masked_fill(~(inside & exists), -torch.inf)
        seen = min(anchors[0].shape[2], (first + n) * window // stride + 1)
        k_far, v_far = (x[:, :, :seen] for x in anchors)  # [B, H, A, D]
        far = (here.flatten(2, 3) @ k_far.mT).unflatten(2, (n, window)).to(wide)
        place = torch.arange(0, seen * stride, stride, device=device)
        far = far.masked_fill(place > t - window, -torch.inf)  # the rest stand in the window
        p = torch.cat([near, far], -1).softmax(-1).to(v.dtype)
        p_near, p_far = p.split([2 * window, seen], -1)
        by_anchor = (p_far.flatten(2, 3) @ v_far).unflatten(2, (n, window))
        out.append(p_near @ pair[1][:, :, span] + by_anchor)
    return torch.cat(out, 2).flatten(2, 3)[:, :, :T].transpose(1, 2)


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, window: int, stride: int) -> Tensor:
    """Sparse attention by whichever form is faster at this length: [B, T, H, D] in and out."""
    form = masked if q.shape[1] <= SHORT else blocked
    return form(q, k, v, window, stride)


class SparseAttention(Attention):
    """Sparse attention as a layer. State: [keys, values], each [B, R, H, D].

    Slots 0 to w - 1 are a ring: position p stands in slot p mod w until p + w takes its place.
    Then one slot an anchor, then a scratch slot where steps that are no anchor write.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.window, self.stride = config.window, config.stride
        self.anchors = -(-config.max_length // config.stride)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, T, H, D] in and out."""
        return sparse_attention(q, k, v, self.window, self.stride)

    def slots(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """Position in each slot when `last` [B] was the latest, and whether a query there sees it.

        Both [B, R]. An anchor still inside the window is seen through the ring only.
        """
        ring = torch.arange(self.window, device=last.device)
        ring = last[:, None] - (last[:, None] - ring) % self.window  # below 0: not filled yet
        anchor = torch.arange(self.anchors + 1, device=last.device) * self.stride
        place = torch.cat([ring, anchor.expand(len(last), -1)], 1)
        seen = torch.cat([ring >= 0, anchor[:-1] <= last[:, None] - self.window], 1)
        return place, F.pad(seen, (0, 1))  # the scratch slot is never seen

    def absorb(self, k: Tensor, v: Tensor, lengths: Tensor) -> list[Tensor]:
        """Keys and values a later position can reach; slots without a position hold zeros."""
        place, _ = self.slots(lengths - 1)
        held = ((place >= 0) & (place < lengths[:, None]))[..., None, None]
        place = place.clamp(0, k.shape[1] - 1)[..., None, None].expand(-1, -1, *k.shape[2:])
        return [x.gather(1, place) * held for x in (k, v)]

    def mix_step(
        self, q: Tensor, k: Tensor, v: Tensor, state: list[Tensor], position: Tensor
    ) -> Tensor:
        """[B, H, D] in and out; the token is stored first, so it attends to itself."""
        row = torch.arange(len(position), device=position.device)
        anchor = position.div(self.stride, rounding_mode="floor")
        anchor = torch.where(position % self.stride == 0, anchor, self.anchors) + self.window
        for held, new in zip(state, (k, v), strict=True):
            held[row, position % self.window] = new
            held[row, anchor] = new
        _, seen = self.slots(position)
        keys, values = (x.transpose(1, 2) for x in state)  # [B, H, R, D]
        out = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=seen[:, None, None]
        )
        return out.squeeze(2)
