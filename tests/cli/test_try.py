"""`specbatch models try`: a draft model beside a verifier, before it serves."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import called_in, write

from specbatch.jobs.cli.connect import load_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.learning import datasets, gate
from specbatch.pipeline.learning.gate import DEPTHS, Measured, judged
from specbatch.schemas.registry import PairTrial
from specbatch.schemas.settings import Settings
from specbatch.schemas.training import DataOrder
from support.models import TinyPair, tiny_llama

pytestmark = pytest.mark.pipeline  # runs models


def measured(lowest: float, ratio: float, highest: float) -> Measured:
    return Measured(8, 4, 0.5, 2.0, ratio, lowest, highest)


def flags(pair: TinyPair, rows: str, output: str) -> list[object]:
    return [
        *("submit-job", "--local", "--input", rows, "--output", output, "--json"),
        *("--verifier", pair.verifier, "--proposer", pair.draft, "--max-tokens", 8),
        *("--dtype", "float32", "--sources", "draft-model", "--depth", 3),
    ]


def proposed(cli: Any, pair: TinyPair, output: str) -> tuple[str, int]:
    """A job over few rows, and its draft tokens."""
    done = cli(*flags(pair, "prompts.parquet", output))
    assert done.code == 0, done.err
    with closing(make_store(load_settings())) as store:
        return done.json["job"], sum(one.proposed for one in store.completions(done.json["job"]))


@pytest.fixture(scope="module")
def tried_in(shared_folder: Path, tiny_pair: TinyPair) -> Path:
    """A folder where a job of the tiny pair has ended, and its draft model is registered."""
    write(shared_folder / "many.parquet", [f"def f{i}(x, y={i}):" for i in range(24)])
    called_in(shared_folder, *flags(tiny_pair, "many.parquet", "first"))
    called_in(shared_folder, "models", "add", "docs", tiny_pair.draft)
    return shared_folder


@pytest.fixture
def ended(cli: Any, tried_in: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In that folder, with short turns; the draft model's name."""
    assert cli
    monkeypatch.chdir(tried_in)
    monkeypatch.setenv("SPECBATCH_MAX_CONCURRENT_SEQUENCES", "4")
    monkeypatch.setattr(gate, "TOKENS", 6)
    return "docs"


def test_only_drafts_that_lost_every_turn_everywhere_cannot_pay() -> None:
    slow, unsure = measured(0.7, 0.8, 0.9), measured(0.7, 0.9, 1.1)
    assert judged([slow, slow])[0] is False
    assert judged([slow, unsure])[0] is True
    pays, reason = judged([slow, measured(1.2, 1.5, 1.9)])
    assert pays
    assert reason == (
        "drafts can pay: 1.50 times as fast as depth 0 (1.20 to 1.90), at depth 4 with 8 "
        "sequences at once, acceptance 0.50"
    )


