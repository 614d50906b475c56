"""Pages of the planes are allocated before what is restored is written to them."""

import resource

import torch

from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.kv.group import Group
from kvcellar.memory.memory import Memory
from kvcellar.memory.shapes import Plane
from tests.cache.test_readout import feed, filled, read_out

CELLS = 10_000
PAGES = 2 * CELLS * 2 * 512 * 4 // resource.getpagesize()  # of both planes


def large() -> Memory:
    """Planes so large that an allocator takes new pages from the system for them."""
    planes = (Plane("k", 2, 512), Plane("v", 2, 512))
    return Memory(
        [Group("full", Causal(), planes, (0,))],
        cells={"full": CELLS},
        dtype=torch.float32,
        device="cpu",
        backend=Reference(),
    )


def faults_of_writing(made: Memory, n: int) -> int:
    """Page faults of writing the lowest `n` cells."""
    history = made.layers[0]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for plane in history.planes.values():
        plane.rows[1 : n + 1].fill_(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_cells_that_were_paged_in_are_written_without_page_faults() -> None:
    made = large()
    made.storage.page_in(CELLS, 1 << 40)
    assert faults_of_writing(made, CELLS) < PAGES / 100


def test_no_more_bytes_are_paged_in_than_allowed() -> None:
    made = large()
    made.storage.page_in(CELLS, PAGES * resource.getpagesize() // 10)
    assert faults_of_writing(made, CELLS // 11) < PAGES / 100


def test_cells_in_use_keep_their_content() -> None:
    made, claim = filled()
    record, chunks = read_out(made, claim)
    made.storage.page_in(1000, 1 << 40)
    again, same = read_out(made, claim)
    assert again == record
    assert all(torch.equal(a, b) for a, b in zip(chunks, same, strict=True))
    feed(made, 0, 3, torch.Generator().manual_seed(3))
    made.check()
