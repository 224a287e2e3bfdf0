"""Personal data in a template, in a system prompt and in columns is as private as in a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbatch.jobs.chaos import stand_in_model
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.privacy import NOT_KEPT, PrivacyMode
from specbatch.schemas.records import JobState
from specbatch.schemas.spec import JobSpec, load_spec
from support.databases import migrated
from support.planted import PLANTED, Site, masked_logs, planted_in

MAIL, PHONE, STAFF = PLANTED["EMAIL"], PLANTED["PHONE"], PLANTED["STAFF"]
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    masked_logs(monkeypatch)
    kind: Any = stand_in_model._Tokenizer
    monkeypatch.setattr(kind, "chat_template", CHAT)
    monkeypatch.setattr(kind, "special_tokens_map", {}, raising=False)
    monkeypatch.setattr(kind, "get_chat_template", lambda *_, **__: CHAT, raising=False)
    return monkeypatch


def spec_of(site: Site, **inputs: Any) -> JobSpec:
    rows = [{"name": MAIL, "call": PHONE, "by": i} for i in range(3)]
    rows += [{"name": "nobody", "call": "never", "by": 3}, {"name": MAIL, "call": None, "by": 4}]
    path = site.folder / "table.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    values = site.spec("out", breaks=False).model_dump(mode="json")
    values["input"] = {"uri": str(path), **inputs}
    values["sampling"] |= {"n": 1, "stop": []}
    return load_spec(values)


SIMPLE = {"template": f"Write to {{name}} and {STAFF}, call {{call}}.", "system": f"Be {MAIL}."}
JINJA = {  # the last row's error quotes its name
    "template": f"Write to {{{{ name }}}} and {STAFF}, call "
    "{{ {}[name] if call is none else call }}.",
    "template_kind": "jinja",
}


@pytest.mark.parametrize("mode", [PrivacyMode.REDACTED, PrivacyMode.HASH_ONLY])
@pytest.mark.parametrize("inputs", [SIMPLE, JINJA], ids=["simple", "jinja"])
def test_what_a_template_says_is_kept_as_its_tenant_wants(
    mode: PrivacyMode, inputs: dict[str, str], tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path / "site", migrated(tmp_path / "s.db"), mode, patch)
    job = site.drain(site.client.submit(spec_of(site, **inputs))[0].job_id)
    assert job.state is JobState.PARTIAL
    left = [*site.tables(), *((n, d.decode("latin-1")) for n, d in site.workspace().items())]
    assert [(place, planted_in(text)) for place, text in left if planted_in(text)] == []
    (asked,) = [text for place, text in left if place == "jobs.spec"]
    assert ("template=Write to " in asked) is (mode is PrivacyMode.REDACTED)
    assert ("[STAFF], call " in asked) is (mode is PrivacyMode.REDACTED)
    shown = f"{Privacy.of_settings(site.settings).templates(job)}"
    assert not planted_in(shown)
    assert ("[STAFF], call " in shown) is (mode is PrivacyMode.REDACTED)
    (bad,) = site.store.rejected(job.job_id)
    assert bad.code == ("null_column" if inputs is SIMPLE else "template_failed")
    site.close()


def test_a_rendered_prompt_is_redacted_where_it_is_said_again(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    """The engine echoes its prompts: the store marks them, the output has them whole."""
    site = Site(tmp_path / "site", migrated(tmp_path / "s.db"), PrivacyMode.REDACTED, patch)
    job = site.drain(site.client.submit(spec_of(site, **SIMPLE))[0].job_id)
    kept = {record.row_index: record for record in site.store.completions(job.job_id)}
    begin = "system: Be [EMAIL].\nuser: Write to "
    assert kept[0].text == f"{begin}[EMAIL] and [STAFF], call [PHONE].\n"
    assert kept[3].text == f"{begin}nobody and [STAFF], call never.\n"
    assert kept[0].token_ids.count(NOT_KEPT) == 2 * len(MAIL) + len(STAFF) + len(PHONE)
    rows = read_output(str(site.folder / "out")).to_pylist()
    whole = f"system: Be {MAIL}.\nuser: Write to {MAIL} and {STAFF}, call {PHONE}.\n"
    assert rows[0]["text"] == whole
    assert rows[4]["error"].startswith("null_column: column `call` is null")
    site.close()
