"""What a proposer answers to a refill request: the prompt is the store's, and so are its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import claim
from engine.decoding import alone
from ledger.builders import JOB, LEASE_SEC, new_group, new_job, position

from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.stages.refill import Refiller
from specbatch.pipeline.storage.artefacts import write_prompts
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.messages import HintMessage, RefillMessage
from specbatch.schemas.records import PromptRow, Stage
from specbatch.schemas.seeds import sample_seed
from specbatch.schemas.spec import JobSpec
from support.databases import sqlite_store
from support.models import TinyPair

BLOCK = 12
ROWS = [PromptRow(row, f"r{row}", (10 + row, 20, 30), 100 + row, n=2) for row in range(8)]


class Bed:
    """A proposer's worker, and a store with a job of two groups."""

    def __init__(
        self,
        pair: TinyPair,
        host: EngineHost,
        folder: Path,
        policies: Sequence[dict[str, Any]] = (),
        **speculation: Any,
    ) -> None:
        self.pair = pair
        self.spec = JobSpec.model_validate(
            {
                "input": {"uri": "in.parquet"},
                "output": {"uri": "out"},
                "verifier": str(pair.verifier),
                "proposer": str(pair.draft),
                "sampling": {"max_tokens": 60, "temperature": 0.9, "ignore_eos": True},
                "speculation": {"pregenerate_tokens": BLOCK} | speculation,
                "engine": {"dtype": "float32"},
                "policies": policies,
            }
        )
        self.store = sqlite_store()
        spec = self.spec.model_dump(mode="json")
        self.store.create_job(new_job(spec=spec, workspace_uri=str(folder)))
        work = self.store.claim_job(JOB, Stage.INGEST, "ingester", LEASE_SEC)
        assert work is not None
        objects = Objects()
        for index in range(2):
            data = write_prompts(ROWS[index * 4 : index * 4 + 4])
            prompts = objects.put_bytes(f"{folder}/prompts-{index}.arrow", data)
            group = replace(new_group(index), prompts=prompts)
            self.store.add_groups(work.lease, [group], [], index * 4 + 4, position())
        self.refiller = Refiller(self.store, objects, host)

    def ask(self, **values: Any) -> HintMessage | None:
        known = {"job_id": JOB, "group_index": 0, "row_index": 2, "sample_index": 1}
        known |= {"output_ids": (), "reply_to": "hints." + "a" * 32}
        return self.refiller.refill(RefillMessage.model_validate(known | values))

    def draft(self, row: int, sample: int) -> tuple[int, ...]:
        """What the draft model itself writes there."""
        params, seed = self.spec.sampling.params(), sample_seed(ROWS[row].seed, sample)
        return alone(self.pair.draft, ROWS[row].prompt_ids, params, seed, "float32").token_ids


@pytest.fixture(scope="module")
def host(tiny_pair: TinyPair) -> Iterator[EngineHost]:
    """The proposer's engine, which keeps nothing of a request that is done."""
    host = EngineHost(inspect_model(str(tiny_pair.draft)), None, 8, 512, 16 << 20)
    yield host
    host.close()


@pytest.fixture
def bed(tiny_pair: TinyPair, host: EngineHost, tmp_path: Path) -> Bed:
    return Bed(tiny_pair, host, tmp_path)


@pytest.mark.parametrize("sample", [0, 1])
def test_the_answer_is_what_the_proposer_would_have_written_there(bed: Bed, sample: int) -> None:
    known = bed.draft(2, sample)
    hint = bed.ask(sample_index=sample, output_ids=known[:20], late=5)
    assert hint == HintMessage(
        job_id=JOB,
        row_index=2,
        sample_index=sample,
        position=20,
        token_ids=known[20 : 20 + BLOCK + 5],
    )


def test_a_prompt_outside_the_job_s_workspace_is_not_read(bed: Bed, tmp_path: Path) -> None:
    """A row that names it is wrong, and a message that asks for it gets no answer."""
    prompts = bed.store.prompts_of(JOB, 0)
    assert prompts is not None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path(prompts.artefact.uri).rename(elsewhere / "prompts-0.arrow")
    there = replace(prompts.artefact, uri=str(elsewhere / "prompts-0.arrow"))
    moved = replace(prompts, artefact=there)
    bed.store.prompts_of = lambda *_: moved  # type: ignore[method-assign]  # as if it were the row's
    assert bed.ask() is None
    assert bed.ask(group_index=1, row_index=5) is None


def test_the_answer_ends_where_the_output_must_end(bed: Bed) -> None:
    known = bed.draft(2, 1)
    hint = bed.ask(output_ids=known[:55])
    assert hint is not None
    assert hint.token_ids == known[55:]
    assert bed.ask(output_ids=known) is None


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"job_id": "0123456789"}, id="no such job"),
        pytest.param({"job_id": JOB[:8]}, id="a prefix of its id"),
        pytest.param({"group_index": 7}, id="no such group"),
        pytest.param({"row_index": 5}, id="a row of another group"),
        pytest.param({"sample_index": 2}, id="no such sample"),
        pytest.param({"output_ids": [5, 100_000]}, id="tokens that are none"),
    ],
)
def test_what_the_store_does_not_know_is_not_answered(bed: Bed, values: dict[str, Any]) -> None:
    assert bed.ask(**values) is None


@pytest.mark.parametrize(
    "speculation",
    [
        pytest.param({"pregenerate": False}, id="nothing made ahead"),
        pytest.param({"sources": ["ngram"]}, id="no blocks"),
        pytest.param({"depth": "off"}, id="no drafts"),
    ],
)
def test_a_job_that_wants_no_blocks_is_not_written_for(
    tiny_pair: TinyPair, host: EngineHost, tmp_path: Path, speculation: dict[str, Any]
) -> None:
    assert Bed(tiny_pair, host, tmp_path, **speculation).ask() is None


def test_a_row_that_was_given_away_is_found_by_its_new_group(bed: Bed) -> None:
    lease = claim(bed.store, 0).lease
    split_off = bed.store.split_group(lease, 2)
    assert bed.ask(group_index=0) is None
    hint = bed.ask(group_index=split_off)
    assert hint is not None
    assert hint.token_ids == bed.draft(2, 1)[:BLOCK]


def test_outputs_that_policies_judge_are_not_written_on(
    tiny_pair: TinyPair, host: EngineHost, tmp_path: Path
) -> None:
    """A message of an older verify worker may ask for it."""
    policies = [{"use": "patterns", "patterns": {"number": "[0-9]{2,}"}}]
    assert Bed(tiny_pair, host, tmp_path, policies).ask() is None


def test_a_cancelled_job_is_not_written_for(bed: Bed) -> None:
    bed.store.request_cancel(JOB)
    assert bed.ask() is None
