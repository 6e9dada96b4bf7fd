"""A language model that reads pictures: an image becomes 16 vectors that stand where bytes would.

    image [3, 32, 32] -> 64 patches -> two blocks of attention, both ways -> 16 tokens -> projector
    bos <image_start> <image> x 16 <image_end> prompt

The 16 vectors replace the embeddings of the placeholder ids, and the language model goes on as
ever: nothing in it knows of pictures. Beside the tower stands the least that could work, one linear
map of 8x8 patches whose 16 vectors precede bos: a baseline that any tower has to beat.

Layers keep torch's default initialisation, drawn as they are constructed, language model first, so
that one seed gives the same weights on any machine. Left out: video, several images a prompt,
pictures larger than the tower was built for (but see `positions`), a cache to decode from.

Source: Dosovitskiy et al. (arXiv 2010.11929) for patches; query-key norm: Dehghani et al.
(arXiv 2302.05442); projected tokens among the words': Liu et al. (arXiv 2304.08485).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm_course.layers.norm import RMSNorm
from glm_course.layers.rotary import rotary_table, rotate
from glm_course.model import INIT_STD, LanguageModel
from glm_course.tokenizer import ByteTokenizer

IMAGE_START, IMAGE, IMAGE_END = range(ByteTokenizer.vocab_size, ByteTokenizer.vocab_size + 3)
CHANNELS = 3
POSITIONS = ("learned", "rotary")


@dataclass(frozen=True)
class TowerConfig:
    """Sizes of the image tower and its projector. Raises ValueError for sizes that do not fit."""

    image: int = 32  # pixels a side; with rotary positions any multiple of `block` will do
    patch: int = 4  # pixels a side of a patch
    merge: int = 2  # patches a side of a token
    width: int = 24
    blocks: int = 2
    heads: int = 4
    hidden: int = 48  # inner width of a block's SwiGLU
    projector_hidden: int = 64  # and of the projector's
    positions: str = "learned"  # a vector a patch, which fixes the size, or "rotary", which do not
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be {' or '.join(POSITIONS)}, got {self.positions!r}")
        sizes = (self.image, self.patch, self.merge, self.width, self.blocks, self.heads)
        if min(*sizes, self.hidden, self.projector_hidden) < 1:
            raise ValueError(f"sizes must be positive: {self}")
        if self.image % self.block:
            raise ValueError(
                f"an image of {self.image} pixels a side does not divide into blocks of "
                f"{self.patch} x {self.merge} = {self.block}"
            )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")
        if self.positions == "rotary" and (self.head_dim % 2 or self.head_dim < 4):
            raise ValueError(
                f"rotary positions need a pair of channels an axis: heads of even width from 4, "
                f"got {self.head_dim}"
            )

    @property
    def block(self) -> int:
        """Pixels a side of what becomes one token."""
        return self.patch * self.merge

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads


def check_images(images: Tensor, multiple: int, size: int | None = None) -> None:
    """Raise ValueError unless images are floats [B, 3, H, W] within 0 to 1 of a size that fits.

    H and W must be multiples of `multiple`, in pixels, and where `size` is given be `size`.
    """
    shape = list(images.shape)
    if images.ndim != 4 or shape[1] != CHANNELS:
        raise ValueError(f"images must have the shape [B, {CHANNELS}, H, W], got {shape}")
    if not shape[0]:
        raise ValueError(f"need at least one image, got {shape}")
    if size is not None and shape[2:] != [size, size]:
        raise ValueError(f"images must have the shape [B, {CHANNELS}, {size}, {size}], got {shape}")
    if not min(shape) or shape[2] % multiple or shape[3] % multiple:
        raise ValueError(f"height and width must be multiples of {multiple} pixels, got {shape}")
    if not images.is_floating_point():
        raise ValueError(f"images must be floats from 0 to 1, got {images.dtype}")
    low, high = (x.item() for x in images.aminmax())
    if not (low >= 0 and high <= 1):  # NaN fails both
        raise ValueError(f"images must be finite and lie within 0 to 1, got {low:g} to {high:g}")


def axial_table(rows: int, columns: int, head_dim: int, *, device=None) -> Tensor:
    """Rotations of a grid of patches, complex64 [rows columns, head_dim / 2], row by row.

    The first half of a head's channel pairs (the larger, where they are odd in number) turns with
    the row, the rest with the column. Source: Heo et al. (arXiv 2403.13298), the axial form.
    """
    pairs = head_dim // 2
    down = rotary_table(rows, 2 * (pairs - pairs // 2), device=device)  # [rows, .]
    across = rotary_table(columns, 2 * (pairs // 2), device=device)  # [columns, .]
    grid = (down[:, None].expand(-1, columns, -1), across[None].expand(rows, -1, -1))
    return torch.cat(grid, -1).flatten(0, 1)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU (arXiv 2002.05202) from three matrices of its own."""

    def __init__(self, width: int, hidden: int, bias: bool):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] to [..., W]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TowerAttention(nn.Module):
    """Attention of every patch to every patch; q and k are normed head by head, with biases."""

    def __init__(self, config: TowerConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def project(self, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, W] to q, k, v [B, H, T, D]; q and k turned where there is a table [T, D/2]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # [B, T, H, D] each
        q, k = self.q_norm(q), self.k_norm(k)
        if table is not None:
            q, k = rotate(q, table), rotate(k, table)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        """[B, T, W] to [B, T, W]."""
        mixed = F.scaled_dot_product_attention(*self.project(x, table))  # [B, H, T, D]
        return self.proj(mixed.transpose(1, 2).flatten(-2))

    def probabilities(self, x: Tensor, table: Tensor | None) -> Tensor:
        """The weights `forward` mixes values by, [B, H, T, T]: a row a query, each of sum one."""
        q, k, _ = self.project(x, table)
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


class TowerBlock(nn.Module):
    """x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, config: TowerConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = TowerAttention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config.width, config.hidden, bias=True)

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        """[B, T, W] to [B, T, W]."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.mlp(self.mlp_norm(x))


class VisionTower(nn.Module):
    """Image to tokens of width `out`: patches, positions, blocks, norm, merge."""

    def __init__(self, config: TowerConfig, out: int):
        super().__init__()
        self.config = config
        self.patch = nn.Conv2d(CHANNELS, config.width, config.patch, stride=config.patch)
        if config.positions == "learned":
            patches = (config.image // config.patch) ** 2
            self.positions = nn.Parameter(torch.randn(patches, config.width) * INIT_STD)
        self.blocks = nn.ModuleList(TowerBlock(config) for _ in range(config.blocks))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.merge = nn.Conv2d(config.width, out, config.merge, stride=config.merge)

    def tokens(self, height: int, width: int) -> int:
        """How many tokens an image of that size, in pixels, makes."""
        return (height // self.config.block) * (width // self.config.block)

    def patches(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Vectors of the patches [B, T, W], row by row, and their rotary table if they have one.

        images: as `check_images` wants them, of the size of the learned positions.
        """
        learned = self.config.positions == "learned"
        check_images(images, self.config.block, self.config.image if learned else None)
        x = self.patch(images.to(self.patch.weight.dtype))  # [B, W, rows, columns]
        rows, columns = x.shape[2:]
        x = x.flatten(2).mT  # [B, T, W], T = rows columns
        if learned:
            return x + self.positions, None
        return x, axial_table(rows, columns, self.config.head_dim, device=x.device)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [0, 1] to tokens [B, N, out], row by row, N = H W / block^2."""
        x, table = self.patches(images)
        for block in self.blocks:
            x = block(x, table)
        columns = images.shape[3] // self.config.patch
        grid = self.norm(x).mT.unflatten(-1, (-1, columns))  # [B, W, rows, columns]
        return self.merge(grid).flatten(2).mT  # [B, N, out]

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[Tensor]:
        """Attention probabilities of each block, [B, heads, T, T], between patches, row by row.

        Entry [b, h, t, s] is how much patch t of image b takes from patch s in head h.
        """
        x, table = self.patches(images)
        maps = []
        for block in self.blocks:
            maps.append(block.attention.probabilities(block.attention_norm(x), table))
            x = block(x, table)
        return maps


class Projector(nn.Module):
    """From the tower's tokens to the language model's embeddings, without biases."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.mlp = GatedMLP(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] to [..., W]."""
        return self.mlp(F.gelu(self.norm(self.linear(x))))


def check_pairs(images: Tensor, ids: Tensor) -> None:
    """Raise ValueError unless ids [B, T] hold one prompt for each of images [B, 3, H, W]."""
    if ids.ndim != 2 or len(ids) != len(images):
        raise ValueError(
            f"each image needs a prompt: images {list(images.shape)}, ids {list(ids.shape)}"
        )


class VisionLanguageModel(nn.Module):
    """Tower and projector before a language model whose vocabulary has the image ids.

    Takes `language` as it is, and draws the rest from torch's global generator.
    """

    def __init__(self, language: LanguageModel, config: TowerConfig = TowerConfig()):
        super().__init__()
        if language.config.vocab_size <= IMAGE_END:
            raise ValueError(
                f"the image ids run to {IMAGE_END}, the language model's vocabulary only to "
                f"{language.config.vocab_size - 1}"
            )
        self.language = language
        self.tower = VisionTower(config, language.config.width)
        self.projector = Projector(language.config.width, config.projector_hidden)

    @property
    def embedding(self) -> nn.Embedding:
        """The language model's embedding."""
        return self.language.embedding

    def prompt(self, text: str, size: tuple[int, int] | None = None) -> list[int]:
        """Ids of a prompt about one image.

        size: its height and width in pixels, those of the configuration unless given.
        """
        size = size or (self.tower.config.image, self.tower.config.image)
        placeholders = [IMAGE] * self.tower.tokens(*size)
        ids = ByteTokenizer().encode(text, bos=True)
        return [*ids[:1], IMAGE_START, *placeholders, IMAGE_END, *ids[1:]]

    def see(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] to the vectors [B, N, W] that replace the placeholders'."""
        return self.projector(self.tower(images))

    def embed(self, images: Tensor, ids: Tensor) -> Tensor:
        """Embeddings [B, T, W] of ids [B, T], those of placeholder n being image token n.

        Raises ValueError where a row's placeholders are not as many as an image's tokens, and for
        what `check_images` and `LanguageModel.embed` refuse.
        """
        check_pairs(images, ids)
        vectors, tokens = self.language.embed(ids), self.see(images)
        holes = ids == IMAGE  # [B, T]
        counts = holes.sum(1)
        if wrong := (counts != tokens.shape[1]).nonzero().flatten().tolist():
            raise ValueError(
                f"row {wrong[0]} has {int(counts[wrong[0]])} image placeholders, and its image "
                f"makes {tokens.shape[1]} tokens"
            )
        return vectors.masked_scatter(holes[..., None], tokens.to(vectors.dtype))

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """Logits [B, T, V] for images [B, 3, H, W] and ids [B, T]: position t scores id t + 1."""
        return self.language.forward_embeddings(self.embed(images, ids))


class DirectPatchModel(nn.Module):
    """The baseline: 8x8 patches through one linear map, before the prompt and unmarked by ids.

    Takes `language` as it is, and draws the rest from torch's global generator.
    """

    def __init__(self, language: LanguageModel, image: int = 32, patch: int = 8):
        super().__init__()
        if image < 1 or patch < 1 or image % patch:
            raise ValueError(f"an image of {image} pixels does not divide into patches of {patch}")
        self.language, self.image = language, image
        width, tokens = language.config.width, (image // patch) ** 2
        self.patch = nn.Conv2d(CHANNELS, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(tokens, width) * INIT_STD)
        self.modality = nn.Parameter(torch.randn(width) * INIT_STD)  # says: this is no text

    @property
    def embedding(self) -> nn.Embedding:
        """The language model's embedding."""
        return self.language.embedding

    def prompt(self, text: str) -> list[int]:
        """Ids of a prompt, the image not among them."""
        return ByteTokenizer().encode(text, bos=True)

    def see(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] to the vectors [B, N, W] that stand before the prompt."""
        check_images(images, self.patch.kernel_size[0], self.image)
        x = self.patch(images.to(self.patch.weight.dtype)).flatten(2).mT  # [B, N, W]
        return x + self.positions + self.modality

    def embed(self, images: Tensor, ids: Tensor) -> Tensor:
        """Embeddings [B, N + T, W]: the image, then ids [B, T].

        Raises ValueError for what `check_images` and `LanguageModel.embed` refuse.
        """
        check_pairs(images, ids)
        vectors = self.language.embed(ids)
        return torch.cat((self.see(images).to(vectors.dtype), vectors), 1)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """Logits [B, N + T, V] for images [B, 3, H, W] and ids [B, T]."""
        return self.language.forward_embeddings(self.embed(images, ids))
