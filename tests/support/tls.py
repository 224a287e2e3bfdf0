"""Servers that only speak TLS and ask for passwords, with certificates made for the test run.

with Certificates.made() as certificates, TlsRedis(certificates) as redis:
    redis.url         # rediss://worker:…@127.0.0.1:41001/0?ssl_ca_certs=…
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import selectors
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from support.rabbit import PrivateRabbit
from support.servers import PrivatePostgres, PrivateRedis, find_binary, free_port

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Certificates:
    """Files: an authority, a certificate of 127.0.0.1 signed by it, and another authority."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def other_ca(self) -> Path:
        return self.folder / "other-ca.pem"

    @property
    def server(self) -> Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Certificates]:
        with tempfile.TemporaryDirectory(prefix="specbatch-tls-") as name:
            made = cls(Path(name))
            made.folder.chmod(0o755)  # servers run as other users
            ca_key, ca = _authority("tests of specbatch")
            _, other = _authority("nobody")
            key, certificate = _signed(HOST, ca_key, ca)
            made.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
            made.other_ca.write_bytes(other.public_bytes(serialization.Encoding.PEM))
            made.server.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
            made.key.write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
            )
            yield made


def _authority(name: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, name, key).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = builder.add_extension(usage, critical=True)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return key, builder.add_extension(own, critical=False).sign(key, hashes.SHA256())


def _signed(
    host: str, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = ca.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    names = [x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName("localhost")]
    builder = (
        _builder(host, str(issuer), key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
            critical=False,
        )
    )
    return key, builder.sign(ca_key, hashes.SHA256())


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
    )


class TlsRedis(PrivateRedis):
    """Redis without its plain port, for one ACL user."""

    user: ClassVar[str] = "worker"

    def __init__(self, certificates: Certificates, password: str) -> None:
        super().__init__()
        self.certificates = certificates
        self.password = password

    def url_of(self, database: int) -> str:
        secret = quote(self.password, safe="")
        options = f"ssl_ca_certs={self.certificates.ca}"
        return f"rediss://{self.user}:{secret}@{HOST}:{self.port}/{database}?{options}"

    def command(self) -> list[str]:
        config = {
            "port": "0",
            "tls-port": str(self.port),
            "tls-cert-file": str(self.certificates.server),
            "tls-key-file": str(self.certificates.key),
            "tls-ca-cert-file": str(self.certificates.ca),
            "tls-auth-clients": "no",
            "bind": HOST,
            "dir": str(self.folder),
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "no",
        }
        lines = [f"{name} {value}" for name, value in config.items()]
        # What the page about security allows: all data, nothing that looks at or stops the server.
        rights = "~* &* +@all -@admin -@dangerous"
        lines += ["user default off", f"user {self.user} on >{self.password} {rights}"]
        path = self.folder / "redis.conf"  # a file: arguments are for everybody to see
        path.write_text("\n".join(lines) + "\n")
        return [find_binary("redis-server", package="redis-server"), str(path)]

    def talk(self, *commands: str) -> str:
        context = ssl.create_default_context(cafile=str(self.certificates.ca))
        line = ""
        with (
            socket.create_connection((HOST, self.port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=HOST) as connection,
        ):
            stream = connection.makefile("rw", newline="\r\n")
            for command in (f"AUTH {self.user} {self.password}", *commands):
                stream.write(command + "\r\n")
                stream.flush()
                line = stream.readline().strip()
        return line


class TlsPostgres(PrivatePostgres):
    """PostgreSQL that refuses connections without TLS, and logins without their password."""

    login: ClassVar[str] = "nightly"

    def __init__(self, certificates: Certificates, password: str) -> None:
        super().__init__()
        self.certificates = certificates
        self.password = password

    @property
    def url(self) -> str:
        return f"{super().url}?sslmode=require"

    def url_for(self, database: str) -> str:
        """The URL of the login that has a password."""
        secret = quote(self.password, safe="")
        options = f"sslmode=verify-full&sslrootcert={self.certificates.ca}"
        return f"postgresql://{self.login}:{secret}@{HOST}:{self.port}/{database}?{options}"

    def prepare(self) -> None:
        super().prepare()
        for source, name in ((self.certificates.server, "server.pem"),
                             (self.certificates.key, "server.key")):  # fmt: skip
            target = self.folder / name
            shutil.copy(source, target)
            target.chmod(0o600)
            if user := self.run_as():
                shutil.chown(target, user)
        rules = [
            f"hostssl all {self.user} {HOST}/32 trust",
            f"hostssl all all {HOST}/32 scram-sha-256",
        ]
        (self.folder / "data" / "pg_hba.conf").write_text("\n".join(rules) + "\n")

    def command(self) -> list[str]:
        files = {
            "ssl": "on",
            "ssl_cert_file": str(self.folder / "server.pem"),
            "ssl_key_file": str(self.folder / "server.key"),
        }
        return [
            *super().command(),
            *(word for key, value in files.items() for word in ("-c", f"{key}={value}")),
        ]

    def create_login(self, database: str = "nightly") -> str:
        """A database that belongs to the login with a password; its URL."""
        import psycopg
        from psycopg import sql

        with psycopg.connect(self.url, autocommit=True) as connection:
            create = sql.SQL("CREATE ROLE {} LOGIN CREATEROLE PASSWORD {}")
            connection.execute(
                create.format(sql.Identifier(self.login), sql.Literal(self.password))
            )
            connection.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(
                    sql.Identifier(database), sql.Identifier(self.login)
                )
            )
        return self.url_for(database)


