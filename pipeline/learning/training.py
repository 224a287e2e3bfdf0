"""Fine-tunes a draft model on a data set; the same code on a CPU and on a GPU.

The weights are trained in single precision, under bfloat16 autocast on a GPU, and judged as they
will be served: rounded to the type of the parent's. Of the held-out prompts one half chooses the
best checkpoint, the other half compares it with the parent. Two runs on the same kind of processor,
with as many threads, give the same bits, however often they were killed.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.fingerprint import beside_weights
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.learning import checkpoints
from specbatch.pipeline.learning.checkpoints import Checkpoint, Progress
from specbatch.pipeline.learning.datasets import DataSet, Example
from specbatch.pipeline.learning.estimates import (
    Compared,
    Counts,
    acceptance,
    accepted_length,
    counts_of,
)
from specbatch.pipeline.learning.objective import batch_of, batches, logits_of, loss_of, matches
from specbatch.schemas.errors import ModelError, OutputError, UsageError, first_line
from specbatch.schemas.training import DEPTH, RECORD, DataOrder, Parameters

EVALUATIONS = 10  # in a run
PATIENCE = 6  # evaluations without a better one, after which it ends: the last steps gain most
CHECKPOINT_STEPS = 100
WARMUP = 0.05  # share of the steps
LAST_RATE = 0.1  # of the highest rate, at the end
GRADIENT_CLIP = 1.0
# Of a model 128 wide, trained on the demo pair. Wider ones take smaller steps, in proportion.
RATE, RATE_WIDTH = 1e-3, 128


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told how a training continues, and may stop it."""

    say: Callable[[str], None] = lambda _: None
    on_read: Callable[[int, int], None] = lambda *_: None  # completions, and of how many
    on_step: Callable[[int, int], None] = lambda *_: None
    is_stopped: Callable[[], bool] = lambda: False  # asked at every completion and step


@dataclass(frozen=True, slots=True)
class Training:
    """One training and where it goes."""

    parent: ModelFolder
    data: DataSet
    order: DataOrder
    parameters: Parameters
    out: Path
    watcher: Watcher = Watcher()
    checkpoint_steps: int = CHECKPOINT_STEPS

    def run(self) -> dict[str, Any]:
        """Train to the end and return the record, which `RECORD` in the folder holds too.

        Goes on from a checkpoint of the same training. Raises `UsageError` for data that say
        nothing, `OutputError` for a folder with another training, `ModelError` for a parent that
        cannot be trained, and `KeyboardInterrupt` after a checkpoint when it was stopped.
        """
        self._check_data()
        transformers_logging.disable_progress_bar()  # in the middle of a log, or beside ours
        with _deterministic():
            model = _load(self.parent).float().to(self.parameters.device)
            about = self.about(model.config.hidden_size)
            known = checkpoints.about_of(self.out)
            if known is not None:
                checkpoints.check_same(self.out, known, about)
                if (record := checkpoints.record_of(self.out)) is not None:
                    return record
            return _Run(self, model, about).run()

    def about(self, width: int) -> dict[str, Any]:
        """All that decides the result."""
        values = asdict(self.parameters)
        if values["learning_rate"] is None:
            values["learning_rate"] = RATE * RATE_WIDTH / width
        return {
            "parent": self.parent.fingerprint.digest,
            "data": self.data.digest,
            "until": self.order.until,
            **values,
        }

    def _check_data(self) -> None:
        held_out = [prompts_of(part) for part in (self.data.choosing, self.data.judging)]
        if not self.data.train or held_out[0] < 1 or held_out[1] < 2:
            raise UsageError(
                f"{prompts_of(self.data.train):,} prompts to learn from and {sum(held_out)} held "
                "out are too few: name more jobs, or hold out more with --held-out"
            )
        for part in (self.data.choosing, self.data.judging):
            if all(one.completion_tokens < 2 for one in part):
                raise UsageError(
                    "the held-out outputs have one token each, which no draft can save: name jobs "
                    "with longer outputs"
                )


def verdict_of(record: Mapping[str, Any]) -> str:
    """`better`, `worse`, or `not surely better` where the interval has 0 in it."""
    if record["better"]:
        return "better"
    return (
        "worse"
        if record["held_out"]["accepted_length"]["difference"]["high"] < 0
        else ("not surely better")
    )


