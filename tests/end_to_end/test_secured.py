"""A job over TLS and passwords everywhere: it is done, and no secret is found where it has been."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pyarrow.parquet as pq
import pytest
import redis
import yaml

from specbatch.pipeline.outputs.outputs import read_output
from support import demo, forks
from support.servers import PrivateS3
from support.tls import Certificates, TlsFront, TlsPostgres, TlsRabbit, TlsRedis
from support.workers import BIN, command, wait_until, worker

pytestmark = pytest.mark.integration  # servers with passwords and certificates

ROWS = 24
# With what must be escaped in a URL, so that both spellings can leak.
REDIS = "planted@redis/with:signs%20"
DATABASE = "planted@database/with:signs%20"
BUCKET = "planted@bucket/with:signs%20"
OTHER = "planted-but-wrong-password"
SECRETS = {
    spelling
    for secret in (REDIS, DATABASE, BUCKET, OTHER)
    for spelling in (secret, quote(secret), quote(secret, safe=""))
}
MODELS = ("--verifier", str(demo.VERIFIER))


def assert_secret(where: str, text: str | bytes) -> None:
    """No planted secret stands in this text, in any spelling."""
    data = text if isinstance(text, bytes) else text.encode(errors="replace")
    found = [secret for secret in SECRETS if secret.encode() in data]
    assert not found, f"{where} shows {found}"


@dataclass(frozen=True)
class Site:
    """Servers that ask for TLS and passwords, and the environment that has them."""

    certificates: Certificates
    redis: TlsRedis
    postgres: TlsPostgres
    database_url: str
    endpoint: str
    bucket: str

    def environment(self, **changes: str) -> dict[str, str]:
        values = {
            "SPECBATCH_BROKER_URL": self.redis.url,
            "SPECBATCH_DATABASE_URL": self.database_url,
            "SPECBATCH_WORKSPACE": f"s3://{self.bucket}/workspace",
            "SPECBATCH_S3_ENDPOINT_URL": self.endpoint,
            "SPECBATCH_SWEEP_INTERVAL_SEC": "0.5",
            "AWS_ACCESS_KEY_ID": "planted-id",
            "AWS_SECRET_ACCESS_KEY": BUCKET,
            "AWS_CA_BUNDLE": str(self.certificates.ca),
            "AWS_DEFAULT_REGION": PrivateS3.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        return values | changes


@pytest.fixture(scope="module")
def site(s3_server: PrivateS3) -> Iterator[Site]:
    with ExitStack() as stack:
        certificates = stack.enter_context(Certificates.made())
        own_redis = stack.enter_context(TlsRedis(certificates, REDIS))
        own_postgres = stack.enter_context(TlsPostgres(certificates, DATABASE))
        front = stack.enter_context(TlsFront(certificates, s3_server.port))
        yield Site(
            certificates, own_redis, own_postgres, own_postgres.create_login(), front.url,
            s3_server.create_bucket(),
        )  # fmt: skip


def spec_of(folder: Path, output: str) -> str:
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, ROWS), folder / "prompts.parquet")
    spec = {
        "input": {"uri": "prompts.parquet"},
        "output": {"uri": output},
        "verifier": str(demo.VERIFIER),
        "sampling": {"max_tokens": 24, "temperature": 0.8, "seed": 3},
        "group_size": 6,
    }
    name = f"{output.rpartition('/')[2]}.yaml"
    (folder / name).write_text(yaml.safe_dump(spec))
    return name


def run_by_shell(
    *arguments: str, environment: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """A command to its end, whatever that is: its arguments stand in the process list."""
    done = subprocess.run(
        [str(BIN / arguments[0]), *arguments[1:]],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert_secret(f"the output of {arguments}", done.stdout + done.stderr)
    return done


def run(
    *arguments: str, environment: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """The same in a fork, which is begun sooner."""
    done = forks.run(*arguments, environment=environment, cwd=cwd, timeout=240)
    assert_secret(f"the output of {arguments}", done.stdout + done.stderr)
    return done


def in_redis(url: str) -> bytes:
    """All keys and values."""
    client = redis.Redis.from_url(url)
    readers = {
        b"list": lambda key: client.lrange(key, 0, -1),
        b"hash": client.hgetall,
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"string": client.get,
    }
    kept = [(key, readers[client.type(key)](key)) for key in client.scan_iter()]
    client.close()
    return repr(kept).encode()


def in_database(url: str) -> str:
    """All rows of all tables, as text."""
    with psycopg.connect(url) as connection:
        names = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        rows: list[Any] = []
        for (name,) in names.fetchall():
            rows += connection.execute(f'SELECT t::text FROM "{name}" t'.encode()).fetchall()
    assert rows
    return repr(rows)


def in_bucket(site: Site, server: PrivateS3) -> bytes:
    """All objects, by name and bytes, past the TLS front."""
    import boto3

    client = boto3.client(
        "s3", endpoint_url=server.url, region_name=server.region, aws_access_key_id="a",
        aws_secret_access_key="b",
    )  # fmt: skip
    parts: list[bytes] = []
    for item in client.list_objects_v2(Bucket=site.bucket).get("Contents", []):
        found = client.get_object(Bucket=site.bucket, Key=item["Key"])
        parts += [item["Key"].encode(), repr(found["Metadata"]).encode(), found["Body"].read()]
    assert parts
    return b"\n".join(parts)


def in_process_list() -> bytes:
    """The arguments of all processes that there are, as `ps` shows them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # it has ended
            continue
    return b"\n".join(found)


