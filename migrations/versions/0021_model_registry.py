"""The model registry: models by their fingerprints, and which of them drafts for whom.

Revision 0021. Taking it back loses both; workers then draft with what they were started with.
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_table(
        "models",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("fingerprint", "name")),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("parent", sa.Text(), nullable=True),
        sa.Column("origin", sa.JSON(), nullable=False),
        sa.Column("added_at", sa.Double(), nullable=False),
        sa.Column("added_by", sa.Text(), nullable=False),
        sa.Column("retired_at", sa.Double(), nullable=True),
        sa.Column("retired_by", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_models"),
    )
    op.create_index("uq_models_name_version", "models", ["name", "version"], unique=True)
    op.create_table(
        "deployments",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("fingerprint", "tenant", "job_name", "tag")
        ),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("started_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("restores", sa.BigInteger(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("ended_by", sa.Text(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_deployments"),
        sa.ForeignKeyConstraint(
            ["fingerprint"], ["models.fingerprint"], name="fk_deployments_fingerprint_models"
        ),
    )
    live = sa.text("ended_at IS NULL")
    op.create_index(
        "uq_deployments_live",
        "deployments",
        ["tenant", "job_name", "tag"],
        unique=True,
        sqlite_where=live,
        postgresql_where=live,
    )


def downgrade() -> None:
    op.drop_table("deployments")
    op.drop_table("models")
