"""Which backend serves: the first that does not refuse, with the reasons of those before it; or none, with all."""

from dataclasses import replace

import pytest

from kvcellar.errors import BadRequest, ModelRefused, NoBackend
from kvcellar.memory.attention.choose import backends, choose, named
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.shapes import AttentionSpec

ASK = AttentionSpec(8, 2, 64, 64, "bfloat16", "cpu")
UNEVEN = replace(ASK, query_heads=7, softcap=True, sinks=True)


class Never(Sdpa):
    name = "never"

    def refuse(self, spec: AttentionSpec) -> str | None:
        return f"it is not for {spec.device}"


def test_the_first_supporting_backend_is_taken_and_no_later_one_is_called() -> None:
    chosen = choose(ASK, [Sdpa(), Never(), Reference()])
    assert (chosen.backend.name, chosen.refused) == ("sdpa", {})
    chosen = choose(ASK, [Never(), Reference(), Sdpa()])
    assert (chosen.backend.name, chosen.refused) == ("reference", {"never": "it is not for cpu"})


def test_uneven_heads_are_refused_by_all_but_the_reference_with_the_numbers() -> None:
    chosen = choose(UNEVEN, backends())
    assert chosen.backend.name == "reference"
    uneven = "7 query heads cannot share 2 KV heads evenly"
    assert chosen.refused == {"cpu": uneven, "triton": "it runs on cuda, not on cpu", "sdpa": uneven}


def test_when_all_refuse_the_error_has_every_reason() -> None:
    with pytest.raises(NoBackend) as none:
        choose(UNEVEN, [Never(), Sdpa()])
    assert none.value.refused == {
        "never": "it is not for cpu",
        "sdpa": "7 query heads cannot share 2 KV heads evenly",
    }
    assert str(none.value) == (
        "no attention backend can serve 7 query heads on 2 KV heads of 64/64, bfloat16 on cpu, softcap, sinks. "
        "never: it is not for cpu; sdpa: 7 query heads cannot share 2 KV heads evenly"
    )
    assert isinstance(none.value, ModelRefused)


def test_no_candidates_is_said() -> None:
    with pytest.raises(NoBackend, match="there are no candidates"):
        choose(ASK, [])


def test_a_backend_can_be_named() -> None:
    assert [backend.name for backend in named(None)] == [backend.name for backend in backends()]
    for backend in backends():
        assert [found.name for found in named(backend.name)] == [backend.name]


def test_the_error_for_an_unknown_name_lists_all_names() -> None:
    with pytest.raises(BadRequest, match="called 'flash3'; there are cpu, triton, sdpa, reference") as unknown:
        named("flash3")
    assert unknown.value.param == "attention"


def test_names_are_unique_and_the_one_that_serves_everything_is_last() -> None:
    names = [backend.name for backend in backends()]
    assert len(set(names)) == len(names)
    for spec in (ASK, UNEVEN, replace(ASK, key_size=1, value_size=513, dtype="float64")):
        assert backends()[-1].refuse(spec) is None
