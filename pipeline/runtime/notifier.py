"""Tells targets of jobs' ends: signed webhooks, Slack, e-mail, and OpenLineage (`lineage.py`).

The store keeps what is to be sent (`ledger/sql/notifications.py`). Each notification arrives at
least once: a sender that dies after sending leaves it to be sent again. All attempts carry the
same id, so receivers can leave out what they have. Webhooks are signed as Standard Webhooks ask
(https://www.standardwebhooks.com): HMAC-SHA256 of `id.timestamp.body`, in `webhook-signature`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import smtplib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from email.message import EmailMessage
from http.client import HTTPException, InvalidURL
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import orjson

from specbatch.pipeline.ledger.contract import Store
from specbatch.schemas.errors import JobNotFoundError, ObjectError, StoreError, first_line
from specbatch.schemas.notifications import SECRET_PREFIX, Due, Event, Target
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobRow
from specbatch.schemas.refusals import should_log

log = logging.getLogger(__name__)

INTERVAL_SEC = 2.0  # between two questions to the store
ANSWER_SEC = 10.0  # for a target to answer
TAKEN_SEC = 60.0  # after which another sender may send what this one took
MOST_ATTEMPTS = 20  # within about ten hours
_FIRST_RETRY_SEC, _MOST_RETRY_SEC = 5.0, 3600.0


def retry_sec(attempts: int) -> float | None:
    """Seconds to the next attempt after so many failed; None: it is given up."""
    if attempts >= MOST_ATTEMPTS:
        return None
    return min(_MOST_RETRY_SEC, _FIRST_RETRY_SEC * 2.0 ** (attempts - 1))


# --- what is said ---------------------------------------------------------------------------
def message_of(due: Due, job: JobRow, store: Store) -> dict[str, Any]:
    """The webhook's body: names and figures of the job, never a prompt or an output."""
    progress = store.progress(job.job_id)
    private = job.privacy is not PrivacyMode.FULL  # its errors may tell of its texts
    return {
        "id": due.event_id,
        "type": f"job.{due.event.value}",
        "at": datetime.fromtimestamp(due.at, UTC).isoformat(timespec="milliseconds"),
        "job_id": job.job_id,
        "name": job.name,
        "tenant": job.tenant,
        "state": job.state.value,
        "reason": None if private else (job.error or job.stop_reason),
        "rows_total": progress.rows_total,
        "rows_done": progress.rows_done,
        "rows_failed": progress.rows_failed,
        "cost_usd": round(progress.cost_usd, 6),
        "output_uri": job.output_uri,
    }


def sentence(said: Mapping[str, Any]) -> str:
    """The same in words, for people."""
    kind, _, happened = said["type"].partition(".")
    if kind == "schedule":
        when = f"{said['name']} ({said['kind']}, {said['logical_time']})"
        return f"specbatch schedule {when}: {happened}\n{said['reason']}"
    words = {
        Event.STARTED: "has started",
        Event.DONE: "is done",
        Event.PARTIAL: "is done in part",
        Event.FAILED: "failed",
        Event.CANCELLED: "was stopped, and what was finished is published",
        Event.STOPPED: "reached a limit and stops",
    }
    event = Event(happened)
    rows = f"{said['rows_done']:,} of {said['rows_total']:,} rows"
    rows += f", {said['rows_failed']:,} of them failed" if said["rows_failed"] else ""
    reason = f"\nreason: {said['reason']}" if said["reason"] else ""
    return (
        f"specbatch job {said['name']} ({said['job_id']}) {words[event]}: {rows}, "
        f"${said['cost_usd']:g}{reason}\noutput: {said['output_uri']}"
    )


