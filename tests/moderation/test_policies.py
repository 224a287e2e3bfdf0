"""Policies one by one: what they say, and what is left of a completion."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger.builders import completion
from pydantic import ValidationError

from specbatch.pipeline.audit.entries import ruled
from specbatch.pipeline.moderation.hooks import HookFailedError, HookProcess
from specbatch.pipeline.moderation.judge import question, verdict_of
from specbatch.pipeline.moderation.outcome import as_ruled, published_as, with_form
from specbatch.pipeline.moderation.patterns import Patterns
from specbatch.pipeline.outputs.openai import Lines
from specbatch.schemas.errors import RequestCancelledError, SpecError, UsageError
from specbatch.schemas.policies import (
    ALLOWED,
    PolicyInput,
    PolicySpec,
    Ruled,
    Ruling,
    Verdict,
    outcome,
)
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import FinishReason, SamplingParams, TopLogprobs
from specbatch.schemas.spec import load_spec
from specbatch.schemas.tools import canonical_choice, canonical_tools
from support.peak_memory import ended

GIVEN = PolicyInput("a text", "a prompt", "7", None, "stop")
VERDICTS = [ALLOWED, Verdict.redact("[X]"), Verdict.review("odd"), Verdict.block("bad")]


def said(verdict: Verdict, policy: str = "p") -> Ruled:
    return Ruled(policy, "1", verdict, 0.5)


# --- what the spec takes --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"use": "patterns"}, "needs patterns"),
        ({"use": "judge"}, "needs prompt"),
        ({"use": "judge", "prompt": "is it good?"}, "{text}"),
        ({"use": "judge", "prompt": "{text}", "verdict": "redact"}, "only patterns redact"),
        ({"use": "own", "patterns": {"a": "b"}}, "goes with `use: patterns`"),
        ({"use": "own", "prompt": "{text}"}, "goes with `use: judge`"),
        ({"use": "own", "verdict": "allow"}, "redact"),
        ({"use": "own", "on_error": "redact"}, "allow"),
        ({"use": "patterns", "patterns": {"a": "b"}, "options": {"c": 1}}, "takes no options"),
        ({"use": "judge", "prompt": "{text} {promt}"}, "{promt}"),
        ({"use": "a name"}, "pattern"),
        ({"use": "own", "timeout_sec": 0}, "greater than 0"),
    ],
)
def test_a_wrong_policy_is_refused_in_words(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PolicySpec.model_validate(wrong)
    spec = {"input": {"uri": "a.parquet"}, "output": {"uri": "o"}, "verifier": "m"}
    with pytest.raises(SpecError, match="policies"):
        load_spec(spec | {"policies": [wrong]})


@pytest.mark.parametrize("code", ["two words", "x" * 65, "ä", "a\nb", 3])
def test_a_code_is_one_word_that_cannot_quote_a_text(code: Any) -> None:
    with pytest.raises(ValueError, match="one word"):
        Verdict.block(code)


def test_only_a_redaction_has_a_text() -> None:
    with pytest.raises(ValueError, match="only then"):
        Verdict(Ruling.REDACT)
    with pytest.raises(ValueError, match="only then"):
        Verdict(Ruling.BLOCK, "text")


# --- patterns -------------------------------------------------------------------------------------
def patterns(verdict: str = "block", **of: str) -> Patterns:
    return Patterns(
        PolicySpec.model_validate({"use": "patterns", "patterns": of, "verdict": verdict})
    )


def test_patterns_say_which_was_found_first() -> None:
    judge = patterns(card=r"\d{4}", name="Anna")
    assert judge.judge("nothing") == ALLOWED
    assert judge.judge("Anna has 1234") == Verdict.block("name")
    assert patterns("review", card=r"\d{4}").judge("äöü 1234") == Verdict.review("card")
    assert judge.version.startswith("re2 ")


def test_finds_that_overlap_have_one_mark() -> None:
    judge = patterns("redact", word="nn[a-z]", anna="anna")
    assert judge.judge("€ anna, anna nana") == Verdict.redact("€ [word], [word] nana", "word")


@given(st.text(), st.sampled_from(["[a-z]+", "é", ".", r"\s", "a*"]))
def test_a_redacted_text_has_no_find_but_in_marks(text: str, pattern: str) -> None:
    verdict = patterns("redact", p=pattern).judge(text)
    if verdict.text is not None:
        left = verdict.text.replace("[p]", "")
        assert patterns(p=pattern).judge(left).ruling is Ruling.ALLOW or pattern == "a*"


def test_a_pattern_that_re2_does_not_take_is_named() -> None:
    with pytest.raises(UsageError, match=r"pattern `ahead` .*invalid perl operator"):
        patterns(ahead="(?=a)")


# --- the judge ------------------------------------------------------------------------------------
def test_the_question_has_the_text_in_its_place_and_nothing_in_the_text_s() -> None:
    asked = question(
        "{prompt} >> {text} << {Other}",
        replace(GIVEN, text="{prompt} {text}</s>"),
        lambda t: t.replace("</s>", ""),
    )
    assert asked == "a prompt >> {prompt} {text} << {Other}"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("yes", Verdict.review("judged")),
        ("no", ALLOWED),
        ("", Verdict.block("failed")),
        ("yes, it is", Verdict.block("failed")),
    ],
)
def test_an_answer_that_is_neither_fails_closed(answer: str, verdict: Verdict) -> None:
    spec = PolicySpec.model_validate({"use": "judge", "prompt": "{text}", "verdict": "review"})
    assert verdict_of(spec, answer) == verdict


# --- what is left ---------------------------------------------------------------------------------
@given(st.lists(st.sampled_from(VERDICTS), max_size=5))
def test_the_strictest_counts_whatever_the_order(verdicts: list[Verdict]) -> None:
    by = outcome([said(v) for v in verdicts])
    strictest = max((list(Ruling).index(v.ruling) for v in verdicts), default=0)
    assert (by.verdict.ruling if by else Ruling.ALLOW) is list(Ruling)[strictest]


def test_of_two_redactions_the_later_text_counts() -> None:
    first, second = said(Verdict.redact("[A] b")), said(Verdict.redact("[A] [B]"))
    assert as_ruled(completion(1), [first, said(ALLOWED), second]).text == "[A] [B]"


@pytest.mark.parametrize("verdict", VERDICTS[1:])
def test_nothing_of_what_was_written_is_left(verdict: Verdict) -> None:
    tops: tuple[TopLogprobs, ...] = (((7,), (-0.1,)), ((8,), (-0.1,)), ((300_000,), (-0.1,)))
    whole = completion(1, top_logprobs=tops)
    left = as_ruled(whole, [said(verdict)])
    assert left.text == (verdict.text or "")
    assert set(left.token_ids) == {NOT_KEPT}
    assert len(left.token_ids) == len(whole.token_ids)
    assert left.top_logprobs is None
    assert set(left.provenance.rejected) <= {NOT_KEPT}
    same = ("row_id", "cost_usd", "ticks", "origins", "logprobs", "proposed", "seed")
    assert [getattr(left, name) for name in same] == [getattr(whole, name) for name in same]


def test_an_allowed_completion_is_as_it_was() -> None:
    whole = completion(1)
    assert replace(as_ruled(whole, [said(ALLOWED)]), rulings=()) == whole


def test_a_redaction_that_breaks_the_form_says_so() -> None:
    form = orjson.dumps({"type": "json_object"}).decode()
    record = completion(1, text='{"a": 1}', finish_reason=FinishReason.STOP)
    kept = with_form(as_ruled(record, [said(Verdict.redact('{"a": "[X]"}'))]), form)
    assert (kept.error, kept.finish_reason) == (None, FinishReason.STOP)
    broken = with_form(as_ruled(record, [said(Verdict.redact('{"a": [X]}'))]), form)
    assert broken.is_malformed
    assert with_form(record, form) == record, "it was judged before"


@pytest.mark.parametrize(
    ("choice", "text", "reason", "error"),
    [
        ("auto", '{"name": "send", "arguments": {"to": "[MAIL]"}}', FinishReason.TOOL_CALLS, None),
        ("auto", "[removed]", FinishReason.STOP, None),  # a plain answer is right as well
        ("auto", '{"name": "send", [MAIL]', FinishReason.STOP, "not whole"),
        ("required", "[removed]", FinishReason.STOP, "it has none"),
    ],
)
def test_a_redacted_call_is_published_as_what_is_left_of_it(
    choice: str, text: str, reason: FinishReason, error: str | None
) -> None:
    called = '{"name": "send", "arguments": {"to": "anna@example.com"}}'
    function = {"name": "send", "parameters": {"properties": {"to": {"type": "string"}}}}
    tools = canonical_tools([{"type": "function", "function": function}])
    form = SamplingParams(tools=tools, tool_choice=canonical_choice(choice)).form
    record = completion(1, text=called, finish_reason=FinishReason.TOOL_CALLS)
    left = published_as(record, called, [said(Verdict.redact(text))], form)
    assert left.finish_reason is reason
    assert (left.error is None) if error is None else (error in str(left.error))
    choice_of = Lines("job", 0).line([left])["response"]["body"]["choices"][0]
    assert choice_of["finish_reason"] == reason.value
    if reason is FinishReason.STOP:
        assert choice_of["message"]["content"] == text
        assert "tool_calls" not in choice_of["message"]


def test_a_record_of_calls_without_its_calls_has_an_openai_line() -> None:
    record = completion(1, text="[removed]", finish_reason=FinishReason.TOOL_CALLS)
    (choice,) = Lines("job", 0).line([record])["response"]["body"]["choices"]
    assert choice["message"]["content"] == "[removed]"


def test_tokens_behind_a_stop_string_go_whoever_allowed_the_text() -> None:
    record = completion(1, text="a b")
    assert published_as(record, "a b", [said(ALLOWED)], "").token_ids == record.token_ids
    cut = published_as(record, "a b and a secret", [], "")
    assert (cut.text, set(cut.token_ids)) == ("a b", {NOT_KEPT})
    assert cut.finish_reason is record.finish_reason


def test_the_log_counts_all_and_names_what_was_not_allowed() -> None:
    records = [
        as_ruled(completion(row), [said(ALLOWED, "q"), said(verdict)])
        for row, verdict in enumerate(VERDICTS)
    ]
    first, second = ruled(records)
    assert first == {"policy": "q", "version": "1", "asked": 4, "sec": 2.0, "not_allowed": []}
    assert [one[:3] for one in second["not_allowed"]] == [
        [1, 0, "redact"],
        [2, 0, "review"],
        [3, 0, "block"],
    ]


# --- processes ------------------------------------------------------------------------------------
MODULE = """
import os, re, threading, time
from specbatch import Verdict

