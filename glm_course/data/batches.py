"""Lists of ids as padded tensors: tokens first, pad behind, so that causal layers never see it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm_course.tokenizer import PAD


def pad_behind(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids as one tensor [B, T], pad behind the shorter ones, and lengths [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), PAD)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids.to(device), lengths.to(device)


def shifted(examples: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and labels [B, T], one byte apart, and the bool mask [B, T] of positions that count.

    Rows are padded to the longest of the batch: padding adds nothing to the loss.
    """
    ids, lengths = pad_behind(examples, device)
    mask = torch.arange(ids.shape[1] - 1, device=device) < lengths[:, None] - 1
    return ids[:, :-1], ids[:, 1:], mask
