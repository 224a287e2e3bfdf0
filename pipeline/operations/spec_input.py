"""Builds a job spec from a file and from flags. Flags win."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specbatch.pipeline.inputs.folders import odd_kind
from specbatch.schemas.errors import SpecError
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.schemas.uris import absolute, model_ref


def build_spec(file: Path | None, flags: Mapping[str, Any], cwd: Path | None = None) -> JobSpec:
    """The resolved spec. `flags` maps dotted field names to values; None means "not given".

    Paths in the file are relative to its folder, paths in flags to the working folder.
    """
    cwd = cwd or Path.cwd()
    values = _at(read_spec_file(file), file.absolute().parent) if file else {}
    given: dict[str, Any] = {}
    for name, value in flags.items():
        if value is not None:
            _put(given, name, value)
    _merge(values, _at(given, cwd))
    if not values.keys() - JobSpec.model_fields.keys():  # else one may be what is missing
        _ask_for_what_is_missing(values)
    named = [name for name, value in flags.items() if value is not None]
    return load_spec(values, named).resolved(cwd)


def spec_with(
    values: Mapping[str, Any] | Path | None, fields: Mapping[str, Any], cwd: Path | None = None
) -> JobSpec:
    """The resolved spec of a mapping, of a file or of nothing, with these dotted fields in it.

    Paths in a file are relative to its folder, others to the working folder. Raises `SpecError`
    in the words of a spec, not of flags.
    """
    cwd = cwd or Path.cwd()
    base = cwd
    if isinstance(values, Path):
        base = values.absolute().parent
        values = read_spec_file(values)
    whole = _at(_depth_as_word(dict(values or {})), base)
    given: dict[str, Any] = {}
    for name, value in fields.items():
        _put(given, name, value)
    _merge(whole, _at(given, cwd))
    return load_spec(whole).resolved(cwd)


def resolved_spec(values: Mapping[str, Any], base: Path | None = None) -> JobSpec:
    """The spec of a mapping. Its paths are relative to `base`, or to the working folder.

    Raises `SpecError`.
    """
    base = (base or Path.cwd()).absolute()
    return load_spec(_depth_as_word(_at(dict(values), base))).resolved(base)


def read_spec_file(
    file: Path, what: str = "spec file", needed: str = "input, output and verifier"
) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) file. Raises `SpecError` with one sentence."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{what} {file} {odd_kind(file) or 'does not exist'}") from None
    except IsADirectoryError:
        raise SpecError(f"{what} {file} is a folder: name a file") from None
    except UnicodeDecodeError:
        raise SpecError(f"{what} {file} is not a text file in UTF-8") from None
    except OSError as error:
        raise SpecError(f"{what} {file} cannot be read: {_in_words(error)}") from None
    return parse_spec(text, f"{what} {file}", needed)


def _in_words(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def parse_spec(text: str, whose: str, needed: str = "input, output and verifier") -> dict[str, Any]:
    """The mapping in a text. Raises `SpecError` with one sentence that names the text's source."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that is none
        raise SpecError(f"{whose} is not valid YAML: {_where(error)}") from None
    if not isinstance(values, dict):
        raise SpecError(f"{whose} must hold a mapping with {needed}")
    return _depth_as_word(values)


def _depth_as_word(values: dict[str, Any]) -> dict[str, Any]:
    """Restores the word `off`, which YAML reads as false."""
    speculation = values.get("speculation")
    if isinstance(speculation, dict) and speculation.get("depth") is False:
        values = {**values, "speculation": {**speculation, "depth": "off"}}
    return values


def _at(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """The same values with absolute paths. The later check reports values of a wrong type."""
    values = dict(values)
    for part in ("input", "output"):
        section = values.get(part)
        if isinstance(section, dict):
            values[part] = _places_at(section, base)
    for name in ("verifier", "proposer"):
        if _is_text(values.get(name)) and values[name] != "none":
            values[name] = model_ref(values[name], base)
    own = values.get("proposer")
    if isinstance(own, dict) and _is_text(own.get("model")):
        values["proposer"] = {**own, "model": model_ref(own["model"], base)}
    return values


def _places_at(section: dict[str, Any], base: Path) -> dict[str, Any]:
    """An input or an output with absolute paths, of its table too."""
    section = dict(section)
    if _is_text(section.get("uri")):
        section["uri"] = absolute(section["uri"], base)
    table = section.get("table")
    if _is_text(table):
        section["table"] = {"uri": absolute(str(table), base)}
    elif isinstance(table, dict) and _is_text(table.get("uri")):
        section["table"] = {**table, "uri": absolute(table["uri"], base)}
    return section


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *parts, last = name.split(".")
    for part in parts:
        values = values.setdefault(part, {})
    values[last] = value


def _merge(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        is_section = name != "proposer"  # whose fields belong together
        if is_section and isinstance(value, dict) and isinstance(values.get(name), dict):
            values[name] = {**values[name]}
            _merge(values[name], value)
        else:
            values[name] = value


_FLAG_OF = {"input": "--input", "output": "--output", "verifier": "--verifier"}


def _ask_for_what_is_missing(values: Mapping[str, Any]) -> None:
    missing = [name for name in _FLAG_OF if not values.get(name)]
    if missing:
        flags = " ".join(_FLAG_OF[name] for name in missing)
        raise SpecError(
            f"job spec: {', '.join(missing)} not given; add {flags}, or name a spec file that has "
            f"{'it' if len(missing) == 1 else 'them'}"
        )


def _where(error: yaml.YAMLError | ValueError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else str(problem)
