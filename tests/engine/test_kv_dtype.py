"""The engine's `kv_dtype`: checked at the door, counted in bytes, read by the network."""

from contextlib import ExitStack

import pytest

from kvcellar import Engine
from kvcellar.engine.load.build import build
from kvcellar.engine.load.settings import Settings
from kvcellar.errors import BadRequest
from tests.zoo import ARCHS

CACHE = 2_000_000


def test_what_cannot_be_stored_is_refused_at_the_door():
    with pytest.raises(BadRequest, match="int3") as refused:
        Settings(kv_dtype="int3")
    assert refused.value.param == "kv_dtype"


@pytest.mark.parametrize("kv_dtype", [None, "int8", "k=fp8+hadamard,v=int4"])
def test_bytes_that_were_resolved_are_the_bytes_that_are_held(kv_dtype):
    built = build(
        ARCHS["gemma3"].build(),
        Settings(kv_dtype=kv_dtype, cache_bytes=CACHE, device="cpu", step_tokens=32),
        ExitStack(),
    )
    assert built.capacity.bytes == built.memory.storage.bytes <= CACHE


def test_fewer_bits_hold_more_tokens():
    """float32 heads of 16 elements: 64 bytes become 16 and a scale of 2."""
    rates, last = {}, 0
    for kv_dtype in (None, "bfloat16", "int8", "int4"):
        settings = Settings(kv_dtype=kv_dtype, cache_bytes=CACHE, device="cpu", step_tokens=32)
        capacity = build(ARCHS["llama"].build(), settings, ExitStack()).capacity
        assert capacity.tokens > last
        rates[kv_dtype], last = capacity.tokens / capacity.bytes, capacity.tokens
    plain = rates[None]
    planes = (
        build(ARCHS["llama"].build(), Settings(cache_bytes=CACHE, device="cpu"), ExitStack())
        .guest.shape.groups[0]
        .planes
    )
    (size,) = {plane.size for plane in planes}
    assert rates["bfloat16"] == pytest.approx(2 * plain, rel=0.01)
    assert rates["int8"] == pytest.approx(4 * size / (size + 2) * plain, rel=0.01)
    assert rates["int4"] == pytest.approx(4 * size / (size / 2 + 2) * plain, rel=0.01)


def test_an_engine_answers_from_quantised_memory_alone_and_in_company():
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7], [5] * 20]
    with Engine(ARCHS["gemma3"].build(), kv_dtype="int8+hadamard", device="cpu", cache_bytes=2_000_000) as engine:
        together = engine.generate(prompts, max_tokens=12, temperature=0.0, ignore_eos=True)
        alone = [engine.generate(prompt, max_tokens=12, temperature=0.0, ignore_eos=True) for prompt in prompts]
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
