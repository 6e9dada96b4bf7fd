"""The language model: bytes in, a score for every next byte out; and its one-token-at-a-time twin.

Embedding, a stack of blocks on several residual streams, norm, output matrix tied to the embedding.
Only attention looks across positions. So everything else runs on a packed list of real tokens
[N, W], and padding costs nothing outside attention.

Left out: dropout, biases, anything from other model families.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glm_course.config import ModelConfig
from glm_course.device import at_least_fp32
from glm_course.layers.linear_attention import LinearAttention
from glm_course.layers.moe import MixtureOfExperts
from glm_course.layers.norm import RMSNorm
from glm_course.layers.rotary import rotary_table
from glm_course.layers.sparse_attention import SparseAttention
from glm_course.layers.streams import StreamMixer

INIT_STD = 0.02


@dataclass(frozen=True)
class Packing:
    """Which cells of a padded [B, T] grid hold tokens; moves vectors between grid and list."""

    shape: tuple[int, int]  # B, T
    rows: Tensor | None  # flat indices of real cells [N], ascending; None: every cell is real

    @classmethod
    def of(cls, mask: Tensor | None, shape: tuple[int, int]) -> "Packing":
        """Packing of a bool mask [B, T]; None for a grid without padding."""
        return cls(shape, None if mask is None else mask.flatten().nonzero().squeeze(1))

    def pack(self, grid: Tensor) -> Tensor:
        """[B, T, ...] to [N, ...]."""
        flat = grid.flatten(0, 1)
        return flat if self.rows is None else flat.index_select(0, self.rows)

    def unpack(self, packed: Tensor) -> Tensor:
        """[N, ...] to [B, T, ...], zeros in the padding."""
        if self.rows is not None:
            B, T = self.shape
            packed = packed.new_zeros(B * T, *packed.shape[1:]).index_copy(0, self.rows, packed)
        return packed.unflatten(0, self.shape)


class Block(nn.Module):
    """One layer: its attention, its experts, and how it reads and writes the streams."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        attention = SparseAttention if config.is_sparse(layer) else LinearAttention
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = attention(config)
        self.moe_norm = RMSNorm(config.width, config.norm_eps)
        self.moe = MixtureOfExperts(config)
        self.mixer = StreamMixer(config.streams)

    def forward(self, streams: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Streams [S, N, W] in and out; attend maps normed [N, W] to attention's output [N, W]."""
        x = self.mixer.read(streams)
        y = x + attend(self.attention_norm(x))
        return self.mixer.write(streams, y + self.moe(self.moe_norm(y)))


@dataclass
class DecodeCache:
    """What B sequences need to go on from: a state a layer, and each row's next position [B]."""

    states: list[list[Tensor]]
    position: Tensor

    def select(self, rows: Tensor) -> "DecodeCache":
        """Copy of the given rows, in that order; a row named n times becomes n sequences."""
        states = [[part.index_select(0, rows) for part in state] for state in self.states]
        return DecodeCache(states, self.position.index_select(0, rows))

    def expand(self, copies: int) -> "DecodeCache":
        """Every row `copies` times, copies of a row side by side: a prompt shared by a group."""
        rows = torch.arange(len(self.position), device=self.position.device)
        return self.select(rows.repeat_interleave(copies))


class LanguageModel(nn.Module):
    """The course's language model. All of its randomness is torch's global generator at creation.

    Weights are drawn as documented in `redraw`: one seed gives the same weights on any machine.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        # The output matrix is the embedding; it is built, and drawn, as a layer of its own first.
        nn.Linear(config.width, config.vocab_size, bias=False)
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.redraw()
        table = rotary_table(config.max_length, config.head_dim, config.rope_theta)
        self.register_buffer("table", torch.view_as_real(table), persistent=False)

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw every matrix from N(0, 0.02), one [out, in] matrix after the other.

        Order: embedding; a layer's qkv, attention output, router, experts (up, down of each),
        shared expert; output matrix. Tied, it comes last and overwrites the embedding.
        """
        self.embedding.weight.normal_(std=INIT_STD)
        for block in self.blocks:
            block.attention.qkv.weight.normal_(std=INIT_STD)
            block.attention.out.weight.normal_(std=INIT_STD)
            if self.config.experts:
                block.moe.router.weight.normal_(std=INIT_STD)
                for up, down in zip(block.moe.up, block.moe.down, strict=True):
                    for matrix in (up, down):  # stored [in, out], drawn [out, in]
                        matrix.copy_(matrix.new_empty(matrix.T.shape).normal_(std=INIT_STD).T)
            block.moe.shared_up.weight.normal_(std=INIT_STD)
            block.moe.shared_down.weight.normal_(std=INIT_STD)
        self.embedding.weight.normal_(std=INIT_STD)

    def embed(self, ids: Tensor) -> Tensor:
        """Ids [...] to vectors [..., W], fp32. Raises ValueError for ids outside the vocabulary."""
        if ids.numel() and ids.device.type == "cpu":  # elsewhere the check would stall the device
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"ids run from {low} to {high}, the vocabulary from 0 to "
                    f"{self.config.vocab_size - 1}"
                )
        return at_least_fp32(self.embedding(ids))

    def rotations(self, length: int) -> Tensor:
        """Rotary table of the first `length` positions, complex64 [T, D/2]."""
        if length > self.config.max_length:
            raise ValueError(
                f"sequence of {length} tokens is longer than max_length {self.config.max_length}"
            )
        return torch.view_as_complex(self.table[:length])

    def run_blocks(self, streams: Tensor, packing: Packing) -> Tensor:
        """All blocks on packed streams [S, N, W]."""
        table = self.rotations(packing.shape[1])
        for block in self.blocks:
            streams = block(
                streams,
                lambda x, block=block: packing.pack(block.attention(packing.unpack(x), table)),
            )
        return streams

    def split(self, x: Tensor) -> Tensor:
        """Copy vectors [N, W] into every stream, [S, N, W]."""
        return x.expand(self.config.streams, -1, -1)

    def head(self, streams: Tensor) -> Tensor:
        """Streams [S, N, W] to logits [N, V], fp32 or wider."""
        x = self.norm(streams.mean(0))
        weight = self.embedding.weight
        return (x.to(weight.dtype) @ weight.T).to(x.dtype)

    def forward_packed(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embeddings [B, T, W] to logits [N, V] of the real positions, in order of [B, T]."""
        packing = Packing.of(mask, (x.shape[0], x.shape[1]))
        return self.head(self.run_blocks(self.split(packing.pack(x)), packing))

    def forward_embeddings(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Embeddings [B, T, W] to logits [B, T, V]; zeros where mask [B, T] is false (padding)."""
        logits = self.forward_packed(x, mask)
        return Packing.of(mask, (x.shape[0], x.shape[1])).unpack(logits)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Ids [B, T] to logits [B, T, V]: position t scores the byte at t + 1.

        mask: bool [B, T], false on padding, which must stand behind the tokens of its row.
        """
        return self.forward_embeddings(self.embed(ids), mask)

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, DecodeCache]:
        """Read prompts ids [B, T], padded behind to a common T; lengths [B] counts real tokens.

        Returns the logits [B, V] at each row's last token and the cache to decode from.
        """
        return self.prefill_embeddings(self.embed(ids), lengths)

    @torch.no_grad()
    def prefill_embeddings(
        self, x: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, DecodeCache]:
        """`prefill` for embeddings [B, T, W]."""
        B, T = x.shape[:2]
        mask = None
        if lengths is None:
            lengths = torch.full((B,), T, device=x.device)
        else:
            mask = torch.arange(T, device=x.device) < lengths[:, None]
        packing, table, states = Packing.of(mask, (B, T)), self.rotations(T), []

        def attend(block: Block, x: Tensor) -> Tensor:
            out, state = block.attention.prefill(packing.unpack(x), table, lengths)
            states.append(state)
            return packing.pack(out)

        streams = self.split(packing.pack(x))
        for block in self.blocks:
            streams = block(streams, lambda x, block=block: attend(block, x))
        ends = lengths.cumsum(0) - 1  # packed rows of the last tokens
        return self.head(streams[:, ends]), DecodeCache(states, lengths.clone())

    @torch.no_grad()
    def step(self, ids: Tensor, cache: DecodeCache) -> Tensor:
        """Append one token a row, ids [B], and return its logits [B, V]; updates cache in place."""
        return self.step_embeddings(self.embed(ids), cache)

    @torch.no_grad()
    def step_embeddings(self, x: Tensor, cache: DecodeCache) -> Tensor:
        """`step` for embeddings [B, W]."""
        if x.device.type == "cpu":  # elsewhere the check would stall the device
            self.rotations(int(cache.position.max()) + 1)
        table = torch.view_as_complex(self.table[cache.position])  # [B, D/2]

        def attend(block: Block, state: Any) -> Callable[[Tensor], Tensor]:
            return lambda x: block.attention.step(x, table, state, cache.position)

        streams = self.split(x)
        for block, state in zip(self.blocks, cache.states, strict=True):
            streams = block(streams, attend(block, state))
        cache.position += 1
        return self.head(streams)


def parameter_counts(model: LanguageModel) -> dict[str, int]:
    """Parameters by part, their total, and those active for one token.

    Active: everything not routed, plus routed experts times top_k / experts.
    """
    config, blocks = model.config, model.blocks
    routed = [b.moe for b in blocks if config.experts]
    parts = {
        "embedding and output (tied)": model.embedding.weight.numel(),
        "attention": sum(p.numel() for b in blocks for p in b.attention.parameters()),
        "router": sum(moe.router.weight.numel() for moe in routed),
        "routed experts": sum(moe.up.numel() + moe.down.numel() for moe in routed),
        "shared experts": sum(
            b.moe.shared_up.weight.numel() + b.moe.shared_down.weight.numel() for b in blocks
        ),
        "norms": sum(m.weight.numel() for m in model.modules() if isinstance(m, RMSNorm)),
        "stream mixers": sum(p.numel() for b in blocks for p in b.mixer.parameters()),
    }
    total = sum(parts.values())
    idle = parts["routed experts"] * (config.experts - config.top_k) // max(config.experts, 1)
    return parts | {"total": total, "active": total - idle}
