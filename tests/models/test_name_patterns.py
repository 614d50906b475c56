"""Patterns of untrusted files match what Python's `re` says, in a time that no pattern makes exponential."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engine.models.adapters.adapter_config import Effort, NamePattern
from kvcellar.errors import ModelRefused

atoms = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", r"\b", "^", "$", "[ab]", "[^a1]", "[0-9_]", "(?=a)", "(?!b)"]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: f"(?:{'|'.join(some)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
        inner.map(lambda one: f"(?<!{one})" if re.fullmatch(r"\\?[ab.d]|\[.*\]", one) else one),
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(patterns, st.text("ab.1_", max_size=6))
def test_names_match_as_pythons_own_matcher_says(pattern: str, name: str) -> None:
    own = NamePattern(pattern, "targets", Effort())
    assert own.fullmatch(name) == (re.fullmatch(pattern, name) is not None)
    assert own.matches(name) == (re.match(rf"(.*\.)?({pattern})$", name) is not None)


def test_a_pattern_that_backtracks_for_years_takes_no_time() -> None:
    name = "model.layers.0.self_attn.q_proj" * 3
    assert not NamePattern("((a|[a-z._0-9])+)+Q", "targets", Effort()).fullmatch(name)
    assert not NamePattern("(.*.*.*.*)*x{3}!", "targets", Effort()).matches(name)
    assert not NamePattern("(?:a|aa)" * 60 + "b", "targets", Effort()).fullmatch("a" * 90)
    assert NamePattern("(.?){1000000}", "targets", Effort()).fullmatch(name)


def test_what_still_takes_long_is_refused() -> None:
    effort = Effort(10_000)
    pattern = NamePattern("((.?.?.?)+(.?.?)+)+x", "targets", effort)
    with pytest.raises(ModelRefused, match="takes too long to match"):
        pattern.fullmatch("a" * 200)
    with pytest.raises(ModelRefused, match="takes too long"):
        NamePattern("(ab)+", "rank_pattern", effort).matches("ab")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "is not a regular expression"),
        (r"(a)\1", "back references"),
        ("(?i)a+", "flags"),
        ("(?i:a)+", "flags"),
        ("(?>a+)", "atomic groups"),
        ("a" * 10_001, "10000 are allowed"),
        ("(" * 4900 + "a+" + ")" * 4900, "is not a regular expression"),
    ],
)
def test_patterns_that_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        NamePattern(pattern, "targets", Effort())
