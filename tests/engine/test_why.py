"""A request's record says what came from memory, and why it was not more."""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from kvcellar import Engine, RetentionOptions
from kvcellar.events import Recall
from kvcellar.frontend.result import Collector
from kvcellar.images.image import FIRST
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefix.why import SHOWN, Elsewhere, Losses, ReadBack, Sightings, explained
from kvcellar.serve.generation.records import recall_fields
from tests.engine.mixes import bytes_for, small_engine, tokens
from tests.prefix.claims import TokenClaims
from tests.zoo import ARCHS

GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
PROMPT = list(tokens(random.Random(1), 60))


def asked(engine: Engine, prompt: list[int]) -> Recall:
    result = engine.generate(prompt, **GREEDY)
    recall = result.recall
    assert recall is not None
    assert result.usage.cached_tokens == recall.restored <= recall.matched <= recall.asked == len(prompt) - 1
    assert sum(tokens for _, tokens in recall.sources) == recall.restored
    return recall


@contextmanager
def stored_engine(directory: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Iterator[Engine]:
    """An engine whose store is in `directory`, as is its model, which is made at the first call."""
    model = directory / "model"
    if not model.exists():
        ARCHS["llama"].build().save_pretrained(model)
    with Engine(model, dtype=dtype, cache_bytes=16_000_000, threads=1, store=str(directory / "store")) as engine:
        yield engine


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_the_first_prompt_is_new_and_the_same_again_has_all_but_the_last_token(name) -> None:
    with small_engine(name) as engine:
        assert asked(engine, PROMPT).reason == "new"
        again = asked(engine, PROMPT)
        assert (again.reason, again.restored) == ("all", len(PROMPT) - 1)
        longer = asked(engine, [*PROMPT, *engine.generate(PROMPT, **GREEDY).token_ids, 7, 8])
        assert (longer.reason, longer.restored) == ("new", len(PROMPT) + 1)


def test_a_prompt_that_diverges_shows_the_tokens_on_both_sides() -> None:
    with small_engine("llama") as engine:
        asked(engine, PROMPT)
        other = [*PROMPT[:20], 5 if PROMPT[20] != 5 else 6, *PROMPT[21:]]
        found = asked(engine, other)
        assert (found.reason, found.matched, found.restored) == ("diverged", 20, 20)
        assert found.ours == tuple(other[20 : 20 + SHOWN])
        assert found.theirs == tuple(PROMPT[20 : 20 + SHOWN])
        again = asked(engine, [*PROMPT[:30], 5 if PROMPT[30] != 5 else 6])
        assert again.entry != found.entry, "the entry was split where the other prompt diverged"


def test_layers_that_cannot_resume_where_a_prompt_diverged_are_named() -> None:
    with small_engine("lfm2") as engine:
        asked(engine, PROMPT)
        found = asked(engine, [*PROMPT[:20], 5 if PROMPT[20] != 5 else 6])
        assert (found.reason, found.matched, found.restored) == ("no checkpoint", 20, 16)
        assert "recurrent" in found.detail
        assert (found.ours[0], found.theirs[0]) == (5 if PROMPT[20] != 5 else 6, PROMPT[20])
        assert asked(engine, [*PROMPT[:20], 7 if PROMPT[20] != 7 else 8, 9]).restored == 20, (
            "a checkpoint was left there"
        )


def test_what_was_evicted_is_said_with_its_cause() -> None:
    with small_engine("llama", cache_bytes=bytes_for("llama", 100)) as engine:
        asked(engine, PROMPT)
        asked(engine, list(tokens(random.Random(2), 90)))
        found = asked(engine, PROMPT)
        assert (found.reason, found.restored) == ("evicted", found.matched)
        assert found.restored < len(PROMPT) - 1
        assert "cells of" in found.detail


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_what_was_cleared_is_said_to_be_by_what_whatever_the_layers(name) -> None:
    with small_engine(name) as engine:
        draw = random.Random(2)
        for clear, cause in ((engine.clear_cache, "the cache was cleared"), (engine.cache.clear, "`cache clear`")):
            asked(engine, PROMPT)
            clear()
            other = asked(engine, [PROMPT[0], *tokens(draw, 50)])
            assert other.reason == "new", "it has only the first token of what was cleared"
            clear()
            found = asked(engine, PROMPT)
            assert (found.reason, found.restored) == ("evicted", 0)
            said = re.fullmatch(r"at least (\d+) tokens, \d+ s ago: (.+)", found.detail)
            assert said is not None
            assert 30 <= int(said[1]) <= 59
            assert cause in said[2]


def test_a_doubled_first_token_is_seen_where_a_prompt_diverges() -> None:
    with Engine(device="cpu", cache_bytes=16_000_000, threads=1, record="off") as engine:
        ids = engine.encode("import os\nimport sys\n")
        asked(engine, ids)
        found = recall_fields(asked(engine, [ids[0], *ids]), engine)
        assert found.ours is not None
        assert found.theirs is not None
        assert (found.ours.text or "").startswith("<|bos|>import os\n")
        assert (found.theirs.text or "").startswith("import os\n")


def test_what_was_read_back_has_its_tier_and_the_time_that_it_took(tmp_path) -> None:
    prompt = list(tokens(random.Random(3), 150))
    for expected in ((), (("disk", 149),)):
        with stored_engine(tmp_path) as engine:
            found = asked(engine, prompt)
            assert found.sources == expected
            assert (found.seconds > 0) == bool(expected)


def test_a_damaged_snapshot_is_the_reason_for_what_is_computed_again(tmp_path) -> None:
    prompt = list(tokens(random.Random(3), 150))
    with stored_engine(tmp_path) as engine:
        asked(engine, prompt)
    for file in (tmp_path / "store" / "data").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with stored_engine(tmp_path) as engine:
        found = asked(engine, prompt)
        assert (found.reason, found.restored) == ("damaged", 0)
        assert "the disk tier" in found.detail


def test_tokens_with_another_salt_of_the_same_owner_are_counted_but_not_used() -> None:
    prompt = list(tokens(random.Random(4), 150))

    def submitted(engine: Engine, namespace: str, owner: str) -> Recall:
        collector = Collector(1)
        retention = RetentionOptions(owner=owner)
        engine.submit(
            prompt, engine.params(**GREEDY), deliver=collector.deliver, namespace=namespace, retention=retention
        )
        recall = collector.result().recall
        assert recall is not None
        return recall

    with small_engine("llama") as engine:
        assert submitted(engine, "a", "one").salted == 0
        assert submitted(engine, "a", "one").salted == 0, "what it can use itself is not counted"
        other = submitted(engine, "b", "one")
        assert (other.reason, other.restored, other.salted) == ("new", 0, 128)
        assert submitted(engine, "c", "two").salted == 0, "another owner"


def test_what_other_weights_have_stored_is_named_and_not_used(tmp_path) -> None:
    prompt = list(tokens(random.Random(5), 150))
    with stored_engine(tmp_path) as engine:
        asked(engine, prompt)
    with stored_engine(tmp_path, "bfloat16") as engine:
        found = asked(engine, prompt)
        assert (found.reason, found.restored) == ("other weights", 0)
        assert "at least 128 tokens are stored by other weights" in found.detail
        assert asked(engine, list(tokens(random.Random(6), 150))).reason != "other weights"


def test_tokens_that_are_cheaper_to_recompute_are_said_to_be() -> None:
    tree, claims = Tree(TokenClaims(), anywhere=True), Losses(lambda: 0.0)
    read = ReadBack((), 0.0, "reading 99 tokens takes 2 s, computing them 1 s")
    found = explained(
        tree, claims, "", key_of(range(100)), matched=0, restored=0, read=read, kinds="",
        elsewhere=Elsewhere(Sightings(), Sightings()),
    )  # fmt: skip
    assert (found.reason, found.detail) == ("cheaper to recompute", read.skipped)


A, B, C = ([FIRST + 10 * n, FIRST + 10 * n + 1] for n in (1, 2, 3))  # rows of images


@pytest.mark.parametrize(
    ("before", "prompt", "says"),
    [
        ([1, 2, *A, 3], [1, 2, *B, 3], "image 1: another image"),
        ([1, 2, *A, 3], [1, 2, 9, 9], ""),
        ([1, 2, *A, 3], [1, 2, 9, *B, 9], ""),
        ([1, 2, *A, 3], [1, 2, 9, *A, 9], "image 1: the same image, after other tokens"),
        ([1, *B, *A, 3], [1, 5, *A, 9], "image 1: the same image, after other tokens"),
        ([1, 2, 3, 4], [1, 2, *A, 9], "image 1: there was none"),
        ([*A, 1, *B, 2, *C], [*A, 1, *C, 2, *B], "image 2: another image"),
        ([*A, 1, *B, 2, *C], [*A, 1, 5, *C, 2], "image 2: the same image, after other tokens"),
        ([*A, 1, 2], [*A, 3, 4], ""),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_an_image_that_is_not_as_it_was_is_named(before: list[int], prompt: list[int], says: str, cut: bool) -> None:
    """Also where the entries of the tree that have it are several."""
    claims = TokenClaims()
    tree = Tree(claims, anywhere=True)
    root = tree.root("")
    for text in [before, *([[*before[: len(before) // 2], 77]] if cut else [])]:
        tree.insert(root, key_of(text), claims.make(text, 0, set()), 0, root, spare=lambda pos: False)
    matched = next(n for n, (one, other) in enumerate(zip(before, prompt, strict=False)) if one != other)
    firsts = [at for at, token in enumerate(prompt) if token in (A[0], B[0], C[0])]
    found = explained(
        tree, Losses(lambda: 0.0), "", key_of(prompt), matched=matched, restored=matched, read=ReadBack((), 0.0),
        kinds="", elsewhere=Elsewhere(Sightings(), Sightings()),
        images=[(at, f"image {number}") for number, at in enumerate(firsts, start=1)],
    )  # fmt: skip
    assert (found.reason, found.image) == ("diverged", says)
