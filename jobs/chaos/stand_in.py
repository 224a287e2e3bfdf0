"""An engine without a model. Its tokens come from a hash, so a job's outcomes are known.

    token(i) = hash(model, class, seed, prompt ids, i)   below the vocabulary's size; the
                                                         log-probability alike

`model` is a digest of the loaded files, `class` the numeric class. As with the real engine,
batches, drafts, retries and other workers do not change tokens. It runs behind the real service, so
tickets, cancelling and closing work as in every worker, and it reads and announces files at the
same times as the real host. It imports no torch, and ignores temperature, penalties and grammars.
"""

from __future__ import annotations

import logging
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from specbatch.jobs.chaos.stand_in_model import weights_of
from specbatch.pipeline.engines.clock import now
from specbatch.pipeline.engines.contract import (
    Completion,
    EngineStats,
    ModelFolder,
    Request,
    Wanted,
)
from specbatch.pipeline.engines.models.draft_names import pins_of
from specbatch.pipeline.engines.models.fingerprint import unchanged
from specbatch.pipeline.engines.models.model_folder import LoadedModels
from specbatch.pipeline.engines.service import EngineService
from specbatch.pipeline.engines.state.accounting import Rows, TimeBook
from specbatch.pipeline.engines.state.refusal import sequence_of
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.breaker import Lessons
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.draft_switches import ALL_ON, DraftSwitches
from specbatch.schemas.errors import DeviceLostError, ModelError
from specbatch.schemas.numeric_class import Serves, all_keys
from specbatch.schemas.records import FinishReason
from specbatch.schemas.registry import NO_MODELS
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.speculation import PRE_GENERATED, AcceptanceCount
from specbatch.schemas.speculation_spec import SpeculationSpec

log = logging.getLogger(__name__)

MAX_SEQUENCES = 64
NUMERIC_CLASS = "stand-in/f32/1"
AUTO_DEPTH = 4  # draft tokens per step where a job leaves it to the engine
REFUSED = ord("~")  # a prompt that begins with it fails, like one that cannot be run
_PER_HASH = 8  # tokens decided by one hash of 64 bytes
_PAIR = struct.Struct("<II")


class HashedTokens:
    """The tokens of one request. A draft model's tokens differ in some places."""

    def __init__(
        self, request: Request, vocab_size: int, agreement: float = 1.0, model: bytes = b""
    ) -> None:
        """`agreement`: the share of places with the verifier's own token. `model`: a digest of
        everything else that decides."""
        seeded = blake2b(request.seed.to_bytes(8, "little"), digest_size=32)
        seeded.update(model)
        seeded.update(array("q", request.prompt_ids).tobytes())
        self._key = seeded.digest()
        self._vocab_size = vocab_size
        self._agreement = agreement
        self._hashed = (-1, b"")

    def at(self, position: int) -> tuple[int, float]:
        """(token id, log-probability) of an output position; the latter is exact in 32 bits."""
        number, place = divmod(position, _PER_HASH)
        if self._hashed[0] != number:
            self._hashed = (number, blake2b(number.to_bytes(8, "little"), key=self._key).digest())
        word, chance = _PAIR.unpack_from(self._hashed[1], place * _PAIR.size)
        if self._agreement < 1.0 and chance >= self._agreement * 2**32:
            word += 1
        return word % self._vocab_size, -(chance >> 8) / 2**22


