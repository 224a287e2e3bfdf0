"""Pages of the job spec and of the settings, from their pydantic models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from specbatch.tools.site.json_types import Schema, Words, default_of
from specbatch.tools.site.markdown import code, page, plain, section, table

_SPEC_INTRO = """
A job spec is a YAML file for `submit-job`; flags win over it, and paths in it are relative to it.
Unknown fields are refused. What a field is refused for is said in one sentence that names it.
"""

_ABOUT_JOB = "Whose it is, which models serve it, and what it may take."

_SETTINGS_INTRO = """
Settings belong to an installation, not to a job. Each is an environment variable, or a key in
lower case without the prefix in the TOML file that `SPECBATCH_SETTINGS` names; the environment
wins. `specbatch settings` prints those in force, with passwords masked.
"""


def spec_page() -> str:
    """Every field of a spec, section by section, and an example with all of them."""
    whole = JobSpec.model_json_schema()
    words = Words(whole)
    top = _fields(words, whole, "", lambda schema: not _is_section(words, schema))
    parts = [section("The job", _ABOUT_JOB, table(_COLUMNS, top))]
    for name, schema in whole["properties"].items():
        if _is_section(words, schema):
            inner = words.resolved(schema)
            rows = _fields(words, inner, f"{name}.", lambda _: True)
            parts.append(section(code(name), _about(inner), table(_COLUMNS, rows), anchor=name))
    return page("Job spec", _SPEC_INTRO, *parts)


def settings_page() -> str:
    """Every setting."""
    whole = Settings.model_json_schema()
    words = Words(whole)
    rows = [
        (
            code(f"SPECBATCH_{name.upper()}"),
            words.takes(schema),
            default_of(schema, name in whole.get("required", ())),
            plain(schema.get("description", "")),
        )
        for name, schema in whole["properties"].items()
    ]
    return page("Settings", _SETTINGS_INTRO, table(("setting", *_COLUMNS[1:]), rows))


_COLUMNS = ("field", "takes", "default", "meaning")


def _fields(words: Words, schema: Schema, prefix: str, wanted: Any) -> Iterator[tuple[str, ...]]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        if not wanted(field):
            continue
        if _is_section(words, field):
            yield from _fields(words, words.resolved(field), f"{prefix}{name}.", wanted)
        else:
            yield (
                code(prefix + name),
                words.takes(field),
                default_of(field, name in required),
                plain(field.get("description", "")),
            )


def _about(schema: Schema) -> str:
    return plain(schema.get("description", ""))


def _is_section(words: Words, schema: Schema) -> bool:
    return "properties" in words.resolved(schema)
