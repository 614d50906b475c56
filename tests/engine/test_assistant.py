"""A model that drafts with an assistant: the text is that of plain decoding, and the model's memory is not changed."""

from pathlib import Path

import pytest

from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.speculate.assistant import AssistantDrafter
from kvcellar.errors import DraftRefused
from kvcellar.frontend.engine import Engine
from tests.engine.speculating import speculates
from tests.models.assistants import ORDERED, VOCAB, saved
from tests.zoo import ARCHS


def target(path: Path) -> Path:
    with silence_transformers():
        ARCHS["gemma4-e2b"].build(vocab_size=VOCAB).save_pretrained(path)
    return path


@pytest.mark.parametrize("kv_dtype", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_texts_with_an_assistant_are_those_of_plain_decoding(kv_dtype: str | None, tmp_path: Path) -> None:
    """Two outputs of a prompt longer than the window, then a turn that restores them."""
    path, assistant = target(tmp_path / "m"), saved(tmp_path / "a", "gemma4_assistant", **ORDERED)
    texts: list[list[tuple[int, ...]]] = []
    for draft in (None, assistant):
        with Engine(path, draft=draft, kv_dtype=kv_dtype) as engine:
            if draft is not None:
                speculator = engine._built.loop.manager.drafting.speculator
                assert speculator is not None
                assert isinstance(speculator.drafter, AssistantDrafter)
                speculates(engine, speculator.drafter, 3)
            texts.append([])
            prompt = [*range(20, 40)]
            for _ in range(2):
                result = engine.generate(prompt, max_tokens=10, temperature=0, n=2, ignore_eos=True)
                texts[-1] += [choice.token_ids for choice in result.choices]
                prompt = [*prompt, *texts[-1][-1], 7]
            engine.check()
            if draft is not None:
                assert result.speculation is not None
                assert result.speculation.drafted > 9
    assert texts[0] == texts[1]


def test_an_assistant_of_another_size_is_refused_with_the_reasons(tmp_path: Path) -> None:
    path, assistant = target(tmp_path / "m"), saved(tmp_path / "a", "gemma4_assistant", backbone_hidden_size=80)
    with pytest.raises(DraftRefused, match="reads hidden states of 80 values, and the target has 64"):
        Engine(path, draft=assistant)
