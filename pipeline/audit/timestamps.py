"""Time stamps of an RFC 3161 authority: a third party's proof that data existed at a time.

`rfc3161-client` makes requests and checks answers; this module sends them over HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specbatch.schemas.errors import MissingExtraError, ObjectError, UsageError, first_line
from specbatch.schemas.settings import Settings

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from rfc3161_client import TimeStampResponse

URL, ROOTS = "SPECBATCH_TIMESTAMP_URL", "SPECBATCH_TIMESTAMP_ROOTS"
_PATIENCE_SEC = 10.0
_MOST_BYTES = 1 << 20  # of an answer
# HTTP statuses after which the same may succeed later: a timeout, too many requests, the server's.
_PASSING, _OF_SERVER = (408, 429), 500


class Timestamps:
    """One authority, and the roots that verify its answers."""

    def __init__(self, url: str, roots: Sequence[Certificate]) -> None:
        self._url = url
        self._roots = roots

    @classmethod
    def of_settings(cls, settings: Settings) -> Timestamps | None:
        """None if the settings name no authority. Raises `UsageError` and `MissingExtraError`."""
        url, roots = settings.timestamp_url, settings.timestamp_roots
        if not (url or roots):
            return None
        if find_spec("rfc3161_client") is None:
            raise MissingExtraError(
                f"{URL} or {ROOTS} is set and rfc3161-client is not installed here: "
                "`pip install 'specbatch[anchored]'`"
            )
        if url and not url.startswith(("http://", "https://")):
            raise UsageError(f"{URL} must begin with http:// or https://, it is {url!r}")
        return cls(url, _certificates(roots) if roots else ())

    @property
    def asks(self) -> bool:
        """Whether there is an authority to ask."""
        return bool(self._url)

    @property
    def checks(self) -> bool:
        """Whether answers can be checked."""
        return bool(self._roots)

    def stamp(self, statement: bytes) -> bytes:
        """The authority's answer. Raises `ObjectError`."""
        from rfc3161_client import HashAlgorithm, TimestampRequestBuilder

        builder = TimestampRequestBuilder().data(statement)
        request = builder.hash_algorithm(HashAlgorithm.SHA256).build()
        asked = Request(
            self._url,
            data=request.as_bytes(),
            headers={"Content-Type": "application/timestamp-query"},
        )
        try:
            with urlopen(asked, timeout=_PATIENCE_SEC) as answer:
                stamp: bytes = answer.read(_MOST_BYTES)
        except HTTPError as error:  # it answers, and refuses
            raise ObjectError(
                f"the time stamp authority {self._url} refuses with HTTP status {error.code} "
                f"({error.reason}); see that {URL} names it and what it asks of its users",
                passing=error.code in _PASSING or error.code >= _OF_SERVER,
            ) from None
        except (OSError, HTTPException, ValueError) as error:
            raise ObjectError(
                f"the time stamp authority {self._url} does not answer: {first_line(error)}; see "
                f"that it runs and that {URL} names it",
                passing=True,
            ) from None
        wrong = self.check(stamp, statement) if self.checks else _refused(stamp)
        if isinstance(wrong, str):
            raise ObjectError(f"the time stamp authority {self._url} gave no time stamp: {wrong}")
        return stamp

    def check(self, stamp: bytes, statement: bytes) -> tuple[str, str] | str:
        """When and by whom the statement was stamped, or why the stamp is invalid."""
        from rfc3161_client import VerificationError, VerifierBuilder, decode_timestamp_response

        try:
            answer = decode_timestamp_response(stamp)
            VerifierBuilder(roots=list(self._roots)).build().verify_message(answer, statement)
        except (ValueError, TypeError, VerificationError) as error:
            return str(error) or type(error).__name__
        info = answer.tst_info
        when = info.gen_time.astimezone(UTC).isoformat(timespec="seconds")
        return when, _signer_of(answer)


def _signer_of(answer: TimeStampResponse) -> str:
    """The signer of a verified stamp, as its signature names the certificate."""
    from cryptography.x509 import load_der_x509_certificate

    signers = answer.signed_data.signer_infos
    named = {(signer.issuer, signer.serial_number) for signer in signers}
    for data in answer.signed_data.certificates:
        one = load_der_x509_certificate(data)
        if (one.issuer, one.serial_number) in named:
            return one.subject.rfc4514_string()
    # The answer does not carry the certificate itself, so it is among the roots.
    signed = [f"serial {number} of {issuer.rfc4514_string()}" for issuer, number in named]
    return "the certificate with " + " and ".join(signed)


def _refused(stamp: bytes) -> str | None:
    """Why an answer is invalid, as far as that shows without the authority's root."""
    from rfc3161_client import decode_timestamp_response
    from rfc3161_client.tsp import PKIStatus

    try:
        answer = decode_timestamp_response(stamp)
    except ValueError as error:
        return str(error)
    if PKIStatus(answer.status) is not PKIStatus.GRANTED:
        return "; ".join(answer.status_string) or PKIStatus(answer.status).name.lower()
    return None


def _certificates(path: str) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{ROOTS} names {path}, which cannot be read as PEM: {error}") from None
