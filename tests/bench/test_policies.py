"""Rules of eviction on traces: what they say they do, and that ours is the one of the engine."""

from collections.abc import Callable

import pytest

from benchmarks.policies import (
    RULES,
    Admitted,
    Clairvoyant,
    Dual,
    Frequency,
    MostRecent,
    Pieces,
    Rule,
    Segmented,
    by_choice,
    by_rule,
    compared,
    few,
    ours,
)
from benchmarks.replay import FIRST, TRACES, Turn, Writer, last_use, replay


@pytest.mark.parametrize("trace", FIRST)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_ours_computes_what_the_replay_of_the_engine_does(trace, share) -> None:
    found = replay(trace, "full", share=share, scale=0.05)
    assert ours(list(TRACES[trace](Writer(1, 0.05))), found.cells) == found.computed


@pytest.mark.parametrize("trace", FIRST)
def test_no_rule_computes_less_than_the_one_that_knows_what_is_needed(trace) -> None:
    found = compared(list(TRACES[trace](Writer(1, 0.05))), 0.1)
    assert found.clairvoyant <= 1.01 * found.best  # pieces go as a whole
    assert found.best <= 1.01 * min(found.ours, *found.rules.values())


def turns(texts: str) -> list[Turn]:
    """Prompts of four tokens, each named by a letter, with answers of one that is not kept."""
    return [Turn([ord(name), 1, 2, 3], [4]) for name in texts]


def computed(texts: str, rule: Callable[[Pieces, int], Rule], cells: int = 8) -> int:
    """In room for two texts, where one of which all is known computes its last token."""
    return by_rule(Pieces(turns(texts)), cells, rule)


@pytest.mark.parametrize(
    ("rule", "texts", "known"),
    [
        (Rule, "abaca", 2),  # b goes
        (Rule, "abcabc", 0),  # each goes before it is needed
        (MostRecent, "abcabc", 2),
        (Clairvoyant, "abcabc", 2),
        (Frequency, "aabcda", 2),  # of those that were used once the one that was used last
        (Rule, "aabcda", 1),
        (Dual, "aabca", 2),
        (Dual, "aabcdefgha", 1),  # what is not used falls behind
        (Frequency, "aabcdefgha", 2),
        (Segmented, "aabcda", 2),
        (Admitted, "ababcab", 3),  # c was asked for less often than b
        (Rule, "ababcab", 2),
    ],
)
def test_a_rule_keeps_what_it_says(rule, texts, known) -> None:
    assert computed(texts, rule) == 4 * len(texts) - 3 * known


def test_the_order_of_last_use_is_that_of_replay_but_for_the_request_that_runs() -> None:
    trace = list(few(3)(Writer(1, 0.25)))
    assert by_rule(Pieces(trace), 1500, Rule) == pytest.approx(last_use(trace, 1500), rel=0.02)


def test_of_two_rules_the_one_is_followed_that_would_have_computed_less() -> None:
    pieces = Pieces(turns("abcd" * 20))
    worse, better = (by_rule(pieces, 12, rule) for rule in (Rule, MostRecent))
    assert better <= by_choice(pieces, 12, Rule, MostRecent) <= better + 12 < worse


def test_every_rule_computes_all_but_the_last_token_of_what_it_has_no_more_than_once() -> None:
    assert {computed("abab", rule, 100) for rule in RULES.values()} == {4 + 4 + 1 + 1}
