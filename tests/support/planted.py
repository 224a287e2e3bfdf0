"""A job full of personal data, done in this process by an engine that says its prompts again, and
everything that it leaves behind anywhere."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ledger.builders import Clock
from sqlalchemy import create_engine, inspect, text

from specbatch.jobs.chaos import stand_in, stand_in_model
from specbatch.jobs.chaos.stand_in import StandInHost
from specbatch.jobs.cli import console
from specbatch.jobs.cli.console import _masked_record
from specbatch.pipeline.bootstrap import (
    KINDS,
    FakeModels,
    Worker,
    make_client,
    make_exposure,
    make_store,
    make_worker,
)
from specbatch.pipeline.engines.contract import ModelFolder, Request
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas import masking
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import DueWork, JobRow
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec, load_spec
from support.scraping import scrape
from support.servers import free_port

PLANTED = {
    "EMAIL": "anna.musterfrau@example.org",
    "PHONE": "+49 30 9018 2077",
    "CARD": "4111 1111 1111 1111",
    "IP": "192.0.2.177",
    "KEY": "sk-plantedKEYplantedKEY0123456789",
    "STAFF": "STAFF-471108",  # a pattern of the installation's own
}
SETTINGS = {"redaction_patterns": {"STAFF": r"STAFF-\d{4,8}"}, "max_attempts": 2}
KEY = base64.urlsafe_b64encode(bytes(range(32))).decode()
BREAKS = "cannot be decoded"  # a row with it fails by itself, and the error quotes it
PLAIN = "The harbour was quiet."  # an output without personal data
LEASE_SEC = 60.0
_MOST_ROUNDS = 400

log = logging.getLogger("specbatch.tests")


class Echo:
    """The prompt again, then an end."""

    def __init__(
        self,
        request: Request,
        vocab_size: int,
        agreement: float = 1.0,
        model: bytes = b"",  # noqa: ARG002 - the contract's
    ) -> None:
        self._tokens = (*request.prompt_ids, vocab_size - 1)
        self._agreement = agreement

    def at(self, position: int) -> tuple[int, float]:
        token = self._tokens[min(position, len(self._tokens) - 1)]
        wrong = self._agreement < 1.0 and position % 5 == 4
        return (token + 1) % 256 if wrong else token, -0.25


def tokenizer(ref: str) -> TextTokenizer:
    """The stand-in's, which stumbles over some texts and says which."""
    made = stand_in_model.tokenizer(ref)
    plain = made.decode_batch

    def decode_batch(batch: Sequence[Sequence[int]]) -> list[str]:
        texts = plain(batch)
        for said in texts:
            if BREAKS in said:
                raise ValueError(f"cannot make sense of {said}")
        return texts

    made.decode_batch = decode_batch  # type: ignore[method-assign]  # this instance alone
    return made


def _silent(_: DueWork) -> None:
    """Units are found in the store."""


