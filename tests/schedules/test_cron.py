"""Times of cron expressions: by hand, and beside a walk through every minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specbatch.jobs.schedules.cron import CronTimes
from specbatch.schemas.errors import UsageError

MINUTE = timedelta(minutes=1)


def times(expression: str, zone: str, start: str, count: int) -> list[str]:
    """The first `count` times after `start`, as UTC."""
    cron = CronTimes(expression, ZoneInfo(zone))
    begin = datetime.fromisoformat(start).replace(tzinfo=UTC).timestamp()
    found = islice(cron.after(begin), count)
    return [f"{datetime.fromtimestamp(t, UTC):%m-%d %H:%M}" for t in found]


BERLIN, HOWE = "Europe/Berlin", "Australia/Lord_Howe"


@pytest.mark.parametrize(
    ("expression", "zone", "start", "expected"),
    [
        # 02:00 to 03:00 is skipped on 29 March 2026 in Berlin: the run comes at 03:00 CEST
        ("30 2 * * *", BERLIN, "2026-03-28", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
        # all that is skipped together comes once
        ("*/20 2 * * *", BERLIN, "2026-03-29", ["03-29 01:00", "03-30 00:00"]),
        ("0 2,3 * * *", BERLIN, "2026-03-29", ["03-29 01:00", "03-30 00:00", "03-30 01:00"]),
        ("0 */2 * * *", BERLIN, "2026-03-28T22:59", ["03-28 23:00", "03-29 01:00"]),
        # 02:00 to 03:00 comes twice on 25 October 2026: the first of the two counts
        ("30 2 * * *", BERLIN, "2026-10-24", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
        ("*/30 2 * * *", BERLIN, "2026-10-25", ["10-25 00:30", "10-26 01:00", "10-26 01:30"]),
        # amid the second of the two hours nothing of the first comes again
        ("30 2 * * *", BERLIN, "2026-10-25T01:15", ["10-26 01:30", "10-27 01:30"]),
        # every hour is every hour
        ("0 * * * *", BERLIN, "2026-10-24T23:30", ["10-25 00:00", "10-25 01:00", "10-25 02:00"]),
        ("0 * * * *", BERLIN, "2026-03-28T23:30", ["03-29 00:00", "03-29 01:00"]),
        # midnight itself is skipped in Cairo on 24 April 2026
        ("0 0 * * *", "Africa/Cairo", "2026-04-23", ["04-23 22:00", "04-24 21:00"]),
        # half an hour is skipped on Lord Howe Island on 4 October 2026
        ("15 2 * * *", HOWE, "2026-10-03", ["10-03 15:30", "10-04 15:15"]),
        # a whole day was, in Samoa: 30 December 2011
        ("0 2 * * *", "Pacific/Apia", "2011-12-29", ["12-29 12:00", "12-30 10:00", "12-30 12:00"]),
        ("@daily", "UTC", "2024-02-28T00:00", ["02-29 00:00", "03-01 00:00"]),
        ("0 0 L * *", "UTC", "2024-02-01", ["02-29 00:00", "03-31 00:00"]),
        ("0 12 * * MON-FRI", "America/New_York", "2026-03-06T18:00", ["03-09 16:00"]),
    ],
)  # fmt: skip
def test_times_around_changes_of_the_clock(
    expression: str, zone: str, start: str, expected: list[str]
) -> None:
    assert times(expression, zone, start, len(expected)) == expected


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "write five fields"),
        ("* * * *", "write five fields"),
        ("0 0 2 * * *", "write five fields"),  # seconds
        ("@reboot", "write five fields"),
        ("60 * * * *", "wrong minute"),
        ("0 24 * * *", "wrong hour"),
        ("0 0 0 * *", "wrong day-of-month"),
        ("0 0 * 13 *", "wrong month"),
        ("0 0 * * 8", "wrong day-of-week"),
        ("*/0 * * * *", "wrong minute"),
        ("5-1 * * * *", "wrong minute"),
        ("a b c d e", "wrong minute"),
        ("0 0 30 2 *", "wrong day-of-month"),
        ("0 0 */20 * MON#5", "no time that ever comes"),
    ],
)
def test_what_is_no_expression_is_told_in_a_sentence(expression: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        CronTimes(expression, ZoneInfo("UTC"))


@given(st.text("0123456789*/,-L#W @a", max_size=12))
@settings(max_examples=300, deadline=None)
def test_no_text_breaks_the_reader(field: str) -> None:
    for expression in (f"{field} * * * *", f"0 0 {field} * *", f"0 0 * * {field}"):
        with suppress(UsageError):
            CronTimes(expression, ZoneInfo("UTC"))


# --- beside a walk through every minute -----------------------------------------------------

ZONES = (
    *("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago"),
    *("Africa/Cairo", "Pacific/Apia", "Asia/Kolkata", "UTC", "America/St_Johns"),
    *("Antarctica/Troll", "Africa/Casablanca", "Antarctica/Casey"),
)
YEARS = {"Pacific/Apia": 2011}


def changes(zone: ZoneInfo, year: int) -> list[datetime]:
    """The first hours of another offset, as UTC, and one ordinary day."""
    hours = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(hours=n) for n in range(8_800)]
    offsets = [hour.astimezone(zone).utcoffset() for hour in hours]
    found = [hours[n] for n in range(1, len(hours)) if offsets[n] != offsets[n - 1]]
    return [*found, datetime(year, 6, 15, tzinfo=UTC)]


CHANGES = [
    (zone, change) for zone in ZONES for change in changes(ZoneInfo(zone), YEARS.get(zone, 2024))
]


def numbers(field: str, low: int, high: int) -> set[int]:
    """A cron field, read again and otherwise."""
    found: set[int] = set()
    for term in field.split(","):
        span, _, step = term.partition("/")
        first, _, last = span.partition("-")
        begin = low if span == "*" else int(first)
        end = high if span == "*" else int(last or first)
        found |= {n for n in range(begin, end + 1) if (n - begin) % int(step or 1) == 0}
    return found


def walk(expression: str, zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[float]:
    """Each minute after `start` in which the expression is due, by looking at all of them."""
    minutes, hours, days, *_ = expression.split()
    of_minute, of_hour = numbers(minutes, 0, 59), numbers(hours, 0, 23)
    of_day = numbers(days, 1, 31)

    def names(wall: datetime) -> bool:
        return wall.minute in of_minute and wall.hour in of_hour and wall.day in of_day

    now = start - timedelta(days=2)  # to know how far the clock on the wall has been
    reached = now.astimezone(zone).replace(tzinfo=None)
    while now < end:
        now += MINUTE
        wall = now.astimezone(zone).replace(tzinfo=None)
        if len(of_hour) == 24:
            is_due = names(wall)
        else:
            passed = int((wall - reached) / MINUTE)
            is_due = any(names(reached + (n + 1) * MINUTE) for n in range(passed))
        reached = max(reached, wall)
        if is_due and start < now <= end:
            yield now.timestamp()


def a_field(low: int, high: int) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    spans = st.tuples(number, number).map(lambda pair: "-".join(map(str, sorted(pair))))
    lists = st.lists(number, min_size=1, max_size=4).map(lambda n: ",".join(map(str, n)))
    steps = st.integers(1, high).map(lambda n: f"*/{n}")
    return st.one_of(st.just("*"), number.map(str), spans, lists, steps)


EXPRESSIONS = st.tuples(
    a_field(0, 59), st.one_of(a_field(0, 23), a_field(0, 4)), st.sampled_from(["*", "*/2", "1-15"])
).map(lambda fields: f"{' '.join(fields)} * *")


@given(
    place=st.sampled_from(CHANGES),
    expression=EXPRESSIONS,
    ahead_min=st.integers(-1500, 1500),
    seconds=st.sampled_from([0, 0, 30.5]),
)
@example(("Australia/Lord_Howe", datetime(2024, 4, 6, 15, tzinfo=UTC)), "45 * * * *", 30, 0)
@example(("Europe/Berlin", datetime(2024, 3, 31, 1, tzinfo=UTC)), "30 2 * * *", 60, 0)
@settings(max_examples=60, deadline=None)
def test_times_are_those_of_a_walk_through_every_minute(
    place: tuple[str, datetime], expression: str, ahead_min: int, seconds: float
) -> None:
    name, change = place
    zone, start = ZoneInfo(name), change - timedelta(minutes=ahead_min, seconds=seconds)
    end = change + timedelta(hours=30)
    found = CronTimes(expression, zone).after(start.timestamp())
    within = list(takewhile(lambda t: t <= end.timestamp(), found))
    minute = start.replace(second=0, microsecond=0)
    expected = [t for t in walk(expression, zone, minute, end) if t > start.timestamp()]
    assert within == expected
    assert sorted(set(within)) == within
