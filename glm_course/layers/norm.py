"""RMSNorm: divide a vector by its root mean square, then scale each channel.

Source: Zhang and Sennrich (arXiv 1910.07467), eq. 4, without the bias. Left out: LayerNorm's mean.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Weight-only RMSNorm over the last axis, statistics in fp32 or wider. Draws no random numbers.

    weight: [W]. The output has the dtype of the weight, fp32 also in bf16 runs (see device.py):
    one small vector is not worth rounding.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] to [..., W]."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
