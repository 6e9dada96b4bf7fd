"""What a model is made of, as one dataclass, and the named presets the course trains.

Every count a chapter prints follows from these numbers; nothing else in the library knows a width
or a depth.
"""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a language model.

    Layer i, counted from 0, is sparse when (i + 1) % sparse_every == 0, else linear. Raises
    ValueError for sizes that do not fit together.
    """

    vocab_size: int = 260
    width: int = 192  # channels of one residual stream
    layers: int = 12
    heads: int = 6
    expert_hidden: int = 384  # inner width of every SwiGLU expert
    experts: int = 8  # routed experts a layer; with 0 only the shared one: a dense MLP
    top_k: int = 2  # routed experts a token
    selection_bias: bool = False  # a bias an expert on the router's choice, moved by its load
    streams: int = 4  # parallel residual streams
    window: int = 32  # last positions a sparse layer sees, the present one included
    stride: int = 32  # anchors of a sparse layer: positions 0, stride, 2 stride, ...
    max_length: int = 192  # longest sequence, in tokens
    sparse_every: int = 4
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("experts", "top_k", "selection_bias") and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.experts < 0 or self.top_k < min(1, self.experts):
            raise ValueError(
                f"a token needs at least one of the routed experts, or there must be none: "
                f"top_k {self.top_k}, experts {self.experts}"
            )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")
        if self.head_dim % 2:
            raise ValueError(
                f"head width {self.head_dim} is odd: rotary positions turn channels in pairs"
            )
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k {self.top_k} is more than the {self.experts} experts there are"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, uses sparse attention."""
        return (layer + 1) % self.sparse_every == 0


BASE = ModelConfig()
# Softmax attention to every earlier position and one MLP as wide as a token's three experts: what
# BASE uses of its weights for one token, less the router. A window of max_length reaches them all.
DENSE_CONTROL = ModelConfig(expert_hidden=3 * 384, experts=0, top_k=0, window=192, sparse_every=1)
STUDY_MINI = ModelConfig(
    width=48,
    layers=3,
    heads=3,
    expert_hidden=96,
    experts=4,
    top_k=1,
    streams=2,
    window=24,
    stride=24,
    max_length=128,
)
VISION_MINI = ModelConfig(
    vocab_size=263,
    width=32,
    layers=1,
    heads=4,
    expert_hidden=48,
    experts=4,
    streams=2,
    window=8,
    stride=8,
    max_length=64,
)
