"""A decode step calls few Python functions and torch operations in each layer, for any number of sequences."""

import pytest

from benchmarks.counts import SEQUENCES, SPEC, counts
from kvcellar.memory.attention.cpu import Cpu
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.kv.history import Backend

MOST = 8


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("backend", [Cpu(), Sdpa(fused=True)], ids=lambda backend: backend.name)
def test_a_layer_of_a_decode_step(backend: Backend, sequences: int) -> None:
    if (refused := backend.refuse(SPEC)) is not None:
        pytest.skip(f"not compiled here: {refused}")
    found = counts(backend, sequences)
    assert 0 < found.calls <= MOST
    assert 0 < found.operations <= MOST
