"""Which peers run: those whose interpreter an environment variable names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from specbatch.benchmarks.contenders import NEW_TOKENS, Contender
from specbatch.jobs.bench.contenders import Completed, Prompts
from specbatch.jobs.bench.models import BenchModel
from specbatch.jobs.bench.peer_client import SERVE, Peer, PeerError, PeerSpec


class Known(NamedTuple):
    """A peer engine with an engine file."""

    engine: str  # the file's name, and what the results call the engine
    variable: str
    modes: Mapping[str, Mapping[str, Any]]  # contender: options


KNOWN = (
    Known(
        "openvino_genai",
        "SPECBATCH_BENCH_OPENVINO_PYTHON",
        {"openvino": {}, "openvino lookup": {"lookup": 4}},
    ),
    Known("vllm", "SPECBATCH_BENCH_VLLM_PYTHON", {"vllm": {}, "vllm lookup": {"lookup": 4}}),
    Known("llama_cpp", "SPECBATCH_BENCH_LLAMA_PYTHON", {"llama.cpp": {}}),
)


class Roster:
    """The peers of one run. Leave it as a context manager, which ends their processes."""

    def __init__(
        self,
        environment: Mapping[str, str],
        model: BenchModel,
        dtype: str,
        threads: int,
        work: Path,
        skipped: Iterable[str] = (),
        isa: str | None = None,
    ) -> None:
        self.not_installed = [k.engine for k in KNOWN if not environment.get(k.variable)]
        self.contenders: list[Contender] = []
        self._peers: dict[str, list[Peer]] = {}
        for known in KNOWN:
            for name, options in known.modes.items():
                if known.engine in self.not_installed or name in skipped:
                    continue
                engine = SERVE.parent / f"{known.engine}.py"
                python = environment[known.variable]
                spec = PeerSpec(name, python, engine, model.folder, dtype, threads, work, options)
                peer = Peer(replace(spec, isa=isa))
                self._peers.setdefault(known.engine, []).append(peer)
                self.contenders.append(Contender(name, known.engine, partial(_complete, peer)))

    def start(self) -> None:
        """Convert and load before anything is timed. A failed peer reports it in each row."""
        for peers in self._peers.values():
            for peer in peers:
                try:
                    peer.start()
                except PeerError as error:
                    print(f"{peer.spec.name}: {error}", flush=True)

    def processes(self) -> dict[str, int]:
        """Process ids by contender."""
        every = [peer for peers in self._peers.values() for peer in peers]
        return {peer.spec.name: peer.process.pid for peer in every if peer.process is not None}

    @property
    def versions(self) -> dict[str, dict[str, str]]:
        """Versions by engine; empty for an engine that did not start."""
        return {
            engine: next((peer.versions for peer in peers if peer.versions), {})
            for engine, peers in self._peers.items()
        }

    def __enter__(self) -> Roster:
        return self

    def __exit__(self, *_: object) -> None:
        for peers in self._peers.values():
            for peer in peers:
                peer.stop()


def _complete(peer: Peer, prompts: Prompts) -> Completed:
    seconds, outputs = peer.complete(prompts, NEW_TOKENS)
    return Completed(seconds, outputs, {"versions": peer.versions, **peer.isa_facts})
