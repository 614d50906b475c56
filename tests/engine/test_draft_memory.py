"""What a drafter has computed is found by later and by simultaneous completions of the same namespace, and after a
restart. Drafts are those that a drafter without any memory would make."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.memory.plan import Batch
from kvcellar.memory.retention import RetentionOptions
from tests.engine.drafting import PATIENCE, VOCAB, Drafting, always_restored, chain, expected
from tests.engine.test_prefixes import KINDS, memory

SPACES = ["", "b"]
STORED = ["full", "sliding", "hybrid", "recurrent", "all"]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    always_restored(monkeypatch)


def text_of(seed: int, n: int) -> list[int]:
    return [(seed + i * i * (seed + 3) + i) % VOCAB for i in range(n)]


WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
ACTION = st.one_of(
    st.tuples(st.just("grow"), st.lists(st.integers(0, 3), min_size=1, max_size=3), WORDS),
    st.tuples(st.just("close"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("fork"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("forget"), st.sampled_from([None, *SPACES]), st.lists(st.integers(0, 2), max_size=4)),
    st.tuples(st.just("fill"), st.integers(100, 200), st.integers(0, 3)),
)


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(actions=st.lists(ACTION, max_size=12))
def test_drafts_are_those_of_a_cold_drafter_whatever_is_shared_or_evicted(kind, in_parts, actions) -> None:
    world = Drafting(kind, in_parts=in_parts)
    texts: dict[int, list[int]] = {}
    for action in actions:
        match action:
            case ("grow", numbers, words):
                grow(world, texts, dict.fromkeys(numbers), words)
            case ("close", number, keep):
                world.close(number, keep=keep)
                texts.pop(number, None)
            case ("fork", number, other) if (
                number in texts and other not in texts and space_of(number) == space_of(other)
            ):
                world.cache.fork((number, 0), (other, 0))
                texts[other] = list(texts[number])
            case ("forget", space, words):
                world.drafter.forget(space, words)
            case ("fill", cells, used):
                world.cache.make_free(cells, 1, [(used, 0)])
        world.check()
    for number in list(texts):
        world.close(number)
    world.drafter.forget(None)
    world.check()
    assert world.is_empty()


def grow(world: Drafting, texts: dict[int, list[int]], numbers: Iterable[int], words: list[int]) -> None:
    for number in numbers:
        texts.setdefault(number, []).extend(words[: 8 + number])
    for space in SPACES:
        asked = {number: texts[number] for number in numbers if space_of(number) == space}
        for number, drafts in world.drafts(asked, namespace=space).items():
            assert drafts == expected(world.kind, texts[number], len(drafts))


def space_of(number: int) -> str:
    return SPACES[number % 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_begins_with_what_another_one_of_its_namespace_has_computed(kind) -> None:
    world, text = Drafting(kind), text_of(1, 60)
    assert world.drafts({1: text}) == {1: expected(kind, text, 3)}
    assert world.restored(2, [*text, 5]) >= 59, "a running completion's prompt is known while it runs"
    assert world.restored(3, [*text, 5], namespace="b") == 0
    longer = [*text, *expected(kind, text, 9)]
    world.drafts({1: longer})
    world.close(1)
    world.close(2)
    assert world.restored(4, [*longer, 1]) == 69, "what was drawn is known after the end"
    before = world.network.computed
    assert world.drafts({4: [*longer, 1]}, room=1) == {4: expected(kind, [*longer, 1], 1)}
    assert world.network.computed == before + 1


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_one_prompt_compute_it_once(kind) -> None:
    world, text = Drafting(kind), text_of(2, 50)
    texts = {number: [*text, number] for number in range(3)}
    first = world.drafts(texts, room=1)
    assert [len(drafts) for drafts in first.values()] == [1, 0, 0], "the others wait for the prompt"
    texts[0].append(6)
    assert world.drafts(texts, room=1) == {number: expected(kind, own, 1) for number, own in texts.items()}
    assert world.network.computed <= 51 + 3


def test_a_fork_shares_all_entries() -> None:
    world, text = Drafting("all"), text_of(2, 50)
    world.drafts({1: text})
    free = world.cache.memory.free()
    world.cache.fork((1, 0), (2, 0))
    assert world.cache.memory.free() == free
    other = [*text, 3]
    assert world.drafts({2: other}) == {2: expected("all", other, 3)}
    world.cache.fork((9, 0), (3, 0))  # one that is not known has nothing to share
    assert world.restored(3, text) == 49


def test_an_error_leaves_nothing_behind() -> None:
    world, text = Drafting("all"), text_of(3, 40)
    world.drafts({1: text})
    world.drafts({1: [*text, 1, 2]})
    world.close(1, keep=False)
    world.close(1, keep=True)
    assert world.restored(2, [*text, 1, 2, 3]) < 42


@pytest.mark.parametrize("kind", ["full", "all"])
def test_what_is_forgotten_is_not_found_and_frees_its_memory(kind) -> None:
    world = Drafting(kind)
    one, two = text_of(1, 30), [6, *text_of(2, 30)]
    assert one[0] != two[0]
    for number, (text, space) in enumerate([(one, ""), (two, ""), (one, "b")]):
        world.drafts({number: text}, namespace=space)
        world.close(number)
    world.drafter.forget("", [6])
    assert world.restored(10, two) == 0
    assert world.restored(11, one) == 29
    world.close(11)
    world.drafter.forget("")
    assert world.restored(12, one) == 0
    assert world.restored(13, one, namespace="b") == 29
    for number in (10, 12, 13):
        world.close(number)
    world.drafter.forget(None)
    assert world.is_empty()


def test_what_has_expired_is_not_found_and_is_freed_between_steps() -> None:
    now = 1000.0
    world, text = Drafting("all", clock=lambda: now), text_of(4, 40)
    short = RetentionOptions(ttl=10.0)
    world.drafts({1: text}, retention=short)
    world.close(1)
    now += 9.0
    assert world.restored(2, text, retention=short) == 39
    world.close(2)
    now += 11.0
    world.cache.pump()
    world.check()
    assert world.is_empty()
    assert world.restored(3, text) == 0


def test_a_full_memory_evicts_what_no_completion_uses_and_then_idle_sequences() -> None:
    world = Drafting("full")
    texts = {number: text_of(number, 60) for number in range(6)}
    for number, text in texts.items():
        assert world.drafts({number: text}) == {number: expected("full", text, 3)}
    assert world.restored(5, texts[5]) == 60
    both = {number: text_of(20 + number, 90) for number in (10, 11)}
    found = world.drafts(both)
    assert all(drafts == expected("full", both[number], len(drafts)) for number, drafts in found.items())
    large = {number: text_of(30 + number, 120) for number in (12, 13)}
    assert world.drafts(large) == {12: expected("full", large[12], 3), 13: []}
    longer = [*large[12], 1]
    assert world.drafts({12: longer, 13: large[13]}) == {12: expected("full", longer, 3), 13: []}, "both do not fit"


def test_entries_that_look_ahead_are_shared_only_with_the_same_tokens_behind_them() -> None:
    cache = DraftMemory(memory("full"), ahead=2)

    def elements(*text: int) -> list[int]:
        return list(cache._elements(text, 0))

    assert elements(1, 2) == []
    assert len(elements(1, 2, 3)) == 1
    assert elements(1, 2, 3, 4, 5)[1:] == [4, 5]
    assert elements(1, 2, 3, 4) == elements(1, 2, 3, 4, 5)[:2]
    assert elements(9, 2, 3, 4)[0] != elements(1, 2, 3, 4)[0] != elements(1, 9, 3, 4)[0]
    assert 0 <= elements(1, 2, 3)[0] < 2**32
    whole = cache._elements(range(9), 0)
    assert whole[3:] == cache._elements(range(9), 3)


def stored(world: Drafting, number: int, text: Sequence[int], **where: object) -> None:
    world.drafts({number: text}, **where)
    world.close(number)
    world.written()


@pytest.mark.parametrize("kind", STORED)
def test_a_restarted_drafter_goes_on_where_the_last_one_was(kind, tmp_path: Path) -> None:
    text, other = text_of(5, 140), text_of(6, 100)
    world = Drafting(kind, tmp_path)
    stored(world, 1, text)
    stored(world, 2, other, namespace="b")
    stored(world, 3, text_of(7, 90), retention=RetentionOptions(stored=False))
    world.cache.shut_down()
    assert world.is_empty()

    again = Drafting(kind, tmp_path)
    assert again.restored(1, [*text, 4]) == 140
    assert again.drafts({1: [*text, 4]}) == {1: expected(kind, [*text, 4], 3)}
    assert again.network.computed == 1 + 2
    again.close(1)
    assert again.restored(2, other) < 64, "another namespace finds nothing"
    assert again.restored(3, other, namespace="b") == 99
    assert again.restored(4, text_of(7, 90)) == 0
    for number in range(2, 5):
        again.close(number)
    again.drafter.forget(None)
    again.check()
    assert again.is_empty()
    again.cache.shut_down()


def test_a_round_never_waits_for_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(5, 140)
    world, gate = Drafting("all", tmp_path), threading.Event()
    stored(world, 1, text)
    assert world.cache.store is not None
    tier = world.cache.store.transfers.tiers[0]
    read = tier.get
    monkeypatch.setattr(tier, "get", lambda key, take: read(key, take) if gate.wait(PATIENCE) else None)
    world.drafter.forget(None)
    assert world.drafts({2: text}) == {2: []}, "its entries are being read"
    assert world.network.computed == 140 + 2
    gate.set()
    world.until(lambda: world.cache.open([chain(2, text, 3)]) != [None])
    assert world.drafts({2: text}) == {2: expected("all", text, 3)}
    world.close(2)
    world.drafter.forget(None)
    gate.clear()
    assert world.drafts({3: text}) == {3: []}
    world.close(3)  # before it was read
    gate.set()
    world.check()
    assert world.is_empty()
    world.cache.shut_down()


def test_a_lost_entry_is_computed_again(tmp_path: Path) -> None:
    text = text_of(5, 140)
    world = Drafting("sliding", tmp_path)
    stored(world, 1, text)
    world.cache.shut_down()
    again = Drafting("sliding", tmp_path)
    assert again.cache.store is not None
    again.cache.store.remove_all()
    assert again.restored(1, text) == 0
    assert again.drafts({1: text}) == {1: expected("sliding", text, 3)}
    again.cache.shut_down()


def test_what_is_stored_is_read_while_a_completion_waits(tmp_path: Path) -> None:
    text = text_of(5, 140)
    world = Drafting("all", tmp_path)
    stored(world, 1, text)
    world.drafter.forget(None)
    world.cache.expect((2, 0), "", text)
    world.cache.expect((3, 0), "", text)
    store = world.cache.store
    assert store is not None
    world.until(lambda: all(one.transfer.outcome is not None for one in store.restores._staged.values()))
    assert world.drafts({2: text}) == {2: expected("all", text, 3)}, "the first round has drafts"
    assert world.network.computed == 142 + 1 + 2
    world.close(2)
    world.close(3)  # cancelled before it ran
    world.check()
    world.cache.shut_down()
    assert world.is_empty()


def test_after_an_error_anywhere_everything_can_be_dropped(tmp_path: Path) -> None:
    text = text_of(5, 140)
    world = Drafting("all", tmp_path)
    stored(world, 1, text)
    world.drafts({2: [*text, 1]})
    world.cache.expect((3, 0), "", text)
    world.cache.reset()
    world.check()
    assert world.is_empty()
    assert world.restored(2, [*text, 1]) == 140
    assert world.drafts({2: [*text, 1]}) == {2: expected("all", [*text, 1], 3)}
    world.cache.shut_down()


def test_what_looks_ahead_is_forgotten_by_the_tokens_that_it_depends_on() -> None:
    world = Drafting("full", ahead=2)
    one, two = text_of(1, 30), [*text_of(1, 2), 6, *text_of(2, 30)]
    for number, text in enumerate((one, two)):
        (seq,) = world.cache.open([chain(number, text, 0)])
        assert seq == number + 1
        plan = world.cache.memory.begin(Batch(world.cache.feeds([((number, 0), len(text) - 2)])))
        world.network(world.cache.memory, plan, text[:-2], [])
        world.cache.keep(chain(number, text, 0), world.cache.memory.commit().get(seq))
        world.close(number)
    world.drafter.forget("", two[:3])
    assert world.restored(5, two) == 0
    assert world.restored(6, one) == 27
    world.close(6)
    world.drafter.forget("", one[:1])  # of fewer tokens than an entry depends on
    assert world.restored(7, one) == 0


def test_only_texts_of_the_same_namespace_are_waited_for() -> None:
    text = [n % VOCAB for n in range(40)]
    apart, together = DraftMemory(memory("full")), DraftMemory(memory("full"))
    assert None not in apart.open([chain(1, text, 0, namespace="a"), chain(2, text, 0, namespace="b")])
    first, second = together.open([chain(1, text, 0, namespace="a"), chain(2, text, 0, namespace="a")])
    assert first is not None
    assert second is None


def test_nothing_is_read_back_for_a_completion_that_ends_while_it_waits(tmp_path: Path) -> None:
    drafting, text = Drafting("full", tmp_path), [n % VOCAB for n in range(150)]
    drafting.cache.expect((1, 0), "", text)
    assert drafting.cache.cache.fetches, "nothing is read"
    drafting.close(1)
    assert not drafting.cache.cache.fetches
