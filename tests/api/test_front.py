"""`import specbatch`: what it offers, what it costs, and what type checkers see."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import specbatch
from support.tree import ROOT

FILE = ROOT / "package" / "__init__.py"
LIST_MODULES = "import json, sys; import specbatch; print(json.dumps(sorted(sys.modules)))"
USE = (
    "import json, sys; import specbatch; specbatch.run; specbatch.submit; specbatch.Client; "
    "print(json.dumps(sorted(sys.modules)))"
)
SLOW = {
    *("torch", "transformers", "tokenizers", "numpy", "pyarrow", "pandas", "polars"),
    *("sqlalchemy", "celery", "kombu", "pydantic", "typer", "rich", "yaml", "IPython"),
}
ENGINE = {"torch", "transformers", "tokenizers", "numpy", "pyarrow", "pandas", "polars", "celery"}


def imported(code: str, folder: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_the_package_imports_nothing_else(tmp_path: Path) -> None:
    modules = imported(LIST_MODULES, tmp_path)
    assert not SLOW & modules
    assert [name for name in modules if name.startswith("specbatch")] == ["specbatch"]


def test_its_functions_need_no_engine_until_they_are_called(tmp_path: Path) -> None:
    assert not ENGINE & imported(USE, tmp_path)


def test_every_name_is_there_and_listed() -> None:
    assert len(set(specbatch.__all__)) == len(specbatch.__all__)
    assert dir(specbatch) == specbatch.__all__
    for name in specbatch.__all__:
        assert getattr(specbatch, name) is not None, name


def test_type_checkers_see_the_names_from_the_modules_that_have_them() -> None:
    block = next(node for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.If))
    shown = {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*shown, "__version__"} == set(specbatch.__all__)
    for name, module in shown.items():
        assert getattr(specbatch, name).__module__ == module, name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        specbatch.rum  # noqa: B018 - the access is what is tested
    with pytest.raises(ImportError, match="cannot import name 'rum'"):
        exec("from specbatch import rum")


def test_the_version_is_that_of_the_install() -> None:
    assert specbatch.__version__ == version("specbatch")


def test_the_package_says_that_it_has_types() -> None:
    assert (Path(str(specbatch.__file__)).parent / "py.typed").is_file()


def test_public_names_explain_themselves() -> None:
    for name in specbatch.__all__:
        value = getattr(specbatch, name)
        if not isinstance(value, str):
            assert value.__doc__, name


def test_sub_packages_are_found_beside_the_names() -> None:
    from specbatch import schemas

    assert schemas.__name__ == "specbatch.schemas"
