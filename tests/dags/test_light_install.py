"""What `pip install specbatch` brings, without extras: how much it is, and that it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dags.conftest import environment

from support.tree import ROOMS, ROOT

MOST_MB = 60.0  # of what is unpacked; Python's own cache of compiled files comes on top
BESIDE = ("README.md", "LICENSE", "pyproject.toml")
SUBMIT = """
import json, sys
from specbatch.jobs.client import open_client

with open_client() as client:
    spec = json.loads(sys.argv[1])
    jobs = [client.submit(spec, "daily"), client.submit(spec, "daily")]
    told = client.outcome(jobs[0].job_id).as_json() | {"created": [job.created for job in jobs]}
    told["stopped"] = client.cancel(jobs[0].job_id, "enough").stop_reason
heavy = {"torch", "pyarrow", "numpy", "cryptography", "airflow", "dagster", "prefect"}
heavy &= set(sys.modules)
print(json.dumps(told | {"heavy": sorted(heavy)}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with a copy of this tree installed, as pip installs it."""
    python, copy = environment("light"), tmp_path_factory.mktemp("tree")
    tracked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listed = subprocess.run(
        [*tracked, *ROOMS, *BESIDE], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    again = ["install", "--no-compile", "--no-deps", "--force-reinstall", str(copy)]
    subprocess.run([*pip, "--python", str(python), *again], check=True)
    return python


def site_packages(python: Path) -> Path:
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def test_the_light_install_is_light(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, int] = {}
    folder = site_packages(installed)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            name = path.relative_to(folder).parts[0]
            sizes[name] = sizes.get(name, 0) + path.stat().st_size
    total = sum(sizes.values()) / 1e6
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:6]
    shown = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in largest)
    with capsys.disabled():
        print(f"\nlight install: {total:.1f} MB ({shown})")
    assert "specbatch" in sizes
    assert total < MOST_MB, shown


def test_a_job_is_submitted_once_and_cancelled_by_the_light_install(
    installed: Path, tmp_path: Path, redis_url: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    spec = {
        "input": {"uri": "prompts.jsonl"},
        "output": {"uri": "out"},
        "verifier": "owner/model",
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "SPECBATCH_BROKER_URL": redis_url,
        "SPECBATCH_WORKSPACE": str(tmp_path / "work"),
    }
    done = subprocess.run(
        [str(installed), "-c", SUBMIT, json.dumps(spec)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["created"] == [True, False]
    assert told["state"] == "queued"
    assert told["output_uri"] == str(tmp_path / "out")
    assert told["stopped"] == "enough"
    assert told["heavy"] == []


def test_what_the_light_install_lacks_is_said(installed: Path, tmp_path: Path) -> None:
    key = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
    for arguments, settings, words in (
        (["demo"], {}, "pip install ./jobs/demo"),
        (["jobs"], {"SPECBATCH_ENCRYPTION_KEY": key}, "pip install 'specbatch[sealed]'"),
    ):
        done = subprocess.run(
            [str(installed.parent / "specbatch"), *arguments],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert words in done.stderr
