"""transformers' own paths: `generate`, continuous batching, and speculation at one prompt."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from specbatch.jobs.bench.contenders import NEW_TOKENS, Contender, Outputs, Prompts, timed
from specbatch.jobs.bench.models import BenchModel

ENGINE = "transformers"
DRAFTED = 4  # tokens a step, of the draft model and of prompt lookup


def transformers_contenders(
    model: BenchModel, dtype: torch.dtype, device: str = "cpu"
) -> list[Contender]:
    """Assisted generation and prompt lookup take one prompt only."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    def loaded(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    module, draft = loaded(model.folder), loaded(model.draft)
    draft.generation_config.num_assistant_tokens = DRAFTED
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    fixed = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def generate(prompts: Prompts, **more: Any) -> Outputs:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            out = module.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **more)
        return list(out[:, ids.shape[1] :].tolist())

    def generate_batch(prompts: Prompts) -> Outputs:
        tokens = len(prompts[0]) + NEW_TOKENS
        batching = ContinuousBatchingConfig(
            page_size=32,
            num_blocks=(tokens // 32 + 2) * len(prompts) + 8,
            max_batch_tokens=max(512, 2 * len(prompts)),
            allow_block_sharing=False,
        )
        config = GenerationConfig(
            do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0,
            use_cuda_graph=False,
        )  # fmt: skip
        out = module.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        return [list(r.generated_tokens) for r in out.values()]

    lookup = partial(generate, prompt_lookup_num_tokens=DRAFTED)
    assisted = partial(generate, assistant_model=draft)
    return [
        Contender("generate", ENGINE, timed(generate)),
        Contender("generate_batch", ENGINE, timed(generate_batch)),
        Contender("prompt_lookup", ENGINE, timed(lookup), only_n=1),
        Contender("assisted", ENGINE, timed(assisted), only_n=1),
    ]
