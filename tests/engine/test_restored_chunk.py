"""What was read enters memory from where it was read into, without a copy."""

import warnings

import torch

from kvcellar.memory.restores import ChunkTensor
from kvcellar.memory.tiers.transfers import Space, allocated


def test_a_chunk_in_memory_that_may_be_written_is_not_copied() -> None:
    space = Space(lambda: allocated(16))
    chunks = [space(8), space(8)]
    for number, chunk in enumerate(chunks):
        chunk[:] = bytes(range(number, number + 8))
    holder = ChunkTensor()
    first, second = map(holder.holding, chunks)
    assert first.tolist() == list(range(8))
    assert second.tolist() == list(range(1, 9))
    chunks[0][0] = 77
    assert first[0] == 77
    assert second.data_ptr() == first.data_ptr() + 8


def test_a_chunk_that_must_not_be_written_is_copied_to_one_place_without_a_warning() -> None:
    holder = ChunkTensor()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = holder.holding(b"abcd")
        assert bytes(first.numpy()) == b"abcd"
        second = holder.holding(memoryview(b"xyz"))
    assert bytes(second.numpy()) == b"xyz"
    assert second.data_ptr() == first.data_ptr()
    assert second.dtype is torch.uint8
