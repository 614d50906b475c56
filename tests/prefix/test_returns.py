"""What is worth keeping is learned of what comes back, and when."""

import random
from collections import Counter
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.policy import worth_by_age
from kvcellar.memory.prefix.node import Node, Use, key_of
from kvcellar.memory.prefix.reuse_statistics import (
    AGAIN,
    AGES,
    KINDS,
    LONGEST,
    OFTEN,
    ONCE,
    RARELY,
    STARTS,
    WIDTHS,
    Returns,
)
from kvcellar.memory.prefix.tree import LEAST, Tree
from tests.prefix.claims import TokenClaims

NONE = [0.0] * AGES


def age_of(requests: int) -> int:
    return max(age for age in range(AGES) if STARTS[age] <= requests)


def test_while_nothing_was_seen_the_order_is_that_of_the_last_use() -> None:
    for worth in worth_by_age([NONE, NONE], [NONE, NONE], WIDTHS):
        assert all(one >= other for one, other in pairwise(worth))
        assert worth[0] > worth[-1]


@pytest.mark.parametrize("period", [3, 8, 40])
def test_of_what_comes_back_in_turn_the_one_that_was_just_used_is_worth_least(period) -> None:
    due, many = age_of(period), 1000.0
    reached = [many if age <= due else 0.0 for age in range(AGES)]
    returned = [many if age == due else 0.0 for age in range(AGES)]
    worth = worth_by_age([returned], [reached], WIDTHS)[0]
    assert worth[0] == min(worth[: due + 1])
    assert all(one < other for one, other in pairwise(worth[: due + 1]))


@given(st.lists(st.integers(0, 9), min_size=AGES, max_size=AGES), st.integers(0, AGES - 1))
def test_a_worth_is_the_most_uses_that_any_time_of_keeping_gives_for_a_unit_of_it(tenths, age):
    many = 1e12  # so much was seen that what is assumed of a class does not count
    worth = worth_by_age([[many * one / 10 for one in tenths]], [[many] * AGES], WIDTHS)[0]

    def rate(stop: int) -> float:
        """Uses over time, of a thing of this age that is kept until it was used, or has reached the age `stop`."""
        uses = time = 0.0
        for at in range(age, stop):
            alive = prod(1 - tenths[before] / 10 for before in range(age, at))
            uses += alive * tenths[at] / 10
            time += alive * WIDTHS[at] * (1 - tenths[at] / 20)  # one that is used is so in the middle of an age
        return uses / time

    assert worth[age] == pytest.approx(max(map(rate, range(age + 1, AGES + 1))), rel=1e-6, abs=1e-9)


def test_of_two_classes_the_one_that_comes_back_more_often_is_worth_more() -> None:
    reached = [1000.0] * AGES
    rarely, often = worth_by_age([NONE, [500.0] * AGES], [reached, reached], WIDTHS)
    assert all(few < many for few, many in zip(rarely, often, strict=True))


def test_a_class_that_comes_back_less_than_others_is_worth_less_at_ages_that_it_has_not_reached() -> None:
    young = [100.0 if age < 4 else 0.0 for age in range(AGES)]
    reached, returned = [young, [100.0] * AGES], [[0.2 * many for many in young], [40.0] * AGES]
    rarely, often = worth_by_age(returned, reached, WIDTHS)
    unknown, _ = worth_by_age([NONE, returned[1]], [NONE, reached[1]], WIDTHS)
    assert all(few < same <= many for few, same, many in zip(rarely[4:], unknown[4:], often[4:], strict=True))


def leaf_of(returns: Returns, start: int, tokens: list[int], parent: Node, last: Use | None = None) -> Node:
    node = Node(parent, start, key_of(tokens), use=returns.use(last))
    assert node.use is not None
    node.use.leaf = node
    return node


def kind_of(uses: list[int]) -> int:
    """The class of what these requests have used."""
    if len(uses) == 1:
        return ONCE
    return AGAIN if (uses[-1] - uses[0]) / (len(uses) - 1) < OFTEN else RARELY


@given(st.lists(st.one_of(st.integers(1, 40), st.tuples(st.integers(0, 9), st.booleans())), max_size=60))
def test_what_is_counted_is_what_all_uses_say(steps) -> None:
    """Numbers let requests begin; pairs use one of ten things again, after it was evicted or not."""
    returns, root = Returns(lambda node: None), Node(None, 0, b"", namespace="a")
    leaves = {n: leaf_of(returns, 0, [n] * 20, root) for n in range(10)}
    used = {n: [0] for n in range(10)}
    reached, returned = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def passed(n: int, upto: int) -> None:
        for age in range(upto):
            reached[kind_of(used[n]), age] += 1

    for step in steps:
        if isinstance(step, int):
            for _ in range(step):
                returns.tick()
        else:
            n, evicted = step
            use = leaves[n].use
            assert use is not None
            if evicted:
                returns.lose(leaves[n], 4)
                key = key_of([n] * 20)
                assert returns.lost("a", key, 4) is use
                assert returns.lost("b", key, 4) is None, "another namespace finds it"
                assert returns.lost("a", key, 5) is None
            returns.returned(use)
            assert returns.lost("a", key_of([n] * 20), 4) is None
            age = age_of(returns.now - used[n][-1])
            passed(n, age + 1)
            returned[kind_of(used[n]), age] += 1
            leaves[n] = leaf_of(returns, 0, [n] * 20, root, use)
            used[n].append(returns.now)
        returns.check()
    for n in range(10):
        passed(n, age_of(returns.now - used[n][-1]))
    if returns.now < 1024:  # what was counted before is worth half then
        for one in KINDS:
            assert returns.counts(one) == (
                [reached[one, age] for age in range(AGES)],
                [returned[one, age] for age in range(AGES)],
            )


