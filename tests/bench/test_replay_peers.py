"""Models of other systems' caches compute what these did, where they were counted, and what can be counted by hand."""

import json
from itertools import product

import pytest

from benchmarks.peers import STATES, VLLM, LlamaCpp, LMCache, Room, SGLang
from benchmarks.replay import TRACES, WINDOW, Turn, Writer, clairvoyant, ideal, limits
from benchmarks.replay_peers import KINDS, MODELS, Kvcellar, Peer, Transformers, computed
from benchmarks.run import main

LARGE = Room(1 << 20, 1 << 12)


def turns_of(trace: str, scale: float) -> list[Turn]:
    return list(TRACES[trace](Writer(1, scale)))


def text(number: int, length: int) -> list[int]:
    return [number * 10_000 + at for at in range(length)]


def asked(peer: Peer, *prompts: list[int]) -> list[int]:
    """The tokens of each prompt that are computed; of each answer, none is."""
    return [peer.serve(Turn(prompt, [1])) for prompt in prompts]


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", ["agent", "edits", "chats", "popular"])
@pytest.mark.parametrize(("name", "kind"), [*product(MODELS, KINDS)])
def test_none_computes_less_than_the_ideal_cache_or_more_than_everything(name: str, kind: str, trace: str) -> None:
    turns = turns_of(trace, 0.1)
    for share in (1.0, 0.1):
        peer = MODELS[name](kind, Room(*limits(turns, share=share, checkpoints=100)))
        if peer is not None:
            assert ideal(turns) <= computed(peer, turns) <= sum(len(turn.prompt) for turn in turns)


@pytest.mark.parametrize("trace", TRACES)
def test_in_the_same_cells_none_computes_less_than_the_clairvoyant_cache(trace: str) -> None:
    turns = turns_of(trace, 0.1)
    cells, _ = limits(turns, share=0.1, checkpoints=0)
    for model in (VLLM, SGLang, LlamaCpp):
        assert computed(model("full", Room(cells, 0)), turns) >= clairvoyant(turns, cells)


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_keeps_no_more_than_fits(kind: str) -> None:
    peer = SGLang(kind, Room(2000, 5))
    for turn in turns_of("chats", 0.1):
        peer.serve(turn)
        assert peer.tokens <= 2000 or kind == "recurrent"
        assert peer.states <= 5 or kind not in STATES


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_that_grows_is_resumed_by_the_real_caches(kind: str) -> None:
    turns = [Turn(text(1, 200 + 50 * n), text(1, 231 + 50 * n)[200 + 50 * n :]) for n in range(4)]
    assert computed(Kvcellar(kind, Room(4096, 64)), turns) == computed(Transformers(kind), turns) == ideal(turns)


# -- the systems themselves, as the log has it -------------------------------------------------------------------------

MEASURED = [
    (VLLM, "full", {"agent": 61_880, "users": 37_059, "edits": 72_550, "chats": 25_653}),
    (VLLM, "sliding", {"edits": 109_670}),
    (LlamaCpp, "full", {"agent": 79_520, "users": 54_883, "edits": 69_781, "chats": 17_944}),
]


@pytest.mark.parametrize(("model", "kind", "counts"), MEASURED)
def test_a_model_computes_as_many_tokens_as_the_system_did(model, kind: str, counts: dict[str, int]) -> None:
    options = {"block": 128} if model is VLLM else {}  # of a CPU
    found = {trace: computed(model(kind, LARGE, **options), turns_of(trace, 1.0)) for trace in counts}
    assert found == counts


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_vllm_finds_full_blocks_and_computes_the_last_token() -> None:
    assert asked(VLLM("full", LARGE), text(1, 40), text(1, 40), text(1, 60)) == [40, 8, 60 - 32]
    assert asked(VLLM("full", LARGE), text(1, 32), text(1, 32)) == [32, 16]


def test_vllm_finds_answers_without_the_token_that_was_drawn_last() -> None:
    peer = VLLM("full", LARGE)
    peer.serve(Turn(text(1, 40), text(1, 48)[40:]))
    assert asked(peer, text(1, 60)) == [60 - 32]
    peer.serve(Turn(text(2, 40), text(2, 49)[40:]))
    assert asked(peer, text(2, 60)) == [60 - 48]


def test_vllm_reuses_the_last_blocks_of_the_oldest_request_first() -> None:
    peer = VLLM("full", Room(160, 0))  # ten blocks: the third request takes two of the first one's four
    assert asked(peer, text(1, 64), text(2, 64), text(3, 64), text(1, 64)) == [64, 64, 64, 32]


def test_vllm_keeps_windows_at_ends_of_prompts_and_where_others_parted() -> None:
    first, second, third = (text(1, 400) + text(number, 200) for number in (2, 3, 4))
    assert asked(VLLM("sliding", LARGE), first, second, third, third) == [600, 600, 200, 600 - 592]


