"""The most likely tokens at every token of a completion, where the request asked for them.

Revision 0002. Completions from before have NULL: nobody asked.
"""

from alembic import op

from specbatch.migrations.shared import drop_columns, top_logprobs

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("completions") as table:
        for column in top_logprobs():
            table.add_column(column)


def downgrade() -> None:
    drop_columns("completions", ("top_logprobs", "top_token_ids"))
