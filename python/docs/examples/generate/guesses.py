"""Guesses of the next tokens, from what followed the last two in a text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Tree(NamedTuple):
    """Tokens, each behind its parent: its number, or -1 for the text that is there."""

    tokens: list[int]
    parents: list[int]


NOTHING = Tree([], [])


class Guesses:
    """A model that costs next to nothing: pairs of tokens, and what followed them how often."""

    def __init__(self, text: Sequence[int], size: int) -> None:
        self.size = size  # of a tree
        counts: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for a, b, following in zip(text, text[1:], text[2:], strict=False):
            counts[a, b][following] += 1
        self.followers = {
            pair: [(token, n / found.total()) for token, n in found.most_common(size)]
            for pair, found in counts.items()
        }

    def tree(self, text: Sequence[int], depth: int) -> Tree:
        """The most probable continuations of `text`, of at most `depth` tokens each."""
        tree = Tree([], [])
        pairs, depths = [], []
        heap: list[tuple[float, int, int]] = []  # (-probability, parent, token)

        def grow(node: int, pair: tuple[int, int], probability: float) -> None:
            for token, share in self.followers.get(pair, ()):
                heappush(heap, (-probability * share, node, token))

        if depth > 0:
            grow(-1, (text[-2], text[-1]) if len(text) > 1 else (-1, -1), 1.0)
        while heap and len(tree.tokens) < self.size:
            minus_probability, parent, token = heappop(heap)
            tree.tokens.append(token)
            tree.parents.append(parent)
            pairs.append(((pairs[parent] if parent >= 0 else text)[-1], token))
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
            if depths[-1] < depth:
                grow(len(depths) - 1, pairs[-1], -minus_probability)
        return tree
