"""The list of sentences that users may meet."""

from __future__ import annotations

from pathlib import Path

from specbatch.tools.messages import sentences

SOURCE = """
raise UsageError(f"{path} is no folder" + " at all")
log.warning("job %s: %s", job, "x")
say("no jobs" if empty else f"{count} jobs")
raise ValueError("word")
"""


def test_every_kind_of_sentence_is_listed_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(SOURCE)
    assert sorted(sentences(file)) == [
        (2, "UsageError", "{path} is no folder at all"),
        (3, "warning", "job %s: %s"),
        (4, "say", "<no jobs | {count} jobs>"),
    ]
