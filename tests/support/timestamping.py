"""A private RFC 3161 authority: `openssl ts` behind a small HTTP server on a free port."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CONFIG = """
[tsa]
default_tsa = here
[here]
serial = {folder}/serial
signer_cert = {folder}/tsa.pem
signer_key = {folder}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha384, sha512
ess_cert_id_alg = sha256
"""


class Authority:
    """Stamps what it is asked for while its `status` is 200; None: what it sends is no HTTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.roots = folder / "root.pem"
        self.url = ""
        self.status: int | None = 200
        self.asked = 0
        (folder / "serial").write_text("01\n")
        (folder / "tsa.cnf").write_text(_CONFIG.format(folder=folder))
        root, root_key = _certificate("root of time", None, None)
        tsa, tsa_key = _certificate("time stamps", root, root_key)
        self.roots.write_bytes(root.public_bytes(serialization.Encoding.PEM))
        (folder / "tsa.pem").write_bytes(tsa.public_bytes(serialization.Encoding.PEM))
        (folder / "tsa.key").write_bytes(
            tsa_key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    def stamp(self, query: bytes) -> bytes:
        self.asked += 1
        asked, answer = self.folder / f"{self.asked}.tsq", self.folder / f"{self.asked}.tsr"
        asked.write_bytes(query)
        config = ("-config", str(self.folder / "tsa.cnf"))
        call = ("openssl", "ts", "-reply", "-queryfile", str(asked), "-out", str(answer), *config)
        subprocess.run(call, check=True, capture_output=True)
        return answer.read_bytes()


@contextmanager
def authority(folder: Path) -> Iterator[Authority]:
    """One that answers at its `url`."""
    made = Authority(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = self.rfile.read(int(self.headers["Content-Length"]))
            if made.status is None:
                self.wfile.write(b"this is no HTTP\r\n\r\n")
                return
            if made.status != HTTPStatus.OK:
                self.send_error(made.status)
                return
            answer = made.stamp(query)
            self.send_response(200)
            self.send_header("Content-Type", "application/timestamp-reply")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Not among the tests' output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _certificate(
    name: str, issuer: x509.Certificate | None, issuer_key: rsa.RSAPrivateKey | None
) -> tuple[x509.Certificate, rsa.RSAPrivateKey]:
    """A root, or a certificate for time stamps that one has signed."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if issuer_key is not None:
        stamps = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
        builder = builder.add_extension(stamps, critical=True)
    return builder.sign(issuer_key or key, hashes.SHA256()), key
