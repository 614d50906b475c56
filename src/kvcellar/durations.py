"""durations: how long something is kept, as Ollama writes it: 5m, 1h30m, seconds as a number, and -1 for ever."""

import re

from kvcellar.errors import BadRequest, shown

MOST = 10**9  # seconds
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(h|ms|m|s|us|µs|ns)", re.ASCII)
_WHOLE = re.compile(rf"([+-]?)((?:{_PART.pattern})+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,20}(\.\d{0,20})?", re.ASCII)


def seconds_of(value: object, param: str = "keep_alive") -> float:
    """Seconds; infinite for what is negative. Raises `BadRequest`."""
    seconds = _seconds(value)
    if seconds is None or seconds > MOST:
        raise BadRequest(
            f"{param} must be a time like 30s, 5m or 1h30m, a number of seconds up to {MOST}, or -1 for ever, not "
            f"{shown(value)}",
            param,
        )
    return float("inf") if seconds < 0 else seconds


def _seconds(value: object) -> float | None:
    if type(value) in (int, float):
        return float(value) if abs(value) < 2**63 else None  # type: ignore[arg-type]
    if not isinstance(value, str) or len(value) > 100:
        return None
    if _NUMBER.fullmatch(value):
        return float(value)
    if (found := _WHOLE.fullmatch(value)) is None:
        return None
    total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(found[2]))
    return -total if found[1] == "-" else total
