"""OpenVINO GenAI's continuous batching on the CPU. Run by `serve.py`, in OpenVINO's interpreter.

Weights, arithmetic and KV cache are all of the dtype asked for; nothing is quantised. Options:
`lookup`, the tokens drafted per step by prompt lookup (none without it); `draft`, the folder of a
converted draft model. To replay drafts, what that model computes is replaced by looking them up.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from pathlib import Path
from typing import Any

PRECISION = {"bfloat16": "bf16", "float32": "f32"}
CACHE_GIB = 2
XML = "openvino_model.xml"


def convert(source: Path, target: Path, dtype: str) -> None:
    """Export a Hugging Face folder as OpenVINO's IR, its weights in `dtype`."""
    import torch
    from optimum.exporters.openvino import main_export
    from transformers import AutoModelForCausalLM

    # The exporter keeps the weights' dtype, so the weights get the right one first.
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
        model.save_pretrained(folder)
        main_export(folder, target, task="text-generation-with-past", stateful=True)


class Engine:
    """A pipeline; the batch size is whatever `generate` is given."""

    def __init__(self, model: Path, dtype: str, threads: int, options: dict[str, Any]) -> None:
        self.lookup = int(options.get("lookup", 0))
        self.model = model
        self.draft = Path(options["draft"]) if "draft" in options else None
        self.properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": PRECISION[dtype],
            "KV_CACHE_PRECISION": PRECISION[dtype],
        }
        if self.draft is not None:
            for folder in (model, self.draft):
                add_tokenizer(folder)
        self.learnt: Any = None
        self.counts: dict[str, int] = {}
        self.pipeline = self.made(self.draft)

    def made(self, draft: Path | None) -> Any:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = 256
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        # The same prompts are completed again and again: each time in full.
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = CACHE_GIB
        properties = dict(self.properties)
        if self.lookup:
            properties["prompt_lookup"] = True
        if draft is not None:
            properties["draft_model"] = genai.draft_model(str(draft), "CPU", **self.properties)
        return genai.ContinuousBatchingPipeline(str(self.model), scheduler, "CPU", properties)

    def versions(self) -> dict[str, str]:
        names = ("openvino", "openvino-genai")
        return {name: importlib.metadata.version(name) for name in names}

    def prepare(self, sequences: int, tokens: int) -> None:
        """The pipeline takes any batch within its cache."""

    def learn(
        self, prompts: list[list[int]], known: list[list[int]], drafts: list[list[int]]
    ) -> bool:
        """Let the draft model replay these. True: the pipeline is another one."""
        assert self.draft is not None
        if self.learnt == (prompts, known, drafts):
            return False
        self.learnt = (prompts, known, drafts)
        self.pipeline = None  # its memory goes first
        with tempfile.TemporaryDirectory() as folder:
            write_replaying(self.draft, Path(folder), prompts, known, drafts)
            self.pipeline = self.made(Path(folder))
        return True

    def generate(
        self, prompts: list[list[int]], new_tokens: int, depth: int = 0
    ) -> list[list[int]]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        if self.lookup:
            config.num_assistant_tokens = self.lookup
            config.max_ngram_size = 3
        elif depth:
            config.num_assistant_tokens = depth
        ids = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self.pipeline.generate(ids, [config] * len(prompts))
        self.count(results[0])
        return [list(result.m_generation_ids[0]) for result in results]

    def count(self, result: Any) -> None:
        """Counts for the whole batch. OpenVINO does not report what it proposed."""
        metrics = getattr(result, "extended_perf_metrics", None)
        if metrics is not None and hasattr(metrics, "get_num_accepted_tokens"):
            self.counts = {"accepted": metrics.get_num_accepted_tokens()}


def add_tokenizer(folder: Path) -> None:
    """The same one for every model: the pipeline compares those of a pair, we only send ids."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
    if all((folder / name).is_file() for name in names):
        return
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0])
    for name, made in zip(names, convert_tokenizer(wrapped, with_detokenizer=True), strict=True):
        ov.save_model(made, folder / name)


def write_replaying(
    source: Path,
    target: Path,
    prompts: list[list[int]],
    known: list[list[int]],
    drafts: list[list[int]],
) -> None:
    """Write the model of `source`, but with the logits of the drafts.

    What its head would be fed tells texts apart. At each position the known text is found that is
    nearest to the sequence's, and the token that is drafted there gets the highest logit.
    """
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    shutil.copytree(source, target, dirs_exist_ok=True)
    model = ov.Core().read_model(source / XML)
    head = find_head(model)
    vocab_size, width = head.input_value(1).get_shape()
    first = min(map(len, prompts)) - 1  # position of the first token that is followed by a draft
    positions = max(map(len, prompts)) - 1 - first + max(map(len, drafts))
    texts = np.zeros((positions, len(prompts), width), dtype=np.float32)
    nexts = np.zeros((positions, len(prompts)), dtype=np.int32)
    seen = states(source, [p + k[:-1] for p, k in zip(prompts, known, strict=True)])
    for i, (prompt, draft, state) in enumerate(zip(prompts, drafts, seen, strict=True)):
        begin = len(prompt) - 1
        row = begin - first
        nexts[row : row + len(draft), i] = draft
        texts[row : row + len(draft), i] = state[begin : begin + len(draft)]

    def number(value: int) -> Any:
        return ops.constant(np.int64(value))

    state, position = head.input_value(0), model.input("position_ids").get_node()
    at = ops.clamp(ops.subtract(position, number(first)), 0, positions - 1)
    likeness = ops.matmul(
        ops.gather(ops.constant(texts), at, number(0)),  # [..., texts, width]
        ops.unsqueeze(state, number(-1)),
        transpose_a=False,
        transpose_b=False,
    )
    nearest = ops.topk(likeness, number(1), -2, "max", "none", index_element_type="i64").output(1)
    text = ops.squeeze(nearest, ops.constant(np.array([-2, -1])))
    place = ops.add(ops.multiply(at, number(len(prompts))), text)
    token = ops.gather(ops.constant(nexts.reshape(-1)), place, number(0))
    # Rows of signs are nearest to themselves, in bfloat16 too.
    signs = np.random.default_rng(0).choice(
        np.array([-1, 1], dtype=np.float32), (vocab_size, width)
    )
    codes = ops.gather(ops.constant(signs), token, number(0))
    head.input(0).replace_source_output(codes.output(0))
    head.input(1).replace_source_output(ops.constant(signs).output(0))
    model.validate_nodes_and_infer_types()
    ov.save_model(model, target / XML, compress_to_fp16=False)


def find_head(model: Any) -> Any:
    """The product that makes the logits."""
    head = model.get_results()[0].input_value(0).get_node()
    while head.get_type_name() != "MatMul":  # a conversion to float32 may follow it
        head = head.input_value(0).get_node()
    return head


def states(source: Path, texts: list[list[int]]) -> list[Any]:
    """What the head is fed after each token: float32 [tokens, width] per text."""
    import numpy as np
    import openvino as ov

    core = ov.Core()
    model = core.read_model(source / XML)
    model.add_outputs(find_head(model).input_value(0))
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    found = []
    for text in texts:
        request.reset_state()
        inputs = {
            "input_ids": np.array([text], dtype=np.int64),
            "attention_mask": np.ones((1, len(text)), dtype=np.int64),
            "position_ids": np.arange(len(text), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        found.append(np.array(request.infer(inputs)[1][0]))
    return found
