"""AdamW with clipping, and the fp32 master weights that a bf16 model is trained through.

In fp32 this is torch's fused AdamW and nothing else. In bf16 the optimiser works on an fp32 copy of
every matrix: gradients are widened once a step, the update is made in fp32, and the model's bf16
matrices are the rounded copy. Small updates would be lost if they were added to bf16 numbers.

Source: Loshchilov and Hutter (arXiv 1711.05101); master weights: Micikevicius et al. (1710.03740).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glm_course.device import place


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters of AdamW; clip is the largest norm of all gradients together."""

    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: int = 0  # updates over which the rate rises in a line to learning_rate; 0: none
    decay_all: bool = True  # False: no decay on vectors (norms, stream logits) and the embedding

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")


class MasterAdamW:
    """AdamW over the trainable parameters of a model that is stored in `dtype`.

    Takes the model in fp32, on its device, and converts it. Frozen parameters (requires_grad false)
    are left alone but keep their fp32 copy, so that checkpoints lose nothing. All it asks of a
    model is an `embedding`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, settings: AdamWSettings):
        self.model, self.dtype, self.settings = model, dtype, settings
        self.master = {name: p for name, p in model.named_parameters()}
        if dtype != torch.float32:
            self.master = {n: p.detach().clone() for n, p in self.master.items()}
            place(model, model.embedding.weight.device, dtype)
        self.trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        decayed, others = [], []
        for name, p in self.trained:
            matrix = p.ndim > 1 and p is not model.embedding.weight
            group = decayed if matrix or settings.decay_all else others
            group.append(self.master[name].requires_grad_())
        self.adamw = torch.optim.AdamW(
            [{"params": decayed}] + [{"params": others, "weight_decay": 0.0}] * bool(others),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self) -> float:
        """One clipped update from the model's gradients, which it clears.

        Returns their norm before clipping.
        """
        for name, p in self.trained:
            master = self.master[name]
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float()
        masters = [self.master[name] for name, _ in self.trained]
        norm = torch.nn.utils.clip_grad_norm_(masters, self.settings.clip)
        if self.settings.warmup:
            done = max((int(state["step"]) for state in self.adamw.state.values()), default=0)
            for group in self.adamw.param_groups:
                share = min(1.0, (done + 1) / self.settings.warmup)
                group["lr"] = self.settings.learning_rate * share
        self.adamw.step()
        with torch.no_grad():
            for name, p in self.trained:
                if self.master[name] is not p:
                    p.copy_(self.master[name])
                    self.master[name].grad = None
                p.grad = None
        return norm.item()

    def weights(self) -> dict[str, Tensor]:
        """The model's state_dict with every weight in fp32."""
        return self.model.state_dict() | {n: p.detach() for n, p in self.master.items()}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], state: dict) -> None:
        """Go on from fp32 weights and the state_dict of `adamw` that were saved with them."""
        for name, p in self.model.named_parameters():
            self.master[name].copy_(weights[name])
            if self.master[name] is not p:
                p.copy_(self.master[name])
        for name, buffer in self.model.named_buffers():
            if name in weights:  # a table that is computed is not saved
                buffer.copy_(weights[name])
        self.adamw.load_state_dict(state)
