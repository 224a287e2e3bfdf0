"""The container files: what goes in, as whom it runs, and how its health is told."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from deploy.deployed import DEPLOY, SETTINGS

from support.tree import ROOMS, ROOT

FILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
IDS = [path.name for path in FILES]
KNOWN = {
    *("FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"),
    *("CMD", "ARG", "LABEL", "STOPSIGNAL"),
}
HEALTHCHECK = DEPLOY / "docker" / "healthcheck.py"


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, the rest), continued lines joined, comments left out."""
    lines = [x for x in path.read_text().splitlines() if not x.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(words[0], words[1]) for words in found]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions(path):
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found


def test_there_is_one_for_processors_and_one_for_gpus() -> None:
    assert IDS == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_an_image_is_built_in_stages_from_pinned_ones_and_runs_as_nobody_special(
    path: Path,
) -> None:
    build, last = stages(path)
    assert {name for stage in (build, last) for name, _ in stage} <= KNOWN
    for stage in (build, last):
        assert re.match(r"^python:\d+\.\d+\.\d+-slim-bookworm( AS \w+)?$", stage[0][1])
    names = [name for name, _ in last]
    (user,) = [rest for name, rest in last if name == "USER"]
    assert user == "10001:10001"
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))
    (health,) = [rest for name, rest in last if name == "HEALTHCHECK"]
    assert "specbatch-healthcheck" in health
    assert ("ENTRYPOINT", '["specbatch"]') in last
    runs = " ".join(rest for name, rest in last if name == "RUN")
    for name, rest in (*build, *last):
        if name == "RUN" and "apt-get" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists" in rest
    assert "pip" not in runs  # what is installed comes from the stage that built it


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_the_whole_product_goes_in_and_the_context_lets_it(path: Path) -> None:
    copied = [
        rest.split()[:-1]
        for name, rest in instructions(path)
        if name == "COPY" and "--from" not in rest
    ]
    sources = {word for words in copied for word in words if not word.startswith("--")}
    assert set(ROOMS) <= sources
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert sources <= allowed, sources - allowed
    assert allowed <= sources
    assert all((ROOT / source).exists() for source in sources)


def test_the_context_leaves_everything_else_out() -> None:
    lines = [x for x in (ROOT / ".dockerignore").read_text().splitlines() if x and x[0] != "#"]
    assert lines[0] == "*"
    assert "**/.env" in lines


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_an_image_has_the_extras_settings_and_torch_that_there_are(path: Path) -> None:
    text = path.read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (asked,) = re.findall(r"'\.\[([a-z0-9,]+)\]'", text)
    assert set(asked.split(",")) <= set(extras)
    assert set(re.findall(r"SPECBATCH_[A-Z_]+", text)) <= SETTINGS
    (torch,) = re.findall(r"torch==(\S+)", text)
    assert f"\ntorch=={torch}\n" in (ROOT / "constraints.txt").read_text()
    assert not re.search(r"(?i)(password|token|secret|api_key)\s*=", text)


def health(port: object) -> int:
    given = os.environ | {"SPECBATCH_METRICS_PORT": str(port)}
    done = subprocess.run([sys.executable, str(HEALTHCHECK)], env=given, capture_output=True)
    return done.returncode


def test_a_worker_is_healthy_while_its_metrics_port_answers() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert health(port) == 1
        listener.listen()
        assert health(port) == 0
    assert health("") == health(0) == 0
