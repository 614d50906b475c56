"""kv_quality: every way of storing K/V is measured on the model itself, and what no backend reads is refused."""

import json

import pytest
from click.testing import CliRunner

from kvcellar.cli.main import cli
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.errors import BadRequest
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.shapes import Kind
from kvcellar.verify.kv_quality import WAYS, KvQuality, kv_quality
from tests.zoo import ARCHS


@pytest.fixture(scope="module")
def guest() -> Guest:
    return build_guest(ARCHS["gemma3"].build(), backends())


def test_quality_is_measured_for_every_way_and_falls_with_the_bits(guest):
    found = {one.stored: one for one in kv_quality(guest, backends(), (*WAYS, "auto"), tokens=96)}
    assert set(found) == {*WAYS, "auto"}
    for one in found.values():
        assert one.kl is not None
        assert one.agreement is not None
        assert 0 <= one.agreement <= 1
        assert one.tokens == 96
    assert found["auto"] == KvQuality("auto", found["auto"].bytes_per_token, 96, 0.0, 1.0)
    assert found["int8"].kl < found["int4"].kl
    assert found["int8"].bytes_per_token < found["v=int8"].bytes_per_token < found["auto"].bytes_per_token


def test_quality_gives_the_reason_why_no_backend_reads(guest):
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
    with pytest.raises(BadRequest, match="not 0"):
        kv_quality(guest, backends(), tokens=0)


def test_doctor_prints_the_quality_of_every_way(tmp_path):
    ARCHS["llama"].build().save_pretrained(tmp_path)
    command = ["doctor", str(tmp_path), "--device", "cpu", "--cache-bytes", "1M"]
    output = CliRunner().invoke(cli, command, catch_exceptions=False).output
    assert all(f"    {way} " in output for way in WAYS)
    assert "same most likely token" in output
    silent = CliRunner().invoke(cli, [*command, "--no-kv-quality", "--json", "--kv-dtype", "int4"])
    found = json.loads(silent.output)
    assert found["kv_quality"] == []
