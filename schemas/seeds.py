"""Derives seeds from the job's seed, the row's id and the sample's number.

So a retry, another worker or another order of rows draws the same noise.
"""

from __future__ import annotations

import hashlib


def derive_seed(job_seed: int, row_id: str) -> int:
    """Seed of a row without its own: the first 63 bits of SHA-256, in [0, 2**63)."""
    return _first_63_bits(f"{job_seed}\0{row_id}")


def sample_seed(seed: int, sample_index: int) -> int:
    """Seed of one of a row's `n` samples; sample 0 has the row's own seed."""
    return seed if sample_index == 0 else _first_63_bits(f"{seed}\0{sample_index}")


def retry_seed(seed: int, number: int) -> int:
    """Seed of a sample that is sampled again for the `number`th time; 0 is the sample's own."""
    return seed if number == 0 else _first_63_bits(f"{seed}\0again\0{number}")


def draft_seed(seed: int, position: int) -> int:
    """Seed of a draft for a ratio test that begins at an output position.

    Such a draft must not share noise with the test, nor, under block verification, with the draft
    of another block.
    """
    return _first_63_bits(f"{seed}\0draft\0{position}")


def _first_63_bits(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