def test_a_job_over_tls_and_passwords_is_done_and_leaves_no_secret(
    site: Site, s3_server: PrivateS3, tmp_path: Path
) -> None:
    local = {"SPECBATCH_WORKSPACE": str(tmp_path / "local")}
    command("submit-job", spec_of(tmp_path, "plain"), "--local", environment=local, cwd=tmp_path)
    environment = site.environment()
    output = f"s3://{site.bucket}/out"
    report = command("submit-job", spec_of(tmp_path, output), environment=environment, cwd=tmp_path)
    messages = in_redis(site.redis.url)
    assert str(report["job"]).encode() in messages or b"ingest" in messages, "a message lies there"
    assert_secret("the broker", messages)
    with worker("all", *MODELS, environment=environment, cwd=tmp_path, by_shell=True) as one:

        def ended() -> bool:
            assert_secret("the process list", in_process_list())
            show = ("specbatch", "show", str(report["job"]), "--json")
            shown = run(*show, environment=environment, cwd=tmp_path)
            return '"state":"done"' in shown.stdout

        wait_until("the job's end", ended, [one])
        assert_secret("the broker", in_redis(site.redis.url))
        said = one.end()
    assert_secret("the worker's log", said)
    assert_secret("the database", in_database(site.database_url))
    assert_secret("the bucket", in_bucket(site, s3_server))
    for name in ("jobs", "settings", "migrate"):
        run_by_shell("specbatch", name, environment=environment, cwd=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        from specbatch.pipeline.storage.objects import Objects

        got = read_output(output, Objects(site.endpoint))
    expected = read_output(str(tmp_path / "plain"))
    for column in ("id", "token_ids", "text", "seed"):
        assert got[column].to_pylist() == expected[column].to_pylist()


def failures(site: Site) -> dict[str, tuple[dict[str, str], tuple[str, ...], str]]:
    """name: (what is wrong in the environment, the command, words of its complaint)."""
    wrong, other = OTHER, str(site.certificates.other_ca)
    ca = str(site.certificates.ca)
    jobs, submit = ("specbatch", "jobs"), ("submit-job", "job.yaml")
    secret = quote(DATABASE, safe="")
    broker = site.redis.url
    return {
        "broker password": (
            {"SPECBATCH_BROKER_URL": broker.replace(quote(REDIS, safe=""), wrong)},
            submit, "the broker rediss://worker:***@127.0.0.1",
        ),
        "broker away": (
            {"SPECBATCH_BROKER_URL": f"redis://u:{wrong}@127.0.0.1:1/0"},
            submit, "cannot be reached",
        ),
        "broker's certificate": (
            {"SPECBATCH_BROKER_URL": broker.replace(ca, other)}, submit, "cannot be reached",
        ),
        "broker's certificate by the system's authorities": (
            {"SPECBATCH_BROKER_URL": broker.partition("?")[0]}, submit, "cannot be reached",
        ),
        "broker without TLS": (
            {"SPECBATCH_BROKER_URL": broker.replace("rediss", "redis").partition("?")[0]},
            submit, "cannot be reached",
        ),
        "broker of no kind": (
            {"SPECBATCH_BROKER_URL": f"kafka://u:{wrong}@127.0.0.1/0"}, submit, "cannot be used",
        ),
        "rabbit away": (
            {"SPECBATCH_BROKER_URL": f"amqp://u:{wrong}@127.0.0.1:1//"},
            submit, "cannot be reached",
        ),
        "database password": (
            {"SPECBATCH_DATABASE_URL": site.database_url.replace(secret, wrong)},
            jobs, "password authentication failed",
        ),
        "database away": (
            {"SPECBATCH_DATABASE_URL": f"postgresql://u:{wrong}@127.0.0.1:1/d"},
            jobs, "did not answer until",
        ),
        "database's certificate": (
            {"SPECBATCH_DATABASE_URL": site.database_url.replace(ca, other)},
            jobs, "certificate verify failed",
        ),
        "database without TLS": (
            {"SPECBATCH_DATABASE_URL": site.database_url.partition("?")[0] + "?sslmode=disable"},
            jobs, "pg_hba.conf",
        ),
        "database of no kind": (
            {"SPECBATCH_DATABASE_URL": f"mysql://u:{wrong}@127.0.0.1/d?password={wrong}"},
            jobs, "use sqlite or postgresql",
        ),
        "a URL in the wrong place": (
            {"SPECBATCH_LEASE_SEC": f"redis://u:{wrong}@127.0.0.1"}, jobs, "SPECBATCH_LEASE_SEC",
        ),
        "credentials in the workspace": (
            {"SPECBATCH_WORKSPACE": f"s3://id:{wrong}@bucket"}, jobs, "SPECBATCH_WORKSPACE",
        ),
        "credentials in an argument": (
            {}, (*submit, "--input", f"s3://id:{wrong}@bucket/x"), "credentials belong",
        ),
    }  # fmt: skip


NAMES = [
    "broker password", "broker away", "broker's certificate",
    "broker's certificate by the system's authorities", "broker without TLS",
    "broker of no kind", "rabbit away", "database password", "database away",
    "database's certificate", "database without TLS", "database of no kind",
    "a URL in the wrong place", "credentials in the workspace", "credentials in an argument",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_is_one_sentence_without_secrets(site: Site, name: str, tmp_path: Path) -> None:
    changes, arguments, words = failures(site)[name]
    spec_of(tmp_path, "job")
    done = run(*arguments, environment=site.environment(**changes), cwd=tmp_path)
    assert done.returncode in (2, 4), done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1


def test_every_failure_was_tried(site: Site) -> None:
    assert sorted(failures(site)) == sorted(NAMES)


def test_a_worker_that_cannot_log_in_tells_no_secret(site: Site, tmp_path: Path) -> None:
    broker = site.redis.url.replace(quote(REDIS, safe=""), OTHER)
    environment = site.environment(SPECBATCH_BROKER_URL=broker)
    with worker("ingest", environment=environment, cwd=tmp_path) as one:
        wait_until("it says so", lambda: "no messages can be taken" in one.text(), [one])
        one.kill()
        assert_secret("the worker's log", one.text())


def test_a_job_that_cannot_reach_its_bucket_says_so_in_the_store(
    site: Site, tmp_path: Path
) -> None:
    """What a worker meets is written to the job's row, its log and the command's output."""
    environment = site.environment(
        AWS_CA_BUNDLE=str(site.certificates.other_ca),
        SPECBATCH_S3_ENDPOINT_URL=site.endpoint.replace("://", f"://u:{OTHER}@"),
    )
    done = run(
        *("submit-job", spec_of(tmp_path, f"s3://{site.bucket}/other"), "--local"),
        environment=environment,
        cwd=tmp_path,
    )
    assert done.returncode in (2, 4)
    assert "the certificate of the S3 store at https://u:***@127.0.0.1" in done.stderr
    assert_secret("the database", in_database(site.database_url))


def test_a_job_over_amqps_is_done(tmp_path: Path) -> None:
    with Certificates.made() as certificates, TlsRabbit(certificates, "planted-rabbit") as rabbit:
        environment = {
            "SPECBATCH_BROKER_URL": rabbit.create_user(),
            "SPECBATCH_WORKSPACE": str(tmp_path / "workspace"),
        }
        with worker("all", *MODELS, environment=environment, cwd=tmp_path) as one:
            report = command(
                *("submit-job", spec_of(tmp_path, "out"), "--wait", "--timeout", "200"),
                environment=environment,
                cwd=tmp_path,
            )
            said = one.end()
        assert report["state"] == "done"
        assert "planted-rabbit" not in said
        wrong = environment["SPECBATCH_BROKER_URL"].replace(
            str(certificates.ca), str(certificates.other_ca)
        )
        done = run(
            *("submit-job", spec_of(tmp_path, "more")),
            environment=environment | {"SPECBATCH_BROKER_URL": wrong},
            cwd=tmp_path,
        )
        assert "cannot be reached" in done.stderr
        assert "planted-rabbit" not in done.stderr
