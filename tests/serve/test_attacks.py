"""What an attacker sends: keys, ids, paths, headers and bodies that are not what they seem.

Routes are walked, not listed: a new one is attacked by the same tests, or has to be named here.
"""

from __future__ import annotations

import gzip
import hmac
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from serve.conftest import URL, Made, Served, jsonl, line, made_service
from serve.test_page import rollout_of
from serve.test_sign_in import MODELS
from serve.visitor import Visitor, done_job, held_job
from starlette.testclient import TestClient

from specbatch.jobs.serve.app import make_app
from specbatch.jobs.serve.checking import MOST_LINE_BYTES, check_file
from specbatch.jobs.serve.guard import HEADERS
from specbatch.jobs.serve.keys import make_key
from specbatch.schemas.registry import DeployScope
from specbatch.schemas.serving import Scope

NO_FILE, NO_BATCH, NO_JOB = "file-" + "0" * 31, "batch_" + "0" * 31, "0" * 21
EVIL = "<script>alert(1)</script>"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    with made_service(tmp_path / "serve-dir", MODELS) as found:
        yield found


@pytest.fixture
def visitor(made: Made) -> Visitor:
    return Visitor(made.service)


def bearer(made: Made, tenant: str = "default", **values: Any) -> dict[str, str]:
    """The header of a new key."""
    more = {"expires_at": None, **values}
    return {
        "Authorization": f"Bearer {make_key(made.service.store, 'k', tenant, Scope, **more)[1]}"
    }