class TlsRabbit(PrivateRabbit):
    """RabbitMQ with a port for TLS beside the plain one, and a user with a password."""

    user: ClassVar[str] = "worker"

    def __init__(self, certificates: Certificates, password: str) -> None:
        super().__init__()
        self.certificates = certificates
        self.password = password
        self.tls_port = 0

    @property
    def tls_url(self) -> str:
        secret = quote(self.password, safe="")
        return (
            f"amqps://{self.user}:{secret}@{HOST}:{self.tls_port}//"
            f"?ssl_ca_certs={self.certificates.ca}"
        )

    def prepare(self) -> None:
        super().prepare()
        self.tls_port = free_port()
        config = {
            "listeners.ssl.1": f"{HOST}:{self.tls_port}",
            "ssl_options.cacertfile": self.certificates.ca,
            "ssl_options.certfile": self.certificates.server,
            "ssl_options.keyfile": self.certificates.key,
            "ssl_options.verify": "verify_none",
            "ssl_options.fail_if_no_peer_cert": "false",
        }
        lines = (f"{name} = {value}" for name, value in config.items())
        (self.folder / "tls.conf").write_text("\n".join(lines) + "\n")

    def environment(self) -> dict[str, str]:
        return super().environment() | {"RABBITMQ_CONFIG_FILE": str(self.folder / "tls.conf")}

    def create_user(self) -> str:
        """The user with a password; the URL for it."""
        self.control("add_user", self.user, self.password)
        self.control("set_permissions", "-p", "/", self.user, ".*", ".*", ".*")
        return self.tls_url


class TlsFront:
    """Takes TLS connections and passes their bytes on to a server that speaks none."""

    def __init__(self, certificates: Certificates, port: int) -> None:
        self._target = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.server, certificates.key)
        self._listener = socket.create_server((HOST, 0))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="tls-front", daemon=True)

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(plain)
            client = stack.enter_context(self._context.wrap_socket(plain, server_side=True))
            server = stack.enter_context(socket.create_connection((HOST, self._target)))
            ends = selectors.DefaultSelector()
            ends.register(client, selectors.EVENT_READ, server)
            ends.register(server, selectors.EVENT_READ, client)
            while not self._closing.is_set():
                for key, _ in ends.select(0.2):
                    source, target = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    data = source.recv(1 << 16)
                    if isinstance(source, ssl.SSLSocket):
                        while source.pending():
                            data += source.recv(1 << 16)
                    if not data:
                        return
                    target.sendall(data)
