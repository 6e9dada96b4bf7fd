"""How the time of both attentions grows with length: the slope of a straight line in log-log."""

from statistics import median

import numpy as np
import torch

from glm_course.config import BASE
from glm_course.layers.linear_attention import linear_attention
from glm_course.layers.sparse_attention import sparse_attention
from tests.benchmarks.measure import Result, clock


def exponent(name: str, attend, lengths: list[int], rounds: int, wanted: float | None) -> Result:
    """Slope of log time over log length, forward and backward, batch 1, BASE heads, fp32.

    Range: the least and greatest slope between neighbouring lengths.
    """
    times = []
    for length in lengths:
        shape = (1, length, BASE.heads, BASE.head_dim)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))

        def step(q=q, k=k, v=v) -> None:
            attend(q, k, v).sum().backward()

        step()
        times.append(median(clock(step)[0] for _ in range(rounds)))
    x, y = np.log(lengths), np.log(times)
    slope = float(np.polyfit(x, y, 1)[0])
    steps = np.diff(y) / np.diff(x)
    return Result(
        f"{name}, time ~ T^a for T = {lengths[0]} to {lengths[-1]}",
        slope,
        float(steps.min()),
        float(steps.max()),
        "",
        "" if wanted is None else f"<= {wanted:g}",
        None if wanted is None else slope <= wanted,
        {"lengths": lengths, "seconds": times},
    )


def run(quick: bool) -> list[Result]:
    """Linear attention must stay linear; the anchors of sparse attention cost T^2 / (2 stride)."""
    lengths = [1024 * 2**i for i in range(3 if quick else 6)]
    rounds = 3 if quick else 5

    def sparse(q, k, v):
        return sparse_attention(q, k, v, BASE.window, BASE.stride)

    return [
        exponent("linear attention", linear_attention, lengths, rounds, 1.1),
        exponent("sparse attention", sparse, lengths, rounds, None),
    ]