class StandInEngine:
    """Continuous batching of up to `max_sequences`. A step waits `step_sec`, or until `pause`."""

    def __init__(
        self,
        vocab_size: int,
        context_tokens: int,
        max_sequences: int = MAX_SEQUENCES,
        step_sec: float = 0.0,
        agreement: float = 1.0,
        pause: threading.Event | None = None,
        model: bytes = b"",
    ) -> None:
        """The vocabulary's last token ends a text. Setting `pause` ends all waiting. `model`: a
        digest that the tokens depend on."""
        self.stats = EngineStats()
        self._book = TimeBook(self.stats.time)
        self.knowledge = Knowledge()
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._max_sequences = max_sequences
        self._step_sec = step_sec
        self._agreement = agreement
        self._model = model
        self._pause = pause or threading.Event()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, HashedTokens] = {}  # in the order of their arrival
        self._hints: dict[str, tuple[int, tuple[int, ...]]] = {}  # request id: place, tokens
        self._refused: list[Completion] = []
        self._switches = ALL_ON

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._refused)

    def prime(self, job: str, counts: Iterable[AcceptanceCount]) -> None:
        """Does nothing: this engine estimates nothing."""

    def lessons(self, job: str) -> Lessons:  # noqa: ARG002 - every job taught the same: nothing
        return Lessons()

    def prepare(self) -> None:
        """There is no model."""

    def wanted(self) -> list[Wanted]:
        return []

    def add(self, request: Request) -> None:
        eos = set() if request.params.ignore_eos else {self._vocab_size - 1}
        prompt = len(request.prompt_ids)
        sequence = sequence_of(
            request,
            stop_ids=frozenset(eos | set(request.params.stop_token_ids)),
            max_length=min(self._context_tokens, prompt + request.params.max_tokens),
        )
        if not prompt or request.prompt_ids[0] == REFUSED:
            sequence.error = "the stand-in refuses this prompt"
        elif sequence.remaining <= 0:
            sequence.error = f"prompt of {prompt} tokens leaves no room for output"
        if sequence.error is not None:
            self._refused.append(self._end(sequence, FinishReason.ERROR))
            return
        self._waiting.append(sequence)

    def cancel(self, matches: Callable[[Request], bool]) -> list[Completion]:
        dropped = [s for s in (*self._running, *self._waiting) if matches(s.request)]
        return [self._end(s, FinishReason.CANCELLED) for s in dropped]

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def unstarted(self) -> list[str]:
        return [s.request.request_id for s in self._waiting]

    def switch(self, switches: DraftSwitches) -> None:
        self._switches = switches

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        if any(s.request.request_id == request_id for s in self._running):
            self._hints[request_id] = (position, token_ids)
            self.stats.hints_followed += 1

    def step(self) -> list[Completion]:
        """Decide one token or more for each sequence. Returns the completions that ended."""
        refused, self._refused = self._refused, []
        while self._waiting and len(self._running) < self._max_sequences:
            sequence = self._waiting.popleft()
            hashed = HashedTokens(sequence.request, self._vocab_size, self._agreement, self._model)
            self._running[sequence] = hashed
        if not self._running:
            return refused
        begun = now()
        if self._step_sec:
            self._pause.wait(self._step_sec)
        waited = now() - begun
        rows = [self._decide(sequence, hashed) for sequence, hashed in self._running.items()]
        self._account(rows, waited, now() - begun - waited)
        ended = [s for s in self._running if s.finish_reason is not None]
        return refused + [self._end(s, s.finish_reason or FinishReason.ERROR) for s in ended]

    def _account(self, rows: list[Rows], waited: int, computed: int) -> None:
        """Account waiting as a model's computing, and everything else as overhead."""
        self.stats.steps += 1
        self.stats.busy_sec += self._step_sec
        running = list(self._running)
        shares = self._book.share_pass(running, rows, waited, computed, lambda count: count)
        for sequence, share in zip(running, shares, strict=True):
            sequence.steps.append(self.stats.steps)
            sequence.pass_ticks.append(share)

    def _decide(self, sequence: Sequence, hashed: HashedTokens) -> Rows:
        """Accept the draft as far as it agrees, and add one token. Returns a model's rows."""
        at = sequence.num_output
        draft = self._draft(sequence, at)
        tokens, logprobs = [], []
        for place in range(len(draft) + 1):
            token, logprob = self._allowed(sequence, hashed, at + place)
            tokens.append(token)
            logprobs.append(logprob)
            if place == len(draft) or draft[place] != token:
                break
        before = sequence.num_output
        sequence.accept(draft, tokens, logprobs, proposer=PRE_GENERATED)
        self.stats.verifier_passes += 1
        self.stats.proposed += len(draft)
        self.stats.accepted += len(tokens) - 1
        kept = sequence.num_output - before
        self.stats.generated_tokens += kept
        prompt = 0 if before else len(sequence.request.prompt_ids) - 1
        return prompt, kept, len(draft) + 1 - kept

    def _draft(self, sequence: Sequence, at: int) -> list[int]:
        """The draft or hint for the next places, limited to the job's depth."""
        request = sequence.request
        if self._switches.is_off(request.scope, PRE_GENERATED):
            return []
        depth = AUTO_DEPTH if request.depth is None else request.depth
        if request.max_depth is not None:
            depth = min(depth, request.max_depth)
        depth = min(depth, sequence.remaining - 1)
        begin, block = self._hints.get(request.request_id, (0, request.draft_ids))
        return list(block[at - begin : at - begin + depth]) if at >= begin and depth > 0 else []

    def _allowed(
        self, sequence: Sequence, hashed: HashedTokens, position: int
    ) -> tuple[int, float]:
        """The hashed token, or the next one that is not an end where an end is too early."""
        token, logprob = hashed.at(position)
        if position < sequence.request.params.min_tokens:
            while token in sequence.stop_ids:
                token = (token + 1) % self._vocab_size
        return token, logprob

    def _end(self, sequence: Sequence, reason: FinishReason) -> Completion:
        sequence.finish_reason = reason
        if self._running.pop(sequence, None) is None and sequence in self._waiting:
            self._waiting.remove(sequence)
        self._hints.pop(sequence.request.request_id, None)
        self.stats.finished += 1
        return sequence.completion()


