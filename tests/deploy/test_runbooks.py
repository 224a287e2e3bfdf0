"""Runbooks: every command, query and name in them exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from deploy.deployed import (
    DEPLOY,
    RUNBOOKS,
    SETTINGS,
    check_command,
    check_promql,
    commands_in,
    documents,
    fenced,
    problems_of,
)

from specbatch.pipeline.ledger.sql import migrate
from specbatch.schemas.sql_roles import OPERATOR
from support.servers import PrivatePostgres

pytestmark = pytest.mark.integration  # Prometheus' tools

OTHERS = [RUNBOOKS / "README.md", RUNBOOKS / "postmortem.md"]
PAGES = sorted(set(RUNBOOKS.glob("*.md")) - set(OTHERS))
IDS = [path.stem for path in PAGES]
SECTIONS = ["Symptom", "First queries", "Mitigation", "Rollback"]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_has_its_four_sections_and_something_to_ask(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    asks = text.split("## First queries")[1].split("## Mitigation")[0]
    assert fenced(asks, "promql")
    assert fenced(asks, "sql") or fenced(asks, "sh")


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=[*IDS, "README", "postmortem"])
def test_commands_of_a_page_are_those_of_the_program(page: Path) -> None:
    for words in commands_in(page.read_text()):
        check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_promql_of_a_page_asks_for_what_is_exported(page: Path, tmp_path: Path) -> None:
    asked = [line for block in fenced(page.read_text(), "promql") for line in block.splitlines()]
    check_promql(asked, tmp_path)
    assert {query: found for query in asked if (found := problems_of(query))} == {}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=[*IDS, "README", "postmortem"])
def test_a_page_undoes_a_rollout_by_its_revision(page: Path) -> None:
    # Alone it goes back by one, which after an announced rollout is the new image again.
    undone = re.findall(r"rollout undo[^`\n]*", page.read_text())
    assert [command for command in undone if "--to-revision=N" not in command] == []


@pytest.fixture(scope="module")
def operator(postgres_server: PrivatePostgres) -> Iterator[psycopg.Connection]:
    """A login with the role of operators, in a migrated database."""
    url = postgres_server.create_database()
    migrate.upgrade(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"SET ROLE {OPERATOR}".encode())
        yield connection
    postgres_server.drop_database(url)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_an_operator_may_run_the_sql_of_a_page(page: Path, operator: psycopg.Connection) -> None:
    for statement in fenced(page.read_text(), "sql"):
        with operator.transaction():
            operator.execute("SET TRANSACTION READ ONLY")
            operator.execute(statement.encode()).fetchall()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_names_settings_pages_and_deployments_that_there_are(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"SPECBATCH_[A-Z_]+", text)) <= SETTINGS
    for linked in re.findall(r"\]\(([^)]+)\)", text):
        assert (RUNBOOKS / linked).is_file(), linked
    for path in re.findall(r"`(deploy/[^`]+)`", text):
        assert (DEPLOY.parent / path).exists(), path
    there = {
        (document["kind"].lower(), document["metadata"]["name"])
        for file in (DEPLOY / "kubernetes" / "base").glob("*.yaml")
        for document in documents(file)
        if "metadata" in document
    }
    kinds = r"(deployment|configmap|scaledobject)"
    named = set(re.findall(rf"\b{kinds}[/ ]([a-z][a-z-]*)", "\n".join(fenced(text, "sh"))))
    named |= set(re.findall(rf"`{kinds}/([a-z-]+)`", text))
    assert named <= there