def upload(visitor: Visitor, key: Mapping[str, str], *lines: Any, name: str = "x.jsonl") -> str:
    sent = {"file": (name, jsonl(*(lines or (line("a"),))))}
    answer = visitor.http.post("/v1/files", headers=key, files=sent, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def create(
    visitor: Visitor, key: Mapping[str, str], file_id: str, more: Any = None, **body: Any
) -> Any:
    body = {
        "input_file_id": file_id,
        "endpoint": URL,
        "completion_window": "24h",
        **body,
    }
    return visitor.http.post("/v1/batches", headers={**key, **(more or {})}, json=body)


def routes(visitor: Visitor) -> list[tuple[str, str]]:
    """Each method and path of the application."""
    found = [(method, one.path) for one in visitor.app.app.routes for method in one.methods]
    assert len(found) > 25
    return sorted(found)


# --- keys -----------------------------------------------------------------------------------------
def test_nobody_learns_which_keys_there_are(
    made: Made, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong secret a known, an expired, a revoked and an unknown id get the same answer, for
    the same work."""
    store, secret = made.service.store, "A" * 43
    ids = [
        make_key(store, "k", "default", tuple(Scope), expires_at)[0].key_id
        for expires_at in (None, time.time() - 1, None)
    ]
    store.revoke_api_key(ids[2])
    work: list[str] = []
    compare, api_key = hmac.compare_digest, store.api_key
    monkeypatch.setattr(
        "specbatch.jobs.serve.keys.hmac.compare_digest",
        lambda a, b: [work.append(f"compare {len(a)} {len(b)}"), compare(a, b)][1],
    )
    monkeypatch.setattr(store, "api_key", lambda key: [work.append("asked"), api_key(key)][1])
    said = set()
    for key_id in (*ids, "0" * 12):
        key = f"sb-{key_id}-{secret}"
        work.clear()
        answer = visitor.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        told = dict(answer.headers)
        said.add((answer.status_code, answer.text, str(told), str(work)))
    assert len(said) == 1
    assert "compare 32 32" in said.pop()[3]
    pages = {visitor.send_key(f"sb-{key_id}-{secret}").text for key_id in (*ids, "0" * 12)}
    assert len({page.split('name="csrf"')[0] for page in pages}) == 1


@pytest.mark.parametrize(
    "form",
    [
        *("{}", "Basic {}", "Bearer", "Bearer {}x", "Bearer x{}", "Bearer {},{}", "Bearer {}\t{}"),
        *("Digest {}", "Bearer Bearer {}", "Bearer sb-{}", "Bearer {}\u00a0x"),
    ],
)
def test_a_key_in_another_form_does_not_count(made: Made, visitor: Visitor, form: str) -> None:
    key = bearer(made)["Authorization"].partition(" ")[2]
    given = form.replace("{}", key).encode("latin-1")
    assert visitor.get("/v1/models", headers={b"Authorization": given}).status_code == 401


def test_no_route_is_open_without_a_key(visitor: Visitor) -> None:
    open_to_all = {"/", "/sign-in", "/static/{name}"}
    for method, path in routes(visitor):
        if path in open_to_all:
            continue
        url = path.replace("{name:path}", "small").replace("{number}", "1")
        for name, given in (("file", NO_FILE), ("batch", NO_BATCH), ("job", NO_JOB)):
            url = url.replace(f"{{{name}_id}}", given)
        options: dict[str, Any] = {"data": {}} if path[:4] != "/v1/" and method == "POST" else {}
        if options:  # an empty form
            options = {"content": b"", "headers": {"Content-Type": FORM}}
        answer = visitor.http.request(method, url, **options)
        wanted = 303 if path == "/sign-out" else 401  # which ends no session
        assert answer.status_code == wanted, (method, path)


FORM = "application/x-www-form-urlencoded"


# --- other tenants --------------------------------------------------------------------------------
def test_on_every_route_another_tenants_id_is_as_unknown_as_none(
    made: Made, visitor: Visitor
) -> None:
    store = made.service.store
    theirs = bearer(made, "victim")
    file_id = upload(visitor, theirs, line("a", content="swordfish"), name="swordfish")
    batch_id = create(visitor, theirs, file_id, metadata={"a": "swordfish"}).json()["id"]
    made.reconciler.step_all()
    job_id = held_job(store, "1" * 21, tenant="victim", name="swordfish")
    number = rollout_of(store, DeployScope("victim"), "for swordfish")
    before = [
        store.batch("victim", batch_id),
        store.file("victim", file_id),
        store.get_job(job_id),
    ]
    ids = {
        "file_id": (file_id, NO_FILE),
        "batch_id": (batch_id, NO_BATCH),
        "job_id": (job_id, NO_JOB),
        "number": (str(number), str(number + 1)),
    }
    mine = bearer(made, "mine")
    visitor.sign_in("mine")
    token, tried = visitor.token("/jobs"), 0
    for method, path in routes(visitor):
        name = path.partition("{")[2].partition("}")[0]
        if name not in ids:
            assert name in ("", "name", "name:path"), f"{path}: say whose {name} is tried"
            continue
        said = []
        for given in ids[name]:
            url, options = path.replace(f"{{{name}}}", given), {"headers": mine}
            if method == "POST" and not path.startswith("/v1/"):
                options = {"data": {"csrf": token, "decide-0-0": "blocked"}}  # type: ignore[dict-item]  # a form
            answer = visitor.http.request(method, url, **options)  # type: ignore[arg-type]  # either
            said.append((answer.status_code, answer.text.replace(f"39;{given}&", "39;ID&")))
            said[-1] = said[-1][0], said[-1][1].replace(f"'{given}'", "'ID'")
            assert "swordfish" not in answer.text
        assert said[0] == said[1], (method, path)
        assert said[0][0] == 404, (method, path)
        tried += 1
    assert tried > 10
    assert before == [
        store.batch("victim", batch_id),
        store.file("victim", file_id),
        store.get_job(job_id),
    ]
    assert len(store.reviews(job_id).pending) == 2


def test_another_tenants_file_cannot_be_a_batchs_input(made: Made, visitor: Visitor) -> None:
    theirs, mine = bearer(made, "victim"), bearer(made, "mine")
    file_id = upload(visitor, theirs)
    said = [create(visitor, mine, one) for one in (file_id, NO_FILE)]
    assert [one.status_code for one in said] == [404, 404]
    texts = [one.text.replace(file_id, "ID").replace(NO_FILE, "ID") for one in said]
    assert texts[0] == texts[1]


def test_another_tenants_idempotency_key_says_nothing(made: Made, visitor: Visitor) -> None:
    theirs, mine = bearer(made, "victim"), bearer(made, "mine")
    named = {"Idempotency-Key": "night-1"}
    first = create(visitor, theirs, upload(visitor, theirs), named).json()
    other = create(visitor, mine, upload(visitor, mine), named, completion_window="48h")
    assert other.status_code == 200
    assert other.json()["id"] != first["id"]
    again = create(visitor, theirs, first["input_file_id"], named).json()
    assert again["id"] == first["id"]
    # A batch's own id is the idempotency key of its job: nobody gets at it with a header.
    made.reconciler.step_all()
    taken = create(visitor, mine, upload(visitor, mine), {"Idempotency-Key": first["id"]})
    assert taken.status_code == 200
    assert taken.json()["id"] != first["id"]
    made.reconciler.step_all()
    jobs = [job for job in made.service.store.list_jobs() if job.tenant == "mine"]
    assert len(jobs) == 2


def test_another_tenants_cursor_is_a_time_and_nothing_more(made: Made, visitor: Visitor) -> None:
    theirs, mine = bearer(made, "victim"), bearer(made, "mine")
    ids = [upload(visitor, key) for key in (mine, theirs, mine, theirs, mine)]
    batches = [
        create(visitor, key, file_id).json()["id"]
        for key, file_id in zip((mine, theirs, mine, theirs, mine), ids, strict=True)
    ]
    for path, all_ids in (("/v1/files", ids), ("/v1/batches", batches)):
        for cursor in (all_ids[1], all_ids[3]):
            beside = cursor[:-1] + ("0" if cursor[-1] != "0" else "1")  # which nobody has
            pages = [
                visitor.get(f"{path}?after={one}", headers=mine).json() for one in (cursor, beside)
            ]
            assert pages[0] == pages[1]
            mine_before = [one for one in all_ids[::-2] if one < cursor]
            assert [one["id"] for one in pages[0]["data"]] == mine_before
    visitor.sign_in("mine")
    job = done_job(made.service.store, "1" * 21, tenant="victim", name="swordfish")
    for after in (job, "2" * 21):
        assert "swordfish" not in visitor.get(f"/jobs?after={after}").text


# --- forms of other sites -------------------------------------------------------------------------
def test_a_session_opens_no_route_of_the_api_and_other_sites_are_let_in_nowhere(
    made: Made, visitor: Visitor
) -> None:
    visitor.sign_in()
    evil = {"Origin": "https://evil.example"}
    for method, path in routes(visitor):
        url = path.replace("{name:path}", "small")
        if path.startswith("/v1/"):
            assert visitor.http.request(method, url, headers=evil).status_code == 401, path
        asks = {**evil, "Access-Control-Request-Method": method}
        preflight = visitor.http.options(url, headers=asks)
        assert preflight.status_code in (404, 405), path
        assert not [name for name in preflight.headers if name.startswith("access-control")]
    for method, path in routes(visitor):
        if method == "POST" and not path.startswith("/v1/"):
            url = path.replace("{job_id}", held_job(made.service.store, "1" * 21)[:21])
            forged = visitor.post(url, {"key": "x"}, headers={**evil, "Cookie": cookies(visitor)})
            assert forged.status_code == 403, path
            break
    assert visitor.get("/jobs").status_code == 200


def cookies(visitor: Visitor) -> str:
    return "; ".join(f"{one.name}={one.value}" for one in visitor.http.cookies.jar)


@pytest.mark.parametrize(
    "then",
    [
        *("//evil.example", "///evil.example", "/\\evil.example", "\\\\evil.example", "/jobs//x"),
        *("https:evil.example", "javascript:alert(1)", "/jobs/x@evil.example", "/jobs?then=//evil"),
        *(
            "/jobs/%2f%2fevil.example",
            "/jobs\n//evil.example",
            "\t//evil.example",
            "/jobs/x#//evil",
        ),
        *("/jobs/../..//evil.example", " /jobs", "/JOBS", "http://testserver.evil.example/jobs"),
    ],
)
def test_no_sign_in_leads_elsewhere(made: Made, visitor: Visitor, then: str) -> None:
    key = bearer(made)["Authorization"].partition(" ")[2]
    answer = visitor.send_key(key, then)
    assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")


def test_no_header_changes_where_answers_lead(made: Made, visitor: Visitor) -> None:
    lies = {
        "Host": "evil.example",
        "X-Forwarded-Host": "evil.example",
        "X-Forwarded-Prefix": "/evil",
        "Forwarded": "host=evil.example;proto=https",
        "X-Original-URL": "/v1/files",
        "X-Rewrite-URL": "/v1/files",
    }
    assert visitor.get("/", headers=lies).headers["location"] == "/sign-in"
    asked = visitor.get("/sign-in", headers=lies)
    assert "evil" not in asked.text
    assert "domain" not in asked.headers["set-cookie"].lower()
    key = bearer(made)
    for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "_method"):
        file_id = upload(visitor, key)
        url = f"/v1/files/{file_id}?_method=DELETE"
        assert visitor.get(url, headers={**key, name: "DELETE"}).status_code == 200
        assert visitor.get(f"/v1/files/{file_id}", headers=key).status_code == 200, "still there"


# --- texts ----------------------------------------------------------------------------------------
def test_texts_of_clients_are_data_in_every_answer_of_the_api(made: Made, visitor: Visitor) -> None:
    key = bearer(made)
    lines = (line(EVIL, content=EVIL), line("b", model=EVIL))
    file_id = upload(visitor, key, *lines, name=f"{EVIL}.html")
    batch_id = create(visitor, key, file_id, metadata={EVIL: EVIL}).json()["id"]
    made.reconciler.step_all()
    told = visitor.get(f"/v1/batches/{batch_id}", headers=key).json()
    assert EVIL in str(told["errors"])
    for path in (
        *("/v1/files", f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", "/v1/batches"),
        *(f"/v1/batches/{batch_id}", f"/v1/files/{EVIL}", f"/v1/models/{EVIL}", f"/v1/{EVIL}"),
        *(f"/v1/files?after={EVIL}", f"/v1/files?order={EVIL}"),
    ):
        answer = visitor.get(path, headers=key)
        kind = answer.headers["content-type"]
        assert kind in ("application/json", "application/octet-stream"), path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
    visitor.sign_in()
    for page in ("/jobs", "/tenants", "/reviews", "/rollouts"):
        assert EVIL not in visitor.get(page).text


def test_no_address_of_a_client_is_ever_asked(
    made: Made, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models, inputs and outputs are the operator's and the service's: none is a client's."""
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **_: asked.append(a))
    inside, key = "http://169.254.169.254/latest/meta-data", bearer(made)
    more = {"verifier": inside, "proposer": inside, "input": inside, "output": {"uri": inside}}
    image = [{"type": "image_url", "image_url": {"url": inside}}]
    lines = [
        {**line("a", **more), "input": {"uri": inside}, "output": {"uri": inside}},
        {**line("b", messages=[{"role": "user", "content": image}]), "webhook": inside},
    ]
    file_id = upload(visitor, key, *lines)
    batch = create(visitor, key, file_id, metadata={"output": inside, "webhook": inside}).json()
    made.reconciler.step_all()
    (job,) = made.service.store.list_jobs()
    folder = made.settings.workspace
    assert job.spec["input"]["uri"].endswith(f"{folder}/serve/files/{file_id}.jsonl")
    assert job.spec["output"]["uri"].endswith(f"{folder}/serve/outputs/{batch['id']}")
    assert "169.254" not in str(job)
    fields = ("input_file_id", "endpoint", "completion_window", "metadata")
    for name, said in {
        **dict.fromkeys(fields[:3], inside),
        "input_file_id": f"../{file_id}",
        "output": inside,
        "verifier": inside,
        "webhook": inside,
    }.items():
        answer = create(visitor, key, file_id, **{name: said})
        assert answer.status_code in (400, 404), name
    assert not asked


# --- bodies ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        b'{"completion_window": ' + b"9" * 5000 + b"}",
        b'{"input_file_id": "\\ud800"}',
        b"\xff\xfe{}",
        b'{"endpoint": "/v1/completions\\u0000"}',
        b"\0" * 1000,
        b"",
    ],
    ids=["brackets", "objects", "metadata", "digits", "surrogate", "utf-16", "nul", "nuls", "none"],
)
def test_a_strange_body_is_refused_in_a_sentence(made: Made, visitor: Visitor, body: bytes) -> None:
    answer = visitor.http.post("/v1/batches", headers=bearer(made), content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def form(*parts: tuple[bytes, bytes]) -> bytes:
    """Of parts: their headers and their content."""
    shown = b"".join(b"--b\r\n" + head + b"\r\n\r\n" + body + b"\r\n" for head, body in parts)
    return shown + b"--b--\r\n"


NAMED = b'Content-Disposition: form-data; name="%s"'
GOOD_FILE = NAMED % b'file"; filename="x', jsonl(line("a"))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (form(*[(NAMED % b"purpose", b"batch")] * 5000), 413),
        (form(*[(NAMED % str(n).encode(), b"") for n in range(5000)]), 400),
        (form((NAMED % b"purpose", b"x" * 9000), GOOD_FILE), 413),
        (form((NAMED % b"purpose" + b"\r\nX: " + b"y" * 9000, b"batch"), GOOD_FILE), 400),
        (form((b"\r\n".join([NAMED % b"purpose", *[b"X: y"] * 3000]), b"batch"), GOOD_FILE), 400),
        (form((NAMED % b"purpose", b"batch"), GOOD_FILE, GOOD_FILE), 400),
        (form((b"X: y", b"batch"), GOOD_FILE), 400),
        (b"--b" * 20_000, 400),
        (b"\r\n" * 9000, 400),
        (b"--b\r\n" + b"x" * 70_000, 400),
    ],
    ids=[
        *("parts", "fields", "field", "header", "headers", "files", "nameless"),
        *("boundaries", "lines", "unended"),
    ],
)
def test_a_strange_form_is_refused_and_leaves_nothing(
    made: Made, visitor: Visitor, body: bytes, status: int
) -> None:
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = visitor.http.post("/v1/files", headers={**bearer(made), **kind}, content=body)
    assert answer.status_code == status, answer.text
    assert list(made.service.file_store.uploads.iterdir()) == []
    assert list(made.service.file_store.files.iterdir()) == []


