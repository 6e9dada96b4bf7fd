"""What both attentions share: one projection to q, k and v, rotary positions, one projection out.

A subclass says how queries meet keys, in three forms: `mix` for a whole sequence, `absorb` for the
state a prefix leaves behind, and `mix_step` for one more token against that state.
"""

from typing import Any

from torch import Tensor, nn

from glm_course.config import ModelConfig
from glm_course.layers.rotary import rotate


class Attention(nn.Module):
    """Bias-free qkv projection [3W, W] (q rows, then k, then v; head-major) and output [W, W]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def project(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., T, W] to q, k, v [..., T, H, D], with q and k turned by table [..., T, D/2]."""
        qkv = self.qkv(x.to(self.qkv.weight.dtype)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(-3)
        return rotate(q, table), rotate(k, table), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over a whole sequence, [B, T, H, D] in and out."""
        raise NotImplementedError

    def absorb(self, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
        """State after the first lengths[b] positions of each row; k, v: [B, T, H, D]."""
        raise NotImplementedError

    def mix_step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, position: Tensor) -> Tensor:
        """One token at position [B] of each row, [B, H, D] in and out; updates state in place."""
        raise NotImplementedError

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[B, T, W] to [B, T, W]."""
        return self.out(self.mix(*self.project(x, table)).flatten(-2))

    def prefill(self, x: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Any]:
        """`forward` and the state to decode from."""
        q, k, v = self.project(x, table)
        return self.out(self.mix(q, k, v).flatten(-2)), self.absorb(k, v, lengths)

    def step(self, x: Tensor, table: Tensor, state: Any, position: Tensor) -> Tensor:
        """One token a row: x [B, W] at position [B], table [B, D/2] its rotations; [B, W] back."""
        q, k, v = self.project(x, table)
        return self.out(self.mix_step(q, k, v, state, position).flatten(-2))
