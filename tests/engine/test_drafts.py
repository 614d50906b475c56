"""What `draft` may be, what it costs of the cache's bytes, and what is refused."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from kvcellar import BadRequest, CapacityTooSmall, Engine, ModelNotFound, ModelRefused
from kvcellar.engine.load.settings import MOST_DEPTH, Settings
from kvcellar.engine.models import load
from kvcellar.engine.speculate.chain import Chain, Key
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.engine.speculate.factory import Target
from kvcellar.engine.speculate.ngram import NGramDrafter
from kvcellar.errors import DraftRefused
from kvcellar.events import Speculation
from tests.models.assistants import VOCAB, saved
from tests.models.mtp import saved_beside
from tests.zoo import ARCHS

BYTES = 20_000_000
PROMPT = [3, 4, 5, 6, 7, 8] * 5


class Repeats:
    """Drafts the last token of the text, over and over."""

    name, deepest, catches_up, reads_hidden = "repeats", 4, False, False

    def __init__(self, target: Target | None = None) -> None:
        self.target, self.most = target, 0

    def propose(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            self.most = max(self.most, chain.left)
            while chain.left:
                chain.add(chain.text[-1])

    def committed(self, news: Sequence[Committed]) -> None:
        pass

    def fork(self, key: Key, other: Key) -> None:
        pass

    def close(self, key: Key, *, keep: bool) -> None:
        pass

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        pass


def big(name: str = "llama", **changes: Any) -> PreTrainedModel:
    return ARCHS[name].build(num_hidden_layers=8, **changes)


def small(name: str = "llama", **changes: Any) -> PreTrainedModel:
    return ARCHS[name].build(num_hidden_layers=1, **changes)


def engine(draft: Any, model: PreTrainedModel | None = None, **settings: Any) -> Engine:
    return Engine(model or big(), **{"draft": draft, "cache_bytes": BYTES, "threads": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"draft": 5}, "draft", "a function that makes a drafter, not 5"),
        ({"draft": ""}, "draft", "not ''"),
        ({"draft": "ngram", "draft_depth": 0}, "draft_depth", "from 1 to 64, not 0"),
        ({"draft": "ngram", "draft_depth": True}, "draft_depth", "from 1 to 64, not true"),
        ({"draft": "ngram", "draft_depth": MOST_DEPTH + 1}, "draft_depth", f"from 1 to {MOST_DEPTH}"),
        ({"draft": "ngram", "draft_bytes": 0}, "draft_bytes", "at least 1, not 0"),
    ],
)
def test_settings_out_of_bounds_are_named(settings: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as raised:
        Settings(**settings)
    assert raised.value.param == field


@pytest.mark.parametrize("field", ["draft_depth", "draft_bytes"])
@pytest.mark.parametrize("draft", [None, "none"])
def test_settings_of_drafts_without_a_draft_are_refused(draft: str | None, field: str) -> None:
    with pytest.raises(BadRequest, match=f"{field} needs draft") as raised:
        engine(draft, **{field: 3})
    assert raised.value.param == field


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[int, ...]]:
    with engine(None) as made:
        yield made.generate(PROMPT, max_tokens=40, temperature=0.0).token_ids


@pytest.mark.parametrize(("draft", "name"), [("ngram", "ngram"), (small, "LlamaForCausalLM"), (Repeats, "repeats")])
def test_every_kind_gives_the_same_text_and_is_in_the_statistics(draft: Any, name: str, plain: tuple[int, ...]) -> None:
    with engine(small() if draft is small else draft) as made:
        result = made.generate(PROMPT, max_tokens=40, temperature=0.0)
        stats = made.stats().speculation
        made.check()
    assert result.token_ids == plain
    assert isinstance(result.speculation, Speculation)
    assert stats is not None
    assert (stats.drafter, stats.refused) == (name, None)
    found = result.speculation
    assert (stats.rounds, stats.drafted, stats.accepted) == (found.rounds, found.drafted, found.accepted)
    assert stats.seconds_saved == pytest.approx(found.seconds_saved)
    assert (stats.cache_bytes > 0) == (draft is small)


@pytest.mark.parametrize(("name", "layers"), [("lfm3", 1), ("deepseek-v3", 2)])
def test_the_own_mtp_layers_of_a_model_draft_for_it(name: str, layers: int, tmp_path: Path) -> None:
    path, how = saved_beside(tmp_path / "model", name), {"max_tokens": 24, "temperature": 0.0}
    with Engine(path, cache_bytes=BYTES, threads=1) as made:
        plain = made.generate(PROMPT, **how).token_ids
    with Engine(path, draft="mtp", cache_bytes=BYTES, threads=1) as made:
        built = made._built
        assert built.loop.manager.drafting.speculator is not None
        built.loop.manager.drafting.speculator._fixed = 2
        assert [made.generate(PROMPT, **how).token_ids for _ in range(2)] == [plain, plain]
        stats = made.stats().speculation
        made.check()
    assert built.draft_capacity is not None
    assert built.capacity.total + built.draft_capacity.total <= BYTES
    assert stats is not None
    assert (stats.drafter, stats.refused, stats.deepest) == ("mtp", None, 8 if layers == 1 else layers)
    assert stats.drafted > 0
    assert stats.cache_bytes == built.draft_capacity.bytes


@pytest.mark.parametrize("kind", ["gemma4_assistant"])
def test_an_assistant_drafts_from_the_cells_of_its_target(kind: str, tmp_path: Path) -> None:
    path, how = saved(tmp_path / "assistant", kind), {"max_tokens": 24, "temperature": 0.0}
    model = ARCHS["gemma4-e2b"].build(vocab_size=VOCAB)
    with engine(None, model) as made:
        plain = made.generate(PROMPT, **how).token_ids
    with engine(path, model) as made:
        assert made._built.loop.manager.drafting.speculator is not None
        made._built.loop.manager.drafting.speculator._fixed = 3
        assert made.generate(PROMPT, **how).token_ids == plain
        stats = made.stats().speculation
        made.check()
    assert stats is not None
    assert (stats.drafter, stats.refused, stats.cache_bytes) == ("assistant", None, 0)
    assert stats.drafted > 0


def test_a_model_without_a_head_is_refused_with_what_can_be_used_instead(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    with pytest.raises(DraftRefused, match=r"head: .*draft='ngram', or the directory of a smaller model") as raised:
        Engine(tmp_path, draft="mtp", cache_bytes=BYTES, threads=1)
    assert list(raised.value.found) == ["verification"]


def test_without_a_draft_nothing_is_reported() -> None:
    with engine(None) as made:
        assert made.stats().speculation is None
        assert made.generate(PROMPT, max_tokens=4).speculation is None


@pytest.mark.parametrize("pair", [("llama", "llama"), ("llama", "lfm2"), ("qwen3-next", "gemma3"), ("bloom", "llama")])
def test_the_memories_of_both_models_are_within_the_cache(pair: tuple[str, str]) -> None:
    wide = {"llama": {"intermediate_size": 512}, "qwen3-next": {}, "bloom": {}}
    target, draft = ARCHS[pair[0]].build(hidden_size=128, **wide[pair[0]]), ARCHS[pair[1]].build()
    with engine(draft, target) as made:
        built = made._built
        own = built.draft_capacity
        made.generate(PROMPT, max_tokens=30, temperature=0.0)
        made.check()
    assert own is not None
    assert 0 < own.total <= own.budget
    assert built.capacity.total + own.total <= BYTES
    assert own.states.sequences >= 1


def test_both_memories_hold_about_as_many_tokens() -> None:
    with engine(small()) as made:
        built = made._built
        assert built.draft_capacity is not None
        assert built.draft_capacity.tokens == pytest.approx(built.capacity.tokens, rel=0.05)


def test_the_bytes_of_a_draft_model_can_be_set() -> None:
    with engine(small(), draft_bytes=5_000_000) as made:
        own = made._built.draft_capacity
        assert own is not None
        assert own.budget == 5_000_000
    with pytest.raises(BadRequest, match="what drafts has no memory of its own"):
        engine("ngram", draft_bytes=1_000_000)
    with pytest.raises(BadRequest, match="draft_bytes is 20000000 of the 20000000 bytes of cache_bytes") as raised:
        engine(small(), draft_bytes=BYTES)
    assert raised.value.param == "draft_bytes"
    with pytest.raises(CapacityTooSmall, match=r"draft model: 1000 bytes \(draft_bytes\) .*Or set draft_bytes"):
        engine(small(), draft_bytes=1000)


def test_a_draft_that_does_not_fit_is_refused_with_all_reasons() -> None:
    with pytest.raises(DraftRefused) as raised:
        engine(big(vocab_size=64), small())
    assert list(raised.value.refused) == ["vocabulary", "size"]
    assert isinstance(raised.value, ModelRefused)


def test_a_target_that_cannot_reject_drafts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no part can be kept")

    monkeypatch.setattr("kvcellar.engine.models.build_guest.partial_commit_test", broken)
    for draft in ("ngram", Repeats):
        with pytest.raises(
            DraftRefused, match=r"verification: the target cannot keep a part of a step.*Leave draft out"
        ):
            engine(draft, ARCHS["lfm2"].build())


def test_a_draft_that_does_not_fit_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(vocab_size=64).save_pretrained(tmp_path / "draft")
    monkeypatch.setattr(load, "_filled", lambda *_: pytest.fail("its weights are read"))
    with pytest.raises(DraftRefused, match="draft does not fit LlamaForCausalLM as a draft") as raised:
        engine(tmp_path / "draft")
    assert list(raised.value.refused) == ["vocabulary"]
    assert list(raised.value.found) == ["verification", "tokenizer", "end tokens", "size", "context"]


def test_a_draft_from_files_that_fits_has_every_check(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path / "draft")
    with engine(tmp_path / "draft") as made:
        drafts = made._built.drafts
    assert drafts is not None
    checks = ["verification", "tokenizer", "vocabulary", "end tokens", "size", "context", "device"]
    assert list(drafts.fit.found) == checks
    assert not drafts.fit.refused


@pytest.mark.parametrize("name", ["ngrams", "owner/typo", "no such draft"])
def test_a_draft_that_is_not_found_is_named_with_what_it_can_be(name: str) -> None:
    with pytest.raises(ModelNotFound, match=f"^draft '{name}' was not found: there is no directory") as raised:
        engine(name)
    for kind in ("ngram", "mtp", "the path of its directory", "owner/model", "embedded"):
        assert kind in str(raised.value).partition(". draft is ")[2]


def test_a_draft_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"^draft '.*' cannot be loaded: .* has no config.json"):
        engine(tmp_path)


def test_the_embedded_model_is_a_draft_by_its_name() -> None:
    with pytest.raises(DraftRefused, match="embedded does not fit LlamaForCausalLM as a draft"):
        engine("embedded")


def test_a_factory_reads_what_the_target_is() -> None:
    made: list[Repeats] = []

    def factory(target: Target) -> Repeats:
        made.append(Repeats(target))
        return made[-1]

    with engine(factory, context=100) as running:
        running.generate(PROMPT, max_tokens=30, temperature=0.0)
        model = running.model
    (drafter,) = made
    assert drafter.target == Target(model.name, 101, 100, frozenset({2}), "cpu", "float32")


@pytest.mark.parametrize("wrong", [object(), None, type("Flat", (Repeats,), {"deepest": 0})()])
def test_a_factory_has_to_make_a_drafter(wrong: object) -> None:
    with pytest.raises(BadRequest, match="draft has to return a Drafter") as raised:
        engine(lambda target: wrong)
    assert raised.value.param == "draft"


def test_what_a_factory_raises_ends_the_load() -> None:
    def failing(target: Target) -> Repeats:
        raise OSError("no phrases")

    with pytest.raises(OSError, match="no phrases"):
        engine(failing)


@pytest.mark.parametrize(("draft", "depth", "deepest"), [("ngram", None, NGramDrafter.deepest), (Repeats, 9, 4)])
def test_the_depth_is_that_of_the_drafter_or_less(draft: Any, depth: int | None, deepest: int) -> None:
    with engine(draft, draft_depth=depth) as made:
        stats = made.stats().speculation
        assert stats is not None
        assert stats.deepest == deepest
    with engine(draft, draft_depth=2) as made:
        made._built.loop.manager.drafting.speculator._fixed = 99  # type: ignore[union-attr]
        result = made.generate(PROMPT, max_tokens=30, temperature=0.0)
    assert result.speculation is not None
    assert max(most for _, most in result.speculation.depths) == 2
