"""Who else on the machine may read what is kept, and who reaches the metrics."""

from __future__ import annotations

import re
import socket
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from support import forks
from support.models import TinyPair
from support.servers import free_port
from support.workers import wait_until, worker

REMEDY = "run `chmod -R go= "
OF_OTHERS, OF_GROUP = 0o007, 0o070


def said(folder: Path, *arguments: str, umask: int = 0o022, **settings: str) -> str:
    """What a command writes to stderr; it runs with a umask of its own."""
    environment = {"SPECBATCH_WORKSPACE": str(folder / "data")} | settings
    command = ("specbatch", *arguments)
    done = forks.run(*command, environment=environment, cwd=folder, timeout=240, umask=umask)
    assert done.returncode == 0, done.stderr
    return done.stderr


def job(folder: Path, models: TinyPair, umask: int = 0o022, **settings: str) -> str:
    """Do a job in this folder; what is written to stderr."""
    source = folder / "in.jsonl"
    rows = [{"id": f"r{n}", "prompt": "a few words"} for n in range(3)]
    source.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    order = ("--input", str(source), "--output", "out", "--max-tokens", "3")
    model = ("--verifier", str(models.verifier))
    return said(folder, "submit-job", "--local", *order, *model, umask=umask, **settings)


def modes(folder: Path) -> dict[str, int]:
    """Of the folder and of all that is below it."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            found[str(path.relative_to(folder.parent))] = stat.S_IMODE(path.stat().st_mode)
    return found


def with_bits(found: Mapping[str, int], bits: int) -> list[str]:
    return [f"{name}: {oct(mode)}" for name, mode in found.items() if mode & bits]


def test_a_store_is_its_users_alone_and_an_output_is_as_the_umask_says(
    tmp_path: Path, tiny_pair: TinyPair
) -> None:
    assert REMEDY not in job(tmp_path, tiny_pair)
    kept = modes(tmp_path / "data")
    assert "data/specbatch.db" in kept
    assert len(kept) > 3, "the job's folder and files are there"
    assert with_bits(kept, OF_GROUP | OF_OTHERS) == []
    made = modes(tmp_path / "out")
    folders = {"out", "out/data"}
    assert {mode for name, mode in made.items() if name not in folders} == {0o644}
    assert {made[name] for name in folders} == {0o755}


def test_the_log_beside_an_open_store_has_its_modes(tmp_path: Path, redis_url: str) -> None:
    """-wal and -shm are there while somebody has it open."""
    environment = {"SPECBATCH_WORKSPACE": str(tmp_path / "data")}
    environment["SPECBATCH_BROKER_URL"] = redis_url
    with worker("ingest", environment=environment, cwd=tmp_path) as one:
        beside = tmp_path / "data" / "specbatch.db-wal"
        wait_until("the store is open", beside.exists, [one])
        kept = modes(tmp_path / "data")
        assert {name.rpartition("-")[2] for name in kept} >= {"wal", "shm"}
        assert with_bits(kept, OF_GROUP | OF_OTHERS) == []
        one.end()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_users_of_a_group_share_a_store_by_a_setting(
    tmp_path: Path, tiny_pair: TinyPair, umask: int
) -> None:
    job(tmp_path, tiny_pair, umask, SPECBATCH_STORE_MODE="group", SPECBATCH_OUTPUT_MODE="group")
    found = modes(tmp_path / "data") | modes(tmp_path / "out")
    assert with_bits(found, OF_OTHERS) == []
    assert {mode for name, mode in found.items() if (tmp_path / name).is_dir()} == {0o2770}
    assert {mode for name, mode in found.items() if (tmp_path / name).is_file()} == {0o660}


def test_an_output_may_be_private_too(tmp_path: Path, tiny_pair: TinyPair) -> None:
    job(tmp_path, tiny_pair, SPECBATCH_OUTPUT_MODE="private")
    assert with_bits(modes(tmp_path / "out"), OF_GROUP | OF_OTHERS) == []


def test_a_store_that_others_can_read_is_told_of_once_and_left_as_it_is(
    tmp_path: Path, tiny_pair: TinyPair
) -> None:
    """As an earlier version made it."""
    job(tmp_path, tiny_pair, SPECBATCH_STORE_MODE="umask")
    before = modes(tmp_path / "data")
    assert before["data/specbatch.db"] == 0o644
    told = said(tmp_path, "jobs")
    assert told.count(REMEDY) == 1
    assert f"chmod -R go= {tmp_path / 'data'}`" in told
    assert "SPECBATCH_STORE_MODE" in told
    assert modes(tmp_path / "data") == before
    assert said(tmp_path, "jobs", SPECBATCH_STORE_MODE="umask") == ""
    subprocess.run(["chmod", "-R", "go=", str(tmp_path / "data")], check=True)
    assert said(tmp_path, "jobs") == ""


@pytest.mark.parametrize("where", ["everybodys", "where_people_work"])
def test_nothing_but_the_stores_own_files_is_to_be_changed(tmp_path: Path, where: str) -> None:
    """The folder of a SQLite file may be /tmp, or hold somebody's own files."""
    folder = tmp_path / where
    folder.mkdir()
    folder.chmod(0o1777 if where == "everybodys" else 0o755)
    own = folder / "own.txt"
    own.write_text("somebody's")
    settings = {"SPECBATCH_DATABASE_URL": f"sqlite:///{folder}/x.db"}
    said(folder, "jobs", SPECBATCH_STORE_MODE="umask", **settings)
    told = said(folder, "jobs", **settings)
    (advised,) = re.findall(r"`(chmod [^`]*)`", told)
    assert "-R" not in advised
    subprocess.run(["sh", "-c", advised], check=True)
    assert (
        with_bits({"x": stat.S_IMODE((folder / "x.db").stat().st_mode)}, OF_GROUP | OF_OTHERS) == []
    )
    assert own.stat().st_mode & 0o044, "it is nobody's business"
    assert said(folder, "jobs", **settings) == ""


@pytest.mark.parametrize("workspace", [".", "everybodys"])
def test_a_workspace_that_holds_more_is_not_changed_as_a_whole(
    tmp_path: Path, workspace: str
) -> None:
    folder = tmp_path / workspace
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755 if workspace == "." else 0o1777)
    settings = {"SPECBATCH_WORKSPACE": str(folder)}
    said(tmp_path, "jobs", SPECBATCH_STORE_MODE="umask", **settings)
    (advised,) = re.findall(r"`(chmod [^`]*)`", said(tmp_path, "jobs", **settings))
    assert advised == f"chmod go= {folder.resolve() / 'specbatch.db'}"


def reached(address: str, port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(5)
        return one.connect_ex((address, port)) == 0


def test_metrics_are_served_to_this_machine_unless_told_otherwise(
    tmp_path: Path, redis_url: str
) -> None:
    for setting, expected in (({}, False), ({"SPECBATCH_METRICS_ADDRESS": "0.0.0.0"}, True)):
        port = free_port()
        environment = {"SPECBATCH_WORKSPACE": str(tmp_path / "data"), **setting}
        environment |= {"SPECBATCH_METRICS_PORT": str(port), "SPECBATCH_BROKER_URL": redis_url}
        with worker("ingest", environment=environment, cwd=tmp_path) as one:
            wait_until("it serves", lambda port=port: reached("127.0.0.1", port), [one])
            # All of 127/8 is this machine, and only 127.0.0.1 is what is bound to.
            assert reached("127.0.0.2", port) is expected
            one.end()
