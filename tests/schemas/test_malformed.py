"""What a job may ask for about malformed outputs, and which request a recorded output answers."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.schemas.errors import SpecError
from specbatch.schemas.malformed import AS_IT_IS, MalformedSpec
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.seeds import retry_seed, sample_seed
from specbatch.schemas.spec import load_spec

LEAST: dict[str, Any] = {"input": {"uri": "in"}, "verifier": "big"}
FORM = '{"type":"json_object"}'
SAMPLED = SamplingParams(max_tokens=8, temperature=0.5, response_format=FORM)


def spec_with(malformed: dict[str, Any], **more: Any) -> Any:
    return load_spec({**LEAST, "output": {"uri": "out", "malformed": malformed}, **more})


@pytest.mark.parametrize(
    ("malformed", "more", "problem"),
    [
        ({"max_tokens": 128}, {}, "output.malformed.max_tokens 128 is not above sampling.max_tok"),
        ({"max_tokens": 1}, {}, "field `output.malformed.max_tokens`: must be at least 2"),
        ({"retries": 17}, {}, "field `output.malformed.retries`: must be at most 16"),
        ({"then": "drop"}, {}, "field `output.malformed.then`: must be 'keep' or 'quarantine'"),
        ({"retry": 2}, {}, r"unknown field `output.malformed.retry` \(did you mean `retries`"),
        (
            {"retries": 1},
            {"proposer": "small", "speculation": {"verification": "rejection"}},
            "leave its max_tokens and retries out, or verification rejection",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    malformed: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SpecError, match=problem):
        spec_with(malformed, **more)


def test_quarantine_alone_computes_nothing() -> None:
    block = {"proposer": "small", "speculation": {"verification": "block"}}
    made = spec_with({"then": "quarantine"}, **block).output.malformed
    assert not made.mends
    assert not AS_IT_IS.mends
    assert spec_with({"max_tokens": 129}).output.malformed.mends
    assert spec_with({"retries": 1}).output.malformed.mends


def test_a_job_that_says_nothing_has_the_digest_of_earlier_versions() -> None:
    plain = load_spec({**LEAST, "output": {"uri": "out"}})
    assert spec_with({}).digest() == plain.digest()
    assert spec_with({"retries": 1}).digest() != plain.digest()


def test_seeds_of_retries_are_of_no_other_sample() -> None:
    assert retry_seed(5, 0) == 5
    seeds = [retry_seed(sample_seed(5, s), k) for s in range(8) for k in range(17)]
    assert len({*seeds, *(sample_seed(5, s) for s in range(200))}) == len(seeds) + 200 - 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert retry_seed(5, 1) == 5746170038579665692


@pytest.mark.parametrize(
    ("said", "params", "seed", "tokens", "limit", "decided"),
    [
        # (policy, sampling, recorded seed, recorded tokens) -> (limit, seed)
        ({}, SAMPLED, 5, 8, 8, 5),
        ({"max_tokens": 20}, SAMPLED, 5, 8, 8, 5),
        ({"max_tokens": 20}, SAMPLED, 5, 9, 20, 5),
        ({}, SAMPLED, 5, 9, 8, 5),  # more tokens than anybody asked for
        ({"max_tokens": 20}, SamplingParams(max_tokens=8), 5, 9, 8, 5),  # without a form
        ({"max_tokens": 7}, SAMPLED, 5, 9, 8, 5),  # a row's own limit is above it
        ({"retries": 2}, SAMPLED, retry_seed(5, 2), 8, 8, retry_seed(5, 2)),
        ({"retries": 2}, SAMPLED, retry_seed(5, 3), 8, 8, 5),  # no retry has this seed
        ({"retries": 2}, SamplingParams(max_tokens=8), retry_seed(5, 1), 8, 8, 5),  # greedy
    ],
)
def test_the_request_of_a_recorded_output(
    said: dict[str, Any], params: SamplingParams, seed: int, tokens: int, limit: int, decided: int
) -> None:
    found, by = MalformedSpec(**said).decided_by(params, 5, seed, tokens)
    assert (found.max_tokens, by) == (limit, decided)
