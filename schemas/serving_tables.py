"""Tables of `specbatch serve`: files, batches, API keys. Their rows outlive jobs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, LargeBinary, text
from sqlalchemy.orm import Mapped, mapped_column

from specbatch.schemas.tables import Base
from specbatch.schemas.text_columns import SHOWN_WITHOUT_KEY, AnyText, EncryptedText


class ServedFile(Base):
    """A file that was uploaded, or made of a job's output. The row is written last."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_tenant", "tenant", "file_id"),)

    file_id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    purpose: Mapped[str]
    filename: Mapped[str] = mapped_column(EncryptedText("files.filename", SHOWN_WITHOUT_KEY))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    service_id: Mapped[str]  # in whose folder its bytes are
    created_at: Mapped[float]


class Batch(Base):
    """A batch; everything about its rows is its job's."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_tenant", "tenant", "batch_id"),
        Index("uq_batches_key", "tenant", "idempotency_key", unique=True),
        Index(
            "ix_batches_open",
            "service_id",
            "batch_id",
            sqlite_where=text("phase <> 'ended'"),
            postgresql_where=text("phase <> 'ended'"),
        ),
        Index(
            "ix_batches_tenant_open",
            "tenant",
            sqlite_where=text("phase <> 'ended'"),
            postgresql_where=text("phase <> 'ended'"),
        ),
    )

    batch_id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    endpoint: Mapped[str]
    input_file_id: Mapped[str]  # no foreign key: the file may be deleted once the batch has ended
    completion_window: Mapped[str]
    idempotency_key: Mapped[str | None] = mapped_column(AnyText)
    digest: Mapped[str]
    service_id: Mapped[str]  # which does it: no other one looks at it
    client_metadata: Mapped[str | None] = mapped_column(  # JSON
        EncryptedText("batches.client_metadata", "")
    )
    phase: Mapped[str]
    model: Mapped[str | None]
    job_id: Mapped[str | None]
    waits_because: Mapped[str | None] = mapped_column(
        EncryptedText("batches.waits_because", SHOWN_WITHOUT_KEY)
    )
    status: Mapped[str | None]
    errors: Mapped[str | None] = mapped_column(EncryptedText("batches.errors", ""))  # JSON
    requests: Mapped[int] = mapped_column(BigInteger)
    completed: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    output_file_id: Mapped[str | None]
    error_file_id: Mapped[str | None]
    created_at: Mapped[float]
    expires_at: Mapped[float]
    in_progress_at: Mapped[float | None]
    cancelling_at: Mapped[float | None]
    finalizing_at: Mapped[float | None]
    ended_at: Mapped[float | None]


class ApiKey(Base):
    """An API key: whose it is, what it allows, and the hash of its secret."""

    __tablename__ = "api_keys"

    key_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(AnyText)
    tenant: Mapped[str]
    scopes: Mapped[str]  # separated by commas
    digest: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
