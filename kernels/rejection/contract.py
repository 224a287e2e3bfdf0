"""Where rejection draws its randomness. Its arguments and its result are those of `verify`.

A draft is drawn with stream 0. The tests compare that draft with its own distribution, so they must
not use the noise that made it: they would accept what the noise favours, and the output would
follow neither model. Hence three streams of their own.
"""

from __future__ import annotations

ACCEPT_STREAM = 1  # ratio test: word 0 of the row's counter decides about the row's draft token
RESIDUAL_STREAM = 2  # Gumbel noise of the row's own token: residual, or target at the bonus row
BLOCK_STREAM = 3  # block verification: word j of the first row's counter decides about row j