# --- how it is sent -------------------------------------------------------------------------
class _NoRedirects(HTTPRedirectHandler):
    """A redirect would send the message to a place that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = build_opener(_NoRedirects)


def send(target: Target, said: Mapping[str, Any], now: float) -> None:
    """Send one message. Raises `ObjectError` that says what to look at, never the address."""
    if target.url:
        _post(target.url, *_signed(said, target.secret, now))
    elif target.slack:
        _post(target.slack, orjson.dumps({"text": _for_slack(sentence(said))}), {})
    else:
        _mail(target, said)


def _signed(
    said: Mapping[str, Any], secret: str | None, now: float
) -> tuple[bytes, dict[str, str]]:
    """The body and its headers."""
    body, event_id, at = orjson.dumps(said), str(said["id"]), str(int(now))
    headers = {"webhook-id": event_id, "webhook-timestamp": at}
    if secret is not None:
        headers["webhook-signature"] = signature(secret, event_id, at, body)
    return body, headers


def signature(secret: str, event_id: str, at: str, body: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    mac = hmac.new(key, b".".join((event_id.encode(), at.encode(), body)), hashlib.sha256)
    return "v1," + base64.b64encode(mac.digest()).decode()


def _for_slack(text: str) -> str:
    """Its three control characters, escaped: a name must not make a link or call a channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _post(url: str, body: bytes, headers: Mapping[str, str]) -> None:
    host = urlsplit(url).hostname
    try:
        asked = Request(url, data=body, headers={"Content-Type": "application/json", **headers})
        with _OPENER.open(asked, timeout=ANSWER_SEC):
            pass  # its status is all that counts, and what follows might never end
    except HTTPError as error:
        raise ObjectError(f"{host} refuses with HTTP status {error.code}") from None
    except (InvalidURL, UnicodeError):  # their words quote the address
        raise ObjectError(
            f"its address at {host} cannot be used: leave out a user name, and write what is not "
            "ASCII as %XX"
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        raise ObjectError(f"{host} does not answer: {first_line(error)}") from None


def _mail(target: Target, said: Mapping[str, Any]) -> None:
    assert target.smtp is not None
    server = urlsplit(target.smtp)
    mail = EmailMessage()
    kind, _, happened = said["type"].partition(".")
    mail["Subject"] = f"specbatch: {kind} {said['name']} {happened}"
    mail["From"], mail["To"] = target.sender, ", ".join(target.email)
    mail["Message-ID"] = f"<{said['id']}@specbatch>"
    mail.set_content(sentence(said))
    try:
        with _connected(server) as smtp:
            if server.username:
                smtp.login(unquote(server.username), unquote(server.password or ""))
            smtp.send_message(mail)
    except (OSError, smtplib.SMTPException, ValueError) as error:
        raise ObjectError(f"{server.hostname} takes no mail: {first_line(error)}") from None


@contextmanager
def _connected(server: SplitResult) -> Iterator[smtplib.SMTP]:
    """The mail server, by TLS with a certificate that is checked, if it has TLS. Raises
    `ObjectError` where a password would be sent without."""
    host = server.hostname or ""
    context = ssl.create_default_context()
    if server.scheme == "smtps":
        port = server.port or 465
        with smtplib.SMTP_SSL(host, port, timeout=ANSWER_SEC, context=context) as smtp:
            yield smtp
        return
    with smtplib.SMTP(host, server.port or 587, timeout=ANSWER_SEC) as smtp:
        smtp.ehlo_or_helo_if_needed()  # asks for its extensions
        if smtp.has_extn("starttls"):
            smtp.starttls(context=context)
        elif server.username and not _is_this_host(smtp):
            raise ObjectError(
                f"{host} offers no STARTTLS, so the password would be sent in the clear: use "
                "smtps://, or another server"
            )
        yield smtp


def _is_this_host(smtp: smtplib.SMTP) -> bool:
    assert smtp.sock is not None, "connected"
    return ip_address(smtp.sock.getpeername()[0]).is_loopback


# --- the thread -----------------------------------------------------------------------------
class Teller(Protocol):
    """A target that says in its own form what happened."""

    @property
    def events(self) -> Sequence[Event]: ...

    def tell(self, one: Due, job: JobRow, store: Store) -> None:
        """Send it. Raises `ObjectError` where that fails, and `StoreError`."""

    def close(self) -> None:
        """Send what still waits to be sent."""


class Notifier:
    """Sends what is due, in a thread of its own, and once more at its end."""

    def __init__(
        self,
        store: Store,
        targets: Mapping[str, Target | Teller],
        only_job: str | None = None,
        clock: Callable[[], float] = time.time,
        last_sec: float = 2 * ANSWER_SEC,
    ) -> None:
        """`only_job`: send notifications of no other job. `last_sec`: what `close` waits for."""
        self._last_sec = last_sec
        self._store = store
        self._targets = targets
        self._only_job = only_job
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """What ended just now is sent before."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(self._last_sec)

    def send_due(self) -> int:
        """Send what is due now; returns how many were sent. Raises `StoreError`."""
        sent = 0
        while due := self._store.due_notifications(self._targets, job_id=self._only_job):
            sent += sum(self._send(one) for one in due)  # what was not sent is put off
            if self._stop.is_set():
                break
        return sent

    def _send(self, one: Due) -> bool:
        target = self._targets[one.target]
        if one.event not in target.events:
            self._store.note_not_sent(one, "the target does not want this event", None)
            return False
        if not self._store.take_notification(one, TAKEN_SEC):
            return False  # another sender has it
        try:
            job = self._store.get_job(one.job_id)
        except JobNotFoundError:
            return False
        try:
            self._tell(target, one, job)
        except StoreError:
            raise
        except ObjectError as error:
            self._not_sent(one, str(error))
            return False
        except Exception as error:  # it must neither repeat for ever nor stop others
            log.exception("could not notify %s", one.target, extra={"job": one.job_id})
            self._not_sent(one, f"an unexpected {type(error).__name__}; see the sender's log")
            return False
        self._store.note_sent(one)
        words = "notified %s: job %s is %s"
        log.info(words, one.target, one.job_id, one.event.value, extra={"job": one.job_id})
        return True

    def _not_sent(self, one: Due, why: str) -> None:
        again = retry_sec(one.attempts + 1)
        self._store.note_not_sent(one, why, again)
        then = "it is given up" if again is None else f"the next attempt is in {again:g} s"
        log.warning(
            "could not notify %s that job %s is %s: %s; %s",
            *(one.target, one.job_id, one.event.value, why, then),
            extra={"job": one.job_id},
        )

    def _tell(self, target: Target | Teller, one: Due, job: JobRow) -> None:
        if isinstance(target, Target):
            send(target, message_of(one, job, self._store), self._clock())
        else:
            target.tell(one, job, self._store)

    def _run(self) -> None:
        while True:
            stopping = self._stop.wait(INTERVAL_SEC)
            try:
                self.send_due()
            except StoreError as error:
                if should_log(error):
                    log.warning("could not read what is to be notified; will retry: %s", error)
            except Exception:
                log.exception("could not notify; will retry")
            if stopping:
                for target in self._targets.values():
                    if not isinstance(target, Target):
                        target.close()
                return
