"""The private servers do what the tests that use them rely on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.rabbit import PrivateRabbit
from support.servers import PrivatePostgres, PrivateRedis, ServerError, find_binary


def test_redis_keeps_its_data_when_it_is_killed(own_redis: PrivateRedis) -> None:
    own_redis.talk("SELECT 3", "SET key value")
    own_redis.kill()
    assert not own_redis.is_running
    own_redis.restart()
    assert own_redis.talk("SELECT 3", "EXISTS key") == ":1"


def test_redis_urls_are_empty_databases(redis_server: PrivateRedis, redis_url: str) -> None:
    database = redis_url.rsplit("/", 1)[1]
    assert redis_server.talk(f"SELECT {database}", "DBSIZE") == ":0"


def test_postgres_keeps_its_commits_when_it_is_killed(own_postgres: PrivatePostgres) -> None:
    import psycopg

    url = own_postgres.create_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    own_postgres.kill()
    own_postgres.restart()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (7,)


@pytest.mark.parametrize("_turn", [1, 2])
def test_postgres_urls_are_empty_databases(empty_postgres_url: str, _turn: int) -> None:
    import psycopg

    with psycopg.connect(empty_postgres_url) as connection:
        connection.execute("CREATE TABLE mine (n int)")  # fails if the other turn's were here


def test_s3_is_where_the_environment_leads_boto3(s3: Any) -> None:
    import boto3

    boto3.client("s3").put_object(Bucket=s3.bucket, Key="a/b", Body=b"bytes")
    assert s3.client().get_object(Bucket=s3.bucket, Key="a/b")["Body"].read() == b"bytes"


def test_rabbit_keeps_durable_messages_when_it_is_killed(own_rabbit: PrivateRabbit) -> None:
    from kombu.connection import Connection

    url = own_rabbit.create_vhost()
    options = {"confirm_publish": True}
    with Connection(url, transport_options=options) as connection:
        connection.SimpleQueue("kept").put({"n": 7})
    own_rabbit.kill()
    own_rabbit.restart()
    with Connection(url) as connection:
        assert connection.SimpleQueue("kept").get(timeout=10).payload == {"n": 7}


def test_rabbit_urls_are_empty_virtual_hosts(rabbit_url: str) -> None:
    from kombu.connection import Connection

    with Connection(rabbit_url) as connection:
        assert connection.SimpleQueue("mine").qsize() == 0


def test_servers_end_when_the_process_that_started_them_is_killed() -> None:
    code = (
        "import time; from support.servers import PrivateRedis\n"
        "redis = PrivateRedis().__enter__(); print(redis.pid, redis.folder, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while _runs(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(int(pid))
    shutil.rmtree(folder)


def test_a_missing_server_is_named_with_its_package() -> None:
    with pytest.raises(ServerError, match="apt-get install some-package"):
        find_binary("no-such-server", package="some-package")


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
