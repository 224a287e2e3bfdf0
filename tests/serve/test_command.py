"""`specbatch serve` and `specbatch api-keys`: what they refuse, and what they print."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.conftest import Cli, cli, folder

from specbatch.jobs.cli.serve import DIR, serving_settings
from specbatch.jobs.serve.keys import caller_of
from specbatch.jobs.serve.models import load_models
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.errors import UsageError
from specbatch.schemas.serving import Scope

__all__ = ["cli", "folder"]  # fixtures
GOOD = "models: {small: {verifier: models/verifier, spec: {sampling: {max_tokens: 5}}}}"
HELD_BACK = """
models:
  a: {verifier: m, spec: {policies: [{use: patterns, patterns: {x: y}, verdict: review}]}}
"""


def test_a_private_tenant_needs_a_key_from_the_start(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "models.yaml").write_text(GOOD)
    monkeypatch.setenv("SPECBATCH_PRIVACY", "hash-only")
    refused = cli("serve", "--models", "models.yaml", "--no-keys")
    assert refused.code == 2
    assert "needs SPECBATCH_ENCRYPTION_KEY" in refused.complaint


def test_a_key_is_made_shown_once_and_revoked(cli: Cli, folder: Path) -> None:
    made = cli(
        "api-keys", "create", "laptop", *["--tenant", "search", "--scope", "read", "--days", "1"]
    )
    assert made.code == 0
    token = made.out.strip()
    store = make_store(serving_settings(folder / DIR))
    caller = caller_of(store, f"Bearer {token}")
    assert (caller.tenant, caller.scopes) == ("search", {Scope.READ})
    (listed,) = cli("api-keys", "list", "--json").json
    assert listed["name"] == "laptop"
    assert token.split("-", 2)[2] not in str(listed)
    shown = cli("api-keys", "list")
    assert "search" in shown.out
    assert "valid" in shown.out
    assert cli("api-keys", "revoke", listed["id"]).code == 0
    assert "revoked" in cli("api-keys").out
    store.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("create", "takes a name"),
        ("list x", "takes no name"),
        ("revoke", "takes a key's id"),
        ("revoke abc", "there is no store yet"),
        ("revoke abc --days 3", "are for `specbatch api-keys create`"),
        ("create x --tenant a/b", "letters, digits"),
        (f"create x --tenant {'a' * 101}", "must have 1 to 100 characters"),
        ("create x --days 0", "from a minute"),
        ("create x --days nan", "from a minute"),
        ("create x --days inf", "from a minute"),
        ("create x --days 1e9", "to 3650"),
    ],
)
def test_what_a_key_cannot_be(cli: Cli, arguments: str, said: str) -> None:
    refused = cli("api-keys", *arguments.split())
    assert refused.code == 2
    assert said in refused.complaint


def test_who_looks_at_keys_makes_no_store(cli: Cli, folder: Path) -> None:
    for arguments in (["list"], ["revoke", "abc"], ["create", " "]):
        assert cli("api-keys", *arguments).code == 2
        assert not (folder / DIR).exists()
    make_store(serving_settings(folder / DIR)).close()
    assert "no keys" in cli("api-keys").err
    assert cli("api-keys", "--json").json == []
    assert "there is no key abc" in cli("api-keys", "revoke", "abc").complaint


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (GOOD, "--no-keys --host 0.0.0.0", "loopback"),
        (GOOD, "--no-keys --host example.org", "loopback"),
        (GOOD, "", "there is no valid API key yet"),
        ("models: {a: {verifier: ./nowhere}}", "--no-keys", "model `a`: "),
        ("models: {a: {verifier: m, proposer: {kind: suffix}}}", "--no-keys", "model `a`: "),
        (HELD_BACK, "", "may hold completions back for review"),
        ("models: {}", "", "one key, `models`"),
        ("models: {a: {}}", "", "needs `verifier`"),
        ("models: {../a: {verifier: m}}\nelse: 1", "", "one key, `models`"),
        ("models: {a: {verifer: m}}", "", "has `verifer`; it may have"),
        ("models: {a: {verifier: m, path: x}}", "", "it may have verifier, proposer and spec"),
        ("models: {a: {verifier: m, spec: {output: x}}}", "", "leave `output` out"),
        ("models: {a: {verifier: m, spec: {sampling: {top_p: 7}}}}", "", "top_p"),
    ],
)
def test_what_cannot_be_served(
    cli: Cli, folder: Path, text: str, arguments: str, said: str
) -> None:
    (folder / "models.yaml").write_text(text)
    refused = cli("serve", "--models", "models.yaml", *arguments.split())
    assert refused.code == 2
    assert said in refused.complaint


def test_a_fleet_s_broker_must_be_there(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "models.yaml").write_text(GOOD)
    monkeypatch.setenv("SPECBATCH_BROKER_URL", "redis://127.0.0.1:9/0")
    refused = cli("serve", "--models", "models.yaml", "--no-keys")
    assert "cannot be reached" in refused.complaint


def test_a_model_has_its_own_defaults(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD)
    (tmp_path / "models" / "verifier").mkdir(parents=True)
    model = load_models(tmp_path / "m.yaml")["small"]
    spec = model.spec(tmp_path / "in", "/v1/completions", tmp_path / "out", "search", 3600)
    assert spec.verifier == str(tmp_path / "models" / "verifier")
    assert (spec.sampling.max_tokens, spec.tenant, spec.deadline_sec) == (5, "search", 3600)
    assert spec.input.format == "openai-completions"
    with pytest.raises(UsageError, match="does not exist"):
        load_models(tmp_path / "none.yaml")
