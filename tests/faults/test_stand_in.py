"""The stand-in engine: its output depends on the request alone, like the real one's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specbatch.jobs.chaos.stand_in import REFUSED, HashedTokens, StandInEngine, StandInHost
from specbatch.jobs.chaos.stand_in_model import (
    CONTEXT_TOKENS,
    EOS,
    REPLACED,
    VOCAB_SIZE,
    replace_part,
    tokenizer,
    write_model,
)
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.models.model_folder import (
    check_pair,
    inspect_model,
    vocabulary_digest,
)
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas.errors import RequestCancelledError
from specbatch.schemas.fingerprint import TOKENIZER, WEIGHTS
from specbatch.schemas.provenance import NO_TICKS
from specbatch.schemas.records import FinishReason, Origin, SamplingParams
from specbatch.schemas.spec import EngineSpec

PARAMS = SamplingParams(max_tokens=24)


def request(number: int, **values: object) -> Request:
    prompt = tuple(f"prompt {number}".encode())
    made = Request(f"jobjobjob/{number}/0", prompt, PARAMS, seed=number)
    return replace(made, **values)  # type: ignore[arg-type]  # each test names fields of it


def decided(done: Completion) -> tuple[object, ...]:
    return done.token_ids, done.logprobs, done.finish_reason


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def host(folder: Path) -> Iterator[StandInHost]:
    host = StandInHost(inspect_model(str(folder)), max_sequences=5)
    yield host
    host.close()


def run(host: StandInHost, *requests: Request) -> list[Completion]:
    return host.service(EngineSpec()).submit("jobjobjob", requests).wait(60)


def test_outputs_are_the_same_alone_in_company_and_again(host: StandInHost) -> None:
    requests = [request(n) for n in range(40)]
    together = [decided(done) for done in run(host, *requests)]
    assert [decided(run(host, one)[0]) for one in requests] == together
    assert [decided(done) for done in run(host, *reversed(requests))] == together[::-1]
    assert len(set(together)) == len(together)
    lengths = {len(tokens) for tokens, *_ in together if isinstance(tokens, tuple)}
    assert max(lengths) == PARAMS.max_tokens
    assert min(lengths) < PARAMS.max_tokens, "none of them ended by itself"


def test_seed_and_prompt_decide(host: StandInHost) -> None:
    [one], [reseeded], [other] = (
        run(host, r) for r in (request(1), request(1, seed=2), request(2, seed=1))
    )
    assert len({one.token_ids, reseeded.token_ids, other.token_ids}) == 3


def test_drafts_are_kept_where_they_agree_and_change_nothing(host: StandInHost) -> None:
    plain = run(host, request(3))[0]
    draft = list(plain.token_ids)
    wrong_at = 6
    draft[wrong_at] += 1
    drafted = run(host, request(3, draft_ids=tuple(draft), depth=4))[0]
    assert decided(drafted) == decided(plain)
    assert drafted.origins[wrong_at] == Origin.CORRECTED
    assert drafted.origins.count(Origin.ACCEPTED) == drafted.accepted
    assert drafted.accepted < drafted.proposed
    assert drafted.verifier_passes < plain.verifier_passes == len(plain.token_ids)
    assert sum(drafted.proposed_at_depth) == drafted.proposed
    undrafted = run(host, request(3, draft_ids=tuple(draft), depth=0))[0]
    assert undrafted.proposed == 0


def test_a_draft_model_agrees_in_most_places() -> None:
    verifier, draft = (
        HashedTokens(request(4), VOCAB_SIZE),
        HashedTokens(request(4), VOCAB_SIZE, agreement=0.75),
    )
    same = sum(verifier.at(i)[0] == draft.at(i)[0] for i in range(2000))
    assert 0.7 < same / 2000 < 0.8


def test_a_hint_leads_on_where_a_sequence_is() -> None:
    asked = request(5, depth=4, params=replace(PARAMS, ignore_eos=True))
    truth = HashedTokens(asked, VOCAB_SIZE)
    engine = StandInEngine(VOCAB_SIZE, CONTEXT_TOKENS)
    engine.add(asked)
    assert engine.step() == []
    engine.hint(asked.request_id, 1, tuple(truth.at(i)[0] for i in range(1, 24)))
    engine.hint("jobjobjob/unknown/0", 1, (1, 2))
    done: list[Completion] = []
    while not done:
        done = engine.step()
    assert done[0].token_ids == tuple(truth.at(i)[0] for i in range(24))
    assert done[0].accepted == done[0].proposed > 0
    assert done[0].verifier_passes == 1 + 5  # four drafted and one of its own each time
    assert engine.stats.hints_followed == 1
    assert engine.idle


def test_closing_does_not_wait_for_a_step_to_take_its_time(folder: Path) -> None:
    host = StandInHost(inspect_model(str(folder)), step_sec=3600.0)
    ticket = host.service(EngineSpec()).submit("jobjobjob", [request(5)])
    host.close()
    with pytest.raises(RequestCancelledError):
        ticket.wait(60)


def test_stops_and_lengths_are_honoured(host: StandInHost) -> None:
    plain = run(host, request(6))[0]
    stop = plain.token_ids[4]
    first = plain.token_ids.index(stop)
    [stopped], [least], [one] = (
        run(host, request(6, params=params))
        for params in (
            replace(PARAMS, stop_token_ids=(stop,)),
            replace(PARAMS, stop_token_ids=(stop,), min_tokens=20),
            replace(PARAMS, max_tokens=1),
        )
    )
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(least.token_ids) >= 20
    assert one.finish_reason is FinishReason.LENGTH
    assert len(one.token_ids) == 1


def test_output_that_is_decided_is_gone_on_from(host: StandInHost) -> None:
    endless = replace(PARAMS, ignore_eos=True)
    whole = run(host, request(7, params=endless))[0].token_ids
    rest = run(host, request(7, params=endless, decided_ids=whole[:5]))[0].token_ids
    assert whole[:5] + rest == whole


def test_prompts_that_it_refuses_end_with_an_error(host: StandInHost) -> None:
    refused, fine = run(host, request(8, prompt_ids=(REFUSED, 1)), request(9))
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error
    assert fine.error is None


def test_cancelling_fails_the_ticket(folder: Path) -> None:
    host = StandInHost(inspect_model(str(folder)), step_sec=0.001)
    endless = replace(PARAMS, max_tokens=4000, ignore_eos=True)
    ticket = host.service(EngineSpec()).submit("jobjobjob", [request(1, params=endless)])
    host.cancel("jobjobjob")
    with pytest.raises(RequestCancelledError):
        ticket.wait(60)
    host.close()
    with pytest.raises(RequestCancelledError):
        host.service(EngineSpec()).submit("jobjobjob", [request(1)])


# --- its model folder -----------------------------------------------------------------------
def test_its_folder_is_one_that_workers_accept(folder: Path, tmp_path: Path) -> None:
    model = inspect_model(str(folder))
    assert (model.vocab_size, model.model_type) == (VOCAB_SIZE, "llama")
    draft = inspect_model(str(write_model(tmp_path / "draft", "draft")))
    check_pair(model, draft)
    assert vocabulary_digest(model) == vocabulary_digest(draft)
    assert model.fingerprint != draft.fingerprint


def test_its_tokenizer_is_the_one_that_transformers_reads(folder: Path) -> None:
    mine, theirs = tokenizer(str(folder)), TextTokenizer.load(str(folder))
    texts = ["plain", " two  blanks ", "ünïcödé 🎈", "line\nbreak", ""]
    assert mine.encode_batch(texts) == theirs.encode_batch(texts)
    assert mine.encode_batch(["~a"])[0] == [REFUSED, ord("a")]
    assert mine.decode_batch(mine.encode_batch(texts)) == texts
    assert mine._tokenizer.get_vocab() == theirs._tokenizer.get_vocab()
    assert mine.eos_ids == theirs.eos_ids == (EOS,)
    assert mine.vocab_size == theirs.vocab_size == VOCAB_SIZE


def test_it_tells_where_its_tokens_came_from_and_shares_all_of_its_time() -> None:
    engine = StandInEngine(VOCAB_SIZE, CONTEXT_TOKENS, max_sequences=3)
    plain = StandInEngine(VOCAB_SIZE, CONTEXT_TOKENS)
    plain.add(request(0))
    (truth,) = step_to_the_end(plain)
    wrong = (*truth.token_ids[:6], (truth.token_ids[6] + 1) % VOCAB_SIZE, *truth.token_ids[7:])
    for number in range(5):
        engine.add(request(number, draft_ids=wrong if number == 0 else ()))
    done = {c.request_id: c for c in step_to_the_end(engine)}
    assert sum((c.ticks for c in done.values()), start=NO_TICKS) == engine.stats.ticks
    found = done[request(0).request_id].provenance
    assert found.sources == ("block",)
    assert set(found.makers) == {0}
    assert found.rejected == (wrong[6],)
    assert list(found.steps) == list(range(1, len(found.pass_ticks) + 1))
    assert done[request(4).request_id].provenance.sources == ()


def step_to_the_end(engine: StandInEngine) -> list[Completion]:
    done: list[Completion] = []
    while not engine.idle:
        done += engine.step()
    return done


# --- what it was loaded from ----------------------------------------------------------------
@pytest.mark.parametrize("part", REPLACED)
def test_other_files_are_another_model(folder: Path, part: str) -> None:
    asked = request(7)
    before = StandInHost(inspect_model(str(folder)))
    replaced = inspect_model(str(folder)).fingerprint
    tokens = run(before, asked)[0].token_ids
    replace_part(folder, part, folder.name, 1)
    after = StandInHost(inspect_model(str(folder)))
    try:
        assert before.serves().fingerprint == replaced, "what it has loaded, not what lies there"
        assert after.serves().fingerprint != replaced
        if part == TOKENIZER:
            assert tokenizer(str(folder)).decode([65, 66]) != "AB"
        else:
            assert run(after, asked)[0].token_ids != tokens
        assert run(before, asked)[0].token_ids == tokens
    finally:
        before.close()
        after.close()


def test_a_host_that_has_loaded_nothing_serves_what_lies_there(folder: Path) -> None:
    host = StandInHost(inspect_model(str(folder)))
    replace_part(folder, WEIGHTS, folder.name, 1)
    try:
        assert host.serves().fingerprint == inspect_model(str(folder)).fingerprint
    finally:
        host.close()


def test_another_class_writes_other_tokens(folder: Path) -> None:
    hosts = [
        StandInHost(inspect_model(str(folder)), numeric_class=f"stand-in/f32/{n}") for n in (1, 2)
    ]
    try:
        one, other = (run(host, request(8))[0].token_ids for host in hosts)
        assert one != other
    finally:
        for host in hosts:
            host.close()
