"""How a request states how long its entries are kept, and what an entry records."""

import math

import pytest

from kvcellar import RetentionOptions
from kvcellar.errors import BadRequest
from kvcellar.memory.retention import MOST_TTL, Retention, stronger
from tests.engine.mixes import small_engine


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("priority", value) for value in (9, -9, True, 1.0, "1", None)),
        *(("ttl", value) for value in (0, -1, math.nan, math.inf, MOST_TTL + 1, True, "5")),
        *((name, value) for name in ("pinned", "stored", "recurring") for value in (1, None, "yes")),
        *(("owner", value) for value in (None, 5, "x" * 256, "\ud800", "a\nb")),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_name(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=f"^{name} must be") as error:
        RetentionOptions(**{name: value})  # type: ignore[arg-type]
    assert error.value.param == name


@pytest.mark.parametrize("value", [{}, "24h", Retention()])
def test_an_engine_refuses_what_are_no_options(value: object) -> None:
    with small_engine("llama") as engine, pytest.raises(BadRequest, match=r"^retention is RetentionOptions\(\.\.\.\)"):
        engine.submit([5], engine.params(), deliver=lambda event: None, retention=value)  # type: ignore[arg-type]


def test_options_become_the_retention_of_entries_that_are_used_now() -> None:
    options = RetentionOptions(priority=3, ttl=60, pinned=True, owner="a")
    assert options.at(1000.0) == Retention(priority=3, pinned=True, expires=1060.0, owner="a")
    assert RetentionOptions().at(1000.0) == Retention()


def test_the_stronger_of_two_keeps_an_entry_at_least_as_long_as_both() -> None:
    one, other = Retention(-1, True, 10.0, "a"), Retention(2, False, 20.0, "b")
    assert stronger(one, other) == Retention(2, True, 20.0, "a")
    assert stronger(other, one) == Retention(2, True, 20.0, "b")
    assert stronger(one, Retention()) == Retention(0, True, None, "a")


def test_an_entry_is_expired_at_its_time() -> None:
    assert [Retention(expires=10.0).expired(now) for now in (9.9, 10.0, 10.1)] == [False, True, True]
    assert not Retention().expired(10.0**12)
