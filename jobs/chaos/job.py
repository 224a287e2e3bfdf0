"""The small job of all runs: a few prompts, good ones and bad ones."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.orders import EngineKind
from specbatch.jobs.chaos.plan import Plan
from specbatch.schemas.numeric_class import Pinned
from specbatch.schemas.spec import JobSpec, load_spec

ROWS = 12
SAMPLES = 2
MAX_TOKENS = 12
_WITHOUT_PROMPT, _REFUSED = 4, 9  # rows: one is quarantined, the stand-in gives up the other


def write_input(folder: Path) -> Path:
    """Write the prompts as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts: list[str | None] = [f"The story of {i} sailors and" for i in range(ROWS)]
    prompts[_WITHOUT_PROMPT] = None
    prompts[_REFUSED] = "~ no model continues this"
    table = pa.table({"id": [f"row-{i}" for i in range(ROWS)], "prompt": prompts})
    path = folder / "prompts.parquet"
    pq.write_table(table, path, row_group_size=5)
    return path


def models(folder: Path, engine: EngineKind) -> tuple[str, str]:
    """References of the verifier and its draft model."""
    if engine == "stand-in":
        made = (stand_in_model.write_model(folder / n, n) for n in ("verifier", "draft"))
    else:
        demo = Path(str(resources.files("specbatch.jobs.demo"))) / "models"
        made = (demo / n for n in ("verifier", "draft"))
    verifier, draft = (str(path.resolve()) for path in made)
    return verifier, draft


def spec_of(
    plan: Plan,
    prompts: str,
    output: str,
    verifier: str,
    proposer: str,
    engine: EngineKind,
    pinned: Pinned = Pinned(),
) -> JobSpec:
    """The job of a plan. Its outcomes are the same for all plans with the same pins and engine.

    `pinned`: models and class that the spec names. On vLLM it is greedy and without
    log-probabilities, as vLLM draws other samples in another batch.
    """
    engine_spec: dict[str, object] = {"numeric_class": pinned.numeric_class}
    if engine == "vllm":
        engine_spec |= {"dtype": "float32", "exactness": "fast"}
    return load_spec(
        {
            "name": "chaos",
            "input": {"uri": prompts},
            "output": {"uri": output},
            "verifier": verifier,
            "proposer": proposer,
            "model_fingerprint": pinned.model_fingerprint,
            "engine": engine_spec,
            "sampling": {
                "max_tokens": MAX_TOKENS,
                "temperature": 0.0 if engine == "vllm" else 0.8,
                "seed": 5,
                "n": SAMPLES,
                "logprobs": engine != "vllm",
            },
            "speculation": {
                "history_tokens": 0,
                "pregenerate": plan.writes_ahead,
                "pregenerate_tokens": MAX_TOKENS,
            },
            "group_size": plan.group_size,
        }
    )
