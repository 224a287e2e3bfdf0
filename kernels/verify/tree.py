"""Which path of a tree of drafts the verifier takes: the definition.

    row 0      the newest decided token, whose KV is not cached yet: the root
    rows 1 …   draft tokens, each behind its parent

A row's counter has the position that is decided behind it, so all rows of a depth meet the same
noise, and `reference.verify` gives every row its own token as ever. There is nothing else to draw:
sampling without a tree would decide the same tokens along the same path. (With a ratio test each
candidate must be tried in turn: SpecInfer, Miao et al., arXiv 2305.09781.)
"""

from __future__ import annotations

from collections.abc import Sequence


def follow(
    decided: Sequence[int],  # [num_rows] the verifier's own token behind each row
    fed: Sequence[int],  # [num_rows] the rows' own tokens
    parents: Sequence[int],  # [num_rows] the row that each follows; -1: the root. They come first
) -> list[int]:
    """The rows that are kept, from the root on. What is emitted is `decided` of each of them.

    All but the last of these tokens were drafted; the last is the correction, or the bonus token
    where the path ends on a leaf. Of several drafts of the same token the first is followed.
    """
    path = [0]
    for row in range(1, len(fed)):
        if parents[row] == path[-1] and fed[row] == decided[path[-1]]:
            path.append(row)
    return path
