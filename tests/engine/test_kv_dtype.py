"""The engine's `kv_dtype`: checked at the door, counted in bytes, read by the network, and measured beforehand."""

import json

import pytest
from click.testing import CliRunner

from kvcellar import Engine
from kvcellar.attention.choose import backends
from kvcellar.attention.sdpa import Sdpa
from kvcellar.cli.main import cli
from kvcellar.contracts import Kind
from kvcellar.engine.build import build
from kvcellar.engine.kvquality import WAYS, KvQuality, kv_quality
from kvcellar.engine.settings import Settings
from kvcellar.errors import BadRequest
from kvcellar.models.guest import Guest, adopt
from tests.zoo import ARCHS

CACHE = 2_000_000


@pytest.fixture(scope="module")
def guest() -> Guest:
    return adopt(ARCHS["gemma3"].build(), backends())


def test_what_cannot_be_stored_is_refused_at_the_door():
    with pytest.raises(BadRequest, match="int3") as refused:
        Settings(kv_dtype="int3")
    assert refused.value.param == "kv_dtype"


@pytest.mark.parametrize("kv_dtype", [None, "int8", "k=fp8+hadamard,v=int4"])
def test_bytes_that_were_resolved_are_the_bytes_that_are_held(kv_dtype):
    built = build(ARCHS["gemma3"].build(), Settings(kv_dtype=kv_dtype, cache_bytes=CACHE, device="cpu", step_tokens=32))
    assert built.capacity.bytes == built.memory.bytes <= CACHE


def test_fewer_bits_hold_more_tokens():
    """float32 heads of 16 elements: 64 bytes become 16 and a scale of 2."""
    rates, last = {}, 0
    for kv_dtype in (None, "bfloat16", "int8", "int4"):
        settings = Settings(kv_dtype=kv_dtype, cache_bytes=CACHE, device="cpu", step_tokens=32)
        capacity = build(ARCHS["llama"].build(), settings).capacity
        assert capacity.tokens > last
        rates[kv_dtype], last = capacity.tokens / capacity.bytes, capacity.tokens
    plain = rates[None]
    planes = build(ARCHS["llama"].build(), Settings(cache_bytes=CACHE, device="cpu")).guest.shape.groups[0].planes
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


def test_quality_is_measured_for_every_way_and_falls_with_the_bits(guest):
    found = {one.stored: one for one in kv_quality(guest, backends(), (*WAYS, "auto"), tokens=48, lines=2)}
    assert set(found) == {*WAYS, "auto"}
    for one in found.values():
        assert one.kl is not None
        assert one.agreement is not None
        assert 0 <= one.agreement <= 1
        assert one.tokens == 96
    assert found["auto"] == KvQuality("auto", found["auto"].bytes_per_token, 96, 0.0, 1.0)
    assert found["int8"].kl < found["int4"].kl
    assert found["int8"].bytes_per_token < found["v=int8"].bytes_per_token < found["auto"].bytes_per_token


def test_quality_says_what_nobody_can_read(guest):
    class Floats(Sdpa):
        name = "floats"
        kinds = frozenset[Kind]({"float32", "fp8"})

    fp8, int8 = kv_quality(guest, [Floats()], ["fp8", "int8"], tokens=8)
    assert fp8.refused is None
    assert fp8.kl is not None
    assert int8.kl is None
    assert int8.refused is not None
    assert "floats: it cannot read keys stored as int8" in int8.refused


def test_a_sample_of_nothing_is_refused(guest):
    with pytest.raises(BadRequest, match="0 of 5"):
        kv_quality(guest, backends(), lines=0, tokens=5)


def test_the_doctor_says_what_storing_otherwise_would_do(tmp_path):
    ARCHS["llama"].build().save_pretrained(tmp_path)
    asked = ["doctor", str(tmp_path), "--device", "cpu", "--cache-bytes", "1M"]
    told = CliRunner().invoke(cli, asked, catch_exceptions=False).output
    assert all(f"    {way} " in told for way in WAYS)
    assert "same most likely token" in told
    silent = CliRunner().invoke(cli, [*asked, "--no-kv-quality", "--json", "--kv-dtype", "int4"])
    found = json.loads(silent.output)
    assert found["kv_quality"] == []
