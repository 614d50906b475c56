"""How long something is kept, as Ollama writes it."""

from math import inf, nan

import pytest

from kvcellar import BadRequest
from kvcellar.durations import seconds_of

GIVEN = [
    ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), ("0", 0), ("30", 30), (0, 0), (2.5, 2.5), ("+5s", 5),
    (-1, inf), ("-1", inf), ("-5m", inf), (-0.5, inf), (".5s", 0.5), ("0s", 0), (10**9, 10**9),
]  # fmt: skip
WRONG = [
    "", "abc", "1e99h", "5 m", "5x", "m", "1h-30m", "٣s", 10**9 + 1, 10**400, True, None, [], nan, inf, "9" * 200,
    "1e9",
]  # fmt: skip


@pytest.mark.parametrize(("given", "seconds"), GIVEN)
def test_a_time_is_read(given: object, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", WRONG)
def test_anything_else_is_refused(given: object) -> None:
    with pytest.raises(BadRequest, match="keep_alive must be a time like 30s, 5m or 1h30m") as refused:
        seconds_of(given)
    assert refused.value.param == "keep_alive"
