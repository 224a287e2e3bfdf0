"""Scorers one by one: what the spec takes, what they say, and what the verifier's answers mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ledger.builders import new_job

from specbatch.pipeline.engines.contract import Completion
from specbatch.pipeline.inputs.contract import Source
from specbatch.pipeline.moderation.hook_process import POLICY, SCORER
from specbatch.pipeline.moderation.hooks import HookFailedError, HookProcess, Hooks
from specbatch.pipeline.moderation.judge import EACH_ANSWER, score_of
from specbatch.pipeline.operations.preflight import check_best_by, check_policies
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.stages.scoring import prepare_scoring
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import SpecError, UsageError
from specbatch.schemas.policies import PolicyInput, Verdict
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import FinishReason
from specbatch.schemas.spec import JobSpec, load_spec
from support.packages import install
from support.planted import KEY

GIVEN = PolicyInput("a text", "a prompt", "7", None, "stop")
JUDGE = {"use": "judge", "prompt": "Is {text} right?"}
OWN = {"use": "ours", "options": {"a": 1}}


# --- what the spec takes --------------------------------------------------------------------------
def spec(best_by: Any, keep: int | None = 1, n: int = 4, **inputs: Any) -> JobSpec:
    return load_spec(
        {
            "input": {"uri": "a.parquet", "format": "parquet", **inputs},
            "output": {"uri": "o", "keep_best": keep, "best_by": best_by},
            "sampling": {"n": n},
            "verifier": "m",
        }
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"use": "judge"}, "judge needs prompt"),
        ({"use": "judge", "prompt": "is it good?"}, "{text}"),
        ({"use": "judge", "prompt": "{text} {promt}"}, "{promt}"),
        ({**JUDGE, "options": {"a": 1}}, "judge takes no options"),
        ({"use": "patterns"}, "patterns give no score"),
        ({"use": "own", "prompt": "{text}"}, "goes with `use: judge`"),
        ({"use": "a name"}, "must be text that matches"),
        ({"use": "own", "timeout_sec": 0}, "above 0"),
        (
            {"use": "own", "option": {}},
            "(did you mean `options`?); allowed here: options, prompt",
        ),
    ],
)
def test_a_wrong_scorer_is_refused_in_words(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match="best_by") as caught:
        spec(wrong)
    assert words in str(caught.value)


def test_what_would_score_nothing_is_refused_in_one_sentence() -> None:
    with pytest.raises(SpecError, match="best_by needs keep_best: say how many"):
        spec(JUDGE, keep=None)
    with pytest.raises(SpecError, match="keep_best 2 keeps every one of 2 completions"):
        spec(JUDGE, keep=2, n=2)
    assert spec(JUDGE, keep=2, n=3).output.best_by is not None
    assert spec(None, keep=2, n=1).output.best_by is None


def test_rows_that_may_have_more_completions_are_known_when_the_input_is_opened() -> None:
    assert spec(OWN, keep=1, n=1, sampling_column="own").output.keep_best == 1
    unknown = spec(OWN, keep=1, n=1, format="auto")
    opened: Any = SimpleNamespace(format="openai")
    check_best_by(unknown, opened)
    source: Source = opened
    opened.format = "parquet"
    with pytest.raises(SpecError, match="nothing to choose from"):
        check_best_by(unknown, source)


def test_an_engine_whose_logprobs_are_masked_is_no_judge() -> None:
    with pytest.raises(UsageError, match="the judge of best_by needs log-probabilities"):
        check_policies(spec(JUDGE), "vllm")
    check_policies(spec(OWN), "vllm")
    job: Any = SimpleNamespace(numeric_class="vllm/0.32.0/f32/1")
    with pytest.raises(UsageError, match="score with a package's scorer"):
        prepare_scoring(job, spec(JUDGE), Hooks(), cast(Any, None))


def test_who_sees_a_private_tenant_s_job_sees_no_question_and_no_options() -> None:
    privacy = Privacy({"us": PrivacyMode.REDACTED}, cipher=Cipher.of_setting(KEY))
    for best_by in (JUDGE, OWN):
        whole = spec(best_by).model_dump(mode="json")
        stored = privacy.as_stored(replace(new_job(), tenant="us", spec=whole))
        assert stored.spec["output"] == whole["output"] | {"best_by": {"use": best_by["use"]}}
        assert '"best_by"' in str(stored.sealed_spec)
    assert spec(JUDGE).output.best_by is not None


# --- the judge's answers --------------------------------------------------------------------------
END = 9


def answer(*logprobs: float, reason: FinishReason = FinishReason.STOP) -> Completion:
    tokens = (*range(len(logprobs) - 1), END)
    origins, counts = (0,) * len(tokens), (0, 0, 1, 0.0, 0.0, 0.0, (), ())
    return Completion("a/0/0", tokens, origins, logprobs, reason, *counts)


def test_the_score_is_the_share_of_yes_of_both_answers() -> None:
    yes = answer(math.log(0.5), math.log(0.6), math.log(0.01))
    no = answer(math.log(0.1), math.log(0.9))
    assert score_of(yes, no, {END}) == pytest.approx(0.3 / (0.3 + 0.1))
    assert score_of(no, yes, {END}) == pytest.approx(0.1 / (0.3 + 0.1))
    assert score_of(yes, yes, {END}) == 0.5


def test_a_score_is_none_where_an_answer_is_missing_or_both_are_impossible() -> None:
    sure, never = answer(0.0, 0.0), answer(-math.inf, 0.0)
    assert score_of(sure, never, {END}) == 1.0
    assert score_of(answer(-1e300, 0.0), sure, {END}) == 0.0
    assert score_of(never, never, {END}) is None
    assert score_of(answer(math.nan, 0.0), sure, {END}) is None
    for reason in (FinishReason.ERROR, FinishReason.LENGTH):
        assert score_of(answer(0.0, reason=reason), sure, {END}) is None
        assert score_of(sure, answer(0.0, reason=reason), {END}) is None


def test_each_answer_is_asked_for_alone() -> None:
    assert [one.response_format for one in EACH_ANSWER] == [
        '{"type":"choice","choice":["yes"]}',
        '{"type":"choice","choice":["no"]}',
    ]


# --- processes ------------------------------------------------------------------------------------
MODULE = """
import os, time
from fractions import Fraction
import numpy as np
from specbatch import Verdict

