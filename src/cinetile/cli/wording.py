"""Formatting of numbers, the same in every table."""


def milliseconds(value: float) -> str:
    """A time with about three digits: `0.812 ms`, `34.6 ms`, `1,985 ms`."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f} ms"


def seconds(value: float) -> str:
    """A time with about three digits: `0.081 s`, `4.72 s`, `312 s`."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f} s"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def percent_or_dash(fraction: float | None) -> str:
    """A share, or a dash if the measurement does not support it."""
    return "-" if fraction is None else percent(fraction)


def counted(count: int, noun: str) -> str:
    """A number of things: `1 head`, `12 heads`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
