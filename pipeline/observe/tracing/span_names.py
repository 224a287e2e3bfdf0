"""All spans, events and attributes by name. A test holds the documentation to this list.

Names are OpenTelemetry's where it has one. Values are ids, counts, seconds and words of ours: no
prompt, no output, no row id, no tag, no message of an error.
"""

from __future__ import annotations

# --- spans: those of attempts have their stage's name --------------------------------------------
SUBMIT = "submit"
REQUEST = "request"  # one sampled request in one stage

# --- events ---------------------------------------------------------------------------------------
STOPPED = "job stopped"  # it was cancelled, or exceeded its deadline or budget
LEASE_LOST = "lease lost"
SPLIT = "split"  # the group's last rows went to an idle worker
EVENTS = (STOPPED, LEASE_LOST, SPLIT)

# --- attributes -----------------------------------------------------------------------------------
JOB = "specbatch.job.id"
JOB_NAME = "specbatch.job.name"
TENANT = "specbatch.tenant"
CREATED = "specbatch.job.created"
PRIORITY = "specbatch.job.priority"
PRIVACY = "specbatch.privacy"
GROUP = "specbatch.group.index"
GENERATION = "specbatch.generation"
ATTEMPT = "specbatch.attempt"
WORKER = "specbatch.worker"
SAMPLED = "specbatch.sampled"
OUTCOME = "specbatch.outcome"
QUEUE_SEC = "specbatch.queue_sec"
COMPUTE_SEC = "specbatch.compute_sec"
COST_USD = "specbatch.cost_usd"
ROWS = "specbatch.rows"
FAILED = "specbatch.rows.failed"
SPLIT_INDEX = "specbatch.split.group.index"
REQUEST_ID = "specbatch.request.id"
PROPOSED = "specbatch.tokens.proposed"
ACCEPTED = "specbatch.tokens.accepted"
DRAFTED = "specbatch.tokens.drafted"
PASSES = "specbatch.verifier.passes"

ERROR_TYPE = "error.type"
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_OPERATION = "messaging.operation.name"
MESSAGING_TYPE = "messaging.operation.type"
MESSAGING_QUEUE = "messaging.destination.name"
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_MODEL = "gen_ai.request.model"
GEN_AI_ANSWERED_BY = "gen_ai.response.model"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_INPUT = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT = "gen_ai.usage.output_tokens"
GEN_AI_FINISH = "gen_ai.response.finish_reasons"

ATTRIBUTES = tuple(
    value
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, str) and "." in value
)
