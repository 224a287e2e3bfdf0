"""What every verify engine keeps, whatever decides its tokens: the tests of the contract.

A file that imports these tests has a fixture `bed`: an engine, and the requests it may be given.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specbatch.pipeline.engines.contract import Cohort, Completion, Request
from specbatch.pipeline.engines.service import EngineService, SteppingEngine
from specbatch.schemas.errors import EngineError, RequestCancelledError
from specbatch.schemas.provenance import NO_TICKS, Ticks
from specbatch.schemas.records import FinishReason, Origin, SamplingParams
from specbatch.schemas.speculation import PRE_GENERATED
from support.thirds import Thirds
from support.tree import ROOT

TOKENS = 16
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


@dataclass
class Bed:
    """An engine of its own, and what tells it from others."""

    make: Callable[[], SteppingEngine]
    vocab_size: int
    first_token: int = 10  # of prompts

    def request(self, number: int, **changes: object) -> Request:
        pick = random.Random(number)
        tokens = tuple(pick.randrange(self.first_token, self.vocab_size - 1) for _ in range(14))
        made = Request(f"r{number}", tokens, PARAMS, seed=number, route=Cohort("job"))
        return replace(made, **changes)  # type: ignore[arg-type]  # fields by name

    def requests(self, count: int = 6, **changes: object) -> list[Request]:
        return [self.request(number, **changes) for number in range(count)]

    def truth(self, count: int = 6) -> list[tuple[int, ...]]:
        """Outputs without drafts."""
        return in_order(finish(self.make(), self.requests(count, depth=0)))


def finish(engine: SteppingEngine, requests: Sequence[Request] = ()) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while not engine.idle:
        for completion in engine.step():
            assert completion.request_id not in done, "each request ends once"
            done[completion.request_id] = completion
    return done


def in_order(done: dict[str, Completion]) -> list[tuple[int, ...]]:
    return [done[f"r{number}"].token_ids for number in range(len(done))]


def test_every_request_ends_once_with_as_many_tokens_as_asked_for(bed: Bed) -> None:
    done = finish(bed.make(), bed.requests())
    assert sorted(done) == [f"r{number}" for number in range(6)]
    for completion in done.values():
        assert completion.error is None
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == len(completion.origins) == TOKENS
        assert len(completion.logprobs) == TOKENS
        assert max(completion.logprobs) <= 1e-6


def test_drafts_change_no_output_and_are_counted(bed: Bed) -> None:
    truth = bed.truth()
    only = frozenset({PRE_GENERATED})
    for depth in (1, 4):
        right = [
            bed.request(number, draft_ids=tokens, depth=depth, sources=only)
            for number, tokens in enumerate(truth)
        ]
        done = finish(bed.make(), right)
        assert in_order(done) == truth
        for completion in done.values():
            counted = Counter(completion.origins)
            assert completion.proposed == completion.accepted == counted[Origin.ACCEPTED] > 0
        wrong = [replace(r, draft_ids=truth[number - 1]) for number, r in enumerate(right)]
        assert in_order(finish(bed.make(), wrong)) == truth


def test_company_changes_no_output(bed: Bed) -> None:
    truth = bed.truth()
    alone = [finish(bed.make(), [bed.request(n)])[f"r{n}"].token_ids for n in (0, 3)]
    assert alone == [truth[0], truth[3]]


def test_a_stop_token_ends_the_output_and_is_its_last(bed: Bed) -> None:
    truth = bed.truth(1)[0]
    params = replace(PARAMS, stop_token_ids=(truth[6],))
    drafted = bed.request(0, params=params, draft_ids=truth, depth=4)
    for request in (bed.request(0, params=params, depth=0), drafted):
        done = finish(bed.make(), [request])["r0"]
        assert done.token_ids == truth[: truth.index(truth[6]) + 1]
        assert done.finish_reason is FinishReason.STOP


def test_a_request_that_cannot_run_fails_alone(bed: Bed) -> None:
    done = finish(bed.make(), [bed.request(0), bed.request(1, prompt_ids=()), bed.request(2)])
    assert [done[f"r{n}"].error is None for n in range(3)] == [True, False, True]
    assert done["r1"].finish_reason is FinishReason.ERROR


def test_time_is_shared_without_remainder(bed: Bed) -> None:
    engine = bed.make()
    done = finish(engine, bed.requests())
    assert sum((c.ticks for c in done.values()), start=NO_TICKS) == engine.stats.ticks
    assert engine.stats.ticks != Ticks()
    assert engine.stats.finished == 6
    assert engine.stats.generated_tokens == 6 * TOKENS
    for completion in done.values():
        assert len(completion.provenance.steps) == completion.verifier_passes


def test_cancelled_requests_end_as_such_and_the_others_go_on(bed: Bed) -> None:
    truth, engine = bed.truth(), bed.make()
    for request in bed.requests():
        engine.add(request)
    engine.step()
    dropped = engine.cancel(lambda request: request.request_id in ("r1", "r4"))
    assert {c.request_id for c in dropped} == {"r1", "r4"}
    assert {c.finish_reason for c in dropped} == {FinishReason.CANCELLED}
    done = finish(engine)
    assert {name: c.token_ids for name, c in done.items()} == {
        f"r{n}": truth[n] for n in (0, 2, 3, 5)
    }


def test_an_output_that_exists_is_continued(bed: Bed) -> None:
    truth = bed.truth(1)[0]
    done = finish(bed.make(), [bed.request(0, decided_ids=truth[:5])])["r0"]
    assert done.token_ids == truth[5:]


class Unfitting:
    """A grammar that no token fits."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.end_ids = vocab_size, [0]

    def begin(self) -> Unfitting:
        return self

    def append(self, _token: int) -> None:
        raise EngineError("its response format cannot be followed any further")


