"""Presidio beside our own patterns: names, places and what else its recognisers know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from specbatch.pipeline.privacy.patterns import Place
from specbatch.schemas.errors import MissingExtraError

MIN_SCORE = 0.4


def presidio_finder(language: str) -> Callable[[str], Iterator[tuple[str, Place]]]:
    """(kind, place) of what an analyser for the language finds. Loads its models, once.

    Raises `MissingExtraError`.
    """
    try:
        from presidio_analyzer import AnalyzerEngine
    except ImportError:
        raise MissingExtraError(
            "SPECBATCH_PRESIDIO needs Presidio and a model of spaCy: pip install "
            "'specbatch[privacy]' && python -m spacy download en_core_web_lg"
        ) from None
    analyser: Any = AnalyzerEngine()

    def found(text: str) -> Iterator[tuple[str, Place]]:
        for result in analyser.analyze(text=text, language=language, score_threshold=MIN_SCORE):
            yield result.entity_type, (result.start, result.end)

    return found
