"""What the pages' commands need that a test has not, all in one place.

`SUBSTITUTES` is what is put in the place of other machines' names, and of what would take minutes.
`ELSEWHERE` names every program that no test can run from the pages, why, and what holds it instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elsewhere:
    """A program that is not run, and the test (or the file it is in) that stands for it."""

    reason: str
    held_by: str


ELSEWHERE = {
    "make": Elsewhere(
        "installs into .venv, for minutes",
        "tests/docs/test_commands.py::test_targets_of_make_are_there_and_do_what_is_said",
    ),
    ".": Elsewhere(
        "there is no .venv in a test",
        "tests/docs/test_commands.py::test_targets_of_make_are_there_and_do_what_is_said",
    ),
    "aws": Elsewhere(
        "Amazon's own program",
        "tests/docs/session.py::Session.with_servers",  # puts the same file there by boto3
    ),
    "pip": Elsewhere("installs, for minutes", "tests/architecture/test_light_imports.py"),
    "kubectl": Elsewhere("there is no cluster", "tests/deploy"),
    "docker": Elsewhere("there is no daemon", "tests/deploy"),
    "systemctl": Elsewhere("not a test's to tell", "tests/schedules/test_examples.py"),
    "crontab": Elsewhere("not a test's to change", "tests/schedules/test_examples.py"),
    "airflow": Elsewhere("has an environment of its own", "tests/dags/test_inside.py"),
    "dagster": Elsewhere("has an environment of its own", "tests/dags/test_inside.py"),
    "prefect": Elsewhere("has an environment of its own", "tests/dags/test_inside.py"),
    "torchrun": Elsewhere("needs several GPUs", "tests/cli/test_worker_ranks.py"),
}
# `export` beside a program of elsewhere, in the same block, is of that program.
BESIDE = ("export",)

# Pages for who looks after many machines: the store is that of the nightly S3 job.
SHARED_PAGES = ("runbooks/", "howto/schedules.md")
SHARED_JOB = "howto/nightly-s3.md"
SHARED = {
    "SPECBATCH_BROKER_URL": "{redis}",
    "SPECBATCH_DATABASE_URL": "{postgres}",
    "SPECBATCH_WORKSPACE": "s3://specbatch-work/nightly",
}

# The file that a page's first block of YAML is said to be.
FILES = {"howto/schedules.md": "jobs/schedules/nightly.yaml"}

# A page whose commands use what another page has made.
AFTER = {"howto/serve.md": "howto/openai-batch.md"} | {
    f"runbooks/{name}.md": "howto/schedules.md"
    for name in ("NightlyRunMissing", "NightlyRunFailed")
}

# Where a page's command ends with another code than 0, because the page says so.
EXIT_CODES = {
    ("howto/inputs.md", "submit-job"): 3,  # one of its rows is refused
    ("howto/openai-batch.md", "submit-job"): 3,  # one of its requests is refused
    ("howto/vllm-run-batch.md", "submit-job"): 3,  # the same file
    # A step that learns nothing.
    ("howto/train.md", "specbatch train --proposer models/draft --out draft-2 "): 3,
}

# In the order given. The first ones are names of machines; `{…}` is filled in by the session.
SUBSTITUTES = (
    ("redis://broker:6379/0", "{redis}"),
    ("postgresql://specbatch:secret@db/specbatch", "{postgres}"),
    ("acceptance NAME --tenant TENANT", "acceptance nightly --tenant search"),
    ("127.0.0.1:8000", "127.0.0.1:{port}"),
    ("--port 8000", "--port {port}"),
    # Shorter, not other: fewer tokens, sizes and runs.
    ("max_tokens: 64", "max_tokens: 8"),
    ("--max-tokens 48", "--max-tokens 8"),
    ("--max-tokens 64", "--max-tokens 8"),
    ("specbatch demo", "specbatch demo --max-tokens 4"),
    ("--n 1,8,32 --acceptance 0,0.5,0.9,1 --engines ours,transformers",
     "--n 2 --acceptance 0.5 --engines ours --new-tokens 4 --runs 1 --prompt-tokens 16"),
    ("specbatch bench  ",
     "specbatch bench --n 2 --acceptance 0.5 --engines ours --new-tokens 4 --runs 1 "),
    ("specbatch chaos  ", "specbatch chaos --runs 1 "),
    ("--out draft-2", "--out draft-2 --steps 1 --learning-rate 0"),
)  # fmt: skip
