"""llama.cpp in process: all sequences in one context, one `llama_decode` a step. Run by `serve.py`.

As llama.cpp's own "batched" example does; its Python class decodes one sequence only. Greedy by
argmax over the logits. With bfloat16 weights the KV cache is llama.cpp's default, f16; with float32
it is f32, and flash attention is off, the faster choice with that cache.

Speculation is that of its server: the next draft tokens of all sequences in one batch, and what
was refused is removed from the cache. Drafts are replayed, or the option `draft` names their model.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

BATCH_TOKENS = 512  # most tokens of one llama_decode
FILE = "model.gguf"
# By level that a run is forced to, how the features begin that a build for it must not have.
ABOVE = {
    "x86-64-v3": ("AVX512", "AMX"),
    "avx512": ("AVX512_BF16", "AMX"),
    "avx512-bf16": ("AMX",),
}
ROOM = 16  # tokens of drafts behind the last wanted one
GGML_F32, GGML_F16 = 0, 1
LOG_ERROR = 4
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


Piece = tuple[int, int, list[int]]  # sequence, position of its first token, tokens


def convert(source: Path, target: Path, dtype: str) -> None:
    """Write a Llama folder as GGUF: matrices in `dtype`, norms in float32; ids have no text."""
    import gguf

    config = json.loads((source / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"only Llama is converted, not {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    target.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(target / FILE, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    types = gguf.GGMLQuantizationType
    matrix = types.BF16 if dtype == "bfloat16" else types.F32
    for name, weight in read_safetensors(source / "model.safetensors").items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if name.endswith("q_proj.weight"):
            weight = interleaved(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = interleaved(weight, kv_heads)
        kind = matrix if weight.ndim == 2 else types.F32
        data = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_safetensors(path: Path) -> dict[str, Any]:
    """The tensors of one file as float32 arrays; needs no torch, which knows bfloat16."""
    blob = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int.from_bytes(blob[:8].tobytes(), "little")
    tensors: dict[str, Any] = {}
    for name, info in json.loads(blob[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        low, high = (start + offset for offset in info["data_offsets"])
        raw = blob[low:high]
        if info["dtype"] == "BF16":  # a float32 without its lower half
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif info["dtype"] == "F32":
            values = raw.view(np.float32)
        else:
            raise ValueError(f"{name} is {info['dtype']}: only BF16 and F32 are converted")
        tensors[name] = values.reshape(info["shape"])
    return tensors


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def interleaved(weight: Any, heads: int) -> Any:
    """Rows of a projection in ggml's order: Hugging Face keeps the two rotary halves apart."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def log_errors(level: int, text: bytes, _data: Any) -> None:
    """Drop what llama.cpp logs below errors: a page per context."""
    if level == LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class Context:
    """One model, and a context for each number of sequences."""

    def __init__(self, lib: Any, model: Path, dtype: str, threads: int) -> None:
        self.lib = lib
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(model / FILE).encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.exact, self.threads = dtype == "float32", threads
        self.size = (0, 0)
        self.context: Any = None
        self.batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def prepare(self, sequences: int, tokens: int) -> None:
        """Make the context for so many sequences of so many tokens."""
        if self.size == (sequences, tokens):
            return
        if self.context:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        params.n_ctx = sequences * -(-tokens // 256) * 256
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = GGML_F32 if self.exact else GGML_F16
        params.flash_attn_type = (
            self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            if self.exact
            else self.lib.LLAMA_FLASH_ATTN_TYPE_AUTO
        )
        params.kv_unified = False  # each sequence attends to its own cells only
        params.no_perf = True
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.size = (sequences, tokens)

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def keep(self, sequence: int, tokens: int) -> None:
        """Forget what a sequence holds behind its first so many tokens."""
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context), sequence, tokens, -1)

    def feed(self, pieces: list[Piece], all_rows: bool = False) -> list[Any]:
        """Decode (sequence, first position, tokens) of each piece, in as few batches as it takes.

        The greedy next token after each piece's last token, or with `all_rows` after every one:
        int64 [1] or [tokens] per piece.
        """
        tokens = np.concatenate([np.asarray(t, dtype=np.int32) for _, _, t in pieces])
        positions = np.concatenate([np.arange(p, p + len(t)) for _, p, t in pieces])
        sequences = np.concatenate([np.full(len(t), s) for s, _, t in pieces])
        ends = np.cumsum([len(t) for _, _, t in pieces])
        wanted = np.zeros(len(tokens), dtype=np.int8)
        wanted[ends - 1] = 1
        if all_rows:
            wanted[:] = 1
        found = []
        for begin in range(0, len(tokens), BATCH_TOKENS):
            part = slice(begin, begin + BATCH_TOKENS)
            self.name_sequences(sequences[part])
            found.append(self.decode(tokens[part], positions[part], wanted[part]))
        rows = np.concatenate(found)
        return np.split(rows, ends[:-1]) if all_rows else np.split(rows, len(pieces))

    def name_sequences(self, sequences: Iterable[int]) -> None:
        """Say which sequence each of the next batch's tokens belongs to."""
        for i, sequence in enumerate(sequences):
            self.batch.seq_id[i][0] = int(sequence)

    def decode(self, tokens: Any, positions: Any, wanted: Any) -> Any:
        """One pass; the greedy next token of each wanted row, [wanted.sum()] int64."""
        size, view = len(tokens), np.ctypeslib.as_array
        self.batch.n_tokens = size
        view(self.batch.token, (size,))[:] = tokens
        view(self.batch.pos, (size,))[:] = positions
        view(self.batch.n_seq_id, (size,))[:] = 1
        view(self.batch.logits, (size,))[:] = wanted
        code = self.lib.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        shape = (int(wanted.sum()), self.vocab_size)
        if not shape[0]:
            return np.empty(0, dtype=np.int64)
        logits = self.lib.llama_get_logits(self.context)
        return view(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), shape).argmax(axis=1)


