"""What the engine, the broker and earlier runs know of a tenant whose texts are not kept."""

from __future__ import annotations

from contextlib import nullcontext

from ledger.builders import new_job

from specbatch.pipeline.engines.proposers.history import History
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.stages.refill import Refills, refilled
from specbatch.pipeline.stages.requests import requests_of
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.messages import RefillMessage
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobRow, PromptRow
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.schemas.speculation import PastOutput
from support.databases import sqlite_store

MAIL = "anna@example.org"
PRIVACY = Privacy({"clinic": PrivacyMode.REDACTED}, cipher=Cipher([bytes(32)]))
SPEC = load_spec(
    {
        "tenant": "clinic",
        "input": {"uri": "in"},
        "output": {"uri": "out"},
        "verifier": "big",
        "proposer": "small",
        "speculation": {"tag_depths": [[f"of {MAIL}", 2]]},
    }
)
JUDGED = [{"use": "patterns", "patterns": {"number": "[0-9]{2,}"}}]
ROW = PromptRow(0, MAIL, (1, 2, 3), 7, tag=f"of {MAIL}")


def job_of(mode: PrivacyMode) -> JobRow:
    return sqlite_store().create_job(new_job(tenant="clinic", privacy=mode))[0]


class Line:
    """What would go over the broker."""

    reply_to = "queue"

    def ask(self, proposer: str, message: RefillMessage) -> None:
        raise AssertionError(f"asked {proposer}: {message}")


def nothing(_: object) -> str:
    return ""


def test_the_engine_knows_rows_by_what_is_kept_of_their_tag() -> None:
    policy = PRIVACY.text_policy(job_of(PrivacyMode.REDACTED))
    (request,) = requests_of("job", SPEC, ROW, nothing, kept=policy)
    assert request.route.tag == "of [EMAIL]"
    assert request.max_depth == 2, "the spec's own tags are the rows'"


def test_earlier_outputs_are_found_by_what_is_kept_of_an_id() -> None:
    policy = PRIVACY.text_policy(job_of(PrivacyMode.REDACTED))
    history = History.build([PastOutput("before", policy.row_id(MAIL), 0, (5, 6, 7))], 100)
    (request,) = requests_of("job", SPEC, ROW, nothing, history=history, kept=policy)
    assert request.past_ids == (5, 6, 7)


def test_no_tokens_of_a_private_or_judged_job_go_over_the_broker() -> None:
    spec: JobSpec = SPEC
    (request,) = requests_of("job", spec, ROW, nothing)
    drafted = type(request)(
        request_id="job/0/0", prompt_ids=(1,), params=request.params, seed=1, draft_ids=(4, 5)
    )
    refills = Refills(Line())
    private = refilled(refills, job_of(PrivacyMode.REDACTED), spec, 0, [drafted])
    assert isinstance(private, nullcontext)
    whole = refilled(refills, job_of(PrivacyMode.FULL), spec, 0, [drafted])
    assert not isinstance(whole, nullcontext)
    judged = load_spec(SPEC.model_dump() | {"policies": JUDGED})
    unjudged = refilled(refills, job_of(PrivacyMode.FULL), judged, 0, [drafted])
    assert isinstance(unjudged, nullcontext), "a policy may block what they say"
