"""The peers' entries, plain and with their own speculation, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specbatch.jobs.bench.contenders import DRAFT_MODEL, Completed, Ours, Outputs, Prompts
from specbatch.jobs.bench.entries import FIXED, LOOKUP, NONE, REPLAYED, Entry, learning
from specbatch.jobs.bench.huggingface import DRAFTED
from specbatch.jobs.bench.models import BenchModel, smallest_llama
from specbatch.jobs.bench.peer_client import Peer, PeerError, PeerSpec
from specbatch.jobs.bench.plan import ENGINES, Plan

OPENVINO, VLLM, LLAMA_CPP = "openvino", "vllm", "llama.cpp"
FILES = {OPENVINO: "openvino_genai.py", VLLM: "vllm.py", LLAMA_CPP: "llama_cpp.py"}
HOW = {
    (OPENVINO, NONE): "continuous batching, all prompts at once",
    (OPENVINO, LOOKUP): "its continuous batching with its prompt lookup, all prompts at once",
    (OPENVINO, DRAFT_MODEL): "its continuous batching with the draft model, all prompts at once",
    (OPENVINO, REPLAYED): (
        "its continuous batching with a draft model, all prompts at once; the draft model is one "
        "small layer that finds where it is in this way's own last output, and says what comes "
        "next there, spoilt; it may draft fewer tokens a step than the depth"
    ),
    (VLLM, NONE): "its continuous batching, all prompts at once, all greedy, prefix caching off",
    (VLLM, LOOKUP): "the same with its n-gram proposer",
    (VLLM, DRAFT_MODEL): "the same with the draft model",
    (VLLM, REPLAYED): (
        "the same with a proposer of the kind `custom_class`, which drafts this way's own last "
        f"output, spoilt; made for {max(FIXED)} tokens a step, it drafts as many as the depth"
    ),
    (LLAMA_CPP, NONE): "all prompts in one context, one llama_decode a step",
    (LLAMA_CPP, REPLAYED): (
        "all prompts in one context; each step decodes every sequence's next draft tokens in one "
        "batch and removes those that were refused, as its server does; drafts are this way's own "
        "last output, spoilt"
    ),
    (LLAMA_CPP, DRAFT_MODEL): (
        "the same, with drafts by the draft model in a context of its own, all sequences at once"
    ),
}


class PeerEntries:
    """Leave it as a context manager, which ends the processes."""

    def __init__(
        self,
        plan: Plan,
        environment: Mapping[str, str],
        model: BenchModel,
        draft: Path | None,
        ours: Ours,
        work: Path,
        isa: str | None = None,
    ) -> None:
        self.entries: list[Entry] = []
        self._peers: list[tuple[str, Peer]] = []  # with the engine's name
        self._plan, self._model, self._ours, self._work = plan, model, ours, work
        self._isa = isa
        for engine in plan.engines:
            variable = ENGINES[engine]
            if variable:
                self._add(engine, environment[variable], draft)

    def _add(self, engine: str, python: str, draft: Path | None) -> None:
        plain = self._peer(engine, python, "plain")
        self._entry(engine, "plain", NONE, plain)
        replaying = plain
        if engine in (OPENVINO, VLLM):
            looking = self._peer(engine, python, "lookup", options={"lookup": DRAFTED})
            self._entry(engine, f"lookup {DRAFTED}", LOOKUP, looking)
        if engine == OPENVINO:
            body = smallest_llama(self._work, self._model)
            replaying = self._peer(engine, python, "replay", draft=body)
        elif engine == VLLM:
            replaying = self._peer(engine, python, "replay", options={"replay": max(FIXED)})
        for acceptance in self._plan.acceptances:
            for depth in FIXED:
                replay = partial(self._complete, replaying, depth)
                complete = learning(replay, self._ours, acceptance)
                entry = Entry(engine, f"depth {depth}", complete, REPLAYED, acceptance)
                self.entries.append(replace(entry, process=replaying.spec.name))
        if draft is not None:
            options = {"drafted": DRAFTED} if engine == VLLM else {}
            drafting = self._peer(engine, python, "draft", draft=draft, options=options)
            complete = partial(self._complete, drafting, DRAFTED)
            entry = Entry(engine, f"draft {DRAFTED}", complete, DRAFT_MODEL)
            self.entries.append(replace(entry, process=drafting.spec.name))

    def _peer(self, engine: str, python: str, kind: str, **more: Any) -> Peer:
        spec = PeerSpec(
            f"{engine} {kind}",
            python,
            Path(__file__).parent / "peers" / FILES[engine],
            self._model.folder,
            self._plan.dtype,
            torch.get_num_threads(),
            self._work,
            isa=self._isa,
            **more,
        )
        peer = Peer(spec)
        self._peers.append((engine, peer))
        return peer

    def _entry(self, engine: str, mode: str, drafts: str, peer: Peer) -> None:
        entry = Entry(engine, mode, partial(self._complete, peer, None), drafts)
        self.entries.append(replace(entry, process=peer.spec.name))

    def _complete(
        self,
        peer: Peer,
        depth: int | None,
        prompts: Prompts,
        known: Outputs | None = None,
        drafts: Outputs | None = None,
    ) -> Completed:
        drafting: dict[str, Any] = {} if depth is None else {"depth": depth}
        if drafts is not None:
            drafting |= {"known": known, "drafts": drafts}
        seconds, outputs = peer.complete(prompts, self._plan.new_tokens, **drafting)
        return Completed(seconds, outputs, {**peer.counts, **peer.isa_facts})

    def processes(self) -> dict[str, int]:
        """Process ids by the peer's name."""
        peers = [peer for _, peer in self._peers]
        return {peer.spec.name: peer.process.pid for peer in peers if peer.process is not None}

    @property
    def versions(self) -> dict[str, dict[str, str]]:
        """Versions by engine; empty for an engine that did not start."""
        found: dict[str, dict[str, str]] = {}
        for engine, peer in self._peers:
            found[engine] = found.get(engine) or peer.versions
        return found

    def __enter__(self) -> PeerEntries:
        """Convert and load before anything is timed. One that fails says so in each of its rows."""
        try:
            for _, peer in self._peers:
                try:
                    peer.start()
                except PeerError:
                    continue
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for _, peer in self._peers:
            peer.stop()