def test_what_is_compressed_is_not_opened(made: Made, visitor: Visitor) -> None:
    """A few kilobytes that would be a hundred megabytes."""
    key, bomb = bearer(made), gzip.compress(b" " * (100 << 20), compresslevel=1)
    assert len(bomb) < 1 << 20
    for encoding in ("gzip", "deflate", "br", "zstd", "GZIP", "gzip, gzip", "identity, gzip"):
        head = {**key, "Content-Encoding": encoding}
        for path in ("/v1/batches", "/v1/files", "/sign-in"):
            answer = visitor.http.post(path, headers=head, content=bomb[:1000])
            assert answer.status_code == 415, (encoding, path)
            assert "must not be compressed" in answer.json()["error"]["message"]
    sent = {"file": ("x.jsonl.gz", bomb)}
    kept = visitor.http.post("/v1/files", headers=key, files=sent, data={"purpose": "batch"}).json()
    assert kept["bytes"] == len(bomb), "a file is kept as it was sent"
    batch_id = create(visitor, key, kept["id"]).json()["id"]
    made.reconciler.step_all()
    failed = visitor.get(f"/v1/batches/{batch_id}", headers=key).json()
    assert failed["status"] == "failed"


def test_a_row_of_a_hundred_megabytes_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "giant"
    with path.open("wb") as file:
        file.write(jsonl(line("a")))
        file.truncate(100 << 20)  # one line of zeros
        file.seek(0, 2)
        file.write(b"\n" + jsonl(line("b")))
    found = check_file(path, URL, {"small"}, 10)
    assert found is not None
    assert [(one["code"], one["line"]) for one in found.errors] == [("line_too_long", 2)]
    assert found.requests == 2
    assert MOST_LINE_BYTES < 100 << 20