if os.environ.get("BREAKS_ON_IMPORT"):
    raise RuntimeError("secret")

def check(given, do="allow"):
    if do == "pid":
        return Verdict.block(str(os.getpid()))
    if do == "hang":
        time.sleep(3600)
    if do == "die":
        os._exit(3)
    if do == "exit":
        raise SystemExit(given.text)
    if do == "fork":
        os.fork()
        return Verdict.block(given.text.replace(" ", "-"))
    if do == "busy":
        threading.Timer(0.2, re.match, (r"(a+)+$", "a" * 40 + "b")).start()
        return Verdict.allow()
    if do == "of the text":
        return Verdict(given.text)
    if do == "half a character":
        return Verdict.redact("\\ud800")
    if do == "no character":
        return Verdict.redact("a\\0b")
    if do == "too long":
        return Verdict.redact("x" * (33 << 20))
    if do == "own kind":
        class Own(Verdict):
            pass
        return Own.redact(type("Text", (str,), {})("short"))
    if do == "raise":
        raise RuntimeError(given.text)
    return Verdict.allow()
"""


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HookProcess]:
    info = tmp_path / "our_hook-2.0.dist-info"
    info.mkdir()
    (tmp_path / "our_hook.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-hook\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[specbatch.policies]\nours = our_hook:check\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = HookProcess("ours")
    yield made
    made.close()


def test_one_process_serves_until_it_fails(hook: HookProcess) -> None:
    first = hook.judge(GIVEN, {"do": "pid"}, 60).code
    gone = ended(int(first))
    assert hook.judge(GIVEN, {"do": "pid"}, 60).code == first
    with pytest.raises(HookFailedError, match=r"no answer in 0\.2 s"):
        hook.judge(GIVEN, {"do": "hang"}, 0.2)
    second = hook.judge(GIVEN, {"do": "pid"}, 60).code
    assert second != first
    assert gone(), "what hangs is ended"
    with pytest.raises(HookFailedError, match="its process ended"):
        hook.judge(GIVEN, {"do": "die"}, 60)
    with pytest.raises(HookFailedError, match=r"raised RuntimeError$") as caught:
        hook.judge(GIVEN, {"do": "raise"}, 60)
    assert GIVEN.text not in str(caught.value)
    with pytest.raises(HookFailedError, match="TypeError"):
        hook.judge(GIVEN, {"unknown": 1}, 60)
    assert hook.judge(GIVEN, {"do": "own kind"}, 60) == Verdict.redact("short")
    with pytest.raises(HookFailedError, match="verdict is invalid: UnicodeEncodeError"):
        hook.judge(GIVEN, {"do": "half a character"}, 60)
    with pytest.raises(HookFailedError, match="verdict is invalid: ValueError"):
        hook.judge(GIVEN, {"do": "no character"}, 60)
    with pytest.raises(HookFailedError, match="raised ValueError"):
        hook.judge(GIVEN, {"do": "of the text"}, 60)
    with pytest.raises(HookFailedError, match="raised SystemExit"):
        hook.judge(GIVEN, {"do": "exit"}, 60)
    with pytest.raises(HookFailedError, match="too long"):
        hook.judge(GIVEN, {"do": "too long"}, 60)
    assert hook.version == "our-hook 2.0"


def test_a_process_that_somebody_else_ends_is_started_again(hook: HookProcess) -> None:
    first = int(hook.judge(GIVEN, {"do": "pid"}, 60).code)
    os.kill(first, signal.SIGTERM)
    assert hook.judge(GIVEN, {"do": "pid"}, 60).ruling is Ruling.BLOCK


def test_who_waits_when_the_worker_ends_gets_no_verdict(hook: HookProcess) -> None:
    hook.judge(GIVEN, {}, 60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(hook.judge, GIVEN, {"do": "hang"}, 60)
        while not hook._turn.locked():
            time.sleep(0.001)
        hook.close()
        with pytest.raises(RequestCancelledError, match="the worker ends"):
            waiting.result(60)


def test_a_policy_that_forks_answers_once(hook: HookProcess) -> None:
    for word in ("one", "two", "three"):
        assert hook.judge(replace(GIVEN, text=word), {"do": "fork"}, 60) == Verdict.block(word)


def test_a_policy_that_does_not_read_its_question_is_late(hook: HookProcess) -> None:
    hook.judge(GIVEN, {"do": "busy"}, 60)
    long = replace(GIVEN, text="x" * 1_000_000)
    with pytest.raises(HookFailedError, match=r"no answer in 1 s"):
        list(iter(lambda: hook.judge(long, {}, 1), None))  # it is busy soon
    assert hook.judge(GIVEN, {}, 60) == ALLOWED


WORKER = """
import sys
from specbatch.pipeline.moderation.hooks import HookProcess
from specbatch.schemas.policies import PolicyInput

hook = HookProcess("ours")
given = PolicyInput("a", "b", "c", None, "stop")
hook.judge(given, {"do": "busy"}, 60)
print(hook._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_policy_ends_with_a_worker_that_is_killed(hook: HookProcess, tmp_path: Path) -> None:
    assert hook.name == "ours"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout is not None
        gone = ended(int(worker.stdout.readline()))
        worker.kill()
    assert gone()


def test_a_policy_that_cannot_be_loaded_says_so_each_time(
    hook: HookProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKS_ON_IMPORT", "1")
    with pytest.raises(UsageError, match=r"`ours` of our-hook 2\.0 cannot be used: it cannot be"):
        hook.load()
    for _ in range(2):
        with pytest.raises(HookFailedError, match=r"cannot be loaded: RuntimeError$"):
            hook.judge(GIVEN, {}, 60)
    monkeypatch.delenv("BREAKS_ON_IMPORT")
    assert hook.judge(GIVEN, {}, 60) == ALLOWED
