"""What a prompt has lost, against the texts that were ever in the tree: never a token that it did not have, and enough
of a text whose every token has gone, on models that can resume anywhere and on those that need checkpoints."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.prefix.node import common_prefix, key_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefix.why import LEAST, Elsewhere, Losses, ReadBack, Sightings, explained
from tests.prefix.claims import TokenClaims

BOS = 9
HEAD = st.sampled_from([(BOS,), (BOS, 5, 5, 5)])  # what all prompts of a model begin with
TEXT = st.builds(
    lambda head, parts: [*head, *(token for part, times in parts for token in [part] * times)],
    HEAD,
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=4),
)
EVICTION = st.one_of(st.tuples(st.just("leaf"), st.integers(1, 40)), st.tuples(st.just("checkpoint"), st.just(0)))


@dataclass
class World:
    """A tree, all texts that were ever in it, and the losses."""

    anywhere: bool
    claims: TokenClaims = field(default_factory=TokenClaims)
    texts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.losses = Losses(lambda: 0.0)
        self.losses.cause = "the test says so"
        self.tree = Tree(self.claims, anywhere=self.anywhere, evicted=self.losses.evicted)

    def run(self, text: list[int]) -> None:
        """Compute a text, from where it can be resumed, with a checkpoint before its last token and at its end."""
        self.texts.append(text)
        root = self.tree.root("")
        match = self.tree.match(root, key_of(text), len(text) - 1)
        own = self.tree.lock(root, match)
        claim = self.claims.make(text, match.resume, {len(text) - 1, len(text)} - {0})
        node, _ = self.tree.insert(root, key_of(text), claim, match.resume, own)
        self.tree.unlock(node)

    def evict(self, kind: str, tokens: int) -> bool:
        return self.tree.evict_leaf(tokens) > 0 if kind == "leaf" else self.tree.evict_checkpoint() is not None

    def evict_all(self) -> None:
        while self.evict("checkpoint", 0) or self.evict("leaf", 1 << 40):
            pass

    def lost(self, text: list[int]) -> int:
        """How many of the tokens of a text behind those that are there."""
        matched = self.matched(text)
        found = self.losses.of("", key_of(text), matched)
        return 0 if found is None else found[0]

    def matched(self, text: list[int]) -> int:
        return self.tree.match(self.tree.root(""), key_of(text), len(text)).matched

    def reason(self, text: list[int]) -> str:
        match = self.tree.match(self.tree.root(""), key_of(text), len(text) - 1)
        return explained(
            self.tree, self.losses, "", key_of(text), matched=match.matched, restored=match.resume, read=ReadBack(),
            kinds="sliding", elsewhere=Elsewhere(Sightings(), Sightings()),
        ).reason  # fmt: skip


@pytest.mark.parametrize("anywhere", [True, False])
@given(st.lists(st.one_of(TEXT, EVICTION), max_size=12), TEXT)
def test_no_more_is_lost_than_was_ever_there(anywhere, actions, asked) -> None:
    world = World(anywhere)
    for action in actions:
        world.run(action) if isinstance(action, list) else world.evict(*action)
    had = max((common_prefix(asked, text) for text in world.texts), default=0)
    assert world.matched(asked) + world.lost(asked) <= had
    world.tree.check()


@pytest.mark.parametrize("anywhere", [True, False])
@given(st.lists(st.one_of(TEXT, EVICTION), min_size=1, max_size=12), st.data())
def test_after_everything_was_evicted_each_text_is_known_to_be(anywhere, actions, data) -> None:
    world = World(anywhere)
    for action in actions:
        world.run(action) if isinstance(action, list) else world.evict(*action)
    world.evict_all()
    assert not list(world.tree.nodes())
    for text in world.texts:
        assert world.reason(text) == "evicted"
        assert world.reason(text[: data.draw(st.integers(2, len(text)))]) == "evicted"


@pytest.mark.parametrize("anywhere", [True, False])
@given(st.lists(st.one_of(TEXT, EVICTION), max_size=12), TEXT)
def test_a_prompt_that_has_only_the_head_of_all_prompts_in_common_with_what_was_lost_is_new(
    anywhere, actions, asked
) -> None:
    world = World(anywhere)
    for action in actions:
        world.run(action) if isinstance(action, list) else world.evict(*action)
    world.evict_all()
    had = max((common_prefix(asked, text) for text in world.texts), default=0)
    if had < min(LEAST, len(asked) // 2):
        assert world.reason(asked) == "new"


def test_a_loss_that_is_forgotten_is_no_reason() -> None:
    losses = Losses(lambda: 0.0)
    key = key_of(range(8))
    losses.damaged("", key, 0, "the test says so")
    assert losses.of("", key, 0) is not None
    for number in range(1, 5000):
        losses.damaged("", key_of([-number] * 8), 0, "the test says so")
    assert losses.of("", key, 0) is None
