"""Trials of draft models with verifiers, rollouts, and what groups showed of each.

Revision 0023. Taking it back loses them; the models that are deployed stay.
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "rollouts",
        sa.Column("id", number, nullable=False),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("fingerprint", "tenant", "job_name", "tag", "present")
        ),
        sa.Column("steps", sa.JSON(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("started_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("better", sa.Double(), nullable=False),
        sa.Column("worse", sa.Double(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("ended_by", sa.Text(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_rollouts"),
        sa.ForeignKeyConstraint(
            ["fingerprint"], ["models.fingerprint"], name="fk_rollouts_fingerprint_models"
        ),
    )
    live = sa.text("ended_at IS NULL")
    op.create_index(
        "uq_rollouts_live",
        "rollouts",
        ["tenant", "job_name", "tag"],
        unique=True,
        sqlite_where=live,
        postgresql_where=live,
    )
    op.create_table(
        "rollout_groups",
        sa.Column("id", number, nullable=False),
        sa.Column("rollout_id", number, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("is_candidate", sa.Boolean(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.Double(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("accepted", "shadow_drafts", "shadow_candidate", "shadow_serving")
        ),
        sa.PrimaryKeyConstraint("id", name="pk_rollout_groups"),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.id"], name="fk_rollout_groups_rollout_id_rollouts"
        ),
    )
    op.create_index(
        "uq_rollout_groups_group",
        "rollout_groups",
        ["rollout_id", "job_id", "group_index"],
        unique=True,
    )
    op.create_table(
        "pair_trials",
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("verifier", "proposer", "numeric_class")
        ),
        sa.Column("pays", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("tried_at", sa.Double(), nullable=False),
        sa.Column("tried_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("verifier", "proposer", "numeric_class", name="pk_pair_trials"),
    )


def downgrade() -> None:
    op.drop_table("pair_trials")
    op.drop_table("rollout_groups")
    op.drop_table("rollouts")
