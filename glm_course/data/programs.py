"""Composed operations: arithmetic in words, translated into one Python expression.

Three operations out of five, applied in turn to x. 120 sequences are frozen into 88 to train on and
32 held out, so a held-out program composes known operations in an order never seen.
"""

import random
from dataclasses import dataclass
from itertools import product

# operation: (its two phrasings, the expression made of an expression e)
OPERATIONS = {
    "add": (("Add {c}.", "Increase it by {c}."), "({e} + {c})"),
    "sub": (("Subtract {c}.", "Decrease it by {c}."), "({e} - {c})"),
    "mul": (("Multiply by {c}.", "Scale it by {c}."), "({e} * {c})"),
    "neg": (("Negate it.", "Flip its sign."), "(-{e})"),
    "abs": (("Take its absolute value.", "Make the result nonnegative."), "abs({e})"),
}
TRAINING = 88  # structures to train on; the other 32 are held out
SHUFFLE_SEED = 1701

Structure = tuple[str, str, str]


@dataclass(frozen=True)
class Program:
    """A task in words, ending in "Python: ", and the expression and newline that answer it."""

    prompt: str
    answer: str


def structures() -> tuple[list[Structure], list[Structure]]:
    """The 88 structures to train on, in frozen order, and the 32 held out.

    All ordered triples of operations that hold at least two different ones.
    """
    triples = [s for s in product(OPERATIONS, repeat=3) if len(set(s)) > 1]
    random.Random(SHUFFLE_SEED).shuffle(triples)
    return triples[:TRAINING], triples[TRAINING:]


def make_program(structure: Structure, index: int, seed: int) -> Program:
    """Program number `index` of a structure: its constants, 2 to 5, and phrasings are drawn."""
    number = {name: n for n, name in enumerate(OPERATIONS, start=1)}
    mark = sum(p * number[name] * 101 for p, name in enumerate(structure, start=1))
    rng = random.Random(seed * 1_000_003 + index * 9176 + mark)
    constants = [rng.choice((2, 3, 4, 5)) for _ in structure]
    rng.randint(-5, 5)  # the original draws a test input here, and the stream must stay the same
    phrases, expression = [], "x"
    for name, c in zip(structure, constants, strict=True):
        phrasings, form = OPERATIONS[name]
        phrases.append(rng.choice(phrasings).format(c=c))
        expression = form.format(e=expression, c=c)
    return Program(f"Task: start with x. {' '.join(phrases)}\nPython: ", f"{expression}\n")
