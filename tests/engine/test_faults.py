"""What goes wrong beside a forward: it concerns whom it concerns, and the engine goes on."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from kvcellar import BadRequest, Engine, EngineFailed
from kvcellar.memory.kv.pool import Pool
from tests.engine.mixes import assert_at_rest, bytes_for
from tests.zoo import ARCHS

HOW = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine():
    with Engine(ARCHS["llama"].build(), cache_bytes=400_000, step_tokens=16) as made:
        yield made
        made.check()


@pytest.fixture(scope="module")
def embedded():
    with Engine(cache_bytes=12_000_000) as made:
        yield made


@pytest.fixture(scope="module")
def recurrent():
    with Engine(ARCHS["lfm2"].build(), cache_bytes=4_000_000) as made:
        yield made


def test_a_draw_that_fails_for_all_together_is_done_one_by_one(engine, monkeypatch) -> None:
    expected = [result.token_ids for result in engine.generate([[1, 2], [3, 4], [5, 6]], **HOW)]
    draws = engine._built.guest.draws
    real = draws.draw

    def narrow(logits, choices, *rest):
        if len(choices) > 1:
            raise torch.OutOfMemoryError("no room for so many rows")
        return real(logits, choices, *rest)

    monkeypatch.setattr(draws, "draw", narrow)
    assert [result.token_ids for result in engine.generate([[1, 2], [3, 4], [5, 6]], **HOW)] == expected


def test_a_draw_that_fails_ends_its_request_and_no_other(engine, monkeypatch) -> None:
    draws = engine._built.guest.draws
    real = draws.draw

    def refuse_sevens(logits, choices, *rest):
        if any(choice.seed == 7 for choice in choices):
            raise RuntimeError("seven")
        return real(logits, choices, *rest)

    expected = engine.generate([3, 4], **HOW).token_ids
    monkeypatch.setattr(draws, "draw", refuse_sevens)
    with pytest.raises(EngineFailed, match="the draw failed"):
        engine.generate([1, 2], seed=7, **HOW)
    assert engine.generate([3, 4], **HOW).token_ids == expected
    assert_at_rest(engine)


def test_a_shift_without_scratch_memory_reads_again_instead(monkeypatch) -> None:
    how = {"max_tokens": 60, "temperature": 0, "shift": True, "num_keep": 4, "ignore_eos": True}
    with Engine(ARCHS["llama"].build(), context=24, cache_bytes=400_000) as engine:
        monkeypatch.setattr(Pool, "move", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
        result = engine.generate([1, 2, 3, 4, 5, 6], **how)
        assert (len(result.token_ids), result.finish_reason) == (60, "length")
        assert_at_rest(engine)


def test_idle_sessions_are_evicted_for_a_shift() -> None:
    """The keys that move need spare cells; a session that nobody uses has them."""
    how = {"temperature": 0, "ignore_eos": True}
    settings = {"context": 24, "step_tokens": 8}
    with Engine(ARCHS["llama"].build(), cache_bytes=bytes_for("llama", 39, **settings), **settings) as engine:
        idle = engine.session(chat=False)
        idle.send([7] * 12, max_tokens=4, **how)
        result = engine.generate([1, 2, 3, 4, 5, 6], max_tokens=40, shift=True, num_keep=2, **how)
        assert len(result.token_ids) == 40
        engine.check()


def test_a_raw_session_goes_on_from_the_text_that_was_told(embedded) -> None:
    how = {"temperature": 0, "max_tokens": 12}
    prompt = "def f(x):\n"
    plain = embedded.generate(prompt, **how).text
    stop = plain[6:8]
    with embedded.session(chat=False) as session:
        told = session.send(prompt, stop=[stop], **how).text
        assert told == plain[: plain.index(stop)]
        assert embedded.decode(session.tokens) == prompt + told
        assert session.send("\n\n", **how).text == embedded.generate(prompt + told + "\n\n", **how).text


def test_a_session_closed_while_its_turn_is_prepared_keeps_nothing(embedded, monkeypatch) -> None:
    before = embedded.stats().cells_used
    session = embedded.session(chat=False)
    tokenising, closed = threading.Event(), threading.Event()
    codec = embedded._codec
    real = codec.encode

    def slow(text, **how):
        tokenising.set()
        closed.wait(120)
        return real(text, **how)

    monkeypatch.setattr(codec, "encode", slow)
    turn = threading.Thread(target=lambda: session.send("import os", max_tokens=3))
    turn.start()
    assert tokenising.wait(120)
    session.close()
    closed.set()
    turn.join()
    embedded.check()
    assert embedded.stats().cells_used == before


def test_a_program_that_forgets_to_close_its_engine_ends_as_it_should() -> None:
    program = """
from kvcellar import Engine, SamplingParams
engine = Engine(cache_bytes=4_000_000)
started = __import__("threading").Event()
engine.submit(engine.encode("import"), SamplingParams(max_tokens=600, ignore_eos=True), deliver=lambda _: started.set())
started.wait(120)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_an_empty_text_is_no_prompt(embedded) -> None:
    for empty in ("", [""], []):
        with pytest.raises(BadRequest, match="empty"):
            embedded.generate(empty, max_tokens=1)


def test_integers_of_other_libraries_are_token_ids_too(engine) -> None:
    assert (
        engine.generate(np.array([1, 2]).tolist(), **HOW).token_ids
        == engine.generate([np.int64(1), np.int32(2)], **HOW).token_ids
    )


@pytest.mark.parametrize(
    "checkpoint_positions",
    [("x",), (None,), (1.5,), (True,), (-1,), (4,), (2, 1), (1, 10**9)],
    ids=lambda checkpoint_positions: repr(checkpoint_positions),
)
def test_what_is_no_position_of_the_prompt_is_refused(recurrent, checkpoint_positions) -> None:
    params, heard = recurrent.params(**HOW), []
    with pytest.raises(BadRequest, match="0 to 3, in order") as refused:
        recurrent.submit([5, 6, 7], params, deliver=heard.append, checkpoint_positions=checkpoint_positions)
    assert (refused.value.param, heard) == ("checkpoint_positions", [])
    assert recurrent.generate([5, 6, 7], **HOW).finish_reason == "length"


def test_the_ends_of_a_prompt_are_positions_too(recurrent) -> None:
    collector, _ = recurrent._requests.start(
        [5, 6, 7], recurrent.params(**HOW), {"checkpoint_positions": [0, np.int64(1), 3]}
    )
    assert len(list(collector.deltas())) == HOW["max_tokens"]


def test_none_is_what_the_model_does_by_itself(engine) -> None:
    assert engine.params(temperature=None, top_p=None, logit_bias=None, stop=None) == engine.params()


def test_what_is_no_id_has_no_text(embedded) -> None:
    for bad in (-1, 2048, 10**9, True, 1.5):
        with pytest.raises(BadRequest, match="not a token id"):
            embedded.decode([bad])
        with pytest.raises(BadRequest, match="not a token id"):
            embedded.token_bytes(bad)
