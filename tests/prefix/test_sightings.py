"""Beginnings of texts are found in other namespaces of the same owner, and of no other one."""

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.prefix.node import common_prefix, key_of
from kvcellar.memory.prefix.why import LEAST, SEEN, Sightings

TEXT = st.tuples(st.integers(0, 1), st.integers(0, 3 * LEAST), st.integers(1, 3 * LEAST)).map(
    lambda drawn: [drawn[0]] * drawn[1] + [7] * drawn[2]
)
OWNED = st.tuples(st.sampled_from("xy"), st.sampled_from("ab"), TEXT)


@given(st.lists(OWNED, max_size=6), OWNED, st.integers(0, 5 * LEAST))
def test_it_finds_the_longest_power_of_two_that_another_namespace_of_the_owner_has(seen, asked, beyond: int) -> None:
    sightings = Sightings()
    for owner, namespace, text in seen:
        sightings.note(owner, namespace, key_of(text))
    owner, namespace, text = asked
    alike = max(
        (common_prefix(text, other) for one, where, other in seen if one == owner and where != namespace), default=0
    )
    expected = max((n for n in (LEAST, 2 * LEAST, 4 * LEAST) if n <= alike), default=0)
    assert sightings.elsewhere(owner, namespace, key_of(text)) == expected
    assert sightings.elsewhere(owner, namespace, key_of(text), beyond=beyond) == (expected if expected > beyond else 0)


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    sightings = Sightings()
    for number in range(SEEN + 1):
        sightings.note("", "a", key_of([number] * LEAST))
    assert sightings.elsewhere("", "b", key_of([0] * LEAST)) == 0
    assert sightings.elsewhere("", "b", key_of([1] * LEAST)) == LEAST
