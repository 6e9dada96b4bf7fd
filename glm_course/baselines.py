"""Two baselines without a network, trained on the same text as the model they are compared with.

`NgramBytes` counts which byte follows which: how far does local statistics go? `Lookup` remembers a
body for each description: how far does memory go? (All the way: the benchmark has 16 sentences.)
Both complete a prompt by `complete(prompt) -> str`, so whatever scores the model scores them too.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from glm_course.data.tasks import pretraining_batches
from glm_course.tokenizer import EOS, ByteTokenizer

TOKENIZER = ByteTokenizer()
PROMPT = re.compile(r"# Complete this Python function\.\n# (.*)\ndef \w+\((\w+)\):")


def pretraining_examples(steps: int, batch_size: int = 32, seed: int = 42) -> list[list[int]]:
    """The examples a model has seen after `steps` updates: steps * batch_size lists of token ids.

    Bos and eos are included. Raises ValueError for fewer than one step or one example a step.
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(f"{steps} steps of {batch_size} examples are none")
    return [ids for batch in islice(pretraining_batches(batch_size, seed), steps) for ids in batch]


class NgramBytes:
    """Byte n-gram model with Witten-Bell smoothing: the last order - 1 tokens predict the next.

    P(w | h) = (c(h w) + u(h) P(w | h')) / (c(h) + u(h)), where c counts, u(h) is the number of
    different tokens seen after h, and h' is h without its first token; the empty history falls back
    on the uniform distribution over all 260 ids. Each level is a mixture of two distributions, so
    the 260 probabilities sum to 1 after any history. As for the network, bos is context and never
    a target, eos is a target. Order 1 ignores the context.

    `examples` are lists of token ids, bos first. Order 8 on 3,200 examples trains in about a second
    and holds about 35 MB. Raises ValueError for an order below 1 and for no examples.
    Source: Witten and Bell, IEEE Transactions on Information Theory 37 (1991) 1085, method C.
    """

    def __init__(self, order: int, examples: Iterable[Sequence[int]]) -> None:
        if order < 1:
            raise ValueError(f"order must be at least 1, got {order}")
        self.order = order
        # One character an id: slices of a string are quick to make and to look up.
        texts = ["".join(map(chr, ids)) for ids in examples]
        if not texts:
            raise ValueError("an n-gram model needs at least one example to count")
        self.count: Counter[str] = Counter()  # c(h w), by the string h w
        for n in range(1, order + 1):
            first = max(n, 2)  # the shortest slice from the start has a target after bos
            for text in texts:
                self.count.update(text[end - n : end] for end in range(first, len(text) + 1))
        self.seen: Counter[str] = Counter()  # c(h), by h
        self.unlike: Counter[str] = Counter()  # u(h), by h
        for gram, times in self.count.items():
            self.seen[gram[:-1]] += times
            self.unlike[gram[:-1]] += 1
        self.targets = sorted(gram for gram in self.count if len(gram) == 1)

    def probability(self, context: Sequence[int], target: int) -> float:
        """P(target | context) for token ids; only the last order - 1 of `context` matter."""
        return self._probability("".join(map(chr, context)), chr(target))

    def _probability(self, context: str, target: str) -> float:
        p = 1 / TOKENIZER.vocab_size
        for length in range(min(len(context), self.order - 1) + 1):
            history = context[len(context) - length :]
            unlike = self.unlike.get(history)
            if unlike is None:  # never seen, so no longer history was seen either
                break
            p = (self.count.get(history + target, 0) + unlike * p) / (self.seen[history] + unlike)
        return p

    def nats_per_byte(self, examples: Iterable[Sequence[int]]) -> float:
        """Mean of -ln P over every token but the first of each example: the network's loss.

        Raises ValueError when there is nothing to predict.
        """
        total, targets = 0.0, 0
        for ids in examples:
            text = "".join(map(chr, ids))
            for t in range(1, len(text)):
                total -= math.log(self._probability(text[:t], text[t]))
                targets += 1
        if not targets:
            raise ValueError("there is no token to predict in these examples")
        return total / targets

    def complete(self, prompt: str, max_new: int = 48) -> str:
        """Greedy continuation of `prompt`, up to eos or `max_new` tokens; ties go to the lower id.

        Only tokens seen as targets in training are considered: one of them is always most likely.
        """
        text = "".join(map(chr, TOKENIZER.encode(prompt, bos=True)))
        start = len(text)
        while len(text) < start + max_new and text[-1] != chr(EOS):
            text = text + max(self.targets, key=lambda target: self._probability(text, target))
        return TOKENIZER.decode(map(ord, text[start:]))


class Lookup:
    """Remembers the completion that followed each (description, argument) in its examples.

    It reads the text alone: the second comment line and the argument in the signature are the key,
    what follows the colon is the value. A function's name is ignored, so one example of each
    sentence is enough for every task that will ever be drawn. Raises ValueError for an example
    without the three lines of a prompt.
    """

    def __init__(self, examples: Iterable[Sequence[int]]) -> None:
        self.completions: dict[tuple[str, str], str] = {}
        for ids in examples:
            text = TOKENIZER.decode(ids)
            prompt = PROMPT.match(text)
            if prompt is None:
                raise ValueError(f"example does not begin with a task's prompt: {text[:60]!r}")
            self.completions[prompt.groups()] = text[prompt.end() :]

    def complete(self, prompt: str) -> str:
        """The remembered completion, or an empty string for a sentence never seen."""
        found = PROMPT.fullmatch(prompt)
        return self.completions.get(found.groups(), "") if found else ""
