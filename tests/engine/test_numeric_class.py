"""Numeric classes: what changes bits changes the name, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specbatch.kernels import native
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model.device import DeviceOptions
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.native_model import why_not_native
from specbatch.pipeline.engines.exact.model.numeric_class import class_of, serves
from specbatch.pipeline.engines.models.dtypes import choose_dtype
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.schemas.errors import ModelError
from specbatch.schemas.fingerprint import Fingerprint
from specbatch.schemas.numeric_class import all_keys
from specbatch.schemas.spec import EngineSpec
from support.architectures import CONFIGS, tiny_model
from support.models import tiny_llama

CPU = DeviceOptions()
F32 = "float32/bitwise/as-is"


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    """A model that the native pass can run."""
    return inspect_model(str(tiny_llama(tmp_path / "model", hidden=128)))


@pytest.fixture
def threads() -> Iterator[int]:
    """One thread more than there were, for the test's time."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield before + 1
    torch.set_num_threads(before)


@pytest.fixture
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_NATIVE", "0")


def test_native_float32_is_one_class_however_it_is_asked_for(folder: ModelFolder) -> None:
    names = {class_of(folder, f"float32/{e}/as-is", CPU)[0] for e in ("bitwise", "fast")}
    assert names == {"exact/f32/1"}


def test_native_float32_is_one_class_with_any_number_of_threads(
    folder: ModelFolder, threads: int
) -> None:
    assert torch.get_num_threads() == threads
    assert class_of(folder, F32, CPU)[0] == "exact/f32/1"


def test_native_bfloat16_is_named_by_how_the_processor_multiplies(folder: ModelFolder) -> None:
    how = native.arithmetic("bfloat16")
    assert how.startswith("bf16/")
    assert class_of(folder, "bfloat16/bitwise/as-is", CPU)[0] == f"exact/{how}/1"


def test_auto_is_the_class_of_the_dtype_that_the_device_takes(folder: ModelFolder) -> None:
    chosen = str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    auto, named = (class_of(folder, f"{d}/bitwise/as-is", CPU) for d in ("auto", chosen))
    assert auto == named


def test_float16_has_no_native_pass(folder: ModelFolder) -> None:
    assert class_of(folder, "float16/bitwise/as-is", CPU)[0].startswith("torch/f16/")


@pytest.mark.usefixtures("torch_path")
def test_the_torch_path_has_a_class_of_its_own(folder: ModelFolder) -> None:
    name, facts = class_of(folder, F32, CPU)
    assert name.startswith("torch/f32/")
    assert len(name.rpartition("/")[2]) == 8
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert (name, facts) == class_of(folder, F32, CPU)


@pytest.mark.usefixtures("torch_path")
def test_whatever_changes_bits_of_the_torch_path_changes_its_class(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [class_of(folder, key, CPU)[0] for key in all_keys() if not key.startswith("auto")]
    assert len(set(names)) == len(names) == 18
    found = [class_of(folder, F32, CPU)[0]]
    found.append(class_of(folder, F32, CPU, tensor_parallel=2)[0])
    for target, name in (
        (torch, "get_num_threads"),
        (torch.backends.cpu, "get_cpu_capability"),
        (native, "processor_name"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, lambda: "another")
            found.append(class_of(folder, F32, CPU)[0])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        found.append(class_of(folder, F32, CPU)[0])
    assert len(set(found)) == len(found)


def test_quantised_or_shared_weights_take_the_torch_path(folder: ModelFolder) -> None:
    assert class_of(folder, "float32/bitwise/int8", CPU)[0].startswith("torch/f32/")
    assert class_of(folder, F32, CPU, tensor_parallel=2)[0].startswith("torch/f32/")


def test_a_worker_serves_every_way_of_asking(folder: ModelFolder) -> None:
    told = serves(folder, CPU)
    assert {key for key, _ in told.classes} == set(all_keys())
    assert set(told.facts) == set(told.names)
    assert told.model == folder.ref
    assert told.from_json(told.as_json()) == told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_a_config_tells_how_its_model_will_be_loaded(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = inspect_model(str(tiny_model(model_type, tmp_path)))
    name = str(dtype).removeprefix("torch.")
    loaded = load_model(folder, name, "fast")
    assert (why_not_native(folder, dtype) is None) == (loaded.native is not None)


def test_a_config_that_cannot_be_read_is_not_native(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    spoilt = ModelFolder(str(tmp_path), tmp_path, "llama", 199, 256, Fingerprint("none"))
    assert "cannot be read" in str(why_not_native(spoilt, torch.float32))


def test_a_model_that_runs_otherwise_than_announced_is_refused(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EngineHost(folder, None, 4, 64, 1 << 20)
    assert host.serves().class_of(F32) == "exact/f32/1"
    monkeypatch.setenv("SPECBATCH_NATIVE", "0")
    with pytest.raises(ModelError, match="announced in numeric class exact/f32/1"):
        host.make_engine(EngineSpec(dtype="float32"))
