"""The one place that knows devices and dtypes.

fp32 is the default on a CPU and on MPS. bf16 means: matrices are stored and multiplied in bfloat16;
norm weights, stream logits, residual streams, softmax and the linear-attention state stay fp32; and
the optimiser owns an fp32 master copy of every matrix, rounded to bf16 once a step. Autocast would
round every matrix again at each use instead, which on a CPU costs what bf16 gains.

What falls back or differs by device: fp64 does not exist on MPS (used in tests only); grouped
matmul is one kernel on CUDA in bf16 and a loop over experts elsewhere (moe.py); the optimiser's
fused form exists on all three.
"""

import os

import torch
from torch import Tensor, nn

DEVICES = ("auto", "cuda", "mps", "cpu")
DTYPES = ("auto", "fp32", "bf16")


def pick_device(name: str = "auto") -> torch.device:
    """The device to run on; auto is CUDA, else MPS, else CPU.

    Raises ValueError for an unknown name, or for a device this machine does not have.
    """
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; choose from {', '.join(DEVICES)}")
    have = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    if name == "auto":
        name = next(kind for kind, available in have.items() if available())
    elif not have[name]():
        raise ValueError(f"device {name} is not available here; --device auto picks one that is")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype matrices are stored in; auto is bf16 on CUDA, fp32 elsewhere.

    Raises ValueError for an unknown name.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose from {', '.join(DTYPES)}")
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move a model to the device and its matrices (two axes or more) to dtype; vectors stay fp32.

    Moving comes after drawing, so that one seed gives the same weights on every device.
    """
    model.to(device)
    for p in model.parameters():
        if p.ndim >= 2:
            p.data = p.data.to(dtype)
    return model


def describe(device: torch.device) -> str:
    """The device in words, for receipts and `info`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return {"mps": "Apple GPU (MPS)", "cpu": f"CPU, {torch.get_num_threads()} threads"}[device.type]


def set_threads(count: int | None) -> int:
    """Use `count` CPU threads (None: leave torch's choice) and return how many are in use.

    Results depend on it: sums are split over threads, and rounding follows.
    """
    if count is not None:
        if not 1 <= count <= 1024:
            raise ValueError(f"threads must be from 1 to 1024, got {count}")
        os.environ["OMP_NUM_THREADS"] = str(count)  # for processes started from here
        torch.set_num_threads(count)
    return torch.get_num_threads()
