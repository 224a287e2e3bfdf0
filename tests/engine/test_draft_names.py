"""What draft models are called, and what a tag may be pinned to."""

from __future__ import annotations

import pytest

from specbatch.pipeline.engines.models.draft_names import draft_names, kind_of, pins_of
from specbatch.schemas.errors import UsageError

MODELS = ("/models/general", "org/german", "/models/code:v2/")


def test_the_first_is_the_draft_model_and_others_add_their_folders_name() -> None:
    names = draft_names(MODELS)
    assert names == ["draft-model", "draft-model@german", "draft-model@code-v2"]
    assert {kind_of(name) for name in names} == {"draft-model"}
    assert draft_names(()) == []


def test_models_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two draft models are called `draft`"):
        draft_names(["/a/draft", "/b/other", "/c/draft"])


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("general", "draft-model"),
        ("draft-model", "draft-model"),
        ("draft-model@general", "draft-model"),
        ("german", "draft-model@german"),
        ("draft-model@german", "draft-model@german"),
        ("none", "none"),
    ],
)
def test_a_tag_is_pinned_by_folder_or_by_the_whole_name(wanted: str, name: str) -> None:
    assert pins_of([("de", wanted), ("en", "none")], MODELS) == {"de": name, "en": "none"}


def test_an_unknown_model_is_refused_by_naming_those_there_are() -> None:
    with pytest.raises(UsageError) as refused:
        pins_of([("en", "general"), ("fr", "french")], MODELS)
    assert "sends tag `fr` to `french`" in str(refused.value)
    assert "`general`, `german`, `code-v2`" in str(refused.value)
    with pytest.raises(UsageError, match="has no draft model"):
        pins_of([("fr", "french")], ())
