"""Peak memory of linear attention, forward and backward, plain / fast."""

import torch
from torch import Tensor

from glm_course.config import BASE
from glm_course.layers.linear_attention import linear_attention
from tests.benchmarks.measure import Result, peak_bytes
from tests.reference import linear_attention_plain


def run(quick: bool) -> list[Result]:
    """Ratio of peak bytes at T = 2048 (512 when quick), BASE heads, batch 1, fp32."""
    length = 512 if quick else 2048
    shape = (1, length, BASE.heads, BASE.head_dim)

    def peak(attend) -> int:
        torch.manual_seed(0)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        weight: Tensor = torch.randn(shape)
        return peak_bytes(lambda: attend(q, k, v).backward(weight))

    plain, fast = peak(linear_attention_plain), peak(linear_attention)
    ratio = plain / fast
    return [
        Result(
            f"linear attention at T = {length}, peak memory forward + backward, plain / fast",
            ratio,
            ratio,
            ratio,
            "x",
            ">= 10",
            ratio >= 10,
            {"shape": shape, "plain_bytes": plain, "fast_bytes": fast},
        )
    ]
