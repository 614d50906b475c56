"""Small finite languages, as regular expressions and as the set of all their texts, and a vocabulary to write them in.

The texts are enumerated from how an expression is built, without any library of regular expressions.
"""

import atexit
from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvcellar.constraint import Constraint
from kvcellar.engine.sample.grammars import Grammars
from kvcellar.engine.sample.matcher import Matcher
from kvcellar.text.tokens import TextTokenizer
from kvcellar.worker import Worker

WORDS = ["a", "b", "c", "ab", "ba", "abc", "cc", "aab", '"', "{", "}", ":", ",", "1", "0", '"a', '":', "10", "[", "]"]
END, START = len(WORDS), len(WORDS) + 1  # control tokens
COLUMNS = 40  # more than there are tokens: as of a padded output layer
MOST_TEXTS = 300


@dataclass(frozen=True)
class Language:
    pattern: str
    texts: frozenset[str]


def both(one: Language, other: Language) -> Language:
    return Language(one.pattern + other.pattern, frozenset(a + b for a in one.texts for b in other.texts))


def either(one: Language, other: Language) -> Language:
    return Language(f"({one.pattern}|{other.pattern})", one.texts | other.texts)


def repeated(one: Language, least: int, most: int) -> Language:
    texts, power = set[str](), frozenset({""})
    for count in range(most + 1):
        texts |= power if count >= least else set()
        power = frozenset(a + b for a in power for b in one.texts)
    return Language(f"({one.pattern}){{{least},{most}}}", frozenset(texts))


LETTERS = st.sampled_from([*(Language(char, frozenset(char)) for char in "abc"), Language("[ab]", frozenset("ab"))])
LANGUAGES = st.recursive(
    LETTERS,
    lambda inner: (
        st.builds(both, inner, inner)
        | st.builds(either, inner, inner)
        | st.builds(repeated, inner, st.integers(0, 1), st.integers(1, 2))
    ),
    max_leaves=6,
).filter(lambda made: len(made.texts) <= MOST_TEXTS and made.texts != {""})


@cache
def words() -> Tokenizer:
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(WORDS)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<start>", special=True)])
    return made


def tokenizer() -> TextTokenizer:
    return TextTokenizer(words(), end_ids=[END])


def grammars() -> Grammars:
    """All of them try their constraints in the same process."""
    made = Grammars(words(), "", vocab_size=COLUMNS, end_ids=[END])
    made._trial = _trial()
    return made


@cache
def _trial() -> Worker:
    found = Grammars(words(), "", vocab_size=COLUMNS, end_ids=[END])._trial
    atexit.register(found.close)
    return found


def settle(matcher: Matcher, drafts: tuple[int, ...] = ()) -> None:
    """Wait for a mask, where an engine would skip the row."""
    with matcher._threads.changed:
        matcher._ask(drafts)
        assert matcher._threads.changed.wait_for(lambda: matcher._known(drafts), 60)


def allowed(matcher: Matcher, drafts: tuple[int, ...] = ()) -> set[int]:
    mask = np.zeros(-(-COLUMNS // 32), np.int32)
    settle(matcher, drafts)
    assert matcher.fill(drafts, mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=COLUMNS, bitorder="little")).tolist())


def by_looking(texts: frozenset[str], so_far: str) -> set[int]:
    """The tokens after which one of `texts` can still be written, and the end where one is complete."""
    found = {token for token, word in enumerate(WORDS) if any(text.startswith(so_far + word) for text in texts)}
    return found | ({END} if so_far in texts else set())


def agrees(found: set[int], texts: frozenset[str], so_far: str) -> bool:
    """Is what a matcher allows what looking says? Where only one character can follow, the library allows the tokens
    that the tokenizer itself would write, which are some of those; never none, and never another."""
    expected = by_looking(texts, so_far)
    following = {text[len(so_far)] if text != so_far else "" for text in texts if text.startswith(so_far)}
    forced = len(following) == 1 and following != {""}
    return found == expected or (forced and bool(found) and found <= expected)


def regex(language: Language) -> Constraint:
    return Constraint.regex(language.pattern)
