"""Workers are used by what they gain: what they cost is bounded, whatever calls take with them and without them."""

import ctypes
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.kernels.compiled import COMPILERS, SOURCES, library

FOUND = next((found for name in COMPILERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason=f"none of {', '.join(COMPILERS)} is here")

SOURCE = """
#include "balance.h"

// Calls one after the other: each begins `passed[i]` after the one before, and workers would gain `gains[i]` in it.
// Sets used[i] where they are used.
extern "C" void balance(int64_t calls, const int64_t* passed, const int64_t* gains, int64_t* used) {
    Balance balance;
    int64_t now = 1;
    for (int64_t i = 0; i < calls; ++i) {
        now += passed[i];
        used[i] = !balance.rests(now);
        if (used[i]) balance.add(now, gains[i]);
    }
}

// Calls of these kinds, which take `with[i]` with workers and `without[i]` without them. Sets gains[i] to what workers
// are counted to have gained, and measured[i] where there were none.
extern "C" void alone(int64_t calls, int64_t threads, const int64_t* kinds, const int64_t* with, const int64_t* without,
                      int64_t* gains, int64_t* measured) {
    Alone alone;
    for (int64_t i = 0; i < calls; ++i) {
        alone.of(kinds[i]);
        measured[i] = alone.next(threads);
        if (measured[i]) alone.took(without[i]);
        gains[i] = measured[i] ? 0 : alone.gain(with[i]);
    }
}

extern "C" const int64_t credit = Balance::CREDIT, rest = Balance::REST, longest = Balance::LONGEST, some = Alone::SOME;
"""
CALLS = st.lists(st.tuples(st.integers(0, 10**9), st.integers(-(10**8), 10**8)), max_size=60)


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("source")
    shutil.copy(SOURCES / "balance.h", path)
    (path / "rule.cpp").write_text(SOURCE)
    return library(path / "rule.cpp", {**os.environ, "XDG_CACHE_HOME": str(path)})


def number(rule: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int64.in_dll(rule, name).value


def used(rule: ctypes.CDLL, calls: list[tuple[int, int]]) -> list[bool]:
    passed, gains, found = ((ctypes.c_int64 * len(calls))(*(one[at] for one in calls)) for at in (0, 1, 0))
    rule.balance(ctypes.c_int64(len(calls)), passed, gains, found)
    return list(map(bool, found))


@given(CALLS)
def test_what_workers_cost_is_bounded_by_what_they_gain_and_by_time(
    rule: ctypes.CDLL, calls: list[tuple[int, int]]
) -> None:
    taken = [gain for (_, gain), one in zip(calls, used(rule, calls), strict=True) if one]
    losses = [max(0, -gain) for gain in taken]
    most = number(rule, "credit") + max(losses, default=0)
    assert most <= number(rule, "longest")
    elapsed = sum(passed for passed, _ in calls)
    assert sum(taken) >= -most - elapsed / number(rule, "rest")


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8)), max_size=60))
def test_workers_that_never_cost_are_always_used(rule: ctypes.CDLL, calls: list[tuple[int, int]]) -> None:
    assert all(used(rule, calls))


@given(CALLS)
def test_workers_are_tried_again(rule: ctypes.CDLL, calls: list[tuple[int, int]]) -> None:
    assert used(rule, [*calls, (number(rule, "rest") * number(rule, "longest"), 0)])[-1]


def test_a_call_that_was_suspended_for_long_does_not_end_the_use_of_workers(rule: ctypes.CDLL) -> None:
    rest = number(rule, "rest") * number(rule, "longest")
    assert used(rule, [(1, -(10**15)), (rest - 1, 0), (1, 0)]) == [True, False, True]


Kind = st.tuples(st.integers(1, 2), st.integers(1, 10**6), st.integers(1, 10**6))


@given(st.lists(Kind, max_size=300), st.integers(2, 3))
def test_gains_are_counted_against_measured_calls_of_the_same_kind(
    rule: ctypes.CDLL, calls: list[tuple[int, int, int]], threads: int
) -> None:
    kinds, took, without, gains, measured = (
        (ctypes.c_int64 * len(calls))(*(one[at] for one in calls)) for at in (0, 1, 2, 0, 0)
    )
    rule.alone(ctypes.c_int64(len(calls)), ctypes.c_int64(threads), kinds, took, without, gains, measured)
    some = number(rule, "some")
    last, count, seen = 0, 0, list[int]()
    for at, (kind, with_workers, alone) in enumerate(calls):
        count, seen = (count + 1, seen) if kind == last else (1, [])
        last = kind
        assert bool(measured[at]) == (count % (some * threads) == some // 2)
        if measured[at]:
            seen.append(alone)
        elif not seen:
            assert gains[at] == 0
        else:
            assert min(seen) <= gains[at] + with_workers <= max(seen)