def test_a_pair_is_tried_on_recent_prompts_and_the_verdict_is_kept(
    cli: Any, tiny_pair: TinyPair, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads a part of the store, and the log of a job that was read says trial."""
    asked: list[DataOrder] = []
    real = datasets.DataSets.make

    def make(self: Any, order: DataOrder, *args: Any, **more: Any) -> Any:
        asked.append(order)
        return real(self, order, *args, **more)

    monkeypatch.setattr(datasets.DataSets, "make", make)
    with closing(make_store(load_settings())) as store:
        (job,) = store.list_jobs()
        before = len(list(store.log(job.job_id)))
        tried = cli("models", "try", ended, "--verifier", tiny_pair.verifier, "--json")
        (entry,) = list(store.log(job.job_id))[before:]
    assert json.loads(entry.payload)["what"] == "trial"
    assert [one.most_tokens for one in asked] == [gate.MOST_READ]
    trial = tried.json
    assert tried.code == (0 if trial["pays"] else 3)
    found = [Measured(**one) for one in trial["figures"]["measured"]]
    sizes = [(one.sequences, one.depth) for one in found]
    assert sizes == [(n, depth) for n in (1, 4) for depth in DEPTHS]
    assert judged(found) == (trial["pays"], trial["reason"]), "on prompts that were held out"
    assert trial["reason"] in cli("models", "show", ended).out


def test_every_depth_of_every_turn_reads_its_prompts_in_full(
    cli: Any, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else depth 0, whose turn is first, read for all, and drafts that help nothing paid."""
    hosts: list[EngineHost] = []

    class Kept(EngineHost):
        def close(self) -> None:
            hosts.append(self)
            super().close()

    monkeypatch.setattr(gate, "EngineHost", Kept)
    monkeypatch.setattr(gate, "TOKENS", 6)
    write(Path("long.parquet"), [f"def {letter * 80}(x):" for letter in "abcdefgh"])
    done = cli(*flags(tiny_pair, "long.parquet", "long"))
    assert done.code == 0, done.err
    cli("models", "add", "docs", tiny_pair.draft)
    tried = cli("models", "try", "docs", "--verifier", tiny_pair.verifier)
    assert tried.code in (0, 3), tried.err
    ((stats,),) = (host.stats for host in hosts)
    assert stats.finished > 0
    assert stats.reused_tokens == 0


def test_prompts_that_are_too_long_are_named(
    cli: Any, tiny_pair: TinyPair, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "TOKENS", 10_000)
    tried = cli("models", "try", ended, "--verifier", tiny_pair.verifier)
    assert tried.code == 2
    assert "none is short enough" in tried.err
    assert "name a job with shorter prompts with --job" in tried.err


def test_prompts_that_the_kv_cache_has_no_room_for_are_not_tried(
    cli: Any, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is all of them, the remedy is said."""
    monkeypatch.setattr(gate, "TURNS", 1)
    monkeypatch.setattr(gate, "TOKENS", 6)
    monkeypatch.setattr(datasets, "_split", lambda examples, _: (tuple(examples), (), ()))
    long = [f"def {letter * 40}(x):" for letter in "abcd"]
    for name, prompts in (("long", long), ("mixed", [*long, "def f(x):"])):
        write(Path(f"{name}.parquet"), prompts)
        done = cli(*flags(tiny_pair, f"{name}.parquet", name), "--name", name)
        assert done.code == 0, done.err
    cli("models", "add", "docs", tiny_pair.draft)
    monkeypatch.setattr(Settings, "kv_cache_bytes", 1)  # the least is a block of 32 tokens
    trying = ("models", "try", "docs", "--verifier", tiny_pair.verifier, "--job")
    tried = cli(*trying, "mixed", "--json")
    assert tried.code in (0, 3), tried.err
    assert all(one["ratio"] > 0 for one in tried.json["figures"]["measured"])
    tried = cli(*trying, "long")
    assert tried.code == 2
    assert "none is short enough for the verifier's KV cache" in tried.err
    assert "set SPECBATCH_KV_CACHE_MIB higher" in tried.err


def test_a_verdict_says_if_its_prompts_may_have_been_learned_from(
    cli: Any, tiny_pair: TinyPair, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "TURNS", 1)
    monkeypatch.setattr(datasets, "_split", lambda examples, _: (tuple(examples), (), ()))
    tried = cli("models", "try", ended, "--verifier", tiny_pair.verifier, "--json").json
    assert tried["reason"].endswith(
        "on prompts that it may have learned from, as none were held out"
    )


@pytest.mark.usefixtures("ended")
def test_models_with_other_vocabularies_do_not_fit(
    cli: Any, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    other = tiny_llama(tmp_path / "other", vocab_size=301)
    cli("models", "add", "other", other)
    done = cli("models", "try", "other", "--verifier", tiny_pair.verifier)
    assert done.code == 3
    assert "they must share one vocabulary" in done.out


def test_a_model_that_cannot_pay_is_not_asked_and_the_job_says_so(
    cli: Any, tiny_pair: TinyPair
) -> None:
    assert proposed(cli, tiny_pair, "before")[1] > 0
    verifier, draft = map(inspect_model, map(str, (tiny_pair.verifier, tiny_pair.draft)))
    digests = (verifier.fingerprint.digest, draft.fingerprint.digest)
    with closing(make_store(load_settings())) as store:
        (numeric_class,) = {one.numeric_class for one in store.list_jobs()}
        store.add_pair_trial(PairTrial(*digests, str(numeric_class), False, "they lost", {}))
    job, tokens = proposed(cli, tiny_pair, "after")
    assert tokens == 0
    assert "they lost" in cli("show", job).out
    with closing(make_store(load_settings())) as store:
        store.add_pair_trial(PairTrial(*digests, str(numeric_class), True, "they won", {}))
    assert proposed(cli, tiny_pair, "again")[1] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["try", "docs"], "needs --verifier"),
        (["try"], "needs a model"),
        (["try", "docs", "--verifier", ".", "--reason", "x"], "takes no --tag and --reason"),
        (["list", "--verifier", "."], "takes no --verifier"),
        (["try", "docs", "--verifier", "."], "no registered model"),
    ],
)
def test_what_cannot_be_tried_is_said(cli: Any, arguments: list[str], said: str) -> None:
    done = cli("models", *arguments)
    assert (done.code, said in done.err) == (2, True), done.err
