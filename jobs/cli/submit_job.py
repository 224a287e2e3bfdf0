"""`submit-job`: a spec file, flags, or both; as a job for the workers or done right here."""

from __future__ import annotations

from pathlib import Path

from specbatch.jobs.cli import checks
from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import NOT_SUBMITTED, if_interrupted, new_app, run
from specbatch.jobs.running.fields import FIELD_OF, by_field
from specbatch.pipeline.engines.models.model_folder import known_context
from specbatch.pipeline.operations.spec_input import build_spec
from specbatch.schemas.errors import UsageError
from specbatch.schemas.patience import end_within


def submit_job(
    spec_file: o.SpecFile = None,
    input: o.Input = None,
    format: o.Format = None,
    delimiter: o.Delimiter = None,
    snapshot: o.Snapshot = None,
    since: o.Since = None,
    prompt_column: o.PromptColumn = None,
    prompt_kind: o.PromptKind = None,
    id_column: o.IdColumn = None,
    seed_column: o.SeedColumn = None,
    sampling_column: o.SamplingColumn = None,
    template: o.Template = None,
    template_file: o.TemplateFile = None,
    template_kind: o.TemplateKind = None,
    system: o.System = None,
    output: o.Output = None,
    output_format: o.OutputFormat = None,
    keep_columns: o.KeepColumns = None,
    keep_best: o.KeepBest = None,
    table: o.Table = None,
    verifier: o.Verifier = None,
    proposer: o.Proposer = None,
    max_tokens: o.MaxTokens = None,
    min_tokens: o.MinTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    n: o.Samples = None,
    seed: o.Seed = None,
    stop_token_id: o.StopTokenId = None,
    stop_token_ids: o.StopTokenIds = None,
    ignore_eos: o.IgnoreEos = None,
    stop: o.Stop = None,
    response_format: o.ResponseFormat = None,
    tools: o.Tools = None,
    tool_choice: o.ToolChoice = None,
    parallel_tool_calls: o.ParallelToolCalls = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    logprobs: o.Logprobs = None,
    top_logprobs: o.TopLogprobs = None,
    depth: o.Depth = None,
    sources: o.Sources = None,
    max_depth: o.MaxDepth = None,
    history_tokens: o.HistoryTokens = None,
    verification: o.Verification = None,
    dtype: o.Dtype = None,
    exactness: o.Exactness = None,
    reuse_outputs: o.ReuseOutputs = None,
    reuse_check: o.ReuseCheck = None,
    group_size: o.GroupSize = None,
    name: o.Name = None,
    tenant: o.Tenant = None,
    priority: o.Priority = None,
    deadline_sec: o.Deadline = None,
    budget_usd: o.Budget = None,
    regions: o.Regions = None,
    spot: o.Spot = None,
    notify: o.Notify = None,
    lineage_parent: o.LineageParent = None,
    local: o.Local = False,
    engine: o.Engine = None,
    wait: o.Wait = False,
    timeout: o.Timeout = None,
    dry_run: o.DryRun = False,
    tokens_per_sec: o.AssumedSpeed = None,
    json: o.Json = False,
    idempotency_key: o.IdempotencyKey = None,
    schedule: o.ScheduleFile = None,
    logical_time: o.LogicalTime = None,
) -> None:
    """Turn prompts into verified, recorded completions.

    Exit codes: 0 done (or submitted), 2 bad usage or spec, 3 some rows failed, 4 failed,
    5 cancelled, 6 gave up waiting, 130 interrupted.
    """
    given = locals()  # nothing but the parameters yet
    flags = by_field({name: given[name] for name in FIELD_OF} | {
        "notify": notify or None, "stop": stop or None, "depth": o.number_or_word(depth),
        "since": o.number_or_word(since),
        "stop_token_ids": o.stop_ids(stop_token_id, stop_token_ids),
        "template": o.template_text(template, template_file),
        **o.forms(response_format, tools),
    })  # fmt: skip
    o.check_engine_here(engine, local)
    if timeout is not None and not (wait or local):
        raise UsageError("--timeout needs --wait or --local")
    end_within(timeout)
    if tokens_per_sec is not None and not dry_run:
        raise UsageError("--tokens-per-sec needs --dry-run")
    if schedule is not None or logical_time is not None:
        others = {**flags, "spec": spec_file, "idempotency_key": idempotency_key}
        _check_scheduled(schedule, [name for name, value in others.items() if value is not None])
        if local or dry_run:
            raise UsageError("--schedule is for workers: leave --local and --dry-run out")
        from specbatch.jobs.cli.scheduled import submit_scheduled

        assert schedule is not None
        submit_scheduled(load_settings(), schedule, logical_time, wait, timeout, json)
        return
    spec, settings = build_spec(spec_file, flags), o.with_engine(load_settings(), engine)
    checks.check_targets(settings, spec, local)
    with if_interrupted(NOT_SUBMITTED):  # what comes once it is says so itself
        if dry_run:
            checks.check_first(spec)
            from specbatch.jobs.cli.dry_run import show_plan

            show_plan(settings, spec, tokens_per_sec, json)
        elif local:
            checks.check_first(spec)
            from specbatch.jobs.cli.local import submit_here

            submit_here(settings, spec, idempotency_key, timeout, json)
        else:
            checks.check_input_here(spec.input)
            checks.tell_beyond_context(spec, known_context(spec.verifier))
            from specbatch.jobs.cli.remote import submit_there

            submit_there(settings, spec, idempotency_key, wait, timeout, json)


def _check_scheduled(schedule: Path | None, others: list[str]) -> None:
    if schedule is None:
        raise UsageError("--logical-time needs --schedule")
    if others:
        raise UsageError(f"--schedule's file says the whole job: leave {', '.join(others)} out")


app = new_app("Submit a batch generation job.")
app.command()(submit_job)


def main() -> None:
    """The `submit-job` command."""
    run(app, "submit-job")