@dataclass
class Site:
    """One installation: its settings, a store, and a worker that a test drives."""

    folder: Path
    url: str
    mode: PrivacyMode
    patch: pytest.MonkeyPatch
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.patch.setattr(stand_in, "HashedTokens", Echo)
        self.patch.setenv("SPECBATCH_DATABASE_URL", self.url)
        self.patch.setenv("SPECBATCH_WORKSPACE", str(self.folder / "work"))
        self.patch.setenv("SPECBATCH_TENANT_PRIVACY", json.dumps({"clinic": self.mode.value}))
        self.patch.setenv("SPECBATCH_ENCRYPTION_KEY", "" if self.mode.is_full else KEY)
        for name, value in SETTINGS.items():
            shown = value if isinstance(value, int) else json.dumps(value)
            self.patch.setenv(f"SPECBATCH_{name.upper()}", str(shown))
        self.traces = self.folder / "traces.jsonl"
        self.patch.setenv("SPECBATCH_TRACES", f"file:{self.traces}")
        self.patch.setenv("SPECBATCH_TRACE_GROUPS", "1")
        self.patch.setenv("SPECBATCH_TRACE_REQUESTS", "1")
        self.settings = Settings(
            lease_sec=LEASE_SEC,
            kv_cache_mib=16,
            metrics_port=free_port(),
            metrics_address="127.0.0.1",
        )
        self.verifier, self.proposer = (
            str(stand_in_model.write_model(self.folder / name, name).resolve())
            for name in ("verifier", "draft")
        )
        self.store = make_store(self.settings)
        self.exposure = make_exposure(self.settings)
        self.worker = self._hire()
        self.client = make_client(self.settings, _silent, self.store)

    def _hire(self) -> Worker:
        def engines(model: ModelFolder, beside: ModelFolder | None) -> StandInHost:
            agreement = 0.8 if model.ref == self.proposer else 1.0
            return StandInHost(model, beside, agreement=agreement)

        return make_worker(
            self.settings,
            KINDS,
            _silent,
            self.verifier,
            self.proposer,
            store=self.store,
            fake_models=FakeModels(engines, tokenizer),
            meter=None if self.exposure is None else self.exposure.meter,
        )

    # --- jobs -------------------------------------------------------------------------------
    def spec(self, output: str, breaks: bool = True) -> JobSpec:
        """A spec with personal data wherever its fields take any."""
        mail, phone = PLANTED["EMAIL"], PLANTED["PHONE"]
        return load_spec(
            {
                "name": f"letters of {mail}",
                "tenant": "clinic",
                "input": {"uri": str(self.write_input(breaks))},
                "output": {"uri": str(self.folder / output)},
                "verifier": self.verifier,
                "proposer": self.proposer,
                "sampling": {
                    "max_tokens": 200,
                    "seed": 5,
                    "n": 2,
                    "stop": [f"ends with {mail}", f"{PLANTED['STAFF']} stops"],
                    "bad_words": [list(phone.encode())[:16]],
                    "logprobs": True,
                },
                "speculation": {
                    "tag_depths": [[f"tag {phone}", 3]],
                    "pregenerate": True,
                    "pregenerate_tokens": 200,
                },
                "group_size": 4,
            }
        )

    def write_input(self, breaks: bool) -> Path:
        """Good rows, quarantined ones, refused ones, and (`breaks`) one that nobody can finish."""
        mail = PLANTED["EMAIL"]
        rows: list[dict[str, Any]] = [
            {"id": f"row {i} of {value}", "prompt": f"Ähm, write to {value}, please — {kind}!"}
            for i, (kind, value) in enumerate(PLANTED.items())
        ]
        rows += [
            {"id": mail, "prompt": PLAIN, "tag": f"tag {PLANTED['PHONE']}"},
            {"id": mail, "prompt": "an id twice"},
            {"id": "refused", "prompt": f"~ {PLANTED['CARD']}"},
            {"id": "breaks", "prompt": f"{PLANTED['EMAIL']} {BREAKS if breaks else ''}"},
            {"id": "stops", "prompt": f"One that ends with {mail} and goes on to {mail}."},
            {"id": "role", "prompt": [{"role": f"{PLANTED['KEY']}", "content": "x"}]},
            {"id": "quiet", "prompt": PLAIN},
        ]
        path = self.folder / f"in-{breaks}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    def submit(self, output: str = "out", key: str | None = None, breaks: bool = True) -> JobRow:
        return self.client.submit(self.spec(output, breaks), key)[0]

    def drain(self, job_id: str) -> JobRow:
        """Do what is due until the job has ended."""
        for _ in range(_MOST_ROUNDS):
            if self.store.get_job(job_id).state.is_final:
                return self.store.get_job(job_id)
            for message in [message for message in self.store.due() if message.job_id == job_id][
                :1
            ]:
                self.attempt(message)
        raise AssertionError(f"job {job_id} does not end: {self.store.due()}")

    def attempt(self, message: DueWork) -> None:
        """As Celery does it: what a task raises is logged with its traceback."""
        try:
            self.worker.run(message.stage, message.job_id, message.group_index)
        except Exception:
            log.exception("Task raised unexpected")

    def close(self) -> None:
        if self.exposure is not None:
            self.exposure.close()
        for host in self.worker.engines:
            host.close()
        self.worker.lease_keeper.close()
        self.worker.knowledge.close()
        self.store.close()
        self.worker.tracing.close()

    # --- what it left behind ----------------------------------------------------------------
    def metrics(self) -> str:
        """All that its endpoint says."""
        return scrape(self.settings.metrics_port).text

    def workspace(self) -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for path in (self.folder / "work").rglob("*")
            if path.is_file() and "specbatch.db" not in path.name
        }

    def tables(self) -> Iterator[tuple[str, str]]:
        """(where, what) of every value of every table, token ids as their text as well."""
        engine = create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
        with closing(engine.connect()) as connection:
            for table in inspect(engine).get_table_names():
                for row in connection.execute(text(f'SELECT * FROM "{table}"')).mappings():
                    for column, value in row.items():
                        yield f"{table}.{column}", shown(value)
        engine.dispose()


def shown(value: Any) -> str:
    """A value as text. Lists of numbers, in JSON too, are shown as the text of those tokens."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    if isinstance(value, memoryview | bytes):
        return bytes(value).decode("latin-1") + bytes(value).hex()
    if isinstance(value, dict):
        return " ".join(f"{name}={shown(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        plain = " ".join(shown(item) for item in value)
        if all(isinstance(item, int) and -2 <= item <= 256 for item in value):
            letters = (chr(item) if 0 <= item < 256 else "\0" for item in value)
            return f"{plain} {''.join(letters)}"
        return plain
    return str(value)


def planted_in(text: str) -> list[str]:
    """The kinds of what was planted that a text has."""
    return [kind for kind, value in PLANTED.items() if value in text]


def masked_logs(patch: pytest.MonkeyPatch) -> None:
    """Log records as commands make them, until the test ends."""
    patch.setattr(logging, "_logRecordFactory", _masked_record)
    patch.setattr(masking, "_log_filters", [])  # those of this process are not this installation's
    patch.setattr(console.out, "_width", 500)  # nothing is folded away
