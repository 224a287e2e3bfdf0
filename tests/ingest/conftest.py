"""A tiny real tokenizer and a real S3 server over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ingest.making import CHAT_TEMPLATE, save_tokenizer

from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.spec import JobSpec


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"), CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return TextTokenizer.load(str(model_folder))


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture(scope="session")
def make_checker(tokenizer: TextTokenizer) -> Callable[..., RowChecker]:
    def make(spec: JobSpec, context: int = 64, vocab: int | None = None) -> RowChecker:
        return RowChecker(spec, tokenizer, context, vocab or tokenizer.vocab_size, today=0.0)

    return make


# --- S3: a real server on a free port -----------------------------------------------------------
@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3(s3_server: str, s3_credentials: None) -> Objects:  # noqa: ARG001 - for its effect
    return Objects(s3_endpoint_url=s3_server)


@pytest.fixture
def s3_client(s3_server: str, s3_credentials: None) -> Any:  # noqa: ARG001 - for its effect
    import boto3

    return boto3.client("s3", endpoint_url=s3_server, region_name="us-east-1")


@pytest.fixture
def bucket(s3_client: Any) -> str:
    name = f"b-{uuid.uuid4().hex[:12]}"
    s3_client.create_bucket(Bucket=name)
    return f"s3://{name}"
