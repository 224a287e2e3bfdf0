"""Receipts prove a prompt and an output by themselves, part by part."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from ledger.builders import JOB, completion

from specbatch.pipeline.audit.receipts import differing, is_prompt, with_receipts
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.records import FinishReason, PromptRow

CIPHER = Cipher([bytes(range(32))])
ROW = PromptRow(3, "row-3", (1, 2, 3), 5, overrides={"temperature": 0.5})
RECORD = completion(3)


def receipt_of(row: PromptRow = ROW, record: Any = RECORD) -> bytes:
    other = replace(row, row_index=4, prompt_ids=(9,))
    [made] = with_receipts(CIPHER, JOB, [other, row], [record])
    assert replace(made, receipt=record.receipt) == record
    assert made.receipt is not None
    return made.receipt


def test_a_receipt_is_of_its_prompt_alone() -> None:
    receipt = receipt_of()
    assert is_prompt(CIPHER, receipt, JOB, ROW)
    assert not is_prompt(CIPHER, receipt, "another-job", ROW)
    for other in (
        replace(ROW, prompt_ids=(1, 2)),
        replace(ROW, overrides={}),
        replace(ROW, row_index=4),
    ):
        assert not is_prompt(CIPHER, receipt, JOB, other)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({}, ()),
        ({"text": "a c"}, ("output",)),
        ({"token_ids": (7, 8, 9)}, ("output",)),
        ({"finish_reason": FinishReason.LENGTH}, ("output",)),
        ({"logprobs": (-0.5, -0.25, -2.5)}, ("logprobs",)),
        ({"logprobs": (-0.5, -0.25)}, ("logprobs",)),
        ({"sample_index": 1}, ("output", "logprobs")),
        ({"row_index": 2}, ("output", "logprobs")),
        ({"logprobs": (-0.5, -0.25, -2.0 - 1e-12)}, ()),
        ({"cost_usd": 9.0, "tag": "other"}, ()),
    ],
)
def test_a_receipt_names_the_parts_that_differ(
    change: dict[str, Any], parts: tuple[str, ...]
) -> None:
    assert differing(CIPHER, receipt_of(), JOB, replace(RECORD, **change)) == parts


def test_of_another_job_nothing_fits() -> None:
    assert differing(CIPHER, receipt_of(), "another-job", RECORD) == ("output", "logprobs")


def test_log_probabilities_that_are_no_numbers_are_all_alike() -> None:
    other_nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]
    record = replace(RECORD, logprobs=(float("nan"), -0.25, -2.0))
    again = replace(RECORD, logprobs=(other_nan, -0.25, -2.0))
    assert differing(CIPHER, receipt_of(record=record), JOB, again) == ()
    assert differing(CIPHER, receipt_of(record=record), JOB, RECORD) == ("logprobs",)


def test_without_a_key_there_are_no_receipts() -> None:
    assert with_receipts(None, JOB, [ROW], [RECORD]) == [RECORD]
