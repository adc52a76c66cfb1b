"""How alike two texts are: MinHash with one hash function, keeping the least values.

A text is the set of its runs of five words. The least 128 hashes of a set are a sample of it that
is the same wherever the set is, so sketches of two sets tell how much of their union they share;
of sets that small, exactly.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence

KEPT = 128
RUN = 5
_WORD = re.compile(r"\w+")

Sketch = tuple[int, ...]


def normal(text: str) -> str:
    """Return text without what does not make it another text: case and forms of letters."""
    return unicodedata.normalize("NFKC", text).casefold()


def sketch(texts: Iterable[str]) -> Sketch:
    """Return the least hashes over all runs of words, ascending; no words give an empty one."""
    runs: set[bytes] = set()
    for text in texts:
        words = [word.encode() for word in _WORD.findall(normal(text))]
        if words:
            runs |= {b" ".join(words[at : at + RUN]) for at in range(max(len(words) - RUN + 1, 1))}
    hashes = (int.from_bytes(hashlib.blake2b(run, digest_size=8).digest(), "big") for run in runs)
    return tuple(sorted(set(hashes))[:KEPT])


def likeness(one: Sequence[int], two: Sequence[int]) -> float:
    """Return what share of their union two sets have in common, as their sketches tell it."""
    if not one or not two:
        return 0.0
    both = set(one) & set(two)
    union = sorted(set(one) | set(two))[:KEPT]
    return sum(value in both for value in union) / len(union)
