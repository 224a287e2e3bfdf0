"""A core without a model, which agrees with drafts as vLLM's does. Its tokens are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from specbatch.pipeline.engines.vllm.core import CoreOptions, Emitted, Work
from specbatch.schemas.errors import EngineError
from specbatch.schemas.records import TopLogprobs

VOCABULARY = 500
CONTEXT = 200
LOGPROB = -0.5


def next_token(tokens: Sequence[int]) -> int:
    """The token behind these; 0 to 9 are never chosen."""
    text = repr(tuple(tokens)).encode()
    return 10 + int.from_bytes(blake2b(text, digest_size=4).digest()) % (VOCABULARY - 10)


def output_of(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


def _judged(prompt: Sequence[int]) -> list[TopLogprobs]:
    """The likeliest token at each place but the first, and the one that is there."""
    found: list[TopLogprobs] = []
    for place in range(1, len(prompt)):
        likeliest, there = next_token(prompt[:place]), prompt[place]
        same = likeliest == there
        found.append(((there,), (LOGPROB,)) if same else ((likeliest, there), (LOGPROB, -3.0)))
    return found


@dataclass
class Running:
    work: Work
    tokens: list[int]  # prompt, then output
    done: int = 0  # output tokens
    computed: int = 0
    draft: list[int] = field(default_factory=list)


class FakeCore:
    """`chunk`: prompt tokens of a step. `faulty`: what makes greedy outputs wrong, if anything:
    `mixed` (a sampled request in the batch) or `drafts`; `sampled`: drafts make sampled ones wrong;
    `formed`: drafts take grammars off.
    `deaf`: drafts are never accepted."""

    def __init__(
        self, drafted: bool = True, sequences: int = 4, chunk: int = 8, faulty: str = ""
    ) -> None:
        self.options = CoreOptions("fake", "float32", sequences, 64, 4 if drafted else 0)
        self.context_tokens = CONTEXT
        self.batches: list[list[Work]] = []
        self.steps = 0
        self.closed = False
        self.preempt: Mapping[int, str] = {}  # by step: who loses its KV then
        self.raises: Mapping[int, Exception] = {}
        self.nan: set[str] = set()  # requests whose log-probabilities are NaN
        self.ended: set[str] = set()  # requests that end without a token
        self.cached: Mapping[str, int] = {}  # by request: prompt tokens whose KV was there
        self.dropped_caches = 0
        self.deaf = False
        self.most_drafted = 99  # of each sequence in a step, whatever it was given
        self.own: list[int] | None = None  # what it drafts for each sequence; empty: what is right
        self._chunk = chunk
        self._faulty = faulty
        self._running: dict[str, Running] = {}

    def add(self, work: Work) -> None:
        assert not self.closed
        if work.params.top_logprobs > 5:
            raise EngineError("vLLM refuses the request: too many log-probabilities")
        self._running[work.request_id] = Running(work, list(work.prompt_ids))

    def draft(self, drafts: Mapping[str, list[int]]) -> None:
        for name, tokens in drafts.items():
            assert len(tokens) <= self.options.max_depth
            self._running[name].draft = list(tokens)

    def own_draft(self, request_id: str) -> Sequence[int]:
        running = self._running.get(request_id)
        return () if running is None or self.own is None else running.draft

    def step(self) -> list[Emitted]:
        assert not self.closed
        self.steps += 1
        if error := self.raises.get(self.steps):
            raise error
        self.batches.append([running.work for running in self._running.values()])
        victim = self.preempt.get(self.steps)
        emitted = []
        for name, running in list(self._running.items())[: self.options.max_sequences]:
            draft, running.draft = running.draft, []
            if name in self.ended:
                del self._running[name]
                emitted.append(Emitted(name, [], [], [], 0, finished=True))
                continue
            if name == victim:
                running.computed = 0
                continue
            whole = len(running.work.prompt_ids) + running.done
            if running.computed < whole - 1 - self._chunk:
                running.computed += self._chunk
                continue
            draft = draft[: self.most_drafted]
            emitted.append(self._decide(name, running, [] if self.deaf else draft))
        return emitted

    def _decide(self, name: str, running: Running, draft: list[int]) -> Emitted:
        work, tokens, finished = running.work, [], False
        for place in range(len(draft) + 1):
            token = self._token(running, bool(draft))
            tokens.append(token)
            running.tokens.append(token)
            running.done += 1
            finished = token in work.stop_ids and running.done > work.params.min_tokens
            finished = finished or running.done == work.max_tokens
            if finished or place == len(draft) or draft[place] != token:
                break
        running.computed = len(work.prompt_ids) + running.done - 1
        if self.own is not None:
            depth = self.options.max_depth
            running.draft = self.own[:depth] or list(output_of(running.tokens, depth))
        if finished:
            del self._running[name]
        value = float("nan") if name in self.nan else LOGPROB
        tops = (
            [((token, 1), (LOGPROB, -9.0)) for token in tokens] if work.params.top_logprobs else []
        )
        more: dict[str, Any] = {
            "cached": self.cached.get(name, 0) if running.done == len(tokens) else 0,
            "prompt_tops": _judged(work.prompt_ids) if work.judge_prompt else (),
        }
        logprobs = [value] * len(tokens)
        return Emitted(name, tokens, logprobs, tops, len(draft), finished, **more)

    def _token(self, running: Running, drafted: bool) -> int:
        work = running.work
        token = next_token(running.tokens)
        if running.done < work.params.min_tokens:
            while token in work.stop_ids:
                token = 10 + (token + 1) % (VOCABULARY - 10)
        sampled = any(other.work.params.temperature for other in self._running.values())
        hot = bool(work.params.temperature)
        if work.grammar is not None:
            free = self._faulty == "formed" and drafted
            return token if free else self._formed(work, token)
        wrong = {
            "mixed": sampled and not hot,
            "drafts": drafted and not hot,
            "sampled": drafted and hot,
        }
        return 3 if wrong.get(self._faulty) else token

    def _formed(self, work: Work, token: int) -> int:
        """One of those that the grammar allows, chosen by what would have been decided."""
        assert work.grammar is not None
        words = np.full((1, -(-VOCABULARY // 32)), -1, np.int32)
        work.grammar.masks(words, (), 0)
        bits = np.unpackbits(words.view(np.uint8)[0], bitorder="little")[:VOCABULARY]
        (allowed,) = bits.nonzero()
        chosen = int(allowed[token % len(allowed)]) if len(allowed) else 0
        if chosen not in work.stop_ids:
            work.grammar.append(chosen)
        return chosen

    def drop_cache(self) -> None:
        self.dropped_caches += 1

    def drop(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            self._running.pop(name, None)

    def computed(self, request_id: str) -> int | None:
        running = self._running.get(request_id)
        return None if running is None else running.computed

    @property
    def kv_blocks(self) -> tuple[int, int, int]:
        return len(self._running), 64 - len(self._running), 0

    def close(self) -> None:
        self.closed = True