def features(lib: Any) -> list[str]:
    """What the build was made for, such as AVX2; it does not ask the processor again."""
    words = lib.llama_print_system_info().decode().replace("CPU :", "").split("|")
    return [name.strip() for name, _, on in (w.partition("=") for w in words) if on.strip() == "1"]


def check_build(level: str, built_for: list[str]) -> None:
    """Raises `ValueError` for a build that was made for more than the level."""
    if above := [name for name in built_for if name.startswith(ABOVE.get(level, ("-",)))]:
        raise ValueError(
            f"this build of llama.cpp has {', '.join(above)}, and {level} is forced: let "
            "SPECBATCH_BENCH_LLAMA_PYTHON name a build for that level, as CONTRIBUTING.md says"
        )


class Engine:
    """A verifier, and perhaps a draft model, each with its context."""

    def __init__(self, model: Path, dtype: str, threads: int, options: dict[str, Any]) -> None:
        import llama_cpp.llama_cpp as lib

        options = dict(options)
        draft = options.pop("draft", None)
        if options:
            raise ValueError(f"no such options: {sorted(options)}")
        check_build(os.environ.get("SPECBATCH_NATIVE_ISA", ""), features(lib))
        self.built_for = features(lib)
        self.log = lib.llama_log_callback(log_errors)  # C code holds on to it
        lib.llama_log_set(self.log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.verifier = Context(lib, model, dtype, threads)
        self.drafting = Context(lib, Path(draft), dtype, threads) if draft else None
        self.replayed: list[list[int]] = []
        self.counts: dict[str, int] = {}

    def versions(self) -> dict[str, str]:
        return {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}

    def isa(self) -> str:
        return f"built for {' '.join(self.built_for)}"

    def prepare(self, sequences: int, tokens: int) -> None:
        for context in filter(None, (self.verifier, self.drafting)):
            context.prepare(sequences, tokens + ROOM)

    def learn(
        self, prompts: list[list[int]], known: list[list[int]], drafts: list[list[int]]
    ) -> None:
        """Replay these drafts."""
        del prompts, known
        self.replayed = drafts

    def generate(
        self, prompts: list[list[int]], new_tokens: int, depth: int = 0
    ) -> list[list[int]]:
        whole = [(i, 0, prompt) for i, prompt in enumerate(prompts)]
        self.verifier.clear()
        firsts = [int(first[0]) for first in self.verifier.feed(whole)]
        if not depth:
            return self.plain(prompts, firsts, new_tokens)
        if self.drafting is not None:
            self.drafting.clear()
            self.drafting.feed(whole)
        return self.speculate(prompts, [[first] for first in firsts], new_tokens, depth)

    def plain(
        self, prompts: list[list[int]], firsts: list[int], new_tokens: int
    ) -> list[list[int]]:
        """All sequences' next token in each pass."""
        self.counts = {}
        outputs = np.empty((len(prompts), new_tokens), dtype=np.int64)
        outputs[:, 0] = firsts
        lengths = np.asarray([len(prompt) for prompt in prompts], dtype=np.int32)
        every = np.ones(len(prompts), dtype=np.int8)
        self.verifier.name_sequences(range(len(prompts)))
        for i in range(1, new_tokens):
            at = lengths + i - 1
            outputs[:, i] = self.verifier.decode(outputs[:, i - 1], at, every)
        rows: list[list[int]] = outputs.tolist()
        return rows

    def speculate(
        self, prompts: list[list[int]], outputs: list[list[int]], new_tokens: int, depth: int
    ) -> list[list[int]]:
        """All sequences' last token and its draft in each pass; `outputs` begin with one token."""
        self.counts = {"proposed": 0, "accepted": 0}
        fed = [len(prompt) for prompt in prompts]  # tokens that the draft model holds
        while going := [i for i, output in enumerate(outputs) if len(output) < new_tokens]:
            # The last token is the verifier's own in any case.
            room = {i: min(depth, new_tokens - len(outputs[i]) - 1) for i in going}
            drafts = self.drafts(prompts, outputs, room, fed)
            pieces = [
                (i, len(prompts[i]) + len(outputs[i]) - 1, [outputs[i][-1], *drafts[i]])
                for i in going
            ]
            decided = self.verifier.feed(pieces, all_rows=True)
            for (i, position, tokens), row in zip(pieces, decided, strict=True):
                right = 0
                while right < len(tokens) - 1 and tokens[right + 1] == row[right]:
                    right += 1
                outputs[i] += [int(token) for token in row[: right + 1]]
                held = position + 1 + right
                if right < len(tokens) - 1:
                    self.verifier.keep(i, held)
                if self.drafting is not None and fed[i] > held:
                    fed[i] = held
                    self.drafting.keep(i, held)
                self.counts["proposed"] += len(tokens) - 1
                self.counts["accepted"] += right
        return outputs

    def drafts(
        self,
        prompts: list[list[int]],
        outputs: list[list[int]],
        room: dict[int, int],  # tokens wanted, by sequence
        fed: list[int],
    ) -> dict[int, list[int]]:
        """Replayed, or by the draft model: a pass over all sequences for each token."""
        if self.drafting is None:
            starts = {i: len(outputs[i]) for i in room}
            return {i: self.replayed[i][at : at + room[i]] for i, at in starts.items()}
        drafts: dict[int, list[int]] = {i: [] for i in room}
        for _ in range(max(room.values())):
            pieces = []
            for i in (i for i in room if len(drafts[i]) < room[i]):
                text = outputs[i] + drafts[i]
                pieces.append((i, fed[i], text[fed[i] - len(prompts[i]) :]))
                fed[i] = len(prompts[i]) + len(text)
            for (i, _, _), row in zip(pieces, self.drafting.feed(pieces), strict=True):
                drafts[i].append(int(row[0]))
        return drafts
