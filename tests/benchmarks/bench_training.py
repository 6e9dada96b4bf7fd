"""A training step, plain / fast, and how much of the machine's matmul rate the fast one reaches."""

from itertools import islice
from statistics import median

import torch

from glm_course.config import BASE
from glm_course.data.tasks import pretraining_batches
from glm_course.train.optimizer import AdamWSettings, MasterAdamW
from glm_course.train.pretrain import new_model, next_byte_loss
from tests.benchmarks.flops import matmul_floor, step_flops
from tests.benchmarks.measure import Result, ratios, take_turns
from tests.reference import optimizer_plain, training_step_plain


def run(quick: bool) -> list[Result]:
    """BASE from seed 42 on its real stream of 32 examples a step (4 when quick), fp32 and bf16.

    The plain step pads to 128 positions as the original does, and runs bf16 under autocast; the
    fast one packs, and keeps bf16 matrices under an fp32 master copy.
    """
    return [*compare(torch.float32, quick), *compare(torch.bfloat16, quick)]


def compare(dtype: torch.dtype, quick: bool) -> list[Result]:
    """Ratios of the two steps, the rate of the same step's matmuls alone, and the share reached."""
    rounds, batch_size = (2, 4) if quick else (5, 32)
    bf16 = dtype == torch.bfloat16
    name = "bf16" if bf16 else "fp32"
    batches = list(islice(pretraining_batches(batch_size, 42), rounds))
    lengths = [[len(ids) - 1 for ids in batch] for batch in batches]
    model = new_model(BASE, 42)
    state = {key: p.detach().clone() for key, p in model.named_parameters()}
    plain_optimizer = optimizer_plain(state)
    optimizer = MasterAdamW(model, dtype, AdamWSettings())
    floor, floor_flops = matmul_floor(dtype, sum(lengths[0]))
    losses: dict[str, list[float]] = {"plain": [], "fast": []}

    def plain() -> None:
        batch = batches[len(losses["plain"])]
        losses["plain"].append(training_step_plain(state, BASE, plain_optimizer, batch, bf16)[0])

    def fast() -> None:
        loss, _ = next_byte_loss(model, batches[len(losses["fast"])])
        loss.backward()
        optimizer.step()
        losses["fast"].append(loss.item())

    floor()  # the first calls pay for threads, allocations and the choice of kernels
    next_byte_loss(model, batches[0])[0].backward()
    model.zero_grad()
    times = take_turns({"plain": plain, "fast": fast, "floor": floor}, rounds)

    rates = [floor_flops / wall for wall, _ in times["floor"]]
    work = [step_flops(BASE, batch) for batch in lengths]
    reached = [flops / wall for flops, (wall, _) in zip(work, times["fast"], strict=True)]
    shares = [100 * r / rate for r, rate in zip(reached, rates, strict=True)]
    gaps = [abs(a - b) for a, b in zip(losses["plain"], losses["fast"], strict=True)]
    return [
        *ratios(f"training step, {name}", times["plain"], times["fast"], None if bf16 else 4.0),
        Result(
            f"difference in loss, {name}", median(gaps), min(gaps), max(gaps), "nats", detail=losses
        ),
        Result(
            f"the step's matmuls alone, {name}",
            median(rates) / 1e9,
            min(rates) / 1e9,
            max(rates) / 1e9,
            "GFLOP/s",
        ),
        Result(
            f"model FLOPs of the fast step, {name}, of that rate",
            median(shares),
            min(shares),
            max(shares),
            "%",
            "" if bf16 else ">= 45",
            None if bf16 else median(shares) >= 45,
            {"formula": step_flops.__doc__, "step_flops": work, "flops_per_second": reached},
        ),
    ]
