"""The client of one peer's process, which converts the model once and completes prompts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any

from specbatch.jobs.bench.isa import Seen, denying, facts, limits

SERVE = Path(__file__).parent / "peers" / "serve.py"
LIMIT_SEC = 1800.0  # for one answer, a conversion included
LOG_LINES = 3  # of a failed process, for the reason


class PeerError(Exception):
    """A peer could not be started, or did not complete the prompts; the message says why."""


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """Which interpreter runs which engine file, on which model."""

    name: str
    python: str
    engine: Path  # see serve.py for what it defines
    model: Path  # a Hugging Face folder
    dtype: str
    threads: int
    work: Path  # converted models and logs are kept here
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: Path | None = None  # a Hugging Face folder, converted likewise: the option `draft`
    isa: str | None = None  # the level that it is held to


class Peer:
    """A process that starts at its first use, and again if it died.

    Between two uses it is stopped (SIGSTOP), so that it never runs while others are timed. A peer
    that could not be started is not tried again: every later use raises the same PeerError.
    """

    def __init__(self, spec: PeerSpec, limit_sec: float = LIMIT_SEC) -> None:
        self.spec = spec
        self.limit_sec = limit_sec
        self.versions: dict[str, str] = {}
        self.counts: dict[str, int] = {}  # the engine's draft counts for the last prompts
        self.built_for = ""  # what the engine says of its instruction set
        self.seen = Seen()  # of all prompts so far
        self.refused = ""
        self.process: subprocess.Popen[str] | None = None
        self.log = spec.work / f"{spec.name.replace(' ', '-')}.log"

    def complete(
        self, prompts: list[list[int]], new_tokens: int, **drafting: Any
    ) -> tuple[float, list[list[int]]]:
        """Seconds that the peer itself measured, and `new_tokens` ids for each prompt.

        `drafting` may hold `depth`, `known` and `drafts`, as serve.py has them. Raises PeerError,
        also for outputs of another number or length.
        """
        self.start()
        answer = self._ask({"prompts": prompts, "new_tokens": new_tokens, **drafting})
        outputs = answer["outputs"]
        self.counts = answer.get("counts", {})
        self.seen = self.seen.with_later(Seen(**answer["seen"]))
        if [len(row) for row in outputs] != [new_tokens] * len(prompts):
            raise PeerError(f"not {new_tokens} tokens for each of {len(prompts)} prompts")
        return float(answer["seconds"]), outputs

    def start(self) -> None:
        """Convert the model unless that was done, and load it. Raises PeerError."""
        if self.refused:
            raise PeerError(self.refused)
        if self.process is not None and self.process.poll() is None:
            return
        try:
            spec = self.spec
            model, options = self._converted(spec.model), dict(spec.options)
            if spec.draft is not None:
                options["draft"] = str(self._converted(spec.draft))
            self.process = self._launch()
            loading = {"model": str(model), "dtype": spec.dtype, "threads": spec.threads}
            answer = self._ask(loading | {"options": options})
            self.versions, self.built_for = answer["versions"], answer["isa"]
        except PeerError as error:
            self.refused = str(error)
            self.stop()
            raise

    @property
    def isa_facts(self) -> dict[str, Any]:
        """The level, and whether it was kept, for rows of results."""
        return facts(self.spec.isa, self.seen, self.built_for)

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _converted(self, source: Path) -> Path:
        """A model in the peer's format, in the work folder under the checksum of its source."""
        spec = self.spec
        target = spec.work / f"{spec.engine.stem}-{spec.dtype}-{checksum(source)}"
        if target.exists():
            return target
        # In a process of its own, so that its imports and memory do not affect the runs.
        unfinished = Path(tempfile.mkdtemp(dir=_made(spec.work)))
        try:
            self.process = self._launch()
            asked = {"convert": str(source), "into": str(unfinished), "dtype": spec.dtype}
            self._ask(asked)
            unfinished.replace(target)
        finally:
            self.stop()
            shutil.rmtree(unfinished, ignore_errors=True)
        return target

    def _launch(self) -> subprocess.Popen[str]:
        command = [self.spec.python, "-I", str(SERVE), str(self.spec.engine)]
        _made(self.spec.work)
        with self.log.open("w") as log:
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **environment_of(self.spec)},
                )
            except OSError as error:
                raise PeerError(
                    f"cannot run {Path(self.spec.python).name}: {error.strerror}"
                ) from error

    def _ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Send one line and wait for its answer, `limit_sec` at most."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = Timer(self.limit_sec, process.kill)
        timer.start()
        process.send_signal(signal.SIGCONT)
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        try:
            code = 0 if answer else process.wait()
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if not answer:
            self.stop()
            late_words = f"no answer within {self.limit_sec:g} s"
            raise PeerError(late_words if late else self._last_words(code))
        process.send_signal(signal.SIGSTOP)
        reply: dict[str, Any] = json.loads(answer)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _last_words(self, code: int) -> str:
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return " / ".join([f"its process ended with {how}", *(line.strip() for line in lines)])


def environment_of(spec: PeerSpec) -> dict[str, str]:
    """Variables of a peer's process beside the run's own."""
    held = limits(spec.isa) | denying(spec.isa, spec.work)
    # Preload Intel's OpenMP if the environment has it, as vLLM's does.
    openmp = Path(spec.python).parent.parent / "lib" / "libiomp5.so"
    preloaded = [*filter(None, [held.get("LD_PRELOAD")]), *([str(openmp)] * openmp.exists())]
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(spec.threads),
        **held,
        **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
    }


def checksum(folder: Path) -> str:
    """Names a model by its config and weights."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
