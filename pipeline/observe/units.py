"""Numbers as people read them: with their unit, and no more digits than are significant.

And the version of specbatch.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from specbatch.schemas.days import DAY_SEC

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
_SPACE = "\N{NO-BREAK SPACE}"
_GLUE = "\N{WORD JOINER}"  # a line must not end between a minus and its number


def count(value: float | None) -> str:
    """`12,345`."""
    return NOTHING if value is None else _signed(value, f"{abs(value):,.0f}")


def figure(value: float | None, digits: int = 2) -> str:
    """`1.42`."""
    return NOTHING if value is None else _signed(value, f"{abs(value):,.{digits}f}")


def percent(share: float | None, digits: int = 1) -> str:
    """`61.3 %`."""
    return NOTHING if share is None else f"{figure(100 * share, digits)}{_SPACE}%"


def usd(value: float | None, beside: float | None = None) -> str:
    """`$12.34`, `$0.0123`, `$0.000714`: three significant digits, or cents.

    `beside`: a larger amount next to it, whose number of decimals it takes.
    """
    if value is None:
        return NOTHING
    size, scale = abs(value), abs(value if beside is None else beside)
    if scale >= 1000:
        shown = f"{size:,.0f}"
    elif scale >= 1:
        shown = f"{size:.2f}"
    elif scale >= 1e-7:
        places = 2 - int(f"{scale:e}".partition("e")[2])
        shown = f"{size:.{places}f}"
    else:
        shown = "0" if size < 1e-12 else f"{size:.1e}"
    return _signed(value, f"${shown}")


def seconds(value: float | None) -> str:
    """`850 ms`, `12.3 s`, `12 min 5 s`, `3 h 12 min`, `2 d 4 h`."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size < 1e-9:
        shown = f"0{_SPACE}s"
    elif size < 1e-3:
        shown = f"{size * 1e6:.0f}{_SPACE}µs"
    elif size < 1:
        shown = f"{size * 1e3:.{0 if size >= 0.01 else 1}f}{_SPACE}ms"
    elif size < 120:
        shown = f"{size:.1f}{_SPACE}s"
    else:
        shown = _long(round(size))
    return _signed(value, shown)


def _long(value: int) -> str:
    for unit, part, small in ((86_400, 3600, ("d", "h")), (3600, 60, ("h", "min"))):
        if value >= 2 * unit or (unit == 3600 and value >= unit):
            whole, rest = divmod(value, unit)
            return _two(whole, small[0], rest // part, small[1])
    return _two(value // 60, "min", value % 60, "s")


def _two(whole: int, unit: str, rest: int, small: str) -> str:
    return f"{whole}{_SPACE}{unit}" + (f" {rest}{_SPACE}{small}" if rest else "")


def when(at: float | None, seconds_too: bool = True) -> str:
    """`22 Nov 2026, 03:12:05 UTC`."""
    if at is None:
        return NOTHING
    form = "%-d %b %Y, %H:%M:%S UTC" if seconds_too else "%-d %b %Y, %H:%M UTC"
    return datetime.fromtimestamp(at, UTC).strftime(form)


def clock(at: float) -> str:
    """`03:12:05`."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def plural(number: int, one: str, many: str | None = None) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def _signed(value: float, shown: str) -> str:
    nothing = not any(digit in shown for digit in "123456789")
    return shown if value >= 0 or nothing else MINUS + _GLUE + shown


def version_here() -> str:
    """The installed version of specbatch."""
    try:
        return version("specbatch")
    except PackageNotFoundError:  # a checkout on the path
        return "unknown"


def date_of(day: int) -> str:
    """`2026-01-31`, of days since the epoch."""
    return datetime.fromtimestamp(day * DAY_SEC, UTC).date().isoformat()
