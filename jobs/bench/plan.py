"""The plan of `specbatch bench`, checked before anything is loaded, and its prompts."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.jobs.bench.models import MADE, RANDOM_CONTEXT, BenchModel, demo_model, random_model
from specbatch.pipeline.engines.models.model_folder import check_pair, inspect_model
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas.errors import InputError, UsageError

OURS_KEY = "ours"
# Each with the variable that names its interpreter, where it needs one of its own.
ENGINES: Mapping[str, str | None] = {
    OURS_KEY: None,
    "transformers": None,
    "openvino": "SPECBATCH_BENCH_OPENVINO_PYTHON",
    "vllm": "SPECBATCH_BENCH_VLLM_PYTHON",
    "llama.cpp": "SPECBATCH_BENCH_LLAMA_PYTHON",
}
DEMO = "demo"
DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.parquet"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Raises `UsageError` if that cannot be measured."""

    model: str = DEMO  # or MADE, or a folder
    proposer: Path | None = None
    prompts: Path | None = None  # a Parquet file; None: the demo's
    prompt_column: str = "prompt"
    prompt_tokens: int = 256  # longer prompts are cut
    counts: tuple[int, ...] = (1, 8, 32)
    acceptances: tuple[float, ...] = (0.0, 0.5, 0.9, 1.0)  # of replayed drafts
    real: bool = False  # drafts by the draft model as well
    engines: tuple[str, ...] = (OURS_KEY, "transformers")
    new_tokens: int = 32
    runs: int = 2
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_engines()
        self._check_models()

    def _check_numbers(self) -> None:
        for name, least in (("new_tokens", 2), ("runs", 1), ("prompt_tokens", 1)):
            if (value := getattr(self, name)) < least:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is {value}: give {least} or more")
        if not self.counts or min(self.counts) < 1:
            raise UsageError("--n takes numbers of prompts of 1 or more, such as 1,8,32")
        if wrong := [a for a in self.acceptances if not 0 <= a <= 1]:
            raise UsageError(
                f"--acceptance {wrong[0]:g} is not a probability: give numbers from 0 to 1, "
                "such as 0,0.5,0.9,1"
            )
        if not self.acceptances and not self.real:
            raise UsageError("nothing drafts: give --acceptance numbers from 0 to 1, or --real")

    def _check_engines(self) -> None:
        if unknown := [name for name in self.engines if name not in ENGINES]:
            raise UsageError(f"--engines knows no `{unknown[0]}`: choose of {', '.join(ENGINES)}")
        if OURS_KEY not in self.engines:
            raise UsageError(
                "--engines must name ours: the others replay its outputs and are compared with it"
            )
        for name in self.engines:
            variable = ENGINES[name]
            if variable and not os.environ.get(variable):
                raise UsageError(
                    f"engine {name} needs a Python that has it: name one in {variable} "
                    "(CONTRIBUTING.md says how to make it), or leave it out of --engines"
                )

    def _check_models(self) -> None:
        if self.real and self.proposer is None and self.model != DEMO:
            who = f"{MADE} is random" if self.model == MADE else f"`{self.model}` comes alone"
            raise UsageError(
                f"{who}, nothing drafts for it: name a --proposer, or leave out --real"
            )
        if self.proposer is not None and not self.real:
            raise UsageError("--proposer drafts only with --real: add it, or leave both out")
        context = RANDOM_CONTEXT
        if self.model != MADE:
            verifier = inspect_model(str(demo_model().folder) if self.model == DEMO else self.model)
            context = verifier.context_tokens
            if self.proposer is not None:
                check_pair(verifier, inspect_model(str(self.proposer)))
        if self.prompt_tokens + self.new_tokens > context:
            raise UsageError(
                f"--prompt-tokens {self.prompt_tokens} and --new-tokens {self.new_tokens} exceed "
                f"the {context} tokens that `{self.model}` takes: lower one"
            )

    def bench_model(self, work: Path) -> tuple[BenchModel, Path | None]:
        """(the model, its draft model if one is wanted); a random one is made in `work`."""
        if self.model == DEMO:
            model = demo_model()
        elif self.model == MADE:
            model = random_model(work, MADE)
            if self.proposer is not None:
                check_pair(inspect_model(str(model.folder)), inspect_model(str(self.proposer)))
        else:
            found = inspect_model(self.model)
            draft = self.proposer or found.path
            model = BenchModel(found.path.name, found.path, draft, found.vocab_size)
        if not self.real:
            return model, None
        return model, self.proposer or model.draft


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Token ids per prompt, and their source."""

    ids: list[list[int]]
    facts: dict[str, Any]


def read_prompts(plan: Plan, folder: Path) -> PromptSet:
    """As many prompts as the largest N, for the model in `folder`. Raises `InputError`.

    A model without a tokenizer of its own gets the ids of the demo's.
    """
    path, wanted = plan.prompts or DEMO_PROMPTS, max(plan.counts)
    texts = [text for text in _column(path, plan.prompt_column) if text and text.strip()]
    if len(texts) < wanted:
        raise InputError(
            f"{path} has {len(texts)} prompts and --n asks for {wanted}: name a larger file or a "
            "smaller --n"
        )
    own = (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()
    tokenizer = TextTokenizer.load(str(folder if own else demo_model().folder))
    ids = [prompt[: plan.prompt_tokens] for prompt in tokenizer.encode_batch(texts[:wanted])]
    lengths = [len(prompt) for prompt in ids]
    facts = {
        "source": plan.prompts.name if plan.prompts else "demo",
        "column": plan.prompt_column,
        "tokenizer": "the model's" if own else "the demo's",
        "prompts": len(ids),
        "tokens": {
            "least": min(lengths),
            "mean": round(statistics.mean(lengths), 1),
            "most": max(lengths),
        },
    }
    return PromptSet(ids, facts)


def _column(path: Path, name: str) -> list[str | None]:
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise InputError(f"prompts {path} do not exist: name a Parquet file") from None
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path} cannot be read as Parquet ({reason}): name another") from None
    with file:
        if name not in file.schema_arrow.names:
            raise InputError(
                f"{path} has no column `{name}`; its columns are "
                f"{', '.join(file.schema_arrow.names)}: choose with --prompt-column"
            )
        kind = file.schema_arrow.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise InputError(
                f"column `{name}` of {path} is {kind}, not text: choose with --prompt-column"
            )
        texts: list[str | None] = file.read(columns=[name]).column(0).to_pylist()
        return texts
