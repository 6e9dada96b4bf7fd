"""Byte tokenizer: one token per UTF-8 byte, four reserved ids before them, nothing learned.

Any text is represented exactly, the vocabulary is 260 rows, and the embedding and output matrices
stay tiny. The price is length: a byte-pair vocabulary needs several times fewer tokens. Left out:
merges, normalisation, chat templates.
"""

from collections.abc import Iterable

PAD, BOS, EOS, SEP = range(4)
FIRST_BYTE = 4  # byte b has id b + FIRST_BYTE


class ByteTokenizer:
    """Text to ids and back. Ids: pad 0, bos 1, eos 2, sep 3, byte b -> b + 4."""

    vocab_size = FIRST_BYTE + 256

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of the UTF-8 bytes of `text`, with bos before and eos after where asked.

        Raises UnicodeEncodeError for a lone surrogate, which no UTF-8 sequence represents.
        """
        return [BOS] * bos + [b + FIRST_BYTE for b in text.encode("utf-8")] + [EOS] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` up to the first eos; skips reserved ids; invalid UTF-8 becomes U+FFFD.

        Raises ValueError for an id below 0 or above 259, such as an image placeholder.
        """
        data = bytearray()
        for i in ids:
            if i == EOS:
                break
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is no byte: text ids run from 0 to {self.vocab_size - 1}")
            if i >= FIRST_BYTE:
                data.append(i - FIRST_BYTE)
        return data.decode("utf-8", errors="replace")