@pytest.mark.pipeline
def test_a_null_character_is_no_error_of_a_postgresql_store(
    tmp_path: Path, postgres_url: str
) -> None:
    """Which takes none in a text."""
    more = {"database_url": postgres_url}
    with made_service(tmp_path / "serve-dir", MODELS, more_settings=more) as made:
        visitor, key = Visitor(made.service), bearer(made)
        body = form((NAMED % b"purpose", b"batch"), (NAMED % b'file"; filename="a\0b', b"{}\n"))
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        sent = visitor.http.post("/v1/files", headers={**key, **kind}, content=body)
        assert sent.status_code == 200, sent.text
        file_id = sent.json()["id"]
        assert "\0" not in sent.json()["filename"]
        made_batch = create(visitor, key, file_id, metadata={"a\0": "\0b"})
        assert made_batch.json()["metadata"] == {"a\0": "\0b"}
        made.reconciler.step_all()
        visitor.sign_in()
        for path in ("/jobs/%00", "/jobs/a%00/report", "/reviews/%00", "/rollouts/%00"):
            assert visitor.get(path).status_code == 404, path
        for path in ("/jobs?after=%00", "/jobs?state=%00", "/jobs/now?id=%00&newest=%00"):
            assert visitor.get(path).status_code == 200, path
        for path in ("/v1/files/%00", "/v1/batches/%00", "/v1/files?after=%00", "/v1/models/%00"):
            assert visitor.get(path, headers=key).status_code == 404, path


