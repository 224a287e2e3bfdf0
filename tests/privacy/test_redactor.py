"""What is recognised as personal data, what is not, and how long that takes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specbatch.pipeline.privacy.patterns import found
from specbatch.pipeline.privacy.redactor import Redactor, Span, merged, replaced
from specbatch.schemas.errors import MissingExtraError, UsageError
from specbatch.schemas.field_errors import explain
from specbatch.schemas.spec import SamplingSpec

PLAIN = Redactor()
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow/+=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("to anna.m+x@mail.example.co.uk.", "to [EMAIL]."),
        ("ünal@müller.example,b@c.de", "[EMAIL],[EMAIL]"),
        ("call +49 (0)30 9018-2077 now", "call [PHONE] now"),
        ("(030) 901 820, 030/901820; 555-010-9999", "[PHONE], [PHONE]; [PHONE]"),
        ("0049 30 901820", "[PHONE]"),
        # what stands beside a number looks like a part of it
        ("+49 30 90182022 10117 Berlin", "[PHONE] 10117 Berlin"),
        ("030 90182022 10117 Berlin", "[PHONE] 10117 Berlin"),
        ("030 90182022 10117Berlin", "[PHONE] 10117Berlin"),
        ("+49 170 1234567 12.03.2024", "[PHONE].03.2024"),
        ("+44 20 7946 0958 2024-05-06", "[PHONE]"),
        ("+12125550123 2024-05-06 10:00", "[PHONE]-05-06 10:00"),
        ("+12125550123 12125550124", "[PHONE] 12125550124"),
        ("+49 30 90182022 030 90182023", "[PHONE]"),
        ("030 90182022 030 90182023 030 90182024", "[PHONE]"),
        ("2024-05-06 030 90182022", "2024-05-06 [PHONE]"),
        ("01.02.2026 030 90182022", "01.02.2026 [PHONE]"),
        ("4111 1111 1111 1111", "[CARD]"),
        ("no 12 5500-0000-0000-0004.", "no 12 [CARD]."),
        ("378282246310005", "[CARD]"),
        ("from 192.0.2.17, 2001:db8::8a2e:370:7334", "from [IP], [IP]"),
        ("from 2001:db8::1: connection refused", "from [IP]: connection refused"),
        ("fe80::1: unreachable; 2001:db8::: no", "[IP]: unreachable; [IP]: no"),
        ("2001:db8:0:0:0:0:0:1: no, 2001:db8:1:2:3:4:5:: no", "[IP]: no, [IP] no"),
        ("::2:3:4:5:6:7:8, 1:2:3:4:5:6:7:8:443", "[IP], [IP]:443"),
        ("::ffff:192.0.2.17. 192.0.2.17: no", "[IP]. [IP]: no"),
        ("peer:2001:db8::1 source:fe80::1", "peer:[IP] source:[IP]"),
        ("DE89 3704 0044 0532 0130 00", "[IBAN]"),
        ("sk-abcdefghijklmnop1234 AKIAIOSFODNN7EXAMPLE", "[KEY] [KEY]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "[KEY]"),
        (
            "PASSWORD = hunter2hunter2; Bearer abcdefghij0123456789",
            "PASSWORD = [KEY]; Bearer [KEY]",
        ),
        ("İzmir İİ: password=hunter2hunter2", "İzmir İİ: password=[KEY]"),
        (f"a {PEM} b", "a [KEY] b"),
        ("-----BEGIN PRIVATE KEY-----\ncut off", "[KEY]"),
        # JSON, and JSON within it: the letters of escapes are no part of names
        (r'{"a": "Tel.\n+49 30 90182077\tIP\n192.0.2.17"}', r'{"a": "Tel.\n[PHONE]\tIP\n[IP]"}'),
        (r'{"a": "x\tDE89370400440532013000"}', r'{"a": "x\t[IBAN]"}'),
        (r'{"a": "see\nsk-abcdefghijklmnop1234"}', r'{"a": "see\n[KEY]"}'),
        (
            r'{"m": "an\u0061\u0040ex.de \ud83d\ude00 \u0062@c.de"}',
            r'{"m": "[EMAIL] \ud83d\ude00 [EMAIL]"}',
        ),
        (r'{"a": "{\"password\": \"hunter2hunter2\"}"}', r'{"a": "{\"password\": \"[KEY]\"}"}'),
        (
            r'{"a": "{\"k\": \"see\\nsk-abcdefghijklmnop1234\"}"}',
            r'{"a": "{\"k\": \"see\\n[KEY]\"}"}',
        ),
    ],
)
def test_finds_are_replaced_by_their_mark(text: str, redacted: str) -> None:
    assert PLAIN.redacted(text) == redacted


@pytest.mark.parametrize(
    "text",
    [
        *("4111 1111 1111 1112", "room 101, 1234567 people", "3.14159265358979", "12:30:45"),
        *("01.02.2026 02.03.2026", "01.02.2026 10:00", "2026-01-22 1000", "2026-01-22 2026-01-23"),
        *("std::vector<int>", "01.02.2026", "2026-11-22", "pages 100-200", "1.2.3", "999.1.1.1"),
        *("std::a1:b2:", "12:30:45: ready", "at:12:30:45", "00:1a:2b:3c:4d:5e: up"),
        *(r"\alpha\beta", r"C:\new\table", r'{"a": "line\n\u00fc"}', r"\ud800", "\\"),
        *("a@b", "@decorator", "token: a", "1a2009e15760fb886dcc7", "::1", "0.5 - 0.7"),
    ],
)
def test_what_only_looks_a_little_like_it_stays(text: str) -> None:
    assert PLAIN.redacted(text) == text


IBANS = (  # of each number of digits that an IBAN has, examples of its registry
    *("NO93 8601 1117 947", "BE68 5390 0754 7034", "DK50 0040 0440 1162 43"),
    *("NL91 ABNA 0417 1643 00", "SI56 2633 0001 2039 086", "AT61 1904 3002 3457 3201"),
    *("CH93 0076 2011 6238 5295 7", "DE89 3704 0044 0532 0130 00", "GB29 NWBK 6016 1331 9268 19"),
    *("AE07 0331 2345 6789 0123 456", "ES91 2100 0418 4502 0005 1332"),
    *("PT50 0002 0123 1234 5678 9015 4", "FR14 2004 1010 0505 0001 3M02 606"),
    *("PL61 1090 1014 0000 0712 1981 2874", "BR18 0036 0305 0000 1000 9795 493C 1"),
    *("JO94 CBJO 0010 0000 0000 0131 0003 02", "MT84 MALT 0110 0001 2345 MTLC AST0 01S"),
    "LC55 HEMM 0001 0001 0012 0012 0002 3015",
)


@pytest.mark.parametrize("iban", IBANS)
def test_an_iban_is_found_whatever_stands_beside_it(iban: str) -> None:
    for written in (iban, iban.replace(" ", ""), iban.replace(" ", "\u00a0")):
        for behind in ("", " EUR 500", " BIC", " BIC GKCCBEBB", " AUCH", " BITTE", " A", ", EUR"):
            assert PLAIN.redacted(f"to {written}{behind}") == f"to [IBAN]{behind}"
        assert PLAIN.redacted(f"AB12 CDEF {written} {written}") == "AB12 CDEF [IBAN] [IBAN]"


def test_an_installations_own_patterns_come_first() -> None:
    redactor = Redactor({"STAFF": r"STAFF-\d{4,8}", "MAIL": r"\w{1,20}@corp\.example"})
    assert redactor.redacted("STAFF-4711 is anna@corp.example") == "[STAFF] is [MAIL]"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a+)+b", "within a repetition"),
        (r"(\w*\d)*", "empty text"),
        (r"(x\w*\d){2,9}", "within a repetition"),
        ("(a|ab){2,9}c", "repeats alternatives"),
        (r"\w*x\w*", "could take very long"),
        (r"\w{1,200}-\w{1,200}-\w{1,200}", "could take very long"),
        ("(?:a?){24}b", r"could take very long.*`\?\+` for a `\?` that is repeated"),
        ("(?:ab?)+c", "could take very long"),
        ("(?:a|a)" * 26 + "b", "could take very long"),
        (r"(a)\1", "refers back"),
        ("a*", "empty text"),
        ("(", "not a regular expression"),
        ("a" * 201, "201 characters"),
        ("", "0 characters"),
    ],
)
def test_patterns_that_could_take_for_ever_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Redactor({"OWN": pattern})
    with pytest.raises(UsageError, match="needs a name of capital letters"):
        Redactor({"own": "abc"})


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(?:\d ?){10}", "4711 0815 12"),
        (r"(?:\d[ -]?+){13,16}", "4711-0815-4711 0815"),
        (r"(?:[A-Z]\d?+)+-", "A1B2CD-"),
        (r"a{1,20}x|b{1,20}y|c{1,20}z|d{1,20}v|e{1,20}w", "eew"),
    ],
)
def test_patterns_that_take_little_time_are_used(pattern: str, text: str) -> None:
    assert Redactor({"OWN": pattern}).redacted(f"no {text}.") == "no [OWN]."


def test_own_patterns_are_found_across_windows() -> None:
    (own,) = Redactor({"OWN": r"X\d{1,40}Y"})._own.values()
    find = "X" + "1" * 40 + "Y"
    for begin in range(900, 1100, 7):
        text = "a" * begin + find + "a" * 900
        assert (begin, begin + len(find)) in set(found(own, text))


def test_messages_lose_what_they_quote_even_where_the_quote_was_cut_off() -> None:
    said = "an earlier row has the id 'Anna Schmidt' of \"it\" but the model's vocabulary is 5"
    assert PLAIN.without_quotes(said) == (
        "an earlier row has the id […] of […] but the model's vocabulary is 5"
    )
    assert PLAIN.without_quotes("the id 'Anna Schm") == "the id […]"
    for quoted in ('it\'s "Anna" Kowalski', "'", "a\\", b"Anna", b"'\"", "Anna's\n"):
        said = f"the job's id {quoted!r}, of row 'Anna'; see Bob's"
        assert PLAIN.without_quotes(said) == "the job's id […], of row […]; see Bob's"
        cut = f"the job's id {quoted!r:.5}"
        assert "Anna" not in PLAIN.without_quotes(cut)
    place = "parameters at /properties/patient_anna/uniqueItems: Unimplemented"
    assert PLAIN.without_quotes(place) == "parameters at […] Unimplemented"


def test_errors_about_several_fields_lose_all_that_they_quote() -> None:
    values = {"max_tokens": "Anna " * 50, "temperature": "Anna", "top_k": int("9" * 200)}
    with pytest.raises(ValidationError) as caught:
        SamplingSpec.model_validate(values)
    said = explain(caught.value.errors(), SamplingSpec)
    assert said.count("Anna") > 15
    assert PLAIN.without_quotes(said).count("(got […])") == 2
    assert "Anna" not in PLAIN.without_quotes(said)


@given(
    text=st.text(max_size=60),
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=6),
)
def test_every_character_of_a_find_is_gone_and_all_others_stay(
    text: str, spans: list[tuple[int, int]]
) -> None:
    found_ones = merged(Span(start, start + length, "X") for start, length in spans)
    for one, other in itertools.pairwise(found_ones):
        assert one.stop <= other.start
    inside = {p for start, length in spans for p in range(start, start + length)}
    kept = "".join(char for place, char in enumerate(text) if place not in inside)
    marks = sum(span.start < len(text) for span in found_ones)
    assert len(replaced(text, found_ones)) == len(kept) + 3 * marks


def test_a_text_of_any_shape_is_done_in_time_in_proportion_to_its_length() -> None:
    """A search that tries all pairs of places in such a text takes half an hour, not a moment."""
    redactor = Redactor({"OWN": r"\w{1,20}-\d+x"})
    for piece in (
        "the quick fox ",
        "a",
        "1",
        "1.2.",
        "a:",
        "@",
        "a@",
        "4 1",
        "-",
        "'",
        "\u00e9",
        "\\",
        r"\n",
        r"\u0031",
    ):
        length = 200_000
        redactor.spans((piece * length)[:length])


def test_presidio_finds_more_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType, SimpleNamespace

    from specbatch.pipeline.privacy.redactor import presidio_finder

    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(MissingExtraError, match=r"specbatch\[privacy\]"):
        Redactor(more=lambda: presidio_finder("en")).spans("Anna")

    class Analyzer:
        def analyze(self, text: str, language: str, score_threshold: float) -> list[object]:
            assert (language, score_threshold) == ("de", 0.4)
            at = text.index("Anna")
            return [SimpleNamespace(entity_type="PERSON", start=at, end=at + 4)]

    module = ModuleType("presidio_analyzer")
    module.AnalyzerEngine = Analyzer  # type: ignore[attr-defined]  # a module of our own making
    monkeypatch.setitem(sys.modules, "presidio_analyzer", module)
    redactor = Redactor(more=lambda: presidio_finder("de"))
    assert redactor.redacted("Anna has a@b.cd") == "[PERSON] has [EMAIL]"