def raising() -> Callable[[int], bool]:
    raise ValueError("no text")


def test_an_output_that_cannot_be_continued_ends_alone(bed: Bed) -> None:
    """Its grammar, or its check for stop strings, does not take the tokens that it has."""
    truth = bed.truth(2)
    grammar = Unfitting(bed.vocab_size)
    broken = [
        bed.request(2, decided_ids=truth[0][:5], grammar=grammar),
        bed.request(3, decided_ids=truth[0][:5], watch_text=raising),
    ]
    done = finish(bed.make(), [bed.request(0), *broken, bed.request(1)])
    assert [done[f"r{number}"].token_ids for number in (0, 1)] == truth
    for request_id, reason in (("r2", "cannot be followed any further"), ("r3", "no text")):
        assert done[request_id].finish_reason is FinishReason.ERROR
        assert reason in (done[request_id].error or "")
        assert not done[request_id].token_ids


def test_a_service_gives_completions_in_the_callers_order(bed: Bed) -> None:
    truth, service = bed.truth(), EngineService(bed.make)
    try:
        first = service.submit("job", bed.requests()[:3])
        second = service.submit("job", bed.requests()[3:])
        assert [c.token_ids for c in (*first.wait(60), *second.wait(60))] == truth
    finally:
        service.close()


def test_a_closed_service_takes_nothing(bed: Bed) -> None:
    service = EngineService(bed.make)
    service.close()
    try:
        service.submit("job", bed.requests())
    except RequestCancelledError:
        return
    raise AssertionError("it took a request")


# --- what an engine can do, as it is tried --------------------------------------------------------
WARM = replace(PARAMS, temperature=0.9)
CAPABILITIES: dict[str, dict[str, object]] = {
    "greedy": {},
    "`temperature`": {"params": WARM},
    "`top_k`": {"params": replace(WARM, top_k=8)},
    "`top_p`": {"params": replace(WARM, top_p=0.8)},
    "`repetition_penalty`": {"params": replace(PARAMS, repetition_penalty=1.3)},
    "`presence_penalty`": {"params": replace(PARAMS, presence_penalty=0.7)},
    "`frequency_penalty`": {"params": replace(PARAMS, frequency_penalty=0.7)},
    "`bad_token_ids`": {"params": replace(PARAMS, bad_token_ids=(20,))},
    "`min_tokens`": {"params": replace(PARAMS, min_tokens=12, stop_token_ids=(20,))},
    "stop strings": {
        "params": replace(PARAMS, stop=("no output has this",)),
        "watch_text": lambda: lambda _: False,
    },
    "20 `top_logprobs`": {"params": replace(PARAMS, top_logprobs=20)},
    "more `top_logprobs`": {"params": replace(PARAMS, top_logprobs=24)},
    "an output that is continued": {"decided_ids": (21, 22, 23)},
    "the same under `presence_penalty`": {
        "decided_ids": (21, 22, 23),
        "params": replace(PARAMS, presence_penalty=0.7),
    },
    "`min_p`": {"params": replace(WARM, min_p=0.05)},
    "`logit_bias`": {"params": replace(PARAMS, logit_bias=((20, 4.0),))},
    "a grammar": {"grammar": Thirds},
    "an output that is continued under a grammar": {"grammar": Thirds, "decided_ids": (21, 22)},
}


def capabilities(bed: Bed) -> dict[str, str]:
    """Each tried without drafts, then with its own output as drafts."""
    engine = bed.make()
    return {name: _tried(engine, bed, changes) for name, changes in CAPABILITIES.items()}


def _tried(engine: SteppingEngine, bed: Bed, changes: dict[str, object]) -> str:
    if "grammar" in changes:
        changes = changes | {"grammar": Thirds(bed.vocab_size)}
    plain = finish(engine, bed.requests(3, depth=0, **changes))
    if any(c.error for c in plain.values()):
        return "refused"
    only = frozenset({PRE_GENERATED})
    given = [
        bed.request(n, draft_ids=tokens, depth=4, sources=only, **changes)
        for n, tokens in enumerate(in_order(plain))
    ]
    drafted = finish(engine, given)
    if not any(c.proposed for c in drafted.values()):
        return "without drafts"
    same = in_order(drafted) == in_order(plain)
    return "yes" if same else "yes, drafts change the draw"


def documented(engine: str) -> dict[str, str]:
    """An engine's column of the table in the documentation."""
    text = (ROOT / "docs" / "howto" / "engines.md").read_text().partition("| tried |")[2]
    header, _, *lines = text.partition("\n\n")[0].splitlines()
    column = [name.strip(" `") for name in header.strip("|").split("|")].index(engine)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1 + column] for row in rows}
