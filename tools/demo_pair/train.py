"""Train the demo pair from the standard library: tokenizer, prompts, verifier, draft, distillation.

Each stage reads what the stage before it saved, so a broken run goes on with `--stages`. Writes
`<out>/verifier`, `<out>/draft` and, beside `<out>`, `prompts.parquet`.
On a CPU that others use too, `OMP_NUM_THREADS=1` is several times faster than more threads: the
operations are short, and a thread that is not scheduled keeps all others waiting.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from specbatch.tools.demo_pair.batches import WINDOW, training_windows
from specbatch.tools.demo_pair.corpus import read, training_files
from specbatch.tools.demo_pair.distill import Rollouts, distill, text_loss, write_rollouts
from specbatch.tools.demo_pair.learning import Plan, fit, load_model, new_model, save_model
from specbatch.tools.demo_pair.prompts import write_prompts
from specbatch.tools.demo_pair.tokens import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

STAGES = ("tokenizer", "verifier", "draft-text", "rollouts", "draft")
ROLLOUT_ROWS = 128


def verifier_config() -> LlamaConfig:
    """About 4.7M parameters."""
    return _config(hidden=256, intermediate=640, layers=6, heads=8, kv_heads=4)


def draft_config() -> LlamaConfig:
    """About 0.75M parameters, a sixth of the verifier."""
    return _config(hidden=128, intermediate=512, layers=2, heads=4, kv_heads=2)


def _config(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def main() -> None:
    """Train the stages asked for and save each as soon as it is done."""
    options = _arguments()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    rollouts_path = out / "rollouts.pt"
    for stage in options.stages:
        began = time.monotonic()
        if stage == "tokenizer":
            _tokenizer_stage(out)
        elif stage == "verifier":
            _verifier_stage(options)
        elif stage == "draft-text":
            _draft_text_stage(options)
        elif stage == "rollouts":
            _rollout_stage(options, rollouts_path)
        elif stage == "draft":
            _draft_stage(options, rollouts_path)
        print(f"{stage}: done in {(time.monotonic() - began) / 60:.1f} min", flush=True)
    if "draft" in options.stages and not options.keep_rollouts:
        rollouts_path.unlink(missing_ok=True)


def _tokenizer_stage(out: Path) -> None:
    tokenizer = train_tokenizer(read(path) for path in training_files().values())
    for name in ("verifier", "draft"):
        save_tokenizer(tokenizer, out / name)
    write_prompts(load_tokenizer(out / "verifier"), out.parent / "prompts.parquet")


def _verifier_stage(options: argparse.Namespace) -> None:
    windows = training_windows(load_tokenizer(options.out / "verifier"))
    print(f"{len(windows.stream):,} tokens of text, {len(windows.heads):,} function windows")
    generator = torch.Generator().manual_seed(options.seed)
    model = new_model(verifier_config(), options.seed)
    plan = _plan(options, options.verifier_steps, 3e-3, options.verifier_minutes)
    fit(
        "verifier",
        model,
        text_loss(model),
        lambda: (windows.draw(options.verifier_rows, WINDOW, generator),),
        plan,
    )
    save_model(model, options.out / "verifier")


def _draft_text_stage(options: argparse.Namespace) -> None:
    windows = training_windows(load_tokenizer(options.out / "draft"))
    generator = torch.Generator().manual_seed(options.seed + 4)
    draft = new_model(draft_config(), options.seed + 2)
    plan = _plan(options, options.draft_text_steps, 4e-3, options.draft_minutes)
    rows = options.draft_rows
    fit("draft", draft, text_loss(draft), lambda: (windows.draw(rows, WINDOW, generator),), plan)
    save_model(draft, options.out / "draft")


def _rollout_stage(options: argparse.Namespace, path: Path) -> None:
    windows = training_windows(load_tokenizer(options.out / "verifier"))
    verifier = load_model(options.out / "verifier", options.device)
    seed = options.seed + 1
    write_rollouts(verifier, windows, options.rollout_batches, ROLLOUT_ROWS, seed).save(path)


def _draft_stage(options: argparse.Namespace, path: Path) -> None:
    windows = training_windows(load_tokenizer(options.out / "draft"))
    draft = load_model(options.out / "draft", options.device).float().requires_grad_(True)
    plan = _plan(options, options.draft_steps, 3e-3, options.draft_minutes)
    distill(draft, windows, Rollouts.load(path), options.draft_rows, plan, options.seed + 3)
    save_model(draft, options.out / "draft")


def _plan(options: argparse.Namespace, steps: int, rate: float, minutes: float) -> Plan:
    return Plan(steps, rate, minutes, options.device, options.compile)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    default_out = Path(__file__).parents[2] / "jobs" / "demo" / "models"
    parser.add_argument("--out", type=Path, default=default_out, help="folder of both models")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--verifier-steps", type=int, default=1000)
    parser.add_argument("--verifier-rows", type=int, default=20, help=f"windows of {WINDOW} tokens")
    parser.add_argument("--draft-text-steps", type=int, default=1400)
    parser.add_argument("--draft-steps", type=int, default=2000, help="of distillation")
    parser.add_argument("--draft-rows", type=int, default=32)
    parser.add_argument("--rollout-batches", type=int, default=80, help=f"of {ROLLOUT_ROWS} rows")
    parser.add_argument("--verifier-minutes", type=float, default=math.inf, help="a time limit")
    parser.add_argument(
        "--draft-minutes", type=float, default=math.inf, help="a time limit for each of its stages"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--keep-rollouts", action="store_true", help="to train a draft again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