def prompts_of(examples: Sequence[Example]) -> int:
    return len({one.prompt_digest for one in examples})


class _Run:
    """The loop, with what it holds in memory."""

    def __init__(self, training: Training, model: Any, about: dict[str, Any]) -> None:
        self.training, self.model, self.about = training, model, about
        self.data, self.out = training.data, training.out
        self.device = training.parameters.device
        self.budget, self.seed = training.parameters.batch_tokens, training.parameters.seed
        self.rate: float = about["learning_rate"]
        self.served_as = _load(training.parent).dtype
        self.judge = copy.deepcopy(model).requires_grad_(False)  # gets rounded weights
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.progress = Progress()
        self.best: checkpoints.Tensors = {}
        self.steps = self._steps()
        self.every = math.ceil(self.steps / EVALUATIONS)

    def run(self) -> dict[str, Any]:
        before = self._counts(self.data.judging)  # of the parent, before anything is loaded
        if (self.out / checkpoints.FILE).exists():
            self._resume()
        else:
            first = self._counts(self.data.choosing).length
            self.training.watcher.say(f"parent: {first:.3f} accepted draft tokens per pass")
            self._save()  # so that what the training is about is known from the start
        if not self._is_over:
            self._learn()
        self._set_judge(self.best)
        return self._finish(before, self._counts(self.data.judging))

    def _learn(self) -> None:
        progress = self.progress
        for chosen in self._stream(progress.step):
            loss = self._step([self.data.train[i] for i in chosen])
            progress.step += 1
            self.training.watcher.on_step(progress.step, self.steps)
            is_due = progress.step % self.every == 0 or progress.step == self.steps
            if is_due:
                self._evaluate(loss)
            is_stopped = self.training.watcher.is_stopped()
            if is_due or is_stopped or progress.step % self.training.checkpoint_steps == 0:
                self._save()
            if is_stopped:
                raise KeyboardInterrupt
            if self._is_over:
                return

    @property
    def _is_over(self) -> bool:
        return self.progress.step >= self.steps or self.progress.stale() >= PATIENCE

    def _steps(self) -> int:
        parameters = self.training.parameters
        if parameters.steps is not None:
            return parameters.steps
        epoch = len(batches(self.data.train, self.budget, self.seed, 0))
        return max(1, math.ceil(parameters.epochs * epoch))

    def _stream(self, begin: int) -> Iterator[list[int]]:
        """The batches from a step on, epoch after epoch."""
        epoch = 0
        while True:
            some = batches(self.data.train, self.budget, self.seed, epoch)
            yield from some[begin:]
            begin = max(0, begin - len(some))
            epoch += 1

    def _step(self, examples: Sequence[Example]) -> float:
        parameters = self.training.parameters
        batch = batch_of(examples, self.device)
        with self._autocast():
            logits = logits_of(self.model, batch)
        loss = loss_of(logits, batch, parameters.distill)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * _schedule(self.progress.step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _autocast(self) -> torch.autocast:
        on_gpu = torch.device(self.device).type == "cuda"
        return torch.autocast("cuda" if on_gpu else "cpu", torch.bfloat16, enabled=on_gpu)

    # --- held-out prompts -----------------------------------------------------------------------
    def _evaluate(self, loss: float) -> None:
        rounded = {name: p.detach().to(self.served_as) for name, p in self._parameters()}
        self._set_judge(rounded)
        length, progress = self._counts(self.data.choosing).length, self.progress
        progress.evaluations.append({"step": progress.step, "loss": loss, "length": length})
        if length > progress.best_length:
            progress.best_length, progress.best_step = length, progress.step
            self.best = {name: weights.cpu() for name, weights in rounded.items()}
        self.training.watcher.say(
            f"step {progress.step:,} of {self.steps:,}: loss {loss:.3f}, {length:.3f} accepted "
            "draft tokens per pass"
        )

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.model.named_parameters()  # tied ones once

    @torch.no_grad()
    def _set_judge(self, weights: checkpoints.Tensors) -> None:
        for name, parameter in self.judge.named_parameters():
            parameter.copy_(weights[name])

    def _counts(self, examples: Sequence[Example]) -> Counts:
        found = list(matches(self.judge, examples, self.budget, self.device))
        return counts_of([match for _, match in found], [one.prompt_digest for one, _ in found])

    # --- checkpoints ----------------------------------------------------------------------------
    def _save(self) -> None:
        weights = {name: p.detach() for name, p in self._parameters()}
        state = self.optimizer.state_dict()
        checkpoints.save(self.out, Checkpoint(self.about, self.progress, weights, state, self.best))

    @torch.no_grad()
    def _resume(self) -> None:
        found = checkpoints.load(self.out)
        for name, parameter in self._parameters():
            parameter.copy_(found.weights[name])
        self.optimizer.load_state_dict(dict(found.optimizer))
        self.progress, self.best = found.progress, found.best
        self.training.watcher.say(f"resumed at step {self.progress.step:,} of {self.steps:,}")

    # --- the end --------------------------------------------------------------------------------
    def _finish(self, before: Counts, after: Counts) -> dict[str, Any]:
        length = accepted_length(before, after)
        share = acceptance(before, after)
        beside = self.out / ".model"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            self._write_model(beside)
            record = self._record(inspect_model(str(beside)), length, share)
            for path in sorted(beside.iterdir()):
                place = self.out / path.name
                if place.is_dir():  # of a run that was killed here: a folder replaces none
                    shutil.rmtree(place)
                path.replace(place)
            beside.rmdir()
            data = orjson.dumps(record, option=orjson.OPT_INDENT_2)
            checkpoints.replace_file(self.out / RECORD, lambda file: file.write(data))
            (self.out / checkpoints.FILE).unlink()
        except (OSError, SafetensorError) as error:
            raise OutputError(f"no model can be written to {self.out}: {error}") from None
        return record

    @torch.no_grad()
    def _write_model(self, folder: Path) -> None:
        """The parent's folder with other weights."""
        parent = self.training.parent.path
        model = _load(self.training.parent)
        for name, parameter in model.named_parameters():
            parameter.copy_(self.best[name])
        model.generation_config = GenerationConfig()  # the parent's is copied as it is
        model.save_pretrained(folder)
        for path in folder.glob("*config.json"):
            path.unlink()
        for path in beside_weights(parent):
            to = folder / path.relative_to(parent)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, to)
        for path in folder.rglob("*.*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _record(self, model: ModelFolder, length: Compared, share: Compared) -> dict[str, Any]:
        order, data, parent = self.training.order, self.data, self.training.parent
        return {
            "better": length.is_better,
            "model": model.fingerprint.as_json(),
            "parent": {"ref": parent.ref, **parent.fingerprint.as_json()},
            "verifier": data.verifier,
            "tenant": order.tenant,
            "since": order.since,
            "until": order.until,
            "jobs": [
                {"job": job.job_id, "name": job.name, "finished_at": job.finished_at}
                for job in data.jobs
            ],
            "data": {
                "train": _size(data.train),
                "choosing": _size(data.choosing),
                "judging": _size(data.judging),
                "with_top_logprobs": sum(one.top_ids is not None for one in data.train),
                "left_out": {why: n for why, n in data.left_out.items() if n},
                "skipped_jobs": list(data.skipped),
            },
            "held_out": {
                "acceptance": share.as_json(),
                "accepted_length": length.as_json(),
                "depth": DEPTH,
            },
            "steps": self.progress.step,
            "best_step": self.progress.best_step,
            "evaluations": self.progress.evaluations,
            "about": self.about,
            "machine": {"device": self.device, "threads": torch.get_num_threads()},
            "versions": {name: version(name) for name in ("specbatch", "torch", "transformers")},
        }


def _size(examples: Sequence[Example]) -> dict[str, int]:
    tokens = sum(one.completion_tokens for one in examples)
    return {"prompts": prompts_of(examples), "sequences": len(examples), "tokens": tokens}


def _load(folder: ModelFolder) -> Any:
    """The model in the type of its files. Raises `ModelError`."""
    if "quantization_config" in orjson.loads((folder.path / "config.json").read_bytes()):
        raise ModelError(
            f"proposer `{folder.ref}` has quantised weights, which cannot be trained: name the "
            "folder that it was quantised from"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype="auto", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = first_line(error)
        raise ModelError(f"proposer `{folder.ref}` cannot be loaded: {reason}") from None
    # Nothing is dropped at random: the target is another model, not scarce text.
    return model.eval()


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


@contextmanager
def _deterministic() -> Iterator[None]:
    """Operations without a deterministic form warn; none of those is used on a CPU."""
    was = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first CUDA call
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