def test_vllm_keeps_states_at_the_ends_of_blocks_of_528() -> None:
    assert asked(VLLM("hybrid", LARGE), text(1, 500), text(1, 500)) == [500, 500]
    assert asked(VLLM("hybrid", LARGE), text(1, 1100), text(1, 1100)) == [1100, 1100 - 1056]
    parted = text(1, 1600), text(1, 600) + text(2, 1000), text(1, 600) + text(3, 1000)
    assert asked(VLLM("hybrid", LARGE), *parted) == [1600, 1600, 1600 - 528]


def test_lmcache_finds_full_chunks_of_prompts_that_vllm_has_lost() -> None:
    room = Room(1024, 0)
    prompts = text(1, 600), text(2, 600), text(1, 600)
    assert asked(VLLM("full", room), *prompts) == [600, 600, 600 - 416]
    assert asked(LMCache(room), *prompts) == [600, 600, 600 - 512]


def test_sglang_finds_tokens_and_evicts_the_leaf_that_was_used_last_longest_ago() -> None:
    peer = SGLang("full", Room(320, 0))
    assert asked(peer, text(1, 100), text(2, 100), text(3, 100), text(1, 100)) == [100, 100, 100, 1]
    assert asked(peer, text(4, 100), text(1, 100), text(2, 100)) == [100, 1, 100]


def test_sglang_evicts_whole_nodes() -> None:
    peer = SGLang("full", Room(250, 0))
    assert asked(peer, text(1, 100) + text(2, 100), text(3, 100)) == [200, 100]
    assert asked(peer, text(1, 100)) == [100]


def test_sglang_keeps_a_state_where_the_tree_parted_or_at_the_last_multiple_of_64() -> None:
    first, second, third = (text(1, 130) + text(number, 70) for number in (2, 3, 4))
    assert asked(SGLang("hybrid", LARGE), first, first, second, third) == [200, 200 - 192, 200, 200 - 128]


def test_sglang_keeps_states_of_answers_at_multiples_of_256() -> None:
    peer = SGLang("hybrid", LARGE)
    peer.serve(Turn(text(1, 200), text(1, 300)[200:]))
    assert asked(peer, text(1, 400)) == [400 - 256]


def test_sglang_evicts_the_state_that_was_used_last_longest_ago_from_inner_nodes_too() -> None:
    for last, count in ((140, 140 - 128), (100, 100)):  # the state at 64 is that of an inner node
        peer = SGLang("hybrid", Room(10_000, 2))
        assert asked(peer, text(1, 64), text(1, 128), text(2, 64), text(1, last)) == [64, 64, 64, count]


def test_sglang_has_the_windows_of_all_its_tokens() -> None:
    peer = SGLang("sliding", LARGE)
    assert asked(peer, text(1, 600), text(1, 500) + text(2, 100)) == [600, 100]


def test_llama_cpp_takes_a_similar_slot_or_the_oldest_and_loads_what_was_saved() -> None:
    texts = [text(number, 100) for number in range(6)]
    assert asked(LlamaCpp("full", LARGE), *texts, *texts) == [100] * 6 + [1] * 6
    small = LlamaCpp("full", Room(400, 0))
    assert asked(small, *texts, texts[5], texts[0]) == [100] * 6 + [1, 100]


def test_llama_cpp_loads_no_text_of_which_less_than_a_quarter_is_kept() -> None:
    peer = LlamaCpp("full", LARGE)
    asked(peer, text(1, 1000), *(text(number, 100) for number in range(2, 6)))
    assert asked(peer, text(1, 200)) == [200]


def test_llama_cpp_goes_back_to_a_checkpoint_before_the_end_of_a_prompt() -> None:
    for kind in ("hybrid", "recurrent"):
        parted = text(1, 900) + text(2, 100)
        assert asked(LlamaCpp(kind, LARGE), text(1, 1000), parted) == [1000, 1000 - (1000 - 516)]
        assert asked(LlamaCpp(kind, LARGE), text(1, 1000), text(1, 1000)) == [1000, 4]


def test_llama_cpp_goes_back_in_a_window_as_far_as_the_slot_has_it() -> None:
    assert asked(LlamaCpp("sliding", LARGE), text(1, 1000), text(1, 500) + text(2, 100)) == [1000, 100]
    far = text(1, 2 * WINDOW) + text(2, 100)
    assert asked(LlamaCpp("sliding", LARGE), text(1, 3000), far) == [3000, len(far)]


def test_the_row_has_the_counts_of_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(TRACES)[1:]:
        monkeypatch.delitem(TRACES, name)
    main(["replay-peers", "--quick"])
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["rows"]["replay-peers"]
    assert list(found) == [f"agent {kind} {room}" for kind in KINDS for room in ("all", "tenth")]
    assert table[1].split() == ["agent", "full", "all", *map(str, found["agent full all"].values())]
    assert found["agent hybrid all"]["LMCache"] is found["agent full tenth"]["transformers"] is None
