"""Submitting needs neither torch nor pyarrow, and our `kernels` is taken for no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import ROOT, is_inside, modules

HEAVY = (
    *("torch", "pyarrow", "numpy", "transformers", "tokenizers", "safetensors", "triton"),
    *("prometheus_client", "jinja2"),
)
TORCH = ("torch", "transformers", "tokenizers", "safetensors", "triton")
LIGHT_ROOMS = (
    *("schemas", "pipeline.ledger", "pipeline.audit", "pipeline.runtime.client"),
    *("pipeline.bootstrap", "workers"),
    *("jobs.client", "jobs.dags.attaching", "jobs.running", "jobs.api"),
)
# Imported only by those that move bulk rows.
NOT_LIGHT = ("schemas.arrow", "schemas.export_arrow")

BLOCK_AND_IMPORT = """
import importlib, sys

heavy = set(sys.argv[1].split(","))

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[2:]:
    importlib.import_module(name)
    assert not heavy & set(sys.modules), f"{name} imported {heavy & set(sys.modules)}"
"""


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_submitting_needs_no_torch_pyarrow_or_numpy(tmp_path: Path) -> None:
    names = [
        f"specbatch.{module.name}"
        for module in modules()
        if any(is_inside(module.name, room) for room in LIGHT_ROOMS)
        and module.name not in NOT_LIGHT
    ]
    assert names
    done = run_python("-c", BLOCK_AND_IMPORT, ",".join(HEAVY), *names, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_stages_need_no_torch(tmp_path: Path) -> None:
    # So a worker whose engine is no model, as of `specbatch chaos`, starts in half a second.
    names = ["specbatch.pipeline.stages.dispatch", "specbatch.jobs.chaos.worker"]
    done = run_python("-c", BLOCK_AND_IMPORT, ",".join(TORCH), *names, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.pipeline  # slow imports
def test_transformers_imports_with_our_folders_on_the_path() -> None:
    # There `kernels` is at most an empty namespace, which transformers takes for "not installed".
    # A package in either folder would win over both namespaces.
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]}\n"
        "import transformers.integrations.hub_kernels\n"
        "assert getattr(sys.modules.get('kernels'), '__file__', None) is None"
    )
    done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", [ROOT, ROOT / "tests"], ids=["root", "tests"])
def test_an_installed_kernels_package_wins_over_our_folder(folder: Path, tmp_path: Path) -> None:
    installed = tmp_path / "kernels" / "__init__.py"
    installed.parent.mkdir()
    installed.touch()
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.__file__)"
    )
    done = run_python("-c", code, cwd=folder)
    assert done.stdout.strip() == str(installed), done.stderr


@pytest.mark.parametrize("folder", ["kernels", "tests/kernels", ".", "tests"])
def test_no_init_makes_our_kernels_a_package_of_its_own(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
