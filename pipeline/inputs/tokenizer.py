"""Converts text to token ids and back with the model's own tokenizer.

A text gets the special tokens that the tokenizer adds by itself (a BOS, if it has one); a chat gets
those that its template writes. Remote code never runs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from specbatch.pipeline.inputs.contract import RowError
from specbatch.pipeline.inputs.templates import ChatTemplate
from specbatch.schemas.errors import ModelError

if TYPE_CHECKING:
    from specbatch.pipeline.inputs.grammars import CompiledGrammar, Grammars

_CHARS_PER_CALL = 1 << 20  # an encoding takes about 100 bytes per token while it is made
_importing = threading.Lock()  # transformers raises ImportError in threads that import it at once


class TextTokenizer:
    """One tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: Any, name: str, extra_eos_ids: Sequence[int] = ()):
        self.name = name
        self.vocab_size: int = len(tokenizer)  # token ids, added tokens included
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None  # compiled for a model's logits
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *extra_eos_ids]))

    @classmethod
    def load(cls, ref: str) -> TextTokenizer:
        """Load from a model folder or hub id. Raises `ModelError` naming it."""
        folder = Path(ref)
        if not folder.is_dir() and ref.startswith(("/", ".", "~")):
            raise ModelError(f"model folder {ref} does not exist")
        try:
            with _importing, _panics_are_errors(ref):
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(
                    ref, config=_light_config(folder), trust_remote_code=False
                )
        except Exception as error:  # libraries raise many kinds
            first = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"model {ref} has no tokenizer that can be loaded ({first or type(error).__name__})"
            ) from error
        return cls(tokenizer, ref, _generation_eos_ids(folder))

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Token ids of each text; memory is bounded by the text, not by the batch.

        Raises `ModelError` for a tokenizer that fails, as `decode` and its like do.
        """
        result: list[list[int]] = []
        for part in portions(texts):
            with _panics_are_errors(self.name):
                if self._backend is not None:
                    made = self._backend.encode_batch_fast(part, add_special_tokens=special)
                    result.extend(item.ids for item in made)
                else:
                    result.extend(self._tokenizer(part, add_special_tokens=special)["input_ids"])
        return result

    def grammar(self, response_format: str, vocab_size: int) -> CompiledGrammar:
        """Of a canonical form that is not empty, for a model with so many logits. Raises
        `ValueError`: what is wrong with it, and where."""
        if self._grammars is None or self._grammars.vocab_size != vocab_size:
            if self._backend is None:
                raise ValueError(f"needs a tokenizer.json, which model {self.name} does not have")
            from specbatch.pipeline.inputs.grammars import Grammars

            text = self._backend.to_str()
            self._grammars = Grammars(text, vocab_size, self.eos_ids, self._shown)
        return self._grammars.of(response_format)

    @property
    def _shown(self) -> dict[str, int]:
        """Added tokens that decoding shows, such as `<think>`, but for those that end a text."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {
            str(token.content): number
            for number, token in added
            if not token.special and number not in self.eos_ids
        }

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        today: float,
    ) -> str:
        """A chat as the model's template writes it, ready for the assistant's answer, on the day
        `today` (seconds since the epoch).

        Raises `RowError` (`no_chat_template`, or what `ChatTemplate.render` says), and
        `ModelError` for a template that no chat can be rendered with.
        """
        if not self.has_chat_template:
            raise RowError(
                "no_chat_template",
                f"the tokenizer of {self.name} has no chat template; use text prompts, or a model "
                "with a template",
            )
        template = self._tool_template if tools else self._template
        return template.render(messages, tools, today=today)

    @cached_property
    def _template(self) -> ChatTemplate:
        return self._template_for(None)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        """Some models have one of its own for chats with tools."""
        several = isinstance(self._tokenizer.chat_template, dict)
        return self._template_for([{}]) if several else self._template

    def _template_for(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        names = self._tokenizer.special_tokens_map
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
            return ChatTemplate(template, names, self.name)
        except ValueError as error:  # several templates, and none is the default
            raise RowError("no_chat_template", str(error).partition("\n")[0]) from None

    def without_special(self, text: str) -> str:
        """The text without the spellings of special tokens, which encoding would take for them."""
        return self._special.sub(" ", text) if self._special is not None else text

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        names = sorted(map(str, self._tokenizer.all_special_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self.decode_batch([ids])[0]

    def shown(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included: what the model reads."""
        return self._texts([ids], skip_special_tokens=False)[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return self._texts(batch, skip_special_tokens=True)

    def _texts(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        rows = [list(ids) for ids in batch]
        with _panics_are_errors(self.name):
            if self._backend is not None:
                texts = self._backend.decode_batch(rows, skip_special_tokens=skip_special_tokens)
                return cast("list[str]", texts)
            decode = self._tokenizer.decode
            return [decode(ids, skip_special_tokens=skip_special_tokens) for ids in rows]


@contextmanager
def _panics_are_errors(name: str) -> Iterator[None]:
    """A panic in Rust is no `Exception`, and would end the thread that meets it."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        first = str(error).strip().partition("\n")[0]
        raise ModelError(f"the tokenizer of model {name} fails: {first}") from error


def portions(texts: Sequence[str]) -> list[list[str]]:
    """Split texts into runs of about `_CHARS_PER_CALL` characters."""
    portions: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size and size + len(text) > _CHARS_PER_CALL:
            portions.append([])
            size = 0
        portions[-1].append(text)
        size += len(text)
    return [portion for portion in portions if portion]


def _light_config(folder: Path) -> Any:
    """What `AutoTokenizer` asks of a model's config, if the folder names its tokenizer's class.

    Without it transformers imports the model's own config, and with it its code: half of the
    processor time of loading a tokenizer. None: transformers finds the class by that config.
    """
    try:
        model = orjson.loads((folder / "config.json").read_bytes())
        tokenizer = orjson.loads((folder / "tokenizer_config.json").read_bytes())
        model_type, named = model["model_type"], tokenizer["tokenizer_class"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not (isinstance(model_type, str) and isinstance(named, str)) or "auto_map" in tokenizer:
        return None
    from transformers import PreTrainedConfig

    asked = {name: model[name] for name in ("tokenizer_class", "model_name") if name in model}
    config = PreTrainedConfig(name_or_path=str(folder), **asked)
    config.model_type = model_type
    return config


def _generation_eos_ids(folder: Path) -> list[int]:
    """The end tokens that a local model's generation_config.json adds to the tokenizer's."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        value = orjson.loads(path.read_bytes()).get("eos_token_id")
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise ModelError(f"{path} is not a JSON object") from error
    return value if isinstance(value, list) else [value] if isinstance(value, int) else []
