"""transformers' own paths: `generate`, continuous batching, and speculation for one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbatch.jobs.bench.contenders import Outputs, Prompts

ENGINE = "transformers"
DRAFTED = 4  # tokens a step, of the draft model and of prompt lookup


class Transformers:
    """One model in transformers, and perhaps a draft model that offers `DRAFTED` tokens a step."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        new_tokens: int,
        device: str = "cpu",
        draft: Path | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()  # it warns at each `generate` of what it was given

        def loaded(path: Path) -> Any:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()

        self.module, self.device, self.new_tokens = loaded(folder), device, new_tokens
        self.draft = loaded(draft) if draft else None
        if self.draft is not None:
            self.draft.generation_config.num_assistant_tokens = DRAFTED
            self.draft.generation_config.num_assistant_tokens_schedule = "constant"

    def generate(self, prompts: Prompts, **more: Any) -> Outputs:
        """Prompts of several lengths are padded on the left."""
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=self.device)
        mask = torch.ones_like(ids)
        for row, prompt in zip(mask, prompts, strict=True):
            row[: length - len(prompt)] = 0
        with torch.inference_mode():
            out = self.module.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=self.new_tokens,
                min_new_tokens=self.new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **more,
            )
        return list(out[:, length:].tolist())

    def generate_batch(self, prompts: Prompts) -> Outputs:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        tokens = max(map(len, prompts)) + self.new_tokens
        fields = ContinuousBatchingConfig.__dataclass_fields__
        size = "page_size" if "page_size" in fields else "block_size"  # before transformers 5.20
        batching = ContinuousBatchingConfig(
            **{size: 32},
            num_blocks=(tokens // 32 + 2) * len(prompts) + 8,
            max_batch_tokens=max(512, 2 * len(prompts)),
            allow_block_sharing=False,
        )
        config = GenerationConfig(
            do_sample=False, max_new_tokens=self.new_tokens, eos_token_id=-1, pad_token_id=0,
            use_cuda_graph=False,
        )  # fmt: skip
        out = self.module.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        return [list(r.generated_tokens) for r in out.values()]

    def one_by_one(self, prompts: Prompts, **more: Any) -> Outputs:
        """Assisted generation refuses a batch."""
        return [self.generate([prompt], **more)[0] for prompt in prompts]

    def replay(
        self, prompts: Prompts, drafts: Sequence[Sequence[int]], depth: int
    ) -> tuple[Outputs, dict[str, int]]:
        """Assisted generation with given drafts; (outputs, tokens proposed and accepted)."""
        outputs: Outputs = []
        counts = {"proposed": 0, "accepted": 0}
        for prompt, draft in zip(prompts, drafts, strict=True):
            candidates = ReplayCandidates(len(prompt), draft, depth)
            # `generate` builds its candidate generator here; asked for prompt lookup, it decodes
            # with whatever comes back.
            self.module._get_candidate_generator = lambda found=candidates, **_: found
            try:
                outputs += self.generate([prompt], prompt_lookup_num_tokens=depth)
            finally:
                del self.module._get_candidate_generator
            counts["proposed"] += candidates.proposed
            counts["accepted"] += candidates.accepted
        return outputs, counts


class ReplayCandidates:
    """Offers the next `depth` tokens of a draft of the whole output, and counts accepted ones.

    It implements transformers' `CandidateGenerator`.
    """

    requires_model_outputs = False

    def __init__(self, prompt_tokens: int, draft: Sequence[int], depth: int) -> None:
        self.prompt_tokens, self.draft, self.depth = prompt_tokens, draft, depth
        self.proposed = self.accepted = self.offered = 0

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        """The ids so far, int64 [1, tokens], with the offered ones behind them."""
        written = input_ids.shape[1] - self.prompt_tokens
        # The last token of the output is the verifier's own in any case.
        offered = self.draft[written : min(written + self.depth, len(self.draft) - 1)]
        self.offered = len(offered)
        self.proposed += len(offered)
        more = torch.tensor([list(offered)], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, more], dim=1), None

    def update_candidate_strategy(
        self,
        input_ids: Tensor,  # noqa: ARG002 - the contract's
        scores: Tensor,  # noqa: ARG002 - the contract's
        num_matches: Any,
    ) -> None:
        self.accepted += min(int(num_matches), self.offered)