def test_what_was_evicted_too_long_ago_is_forgotten() -> None:
    returns, root = Returns(lambda node: None), Node(None, 0, b"", namespace="a")
    leaf = leaf_of(returns, 0, [1] * 20, root)
    returns.lose(leaf, 4)
    for _ in range(STARTS[-1] - 1):
        returns.tick()
    assert returns.lost("a", leaf.edge, 4) is leaf.use
    returns.tick()
    assert returns.lost("a", leaf.edge, 4) is None
    assert STARTS[-1] < LONGEST
    returns.check()


class Cache:
    """A tree with so many cells, and how many tokens of requests it has computed."""

    def __init__(self, cells: int) -> None:
        self.cells, self.computed = cells, 0
        self.claims = TokenClaims()
        self.tree = Tree(self.claims, anywhere=True)

    def ask(self, text: list[int]) -> None:
        root, key = self.tree.root(""), key_of(text)
        match = self.tree.match(root, key, len(text) - 1)
        node = self.tree.lock(root, match)
        last = self.tree.touch(node, key, match.matched)
        new = len(text) - match.resume
        self.computed += new
        while sum(map(len, self.claims.spans.values())) + new > self.cells and self.tree.evict_leaf(new):
            pass
        claim = self.claims.make(text, match.resume, set())
        node, _ = self.tree.insert(root, key, claim, match.resume, node, last=last)
        self.tree.unlock(node)
        self.tree.check()


def test_of_eight_texts_in_turn_some_stay_in_room_for_four() -> None:
    cache = Cache(4 * 100)
    texts = [[1 + n] * 100 for n in range(8)]
    for _ in range(12):
        for text in texts:
            cache.ask(text)
    in_all = 12 * 8 * 100
    best = 8 * 100 + 11 * 8 * 100 * 4 / 7  # three of seven others are there
    assert cache.computed < 0.75 * in_all
    assert cache.computed < 1.3 * best


def test_what_comes_once_does_not_push_out_what_comes_back() -> None:
    draw = random.Random(1)
    cache = Cache(800)
    back = [[1 + n] * 150 for n in range(4)]
    once = 0
    for n in range(200):
        if draw.random() < 0.4:
            cache.ask(draw.choice(back))
        else:
            cache.ask([100 + n] * 120)
            once += 120
    assert cache.computed < 1.15 * (once + 4 * 150)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_popular_documents_stay_and_questions_on_them_go_first(seed) -> None:
    """The same requests are served by the order of last use, and by what was learned."""
    draw = random.Random(seed)
    documents = [[1 + n] * 120 for n in range(30)]
    asked = draw.choices(documents, [1 / (n + 1) for n in range(30)], k=200)
    learned, by_last_use = Cache(900), Cache(900)
    returns = by_last_use.tree._order.returns
    returns.worth = lambda use: 1 / (1 + returns.now - use.at)
    for cache in (learned, by_last_use):
        for n, document in enumerate(asked):
            cache.ask([*document, *[100 + n] * 60])
    questions = 200 * 60
    assert learned.computed - questions < 0.9 * (by_last_use.computed - questions)


def test_a_document_keeps_its_class_when_one_question_on_it_is_left() -> None:
    cache = Cache(1000)
    for n in range(3):
        cache.ask([*[1] * 100, *[10 + n] * 50])
    while cache.tree.evict_leaf(50) and len(list(cache.tree.nodes())) > 2:
        pass
    document, question = cache.tree.nodes()
    assert (document.tokens, question.parent) == (100, document)
    assert [use.before for use in (document.use, question.use) if use is not None] == [2, 0]


def test_few_tokens_are_evicted_together() -> None:
    cache = Cache(1000)
    cache.ask(list(range(1, 200)))
    assert cache.tree.evict_leaf(1) == LEAST


def test_uses_keep_no_tokens_of_what_left_the_tree() -> None:
    cache = Cache(200)
    for n in range(20):
        cache.ask([7, *range(100 * n, 100 * n + 80)])
        cache.ask([7, *range(100 * n, 100 * n + 90)])
    there = {id(node) for node in cache.tree.nodes()}
    uses = [use for waiting in cache.tree._order.returns._waiting for use in waiting]
    gone = [use.leaf for use in uses if use.leaf is not None and id(use.leaf) not in there]
    assert gone
    assert not any(leaf.edge for leaf in gone)
