"""Names of numeric classes: what they say, who takes whom, and what a job should pin."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.schemas.backlog import PinnedJob, WorkerNow
from specbatch.schemas.errors import SpecError
from specbatch.schemas.numeric_class import (
    UNKNOWN,
    Pinned,
    Serves,
    all_keys,
    class_note,
    contradiction,
    dtype_of,
    engine_key,
    key_of_spec,
    preferred,
)
from specbatch.schemas.spec import EngineSpec, load_spec
from specbatch.schemas.timekeeping import Device

A, B = "exact/f32/1", "torch/f32/0badcafe"
KEY = "float32/bitwise/as-is"


def of(name: str, model: str = "big") -> Serves:
    return Serves.of(model, dict.fromkeys(all_keys(), name))


def worker(serves: Serves | None, silent_sec: float = 0.0) -> WorkerNow:
    return WorkerNow("s", "w", Device("cpu", "", "", 1), 9.0, silent_sec, 0, 0, 0, 0, serves)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(A, "float32"), ("exact/bf16/amx/1", "bfloat16"), ("torch/f16/00000000", "float16")],
)
def test_a_name_says_its_dtype(name: str, dtype: str) -> None:
    assert dtype_of(name) == dtype
    assert contradiction("auto", name) is None
    assert contradiction(dtype, name) is None


def test_a_job_asks_for_no_class_of_another_dtype() -> None:
    assert contradiction("bfloat16", A) == (
        "numeric class exact/f32/1 computes in float32, and dtype is bfloat16"
    )
    assert contradiction("auto", "fast") is not None


def test_an_old_spec_asks_for_what_was_the_default() -> None:
    assert key_of_spec({}) == "auto/bitwise/as-is"
    assert key_of_spec({"engine": {"exactness": "fast"}}, A) == "float32/fast/as-is"


@pytest.mark.parametrize(
    ("pinned", "takes"), [(None, True), (UNKNOWN, True), (A, True), (B, False)]
)
def test_who_takes_whom(pinned: str | None, takes: bool) -> None:
    assert of(A).takes(Pinned(pinned)) is takes


def test_most_live_workers_decide_then_who_asks_then_the_name() -> None:
    assert preferred(KEY, of(A), [of(A), of(B), of(B)]) == B
    assert preferred(KEY, of(B), [of(A), of(B)]) == B
    assert preferred(KEY, Serves.of("big", {}), [of(B), of(A)]) == A
    assert preferred(KEY, Serves.of("big", {}), []) is None


def test_a_spec_may_name_a_class() -> None:
    engine = {"numeric_class": A}
    wanted: dict[str, Any] = {"input": {"uri": "i"}, "output": {"uri": "o"}, "verifier": "v"}
    assert load_spec(wanted | {"engine": engine}).engine.numeric_class == A
    for broken in ({"numeric_class": "x"}, {"numeric_class": A, "dtype": "bfloat16"}):
        with pytest.raises(SpecError):
            load_spec(wanted | {"engine": broken})


def test_auto_is_resolved_by_the_class_and_by_no_other() -> None:
    auto = EngineSpec()
    assert auto.resolved(A).dtype == "float32"
    assert auto.resolved(UNKNOWN).dtype == auto.resolved(None).dtype == "auto"
    named = EngineSpec(dtype="bfloat16")
    assert named.resolved("stand-in/f32/1") == named
    assert EngineSpec(numeric_class=A).resolved(A) == EngineSpec(dtype="float32")


def test_a_job_says_what_it_waits_for() -> None:
    job = PinnedJob("j", "big", A, KEY)
    assert job.waits_to_verify([worker(of(A))]) is None
    assert job.waits_to_verify([worker(of(B)), worker(None), worker(of(A, "small"))]) == (
        f"waits for a worker of numeric class {A}; alive: {B}"
    )
    assert str(job.waits_to_verify([])).endswith("alive: none")


def test_a_job_without_a_class_says_that_nobody_runs_what_it_asks_for() -> None:
    fast = engine_key("auto", "fast", "as-is")
    job = PinnedJob("j", "big", None, engine_key("auto", "bitwise", "as-is"))
    assert job.waits_to_verify([worker(Serves.of("big", {fast: B}))]) == (
        "waits for a worker that runs auto/bitwise/as-is (dtype, exactness, weights); "
        "alive: auto/fast/as-is"
    )
    assert job.waits_to_verify([worker(Serves.of("big", {fast: B})), worker(of(A))]) is None


def test_classes_that_differ_are_named() -> None:
    assert class_note(A, A) is class_note(A, None) is None
    older = f"written before numeric classes were recorded, checked in {A}: bits may differ"
    assert class_note(None, A) == class_note(UNKNOWN, A) == older
    assert class_note(A, B) == f"written in numeric class {A}, checked in {B}: bits may differ"