class StandInHost:
    """A host of this engine for a worker process, whatever dtype or weights a job asks for."""

    def __init__(
        self,
        verifier: ModelFolder,
        proposer: ModelFolder | None = None,
        *,
        max_sequences: int = MAX_SEQUENCES,
        step_sec: float = 0.0,
        agreement: float = 1.0,
        numeric_class: str = NUMERIC_CLASS,
        taught_by: str | None = None,
    ) -> None:
        """`verifier`: the model to stand in for. A propose worker's model has an `agreement` below
        1 with the model in the folder `taught_by`."""
        self._models = LoadedModels(verifier, () if proposer is None else (proposer,))
        self._numeric_class = numeric_class
        self.draft_model = proposer
        self._taught_by = taught_by
        self._pause = threading.Event()
        self._naming = threading.Lock()
        self._service = EngineService(
            lambda: StandInEngine(
                verifier.vocab_size,
                verifier.context_tokens,
                max_sequences,
                step_sec,
                agreement,
                self._pause,
                self.load(),
            ),
            name="stand-in",
        )

    @property
    def model(self) -> ModelFolder:
        """The model as loaded, or as it was at the last inspection."""
        return self._models.model

    def serves(self) -> Serves:
        """One class, whatever a job asks for, and fingerprints like those of `EngineHost`."""
        serves = Serves.of(self.model.ref, dict.fromkeys(all_keys(), self._numeric_class))
        with self._naming:
            try:
                self._models.check_again()
            except ModelError as error:
                log.warning("taking no jobs that pin a fingerprint: %s", error)
                return serves
            found, drafts = self._models.of(self.model), self._models.drafts
        return replace(serves, fingerprint=found, drafts=drafts)

    def load(self) -> bytes:
        """Read the model's files, as for making an engine."""
        with self._naming:
            self._models.check_changed()
        for folder in self._models.draft_models:
            self._read(folder)
        weights = self._read(self.model)
        if self._taught_by is not None:
            weights = weights_of(Path(self._taught_by))
        return weights + self._numeric_class.encode()

    def _read(self, folder: ModelFolder) -> bytes:
        snapshot, weights = unchanged(folder.ref, folder.path, partial(weights_of, folder.path))
        with self._naming:
            self._models.note(folder, snapshot)
        return weights

    def service(self, spec: EngineSpec) -> EngineService:  # noqa: ARG002 - there is only one
        return self._service

    def tag_models(
        self,
        wanted: SpeculationSpec,
        deployed: Mapping[str | None, str] = NO_MODELS,  # noqa: ARG002 - its one model drafts
    ) -> dict[str | None, str]:
        refs = [] if self.draft_model is None else [self.draft_model.ref]
        return pins_of(wanted.routes, refs) if wanted.enabled else {}

    def check(self) -> None:
        self._service.check()

    def cancel(self, job_id: str) -> None:
        self._service.cancel(job_id)

    def switch(self, switches: DraftSwitches) -> None:
        self._service.switch(switches)

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        self._service.hint(request_id, position, token_ids)

    @property
    def stats(self) -> list[EngineStats]:
        return [self._service.stats]

    @property
    def stepping_since(self) -> int | None:
        return self._service.stepping_since

    @property
    def loading_since(self) -> int | None:
        return self._service.loading_since

    def give_up(self, error: DeviceLostError) -> None:
        self._service.give_up(error)

    def stop(self) -> None:
        self._pause.set()
        self._service.stop()

    def close(self) -> None:
        self.stop()
        self._service.close()
