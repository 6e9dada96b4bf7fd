"""Pictures of digits, drawn from seeds: seven-segment figures in random colours, moved a little.

An image task small enough to learn in seconds, whose answer no prompt gives away. A digit is its
segments, filled with one colour on black, shifted by up to two pixels; then noise everywhere. Left
out: fonts, sizes, rotation, backgrounds, files.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SIZE = 32  # pixels a side
SHIFT = 2  # pixels at most, each way
NOISE = 0.06  # largest value added to a pixel

# segment: rows y0 to y1 - 1, columns x0 to x1 - 1, before the shift
SEGMENTS: dict[str, tuple[int, int, int, int]] = {
    "a": (4, 7, 8, 24),  # top
    "b": (6, 15, 24, 27),  # upper right
    "c": (16, 26, 24, 27),  # lower right
    "d": (25, 28, 8, 24),  # bottom
    "e": (16, 26, 5, 8),  # lower left
    "f": (6, 15, 5, 8),  # upper left
    "g": (14, 17, 8, 24),  # middle
}
DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgecd", "abc", "abcdefg", "abfgcd")


def digit_images(labels: Sequence[int], seed: int) -> Tensor:
    """Images of the digits `labels`, float32 [B, 3, 32, 32] in [0, 1], on the CPU.

    All random numbers are those of one generator: a picture depends on its label, on `seed`, on its
    place in the batch and, since noise is drawn last, on the size of the batch. Raises ValueError
    for no labels, and for a label that is no digit.
    """
    if not len(labels) or not all(0 <= label < len(DIGITS) for label in labels):
        raise ValueError(f"labels must be digits from 0 to 9, at least one, got {list(labels)}")
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(len(labels), 3, SIZE, SIZE)
    for image, label in zip(images, labels, strict=True):  # order of the draws: do not change
        dy, dx = (int(torch.randint(-SHIFT, SHIFT + 1, (), generator=generator)) for _ in range(2))
        colour = 0.55 + 0.45 * torch.rand(3, 1, 1, generator=generator)  # [C, 1, 1]
        intensity = 0.80 + 0.20 * torch.rand((), generator=generator)
        for segment in DIGITS[label]:
            y0, y1, x0, x1 = SEGMENTS[segment]
            image[:, y0 + dy : y1 + dy, x0 + dx : x1 + dx] = colour * intensity
    noise = torch.rand(images.shape, generator=generator)
    return (images + NOISE * noise).clamp(0, 1)