def judged(given):
    return Verdict.allow()

def scored(given, do="length"):
    return {
        "length": lambda: len(given.text),
        "numpy": lambda: np.float32(0.5),
        "fraction": lambda: Fraction(1, 4),
        "yes": lambda: True,
        "none": lambda: None,
        "text": lambda: given.text,
        "nan": lambda: float("nan"),
        "infinite": lambda: -float("inf"),
        "too large": lambda: 10**400,
        "raise": lambda: 1 / 0,
        "print": lambda: print(given.text, flush=True) or 1.0,
        "escape": escaped,
        "daemonize": daemonized,
    }[do]()

def escaped():
    os.setsid()
    time.sleep(3600)

def daemonized():
    if not os.fork():
        os.setsid()
        time.sleep(20)
        os._exit(0)
    os._exit(3)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with a policy and a scorer of the same name."""
    lines = {
        "specbatch.policies": "ours = our_scorer:judged",
        "specbatch.scorers": "ours = our_scorer:scored",
    }
    install(monkeypatch, tmp_path / "site", "our_scorer", MODULE, lines, version="3.1")


@pytest.fixture
def hooks(package: None) -> Iterator[Hooks]:  # noqa: ARG001 - it is installed
    made = Hooks()
    yield made
    made.close()


@pytest.mark.parametrize(("do", "score"), [("length", 6.0), ("numpy", 0.5), ("fraction", 0.25)])
def test_any_real_number_is_a_score(hooks: Hooks, do: str, score: float) -> None:
    assert hooks.of("ours", SCORER).score(GIVEN, {"do": do}, 60) == score


def test_what_is_no_number_fails_without_a_word_of_the_text(hooks: Hooks) -> None:
    hook = hooks.of("ours", SCORER)
    assert hook.version == "our-scorer 3.1"
    for do, words in {
        "yes": "returned bool, no number",
        "none": "returned NoneType, no number",
        "text": "returned str, no number",
        "nan": "number is not finite",
        "infinite": "number is not finite",
        "too large": "raised OverflowError",
        "raise": "raised ZeroDivisionError",
        "unknown": "raised KeyError",
    }.items():
        with pytest.raises(HookFailedError, match=words) as caught:
            hook.score(GIVEN, {"do": do}, 60)
        assert GIVEN.text not in str(caught.value)


@pytest.mark.parametrize("do", ["escape", "daemonize"])
def test_who_leaves_the_session_of_its_process_holds_nobody_up(hooks: Hooks, do: str) -> None:
    hook = hooks.of("ours", SCORER)
    with pytest.raises(HookFailedError):
        hook.score(GIVEN, {"do": do}, 2)
    assert hook.score(GIVEN, {}, 60) == 6.0


def test_what_a_scorer_prints_is_nowhere(hooks: Hooks, capfd: pytest.CaptureFixture[str]) -> None:
    assert hooks.of("ours", SCORER).score(GIVEN, {"do": "print"}, 60) == 1.0
    assert capfd.readouterr() == ("", "")


def test_a_policy_and_a_scorer_of_one_name_are_two_processes(hooks: Hooks) -> None:
    assert hooks.of("ours", SCORER) is hooks.of("ours", SCORER)
    assert hooks.of("ours") is hooks.of("ours", POLICY)
    assert hooks.of("ours").judge(GIVEN, {}, 60) == Verdict.allow()
    assert hooks.of("ours", SCORER).score(GIVEN, {}, 60) == 6.0
    with pytest.raises(HookFailedError, match="its score is invalid"):
        hooks.of("ours").score(GIVEN, {}, 60)


@pytest.mark.usefixtures("package")
def test_who_asks_for_a_scorer_that_is_not_there_hears_which_are() -> None:
    with pytest.raises(
        UsageError,
        match=r"no installed package offers scorer `theirs` \(entry points of specbatch\.scorers "
        r"here: ours\); install it on every verify worker",
    ):
        HookProcess("theirs", SCORER)
