"""An S3 that is overloaded, cuts answers and uploads short, or goes away: whole or not at all."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore import exceptions
from ledger.builders import completion

from specbatch.pipeline.outputs.outputs import OutputWriter, read_output
from specbatch.pipeline.storage import s3 as s3_module
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.s3 import Patience, S3Objects, is_transient
from specbatch.schemas.errors import ObjectError
from support.faulty_s3 import Call, Fault, FaultyS3

PART = 5 << 20  # S3's smallest
LARGE = bytes(range(256)) * (12 << 12)  # three parts


@pytest.fixture
def proxy(s3_server: str, s3_credentials: None) -> Iterator[FaultyS3]:  # noqa: ARG001 - its effect
    with FaultyS3(s3_server) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> S3Objects:
    monkeypatch.setattr(s3_module, "PART_BYTES", PART)
    return S3Objects(proxy.url, retry_sec=20.0, answer_sec=5.0)


def uploads(client: Any, bucket: str) -> list[Any]:
    """Multipart uploads that are neither finished nor aborted."""
    found = client.list_multipart_uploads(Bucket=bucket.removeprefix("s3://"))
    return list(found.get("Uploads", []))


PASSING = [Fault.UNAVAILABLE, Fault.DROP, Fault.LOST_ANSWER]


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("data", [b"hello", LARGE], ids=["whole", "in parts"])
def test_an_upload_is_tried_again(
    store: S3Objects, proxy: FaultyS3, s3_client: Any, bucket: str, fault: Fault, data: bytes
) -> None:
    for method in ("PUT", "POST", "HEAD"):
        proxy.fail(fault, method, times=2)
    artefact = store.put_bytes(f"{bucket}/a", data)
    assert len(proxy.faults) >= 4
    assert store.get_bytes(f"{bucket}/a", artefact) == data
    assert uploads(s3_client, bucket) == []


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.DROP, Fault.CUT_ANSWER])
def test_a_read_is_tried_again(
    store: S3Objects, proxy: FaultyS3, bucket: str, fault: Fault
) -> None:
    artefact = store.put_bytes(f"{bucket}/a", b"hello" * 1000)
    proxy.fail(fault, "GET", times=2)
    assert store.get_bytes(f"{bucket}/a", artefact) == b"hello" * 1000
    proxy.fail(fault, "GET", times=2)
    assert store.open(f"{bucket}/a").read() == b"hello" * 1000
    assert len(proxy.faults) == 4


def test_a_read_that_hangs_is_given_up_and_tried_again(proxy: FaultyS3, bucket: str) -> None:
    store = S3Objects(proxy.url, retry_sec=20.0, answer_sec=0.3)
    store.put_bytes(f"{bucket}/a", b"hello")
    proxy.fail(Fault.HANG, "GET")
    assert store.get_bytes(f"{bucket}/a") == b"hello"
    assert [fault for _, fault in proxy.faults] == [Fault.HANG]


def test_a_store_that_is_not_up_yet_is_asked_again(
    s3_server: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is refused passes, as one that is closed does."""
    from moto.server import ThreadedMotoServer

    artefact = S3Objects(s3_server).put_bytes(f"{bucket}/a", b"hello")
    with socket.socket() as taken:  # a port at which nobody listens
        taken.bind(("127.0.0.1", 0))
        host, port = taken.getsockname()
        server = ThreadedMotoServer(host, port, verbose=False)
        note, refused = Patience.note, 0

        def comes_up(patience: Patience, state: Any) -> None:
            nonlocal refused
            note(patience, state)
            refused += 1
            if refused == 2:
                taken.close()
                server.start()

        monkeypatch.setattr(Patience, "note", comes_up)
        store = S3Objects(f"http://{host}:{port}", retry_sec=20.0)
        try:
            assert store.get_bytes(f"{bucket}/a", artefact) == b"hello"
        finally:
            server.stop()
    assert refused == 2


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (exceptions.EndpointConnectionError(endpoint_url="x"), True),
        (exceptions.ConnectTimeoutError(endpoint_url="x"), True),
        (exceptions.ReadTimeoutError(endpoint_url="x"), True),
        (exceptions.SSLError(endpoint_url="x", error="not trusted"), False),
        (exceptions.ProxyConnectionError(proxy_url="x"), False),
        (exceptions.NoCredentialsError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_store_out_of_reach_is_out_of_reach_for_a_while(error: Exception, passes: bool) -> None:
    assert is_transient(error) is passes


@pytest.mark.parametrize(("fault", "passes"), [(Fault.UNAVAILABLE, True), (Fault.DENIED, False)])
def test_a_failure_says_whether_it_passes(
    proxy: FaultyS3, bucket: str, fault: Fault, passes: bool
) -> None:
    proxy.fail(fault, times=99)
    with pytest.raises(ObjectError) as caught:
        S3Objects(proxy.url, retry_sec=0.0).get_bytes(f"{bucket}/a")
    assert caught.value.passing is passes


def test_an_answer_that_is_short_and_says_so_is_noticed(
    store: S3Objects, proxy: FaultyS3, bucket: str
) -> None:
    artefact = store.put_bytes(f"{bucket}/a", b"hello" * 1000)
    proxy.fail(Fault.SHORT_ANSWER, "GET", times=2)
    with pytest.raises(ObjectError, match="has 2500 bytes where 5000 were written"):
        store.get_bytes(f"{bucket}/a", artefact)
    with pytest.raises(ObjectError, match="sent 2500 bytes where 5000 were asked for"):
        store.open(f"{bucket}/a").read()


@pytest.mark.parametrize("data", [b"hello", LARGE], ids=["whole", "in parts"])
def test_an_upload_that_arrives_cut_is_deleted_and_named(
    store: S3Objects, proxy: FaultyS3, s3_client: Any, bucket: str, data: bytes
) -> None:
    proxy.fail(Fault.CUT_UPLOAD, "PUT", part="/a")
    with pytest.raises(ObjectError, match=f"{bucket}/a"):
        store.put_bytes(f"{bucket}/a", data)
    assert store.head(f"{bucket}/a") is None
    assert uploads(s3_client, bucket) == []
    artefact = store.put_bytes(f"{bucket}/a", data)
    assert store.get_bytes(f"{bucket}/a", artefact) == data


@pytest.mark.parametrize("then", [Fault.LOST_ANSWER, Fault.NO_SUCH_UPLOAD])
def test_a_finished_upload_whose_answer_is_lost_is_not_taken_for_a_failure(
    store: S3Objects, proxy: FaultyS3, s3_client: Any, bucket: str, then: Fault
) -> None:
    proxy.fail(Fault.LOST_ANSWER, "POST", part="uploadId=")
    proxy.fail(then, "POST", part="uploadId=")
    artefact = store.put_bytes(f"{bucket}/a", LARGE)
    assert len(proxy.faults) == 2
    assert store.get_bytes(f"{bucket}/a", artefact) == LARGE
    assert uploads(s3_client, bucket) == []


def failure(attempt: int, since: float, wait: float) -> Any:
    """As tenacity tells of one: seconds since the request's first attempt began."""
    return SimpleNamespace(attempt_number=attempt, seconds_since_start=since, upcoming_sleep=wait)


def test_the_retries_of_a_whole_upload_are_capped_together() -> None:
    """A store that fails once per request would otherwise be put up with once per part."""
    patience = Patience(1.0)
    for one in (failure(1, 0.3, 0.1), failure(2, 0.6, 0.1)):
        assert not patience.is_used_up(one)
        patience.note(one)
    assert not patience.is_used_up(failure(1, 0.1, 0.1)), "another request: 0.3 s are left"
    assert patience.is_used_up(failure(1, 0.25, 0.1))
    assert not Patience(1.0).is_used_up(failure(1, 0.25, 0.1))


def test_a_failed_upload_leaves_no_parts(
    proxy: FaultyS3, s3_client: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PART_BYTES", PART)
    store = S3Objects(proxy.url, retry_sec=1.0, answer_sec=5.0)
    proxy.fail(Fault.DENIED, "PUT", part="partNumber=2")
    with pytest.raises(ObjectError, match="denied access"):
        store.put_bytes(f"{bucket}/a", LARGE)
    assert uploads(s3_client, bucket) == []


def test_an_interrupt_aborts_the_upload(
    store: S3Objects, proxy: FaultyS3, s3_client: Any, bucket: str
) -> None:
    """Ctrl-C and SIGTERM become exceptions in the thread that uploads, or it ends its work."""
    heard, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def hear(*_: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        assert heard.wait(60), "the answer to the upload came first"

    before = signal.signal(signal.SIGINT, hear)
    try:
        freeze(proxy, "the second part", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put_bytes(f"{bucket}/a", LARGE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert uploads(s3_client, bucket) == []


def test_what_a_killed_process_left_is_ended_by_the_next_upload(
    store: S3Objects, s3_client: Any, bucket: str
) -> None:
    name = bucket.removeprefix("s3://")
    for key in ("a", "a", "ab"):
        s3_client.create_multipart_upload(Bucket=name, Key=key)
    store.put_bytes(f"{bucket}/a", LARGE)
    assert [upload["Key"] for upload in uploads(s3_client, bucket)] == ["ab"], "another's"


def test_of_two_writers_of_a_marker_one_wins_whatever_is_lost(proxy: FaultyS3, bucket: str) -> None:
    proxy.fail(Fault.LOST_ANSWER, "PUT")
    objects = Objects(proxy.url)
    wins = []
    threads = [
        threading.Thread(target=lambda i=i: wins.append(objects.put_new(f"{bucket}/m", b"%d" % i)))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wins.count(True) <= 1
    assert objects.get_bytes(f"{bucket}/m") in (b"0", b"1")


# --- one that was frozen, and its successor -------------------------------------------------------
AT = {
    "the second part": lambda call: "partNumber=2" in call.path,
    "the completion": lambda call: call.method == "POST" and "uploadId=" in call.path,
    "the look at it": lambda call: call.method == "HEAD",
    "whatever it reads": lambda call: call.method in ("GET", "HEAD"),
    "its deletion": lambda call: call.method == "DELETE",
}


def freeze(proxy: FaultyS3, at: str, meanwhile: Callable[[], object]) -> None:
    """Something is done by somebody else before the first request of this kind goes on.

    Uploads to that key are ended by it.
    """
    waiting, orders = [meanwhile], proxy.decide

    def decide(call: Call) -> Fault | None:
        if waiting and AT[at](call):
            waiting.pop()()
            if "uploadId=" in call.path:
                return Fault.NO_SUCH_UPLOAD
        return orders(call)

    proxy.decide = decide


@pytest.mark.parametrize("at", ["the second part", "the completion", "the look at it"])
def test_who_is_frozen_in_an_upload_lets_its_successor_s_object_be(
    store: S3Objects, proxy: FaultyS3, s3_server: str, s3_client: Any, bucket: str, at: str
) -> None:
    successor, theirs = S3Objects(s3_server), LARGE[::-1]
    freeze(proxy, at, lambda: successor.put_bytes(f"{bucket}/a", theirs))
    with pytest.raises(ObjectError, match=r"a later upload to the same name|by another upload"):
        store.put_bytes(f"{bucket}/a", LARGE)
    assert successor.get_bytes(f"{bucket}/a") == theirs
    assert uploads(s3_client, bucket) == []


@pytest.mark.parametrize("how", ["put_bytes", "put_new"])
@pytest.mark.parametrize("at", ["the look at it", "its deletion"])
def test_who_is_frozen_after_a_small_upload_does_so_too(
    store: S3Objects, proxy: FaultyS3, s3_server: str, bucket: str, at: str, how: str
) -> None:
    """It deletes what arrived cut only while that is what is there."""
    if at == "its deletion":
        proxy.fail(Fault.CUT_UPLOAD, "PUT")
    successor = S3Objects(s3_server)
    freeze(proxy, at, lambda: successor.put_bytes(f"{bucket}/a", b"theirs"))
    with pytest.raises(ObjectError, match=r"did not arrive whole|by another upload"):
        getattr(store, how)(f"{bucket}/a", b"mine")
    assert successor.get_bytes(f"{bucket}/a") == b"theirs"


def test_who_is_frozen_after_its_upload_leaves_the_next_one_s_parts(
    store: S3Objects, proxy: FaultyS3, s3_client: Any, bucket: str
) -> None:
    name = bucket.removeprefix("s3://")

    def meanwhile() -> None:
        s3_client.put_object(Bucket=name, Key="a", Body=b"theirs")
        s3_client.create_multipart_upload(Bucket=name, Key="a")

    freeze(proxy, "whatever it reads", meanwhile)
    with pytest.raises(ObjectError, match="by another upload"):
        store.put_bytes(f"{bucket}/a", LARGE)
    assert [upload["Key"] for upload in uploads(s3_client, bucket)] == ["a"]


# --- a store that knows no conditions ------------------------------------------------------------
def test_without_conditional_writes_a_marker_is_written_once_looked_for(
    store: S3Objects, proxy: FaultyS3, bucket: str
) -> None:
    proxy.fail(Fault.NOT_IMPLEMENTED, "PUT")
    assert store.put_new(f"{bucket}/m", b"mine")
    assert [call.method for call in proxy.calls] == ["PUT", "HEAD", "PUT", "HEAD"]


def test_without_conditional_deletion_what_arrived_cut_goes_too(
    store: S3Objects, proxy: FaultyS3, bucket: str
) -> None:
    proxy.fail(Fault.CUT_UPLOAD, "PUT")
    proxy.fail(Fault.NOT_IMPLEMENTED, "DELETE")
    with pytest.raises(ObjectError, match="did not arrive whole"):
        store.put_bytes(f"{bucket}/a", b"hello")
    assert store.head(f"{bucket}/a") is None


# --- outputs ------------------------------------------------------------------------------------
def write(objects: Objects, uri: str) -> None:
    writer = OutputWriter(objects, uri, "job00000000000001", rows_per_part=5)
    writer.write([completion(row) for row in range(12)], [])


def keys(proxy: FaultyS3) -> list[str]:
    """Names of the files that were put, in order."""
    return [c.path.rpartition("/")[2].partition("?")[0] for c in proxy.calls if c.method == "PUT"]


def test_the_manifest_is_the_last_thing_that_is_written(proxy: FaultyS3, bucket: str) -> None:
    proxy.fail(Fault.UNAVAILABLE, "PUT", times=3)
    write(Objects(proxy.url), f"{bucket}/out")
    assert keys(proxy)[-1] == "manifest.json"
    assert keys(proxy).count("manifest.json") == 1


@pytest.mark.parametrize("part", ["part-00000", "part-00002", "manifest"])
def test_an_output_that_fails_half_way_is_not_finished_and_can_be_written_again(
    proxy: FaultyS3, bucket: str, part: str, tmp_path: Path
) -> None:
    objects = Objects(proxy.url, scratch=tmp_path)
    proxy.fail(Fault.DENIED, "PUT", part=part)
    with pytest.raises(ObjectError, match="denied access"):
        write(objects, f"{bucket}/out")
    assert not objects.exists(f"{bucket}/out/manifest.json")
    assert list(tmp_path.iterdir()) == []
    write(objects, f"{bucket}/out")
    assert read_output(f"{bucket}/out", objects).num_rows == 12
