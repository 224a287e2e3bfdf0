"""Shapes of trees of drafts: how many tokens a pass brings with each, and which are best.

    rank     of a decided token: how many tokens the draft model liked better, given the true past
    node     the ranks along the path to it, so (0, 1) is the second choice behind the first
    shape    all nodes of a tree; a chain has first choices only

A pass accepts the longest run of coming ranks that is a node. So what any shape brings is counted
on texts whose ranks are known, and no tree has to be run. Which nodes are worth most follows from
how often each rank is right, as in Sequoia (Chen et al., arXiv 2402.12374): the product along the
path; those of highest worth form a tree, since a child is never worth more than its parent.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RANKS = 8  # choices that are told apart; a token of a later rank is in no tree
Node = tuple[int, ...]
Shape = frozenset[Node]
Ranks = Sequence[int]  # of one text, from its first token on
# [3, RANKS]: chance of each rank at the start of a draft, behind a first choice, behind another
Chances = NDArray[np.float64]


def chain(depth: int) -> Shape:
    return frozenset((0,) * (i + 1) for i in range(depth))


def chances_of(texts: Sequence[Ranks]) -> Chances:
    seen = np.zeros((3, RANKS + 1))
    for ranks in texts:
        known = np.minimum(ranks, RANKS)
        np.add.at(seen[0], known, 1)
        np.add.at(seen, (np.where(known[:-1] == 0, 1, 2), known[1:]), 1)
    return np.asarray(seen[:, :RANKS] / np.maximum(seen.sum(axis=1, keepdims=True), 1.0))


def best_tree(chances: Chances, tokens: int, depth: int) -> Shape:
    """The nodes of highest worth, no deeper than `depth`."""
    heap: list[tuple[float, Node]] = []

    def offer(path: Node, worth: float) -> None:
        state = 0 if not path else 1 if path[-1] == 0 else 2
        for rank in range(RANKS):
            heapq.heappush(heap, (-worth * float(chances[state, rank]), (*path, rank)))

    offer((), 1.0)
    shape: set[Node] = set()
    while heap and len(shape) < tokens:
        worth, node = heapq.heappop(heap)
        shape.add(node)
        if len(node) < depth:
            offer(node, -worth)
    return frozenset(shape)


def tokens_per_pass(shape: Shape, texts: Sequence[Ranks]) -> float:
    return sum(map(len, texts)) / sum(passes(shape, ranks) for ranks in texts)


def passes(shape: Shape, ranks: Ranks) -> int:
    """Passes that one text takes."""
    at = count = 0
    while at < len(ranks):
        node: Node = ()
        while at < len(ranks) and (*node, ranks[at]) in shape:
            node, at = (*node, ranks[at]), at + 1
        at, count = at + 1, count + 1
    return count


def expected_tokens(shape: Shape, chances: Chances) -> float:
    """Tokens of a pass where ranks are drawn with these chances."""
    total = 1.0
    for node in shape:
        worth, state = 1.0, 0
        for rank in node:
            worth *= float(chances[state, rank])
            state = 1 if rank == 0 else 2
        total += worth
    return total


def widths(shape: Shape) -> list[int]:
    """Rows of each pass of the draft model: the root, then the nodes of a depth with children."""
    inner = {node[:-1] for node in shape}
    by_depth = Counter(map(len, inner))
    return [by_depth[depth] for depth in range(len(by_depth))]
