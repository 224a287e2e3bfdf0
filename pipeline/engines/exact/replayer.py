"""Re-runs the verifier to check recorded output: teacher-forced, or from the prompt alone.

It has an engine of its own without proposers, and knows nothing of SQL or text.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from specbatch.pipeline.engines.contract import Completion, ModelFolder, Request
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model.device import DeviceOptions
from specbatch.pipeline.engines.exact.recheck import Difference, Rechecker
from specbatch.pipeline.engines.state.sequence import Sequence, stop_ids_of
from specbatch.schemas.records import FinishReason, Verification
from specbatch.schemas.spec import EngineSpec

# The largest margin, in logits, at which another order of additions explains another token. Of
# random models in bfloat16 the two best logits lay up to 0.6 apart where `fast` decided otherwise;
# the other types have 8 and 65,536 times finer steps.
NEAR_TIE = {"bfloat16": 1.0, "float16": 0.125, "float32": 0.001}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of checking one completion."""

    differences: Seq[Difference]
    ending: str | None  # what is wrong with where or why it ended; None: nothing


class Replayer:
    """One verifier as a job asks for it. Only one thread may use it."""

    def __init__(
        self,
        verifier: ModelFolder,
        spec: EngineSpec,
        device: DeviceOptions,
        kv_cache_bytes: int | None,
        max_batch_tokens: int = 2048,
        draft_model: ModelFolder | None = None,
    ) -> None:
        """`draft_model`: of a job whose outputs depend on it.

        Raises `ModelError`, and `MissingExtraError` where the job's weights need one.
        """
        host = EngineHost(verifier, draft_model, 1, max_batch_tokens, kv_cache_bytes, device=device)
        self.numeric_class = host.serves().class_of(spec.key)
        self._engine = host.make_engine(spec)
        loaded = host.serves().fingerprint
        self.model_fingerprint = None if loaded is None else loaded.digest
        self._rechecker = Rechecker(self._engine.runner)

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return self._engine.runner.dtype

    @property
    def vocab_size(self) -> int:
        """Tokens that have logits."""
        return self._engine.runner.vocab_size

    def near_tie(self, margin: float) -> bool:
        """Whether another order of additions explains so small a margin."""
        return margin <= NEAR_TIE[self.dtype]

    def replay(
        self, request: Request, written: Seq[int], reason: FinishReason
    ) -> Comparison | None:
        """Compare each written token with the verifier's own choice, in one prefill.

        None if that is impossible: the request does not fit this KV cache, or a ratio test decided
        its tokens, and so did drafts that no longer exist.
        """
        runner = self._engine.runner
        stop_ids = stop_ids_of(request, runner.eos_ids, runner.vocab_size)
        limit = min(runner.context_tokens, len(request.prompt_ids) + request.params.max_tokens)
        done = Sequence(replace(request, watch_text=None), stop_ids, limit)
        if done.verification is not Verification.COUPLED:
            return None
        strange = [t for t in (*request.prompt_ids, *written) if not 0 <= t < runner.vocab_size]
        if strange:
            return Comparison((), f"has token {strange[0]}, which is not in the model's vocabulary")
        done.tokens += written
        found = self._rechecker.differences(done)
        if found is None:
            return None
        return Comparison(found, wrong_end(request, written, reason, stop_ids, limit))

    def again(self, request: Request) -> Completion:
        """The completion as the verifier writes it without drafts."""
        return self._run(
            replace(
                *(request,), depth=0, shadow=False, candidate=None,
                verification=Verification.COUPLED,
            )
        )  # fmt: skip

    def tested_again(self, request: Request, pass_depths: Mapping[int, int]) -> Completion:
        """The completion as a ratio test writes it with drafts of these depths: they and the seed
        decide what the draft model drafts, and what of it is kept."""
        return self._run(
            replace(
                *(request,), depth=1, max_depth=None, shadow=False, candidate=None, sources=None,
                draft_model=None, draft_ids=(), pass_depths=pass_depths, context_depths=(),
            )
        )  # fmt: skip

    def _run(self, request: Request) -> Completion:
        self._engine.add(request)
        done: list[Completion] = []
        while not self._engine.idle:
            done += self._engine.step()
        return done[0]


def wrong_end(
    request: Request,
    written: Seq[int],
    reason: FinishReason,
    stop_ids: frozenset[int],
    limit: int,  # tokens of prompt and output together
) -> str | None:
    """What is wrong with the end of an output, in words that follow "it"; None if nothing is."""
    if reason is FinishReason.TOOL_CALLS:  # which recording made of it
        reason = FinishReason.STOP
    watch = request.watch_text() if request.watch_text is not None else None
    most = limit - len(request.prompt_ids)
    for position, token in enumerate(written):
        text_ends = watch is not None and watch(token)
        if not (text_ends or token in stop_ids):
            continue
        if position < len(written) - 1:
            return f"continues after token {position}, which ends it"
        return None if reason is FinishReason.STOP else f"ended by a stop, not by {reason}"
    if reason is FinishReason.STOP:
        return "claims to have stopped, but its last token is no stop"
    if len(written) > request.params.max_tokens:
        return f"has {len(written)} tokens, more than the {request.params.max_tokens} asked for"
    if len(written) < most:
        return (
            f"ends by length after {len(written)} tokens, though {most} were possible: tokens "
            "were removed, or its worker's KV cache was smaller than this one"
        )
    return None
