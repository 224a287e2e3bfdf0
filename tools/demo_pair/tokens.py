"""The demo pair's tokenizer: byte-level BPE, trained on the training text alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

VOCAB_SIZE = 2048
MAX_POSITIONS = 1024
END_OF_TEXT = "<|endoftext|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ message['content'] + '\\n' }}"
    "{%- else -%}"
    "{{ '# ' + message['role'] + ': ' + message['content'].replace('\\n', '\\n# ') + '\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
"""Messages become comments, which a model of source code has seen; answers are plain text."""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """A fresh tokenizer; the same texts give the same vocabulary."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write it with the template inside `tokenizer_config.json`, where every loader looks."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer as a user of the model folder gets it."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer
