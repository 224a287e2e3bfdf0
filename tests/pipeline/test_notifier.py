"""What targets are told and how: signatures, refusals, retries, mail. Real servers on this host."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator, Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from contracts.shorthand import commit, finish, ingest, verified
from ledger.builders import JOB, Clock, new_job

from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.runtime.notifier import (
    MOST_ATTEMPTS,
    TAKEN_SEC,
    Notifier,
    retry_sec,
    send,
    sentence,
)
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.notifications import TOLD, Event, Target, load_targets
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobState, Stage
from support.databases import sqlite_store
from support.tls import Certificates
from support.webhooks import Receiver, receiving

SECRET = "whsec_" + base64.b64encode(b"a key of enough bytes").decode()
SAID = {
    "id": "job-7", "type": "job.partial", "job_id": "job", "name": "nightly", "reason": None,
    "rows_done": 1200, "rows_total": 1200, "rows_failed": 3, "cost_usd": 1.5, "output_uri": "s3://b/o",
}  # fmt: skip


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> SqlStore:
    return sqlite_store(clock)


def done(store: SqlStore, targets: Sequence[str] = ("ops",)) -> None:
    ingest(store, groups=1, spec={**new_job().spec, "notify": list(targets)})
    commit(store, verified(store, 0))
    finish(store, JobState.DONE)


def test_a_webhook_gets_the_figures_under_an_id_and_a_signature(
    store: SqlStore, receiver: Receiver, clock: Clock
) -> None:
    done(store)
    notifier = Notifier(store, {"ops": Target(url=receiver.url, secret=SECRET)}, clock=clock)
    assert notifier.send_due() == 1
    assert notifier.send_due() == 0
    ((headers, body),) = receiver.got
    said = json.loads(body)
    assert said["type"] == "job.done"
    assert (said["job_id"], said["state"], said["name"]) == (JOB, "done", "nightly")
    assert (said["rows_done"], said["rows_total"], said["rows_failed"]) == (4, 4, 0)
    assert said["output_uri"] == "file:///out"
    assert headers["webhook-id"] == said["id"] == f"{JOB}-{store.log_head(JOB).number}"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    mac = hmac.new(b"a key of enough bytes", signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(mac).decode()
    assert abs(int(headers["webhook-timestamp"]) - clock()) <= 1


def test_a_target_without_a_secret_gets_no_signature(receiver: Receiver) -> None:
    send(Target(url=receiver.url), SAID, 5.0)
    ((headers, _),) = receiver.got
    assert "webhook-signature" not in headers
    assert headers["webhook-timestamp"] == "5"


def test_an_attempt_that_is_refused_is_made_again_with_the_same_id(
    store: SqlStore, receiver: Receiver, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    done(store)
    receiver.answers = [500, 503]
    notifier = Notifier(store, {"ops": Target(url=receiver.url)}, clock=clock)
    for attempts in (1, 2):
        assert notifier.send_due() == 0
        assert notifier.send_due() == 0, "it is not due yet"
        clock.advance(retry_sec(attempts) or 0.0)
    assert notifier.send_due() == 1
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert "127.0.0.1 refuses with HTTP status 500; the next attempt is in 5 s" in caplog.text
    (row,) = store.notifications_of(JOB)
    assert (row.attempts, row.error) == (3, None)


def test_a_sender_that_dies_after_sending_leaves_it_to_the_next(
    store: SqlStore, receiver: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(store)
    targets = {"ops": Target(url=receiver.url)}
    with monkeypatch.context() as patch:

        def dies(_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(store, "note_sent", dies)
        with pytest.raises(KeyboardInterrupt):
            Notifier(store, targets, clock=clock).send_due()
    other = Notifier(store, targets, clock=clock)
    assert other.send_due() == 0
    clock.advance(TAKEN_SEC)
    assert other.send_due() == 1
    first, second = receiver.got
    assert first[0]["webhook-id"] == second[0]["webhook-id"]
    assert json.loads(first[1]) == json.loads(second[1])


@pytest.mark.parametrize(
    ("status", "why"), [(302, "HTTP status 302"), (404, "status 404"), (307, "status 307")]
)
def test_a_redirect_is_not_followed(receiver: Receiver, status: int, why: str) -> None:
    receiver.answers = [status]
    with pytest.raises(ObjectError, match=why):
        send(Target(url=receiver.url), SAID, 0.0)
    assert len(receiver.got) == 1


def test_an_answer_that_never_ends_holds_nobody_up(receiver: Receiver) -> None:
    told = threading.Event()
    receiver.answers, receiver.after = [200], told.wait
    send(Target(url=receiver.url), SAID, 0.0)
    assert not told.is_set()
    told.set()


def test_an_error_names_the_host_and_not_the_address_which_may_be_a_secret() -> None:
    with pytest.raises(ObjectError) as found:
        send(Target(slack="http://127.0.0.1:9/services/T0/B0/secret"), SAID, 0.0)
    assert "127.0.0.1 does not answer" in str(found.value)
    assert "secret" not in str(found.value)


@pytest.mark.parametrize("url", ["https://u:secret@127.0.0.1/", "http://127.0.0.1:9/secr\u00e9t"])
def test_an_address_that_cannot_be_used_is_not_quoted(url: str) -> None:
    with pytest.raises(ObjectError, match=r"its address at 127\.0\.0\.1 cannot be used") as found:
        send(Target(slack=url), SAID, 0.0)
    assert "secr" not in str(found.value)


class Faulty:
    """A target with a bug."""

    events = tuple(Event)

    def tell(self, *_: object) -> None:
        raise KeyError("secret")

    def close(self) -> None: ...


def test_a_fault_of_a_sender_counts_as_an_attempt_and_others_are_told(
    store: SqlStore, receiver: Receiver, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    done(store, ["faulty", "ops"])
    notifier = Notifier(store, {"faulty": Faulty(), "ops": Target(url=receiver.url)}, clock=clock)
    assert notifier.send_due() == 1
    row = next(one for one in store.notifications_of(JOB) if one.target == "faulty")
    assert (row.attempts, row.error) == (1, "an unexpected KeyError; see the sender's log")
    assert row.due_at == clock() + (retry_sec(1) or 0.0)
    assert "faulty that job" in caplog.text


def test_slack_gets_words_without_control_characters(receiver: Receiver) -> None:
    send(Target(slack=receiver.url), {**SAID, "name": "<!channel> & co"}, 0.0)
    text = json.loads(receiver.got[0][1])["text"]
    assert "&lt;!channel&gt; &amp; co" in text
    assert "1,200 of 1,200 rows, 3 of them failed, $1.5" in text
    assert "output: s3://b/o" in text


@pytest.mark.parametrize("event", Event)
def test_every_event_has_words(event: Event) -> None:
    assert sentence({**SAID, "type": f"job.{event}", "reason": "why"}).count("\n") == 2


def test_events_that_a_target_does_not_want_are_not_sent(
    store: SqlStore, receiver: Receiver, clock: Clock
) -> None:
    done(store)
    targets = {"ops": Target(url=receiver.url, events=(Event.FAILED,))}
    assert Notifier(store, targets, clock=clock).send_due() == 0
    assert receiver.got == []
    (row,) = store.notifications_of(JOB)
    assert (row.due_at, row.sent_at) == (None, None)


def test_of_a_private_job_no_reason_leaves_the_store(
    store: SqlStore, receiver: Receiver, clock: Clock
) -> None:
    for name, privacy in (("open", PrivacyMode.FULL), ("private", PrivacyMode.REDACTED)):
        store.create_job(new_job(name, spec={"notify": ["ops"]}, privacy=privacy))
        work = store.claim_job(name, Stage.INGEST, "i", 60.0)
        assert work is not None
        store.fail_job(work.lease, "anna's row")
    assert Notifier(store, {"ops": Target(url=receiver.url)}, clock=clock).send_due() == 2
    reasons = {json.loads(b)["job_id"]: json.loads(b)["reason"] for _, b in receiver.got}
    assert reasons == {"open": "anna's row", "private": None}


def test_all_that_is_due_is_sent_however_much(
    store: SqlStore, receiver: Receiver, clock: Clock
) -> None:
    for number in range(20):
        store.create_job(new_job(f"job{number}", spec={"notify": ["ops"]}))
        work = store.claim_job(f"job{number}", Stage.INGEST, "i", 60.0)
        assert work is not None
        store.fail_job(work.lease, "its input is gone")
    receiver.answers = [500] * 8  # as many as are asked for at once
    assert Notifier(store, {"ops": Target(url=receiver.url)}, clock=clock).send_due() == 12


def test_a_local_job_sends_its_own_alone(store: SqlStore, receiver: Receiver, clock: Clock) -> None:
    done(store)
    targets = {"ops": Target(url=receiver.url)}
    assert Notifier(store, targets, only_job="another", clock=clock).send_due() == 0
    assert Notifier(store, targets, only_job=JOB, clock=clock).send_due() == 1


def test_the_thread_sends_what_is_due_before_it_ends(
    store: SqlStore, receiver: Receiver, clock: Clock
) -> None:
    notifier = Notifier(store, {"ops": Target(url=receiver.url)}, clock=clock)
    notifier.start()
    done(store)
    notifier.close()
    assert len(receiver.got) == 1


def test_retries_come_later_and_later_and_end() -> None:
    waits = [retry_sec(attempts) for attempts in range(1, MOST_ATTEMPTS + 1)]
    *times, last = waits
    assert last is None
    known = [one for one in times if one is not None]
    assert known == sorted(known)
    assert (known[0], known[-1]) == (5.0, 3600.0)
    assert 8 * 3600 < sum(known) < 14 * 3600


# --- mail -----------------------------------------------------------------------------------
class _Smtp(socketserver.StreamRequestHandler):
    """As much of RFC 5321 as one mail needs, with the extensions that the server is to have."""

    def handle(self) -> None:
        server: Any = self.server
        self._in_tls = server.tls is not None and server.tls_first
        with contextlib.suppress(OSError):  # the client does not trust the certificate
            if self._in_tls:
                self._start_tls()
            self._say("220 here")
            while line := self.rfile.readline().decode().strip():
                server.lines.append(line)
                self._answer(line.split()[0].upper())

    def _answer(self, verb: str) -> None:
        server: Any = self.server
        if verb == "EHLO":
            tls_offered = server.tls is not None and not self._in_tls
            self._say("250-here\r\n" + "250-STARTTLS\r\n" * tls_offered + "250 AUTH PLAIN")
        elif verb == "STARTTLS" and server.tls is not None:
            self._say("220 go on")
            self._start_tls()
        elif verb == "AUTH":
            server.passwords_in_tls.append(self._in_tls)
            self._say("235 welcome")
        elif verb == "DATA":
            self._say("354 go on")
            data = b""
            while (part := self.rfile.readline()) != b".\r\n":
                data += part
            server.mails.append(data)
            self._say("250 ok")
        elif verb == "RCPT" and server.refuses:
            self._say("550 nobody of that name")
        else:
            self._say("221 bye" if verb == "QUIT" else "250 ok")

    def _start_tls(self) -> None:
        server: Any = self.server
        self.connection = server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self._in_tls = True

    def _say(self, line: str) -> None:
        self.wfile.write(f"{line}\r\n".encode())


@pytest.fixture
def smtp() -> Iterator[Any]:
    server: Any = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Smtp)
    server.mails, server.lines, server.passwords_in_tls = [], [], []
    server.refuses, server.tls, server.tls_first = False, None, False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def certificates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Certificates]:
    """Of servers here; their authority is trusted."""
    with Certificates.made() as made:
        monkeypatch.setenv("SSL_CERT_FILE", str(made.ca))
        yield made


def give_tls(server: Any, certificates: Certificates) -> None:
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(certificates.server, certificates.key)


def mail_target(server: Any, scheme: str = "smtp", user: str = "") -> Target:
    url = f"{scheme}://{user}127.0.0.1:{server.server_address[1]}"
    return Target(email=("a@example.org", "b@example.org"), smtp=url, sender="s@example.org")


def test_a_mail_says_in_words_what_happened(smtp: Any) -> None:
    send(mail_target(smtp), SAID, 0.0)
    mail = message_from_bytes(smtp.mails[0])
    assert mail["Subject"] == "specbatch: job nightly partial"
    assert mail["To"] == "a@example.org, b@example.org"
    assert mail["Message-ID"] == "<job-7@specbatch>"
    assert "is done in part: 1,200 of 1,200 rows" in mail.get_payload()
    assert sum(line.upper().startswith("RCPT") for line in smtp.lines) == 2


def test_a_mail_server_that_refuses_is_named(smtp: Any) -> None:
    smtp.refuses = True
    with pytest.raises(ObjectError, match="takes no mail"):
        send(mail_target(smtp), SAID, 0.0)


@pytest.mark.parametrize("scheme", ["smtp", "smtps"])
def test_a_password_is_sent_within_tls_where_the_server_has_it(
    smtp: Any, certificates: Certificates, scheme: str
) -> None:
    give_tls(smtp, certificates)
    smtp.tls_first = scheme == "smtps"
    send(mail_target(smtp, scheme, "user:secret@"), SAID, 0.0)
    assert smtp.passwords_in_tls == [True]
    assert len(smtp.mails) == 1


@pytest.mark.parametrize("scheme", ["smtp", "smtps"])
def test_a_mail_server_that_nobody_vouches_for_gets_no_password(
    smtp: Any, certificates: Certificates, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_tls(smtp, certificates)
    smtp.tls_first = scheme == "smtps"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.other_ca))
    with pytest.raises(ObjectError, match="certificate verify failed"):
        send(mail_target(smtp, scheme, "user:secret@"), SAID, 0.0)
    assert smtp.passwords_in_tls == []


def test_without_tls_only_this_host_gets_a_password(
    smtp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(mail_target(smtp, user="user:secret@"), SAID, 0.0)
    assert smtp.passwords_in_tls == [False]
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("192.0.2.1", 25))
    with pytest.raises(ObjectError, match=r"127\.0\.0\.1 offers no STARTTLS.*use smtps://"):
        send(mail_target(smtp, user="user:secret@"), SAID, 0.0)
    assert smtp.passwords_in_tls == [False]
    send(mail_target(smtp), SAID, 0.0)  # no password, nothing to hide
    assert len(smtp.mails) == 2


# --- the file of targets --------------------------------------------------------------------
def test_targets_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "notify.yaml"
    path.write_text(
        f"ops: {{url: https://example.org/hook, secret: {SECRET}, events: [failed, stopped]}}\n"
        "team: {slack: https://hooks.slack.com/services/T/B/x}\n"
        "mail: {email: [a@b.org], smtp: smtps://u:p@mail.b.org, sender: s@b.org}\n"
    )
    targets = load_targets(str(path))
    assert {name: target.kind for name, target in targets.items()} == {
        "ops": "webhook", "team": "slack", "mail": "email",
    }  # fmt: skip
    assert targets["ops"].events == (Event.FAILED, Event.STOPPED)
    assert targets["team"].events == TOLD


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- ops", "must map names to targets"),
        ("ops: {", "is not YAML"),
        ("ops: {}", "target ops of .*: name exactly one of url, slack and email"),
        ("ops: {url: https://a, slack: https://b}", "name exactly one"),
        ("ops: {url: ftp://a}", "field `url`"),
        ("ops: {url: https://a, secret: short}", "field `secret`"),
        ("ops: {url: https://a, secret: whsec_AAAAAAAAAAAAAAAAA}", "whsec_ and base64"),
        ("ops: {email: [a b], smtp: smtps://h, sender: a@b}", "field `email.0`"),
        ("ops: {slack: https://a, secret: whsec_AAAAAAAAAAAAAAAA}", "only webhooks are signed"),
        ("ops: {email: [a@b]}", "email needs smtp and sender"),
        ("ops: {url: https://a, events: [ended]}", "field `events.0`"),
        ("ops: {url: https://a, events: [started]}", "leave started out of events"),
        ("ops: {uri: https://a}", "did you mean `url`"),
        ("ops: 3", "target ops"),
        ("ops: {url: 'https://[bad'}", "field `url`: must name a host"),
        ("ops: {slack: 'https://:80/x'}", "field `slack`: must name a host"),
        ("ops: {email: [a@b], smtp: 'smtp://mail:25l', sender: a@b}", "`smtp`: .*port in digits"),
        ("ops: {email: [a@b], smtp: 'smtp://u:p/w@mail', sender: a@b}", "write / .* as %2F"),
        ("ops: {email: [a@b], smtp: 'smtp://u:%C3%A9@mail', sender: a@b}", "`smtp`: .*of ASCII"),
        ("ops: 2026-02-30", "is not YAML"),
    ],
)
def test_a_wrong_file_is_named_with_the_entry(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "notify.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=why):
        load_targets(str(path))


def test_no_message_about_a_file_shows_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "notify.yaml"
    for entry in (
        "{url: ftp://hidden, secret: hidden, smtp: hidden}",
        "{email: [a@b], smtp: 'smtp://u:hidden/hidden@mail', sender: a@b}",
        "{email: [a@b], smtp: 'smtp://u:hidden%C3%A9@mail', sender: a@b}",
    ):
        path.write_text(f"ops: {entry}\n")
        with pytest.raises(UsageError) as found:
            load_targets(str(path))
        assert "hidden" not in str(found.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which cannot be read"):
        load_targets(str(tmp_path / "none.yaml"))