# --- the wire -------------------------------------------------------------------------------------
def ask(port: int, sent: bytes, ends: bool = False) -> bytes:
    """All that a server answers to these bytes until it closes. `ends`: the client is gone then."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(60)
        sock.sendall(sent)
        if ends:
            sock.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while chunk := sock.recv(1 << 16):
                found += chunk
        except ConnectionResetError:  # it has closed with bytes of ours unread
            pass
        return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_an_error_of_the_service_is_answered_with_the_headers_of_every_answer(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("swordfish")

    monkeypatch.setattr(type(made.service.store), "files", fails)
    asking = TestClient(make_app(made.service), raise_server_exceptions=False)
    answer = asking.get("/v1/files", headers=bearer(made))
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the service failed: its log says why"
    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS


def test_no_path_leads_out_of_the_service(served: Served) -> None:
    (Path(served.settings.workspace) / "serve" / "files" / "secret.jsonl").write_text("swordfish")
    head = f"\r\nHost: here\r\nAuthorization: Bearer {served.key()}\r\nConnection: close"
    up = "../" * 6
    for path in (
        *("/v1/files/../files/secret", "/v1/files/secret", "/v1/files/secret/content"),
        *("/v1/files/%2e%2e%2ffiles%2fsecret/content", "/v1/files/..%5c..%5csecret/content"),
        *(f"/static/{up}etc/passwd", "/static/..%2f..%2fserve%2fkeys.py", "/static/%2e%2e/app.py"),
        *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/page.css%00.html"),
        *(f"/v1/models/{up}etc/passwd", "/v1/models/%2e%2e/small", "/jobs/%2e%2e%2f%2e%2e/report"),
        *("http://evil.example/v1/files", "//evil.example/v1/files", "/v1\\files", "/v1/files%00"),
        *("/v1/files;x", "/V1/files", "/v1//files", "/./v1/files", "/v1/files/", "*", "/%ff%fe"),
        *("/v1/files/" + "a" * 60_000, "/v1/batches/" + "%00" * 300, "/reviews/%c0%ae%c0%ae"),
    ):
        answer = ask(served.port, f"GET {path} HTTP/1.1{head}\r\n\r\n".encode())
        assert status(answer) in (400, 401, 404), path
        assert b"swordfish" not in answer
        assert b"root:" not in answer
        assert b"import " not in answer


def test_a_request_that_can_be_read_in_two_ways_is_refused(served: Served) -> None:
    """None of them reaches a route, and what follows is not taken for another request."""
    key, other = served.key(), served.key("other")
    good = f"Host: here\r\nAuthorization: Bearer {key}"
    smuggled = f"GET /v1/models HTTP/1.1\r\n{good}\r\n\r\n"
    chunked = "Transfer-Encoding: chunked"
    for head, body in (
        (f"{good}\r\nAuthorization: Bearer {other}", ""),
        (f"{good}\r\nHost: evil.example", ""),
        (f"{good}\r\nIdempotency-Key: a\r\nIdempotency-Key: b", ""),
        (f"{good}\r\nContent-Type: a/b\r\nContent-Type: c/d", ""),
        (f"{good}\r\nContent-Length: 3\r\nContent-Length: 5", "{} \r\n"),
        (f"{good}\r\nContent-Length: 5\r\n{chunked}", f"0\r\n\r\n{smuggled}"),
        (f"{good}\r\n{chunked}\r\nContent-Length: 5", f"0\r\n\r\n{smuggled}"),
        (f"{good}\r\n{chunked}\r\n{chunked}", f"0\r\n\r\n{smuggled}"),
        (f"{good}\r\nTransfer-Encoding: identity, chunked", f"0\r\n\r\n{smuggled}"),
        (f"{good}\r\nTransfer-Encoding: xchunked", f"0\r\n\r\n{smuggled}"),
        (f"{good}\r\nTransfer-Encoding : chunked", f"0\r\n\r\n{smuggled}"),
        (f"{good}\r\nContent-Length: +5", smuggled),
        (f"{good}\r\nContent-Length: 0x5", smuggled),
        (f"{good}\r\nContent-Length: -1", smuggled),
        (f"{good}\r\nContent-Length: {'9' * 5000}", smuggled),
        (f"{good}\r\nX: a\0b", ""),
        (f"{good}\r\n X: folded\r\n\tand: more\0", ""),
        (f"{good}\r\nX: {'y' * 70_000}", ""),
        (good + "\r\nX: y" * 20_000, ""),
        (f"Authorization: Bearer {key}", ""),  # no Host
    ):
        sent = f"POST /v1/batches HTTP/1.1\r\n{head}\r\n\r\n{body}".encode()
        answer = ask(served.port, sent)
        assert 400 <= status(answer) < 500 or status(answer) == 501, head[:200]
        assert answer.count(b"HTTP/1.1 ") == 1, head[:200]
        assert b'"object"' not in answer
    assert served.client(key).batches.list().data == []


def test_a_body_of_another_length_than_was_said_makes_nothing(served: Served) -> None:
    key = served.key()
    body = orjson.dumps(
        {"input_file_id": NO_FILE, "endpoint": URL, "completion_window": "24h"}
    ).decode()
    head = f"POST /v1/batches HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\n"
    head += "Connection: close\r\n"
    long = f"{head}Content-Length: {len(body) + 10}\r\n\r\n{body}"
    assert status(ask(served.port, long.encode(), ends=True)) in (0, 400)
    short = ask(served.port, f"{head}Content-Length: {len(body) - 5}\r\n\r\n{body}".encode())
    assert status(short) == 400
    huge = f"POST /v1/files HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\n"
    huge += "Connection: close\r\n"
    huge += f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {10**15}\r\n\r\n"
    assert status(ask(served.port, huge.encode())) == 413
    assert served.client(key).files.list().data == []


@pytest.mark.parametrize(
    "sent",
    [
        *(b"", b"\r\n" * 1000, b"GET /\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", b"\0" * 9000),
        *(b"TRACE /v1/files HTTP/1.1\r\nHost: a\r\n\r\n", b"A" * 100_000),
        *(b"CONNECT evil.example:80 HTTP/1.1\r\nHost: a\r\n\r\n",),
        b"GET /jobs HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
)
def test_what_is_no_request_is_answered_or_closed(served: Served, sent: bytes) -> None:
    assert status(ask(served.port, sent, ends=True)) in (0, 400, 401, 404, 405, 431, 505)
    assert [one.id for one in served.client().models.list()] == ["small", "org/large"]


def test_an_address_that_a_client_made_up_is_not_counted(served: Served) -> None:
    """`X-Forwarded-For` counts as a proxy wrote it: what a client sent before it is not read."""
    close, told = "Host: a\r\nConnection: close\r\n", []
    page = ask(served.port, f"GET /sign-in HTTP/1.1\r\n{close}\r\n".encode()).decode()
    token = page.partition('name="csrf" value="')[2][:64]
    cookie = page.partition("set-cookie: ")[2].partition(";")[0]
    body = f"csrf={token}&key=x"
    for number in range(12):
        head = (
            f"POST /sign-in HTTP/1.1\r\n{close}Content-Type: {FORM}\r\nCookie: {cookie}\r\n"
            f"X-Forwarded-For: 10.0.0.{number}, 192.0.2.1\r\nContent-Length: {len(body)}\r\n"
        )
        told.append(status(ask(served.port, f"{head}\r\n{body}".encode())))
    assert told == [401] * 10 + [429] * 2
