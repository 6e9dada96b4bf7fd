"""The eight task families, their frozen splits, and the endless stream of pretraining examples.

A task is a one-argument Python function: a prompt of two comments and a signature, the body as
completion, three hidden tests. A family has two descriptions and one body; all that makes two tasks
of a family differ is the description and seven random letters in the function's name. So the data
is small: 16 sentences and 8 bodies.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

from glm_course.tokenizer import ByteTokenizer

# family: (argument, two descriptions, body, three tests as (argument, result))
FAMILIES: dict[str, tuple[str, tuple[str, str], str, tuple[tuple[Any, Any], ...]]] = {
    "increment": (
        "x",
        ("Return x plus one.", "Increase x by one."),
        "return x + 1",
        ((-3, -2), (0, 1), (7, 8)),
    ),
    "double": (
        "x",
        ("Return two times x.", "Double the input."),
        "return x * 2",
        ((-4, -8), (0, 0), (6, 12)),
    ),
    "square": (
        "x",
        ("Return x squared.", "Multiply x by itself."),
        "return x * x",
        ((-4, 16), (0, 0), (5, 25)),
    ),
    "absolute": (
        "x",
        ("Return the absolute value of x.", "Make a negative x positive."),
        "return -x if x < 0 else x",
        ((-7, 7), (0, 0), (9, 9)),
    ),
    "nonnegative": (
        "x",
        ("Clamp x to at least zero.", "Return zero when x is negative."),
        "return x if x > 0 else 0",
        ((-5, 0), (0, 0), (8, 8)),
    ),
    "even": (
        "x",
        ("Return whether x is even.", "Check divisibility by two."),
        "return x % 2 == 0",
        ((-3, False), (0, True), (8, True)),
    ),
    "reverse": (
        "text",
        ("Return text in reverse order.", "Reverse the string."),
        "return text[::-1]",
        (("", ""), ("abc", "cba"), ("level", "level")),
    ),
    "list_sum": (
        "values",
        ("Return the sum of values.", "Add every number in the list."),
        "return sum(values)",
        (([], 0), ([1, 2, 3], 6), ([-2, 5], 3)),
    ),
}
SPLITS = {
    "dev": 1701,
    "final": 2909,
    "rl": 3907,
    "confirm": 8123,
    "fresh": 9677,  # the original has none like it: opened by the studies that confirm a choice
}  # split: seed; family number f adds 53 f


@dataclass(frozen=True)
class CodingTask:
    """One function to write: `prompt` is shown, `completion` is a reference, `tests` are hidden."""

    family: str
    entry_point: str  # the function's name
    description: str
    prompt: str  # three lines, no newline at the end
    completion: str  # newline, four spaces, body, newline
    tests: tuple[
        tuple[Any, Any], ...
    ]  # (argument, expected result); mutable arguments: copy before use


def make_task(family: str, index: int, seed: int) -> CodingTask:
    """Task number `index` of `family` under `seed`; the same three always give the same task."""
    argument, descriptions, body, tests = FAMILIES[family]
    rng = random.Random((seed + 1) * 1_000_003 + index * 9176 + sum(map(ord, family)))
    name = f"{family}_{''.join(rng.choice(ascii_lowercase) for _ in range(7))}"
    description = descriptions[rng.randrange(2)]
    prompt = f"# Complete this Python function.\n# {description}\ndef {name}({argument}):"
    return CodingTask(family, name, description, prompt, f"\n    {body}\n", tests)


def frozen_tasks(
    split: str, per_family: int, families: Sequence[str] | None = None
) -> list[CodingTask]:
    """The first `per_family` tasks of each family of a split, ordered family by family as FAMILIES.

    Raises ValueError for an unknown split or family, and for a count below one.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
    unknown = [name for name in families or () if name not in FAMILIES]
    if unknown:
        raise ValueError(f"unknown family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    if per_family < 1:
        raise ValueError(f"per_family must be at least 1, got {per_family}")
    return [
        make_task(family, index, SPLITS[split] + 53 * number)
        for number, family in enumerate(FAMILIES)
        if families is None or family in families
        for index in range(per_family)
    ]


def pretraining_task(number: int, seed: int) -> CodingTask:
    """Example `number` of the pretraining stream under `seed`: a random family, then its task."""
    family = list(FAMILIES)[random.Random(seed * 10_000_019 + number).randrange(len(FAMILIES))]
    return make_task(family, number, seed)


def pretraining_batches(batch_size: int, seed: int, start: int = 0) -> Iterator[list[list[int]]]:
    """Batches of token ids, bos and eos included, without end, from step `start` (0 is the first).

    Step n takes examples n * batch_size to (n + 1) * batch_size - 1: any step can be rebuilt alone.
    """
    if batch_size < 1 or start < 0:
        raise ValueError(
            f"need a batch of at least 1 and a start of at least 0, got {batch_size}, {start}"
        )
    tokenizer = ByteTokenizer()
    step = start
    while True:
        tasks = [pretraining_task(step * batch_size + i, seed) for i in range(batch_size)]
        yield [
            tokenizer.encode(task.prompt + task.completion, bos=True, eos=True) for task in tasks
        ]
        step += 1
