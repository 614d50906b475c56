"""Patterns of untrusted files match what Python's `re` says, and end in time or are refused."""

import re

import pytest

from kvcellar.engine.models.name_patterns import matched
from kvcellar.errors import ModelRefused

NAMES = ("q_proj", "model.norm", "norm", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
PATTERNS = (
    "q_proj",
    r"norm|.*\.0\..*",
    r"(?!.*1).*q_proj",
    r"layers\.\d+\.self_attn\.q_proj",
    "^norm",
    "(?i:NORM)+",
    "x",
)


@pytest.mark.parametrize("patterns", [PATTERNS, ("q_proj", "^norm", "model.norm")], ids=["any", "plain"])
def test_names_match_as_pythons_own_matcher_says(patterns: tuple[str, ...]) -> None:
    whole, ends = matched(patterns, NAMES, "targets"), matched(patterns, NAMES, "ranks", ends=True)
    for pattern, names, longer in zip(patterns, whole, ends, strict=True):
        assert names == {name for name in NAMES if re.fullmatch(pattern, name)}
        assert longer == {name for name in NAMES if re.match(rf"(.*\.)?({pattern})$", name)}
    assert matched((), NAMES, "targets") == []


def test_a_pattern_that_backtracks_for_years_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcellar.engine.models.name_patterns.SECONDS", 0.2)
    with pytest.raises(ModelRefused, match="targets takes too long to match"):
        matched(["((a|[a-z._0-9])+)+Q"], NAMES, "targets")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "is not a regular expression"),
        ("a)(b", "is not a regular expression"),
        ("(?i)a+", "is not a regular expression"),
        ("a" * 10_001, "10000 are allowed"),
        ("(" * 4900 + "a+" + ")" * 4900, "is not a regular expression"),
    ],
)
def test_patterns_that_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        matched([pattern], NAMES, "ranks", ends=True)
