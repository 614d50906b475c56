"""Every way of storing K/V: what is read back, in how many bytes, in which arrangement, and after moving or turning."""

from itertools import pairwise, product
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.errors import BadRequest
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.kv.history import write_planes
from kvcellar.memory.kv.pool import Pool, rope_rotated
from kvcellar.memory.kv.quantise import LARGEST, dequantise, hadamard, quantise, rotate
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Arrangement, Kind, Plane, Rotation, Storage, StoredAs
from kvcellar.memory.spans import Span
from tests.laws.watch import Wishes

CPU = torch.device("cpu")
ARRANGEMENTS: tuple[Arrangement, ...] = get_args(Arrangement)
KINDS: tuple[Kind, ...] = ("fp8", "int8", "int4")
WAYS = (*(Storage(kind) for kind in get_args(Kind)), *(Storage(kind, hadamard=True) for kind in KINDS))
SIZES = (1, 5, 16, 64, 80, 128, 192, 256)


def drawn(seed: int, *shape: int, spread: float = 0.0) -> Tensor:
    """Normal numbers, times powers of ten of up to `spread` in either direction."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * 10 ** (spread * (2 * torch.rand(shape[:-1], generator=generator) - 1))[..., None]


def back(x: Tensor, kind: Kind) -> Tensor:
    return dequantise(*quantise(x, kind), kind, x.shape[-1])


def bound(x: Tensor, kind: Kind) -> Tensor:
    """What an element may be off by, and a hair for the float32 division."""
    scales = quantise(x, kind)[1].float().repeat_interleave(128, -1)[..., : x.shape[-1]]
    off = torch.maximum(x.abs() / 16, scales / 1024) if kind == "fp8" else scales / 2
    return off * (1 + 1e-5)


# -- one vector -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), size=st.sampled_from(SIZES), spread=st.sampled_from([0.0, 2.0, 4.0]))
def test_every_element_comes_back_within_the_bound_of_its_kind(kind, seed, size, spread):
    x = drawn(seed, 7, 2, size, spread=spread)
    assert ((back(x, kind) - x).abs() <= bound(x, kind)).all()


@pytest.mark.parametrize("kind", KINDS)
@given(exponent=st.integers(-9, 9), size=st.sampled_from(SIZES), seed=st.integers(0, 2**32))
def test_what_is_a_code_times_a_scale_comes_back_exactly(kind, exponent, size, seed):
    generator = torch.Generator().manual_seed(seed)
    most = int(LARGEST[kind])
    codes = torch.randint(-most, most + 1, (3, 2, size), generator=generator).float()
    codes = codes.to(torch.float8_e4m3fn).float() if kind == "fp8" else codes
    codes[..., ::128] = most  # each group reaches its largest code, so its scale is the one we mean
    x = codes * 2.0**exponent
    assert torch.equal(back(x, kind), x)


def test_every_byte_of_fp8_is_read_as_torch_reads_it():
    every = torch.arange(256, dtype=torch.uint8)[None]
    expected = every.view(torch.float8_e4m3fn).float()
    finite = expected.isfinite()
    assert finite.sum() == 254
    read = dequantise(every, torch.ones(1, 2, dtype=torch.float16), "fp8", 256)
    assert torch.equal(read[finite], expected[finite])
    assert torch.equal(read.signbit()[finite], expected.signbit()[finite])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_back_is_stored_as_it_is(kind):
    """Where scales are normal float16 numbers: copying through floats loses nothing more."""
    x = back(drawn(1, 40, 3, 192), kind)
    assert torch.allclose(back(x, kind), x, atol=0, rtol=2**-10)
    if kind != "fp8":  # its codes are too coarse for the largest to say what the scale was
        assert torch.equal(back(x, kind), x)


@pytest.mark.parametrize(("kind", "size"), list(product(KINDS, SIZES)))
def test_zeros_come_back_as_zeros(kind, size):
    codes, scales = quantise(torch.zeros(2, 3, size), kind)
    assert not scales.any()
    assert torch.equal(dequantise(codes, scales, kind, size), torch.zeros(2, 3, size))
    zeroed = torch.zeros_like(codes), torch.zeros_like(scales)
    assert torch.equal(dequantise(*zeroed, kind, size), torch.zeros(2, 3, size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan, 1e9, -3e38])
def test_what_has_no_scale_reads_back_as_nan_in_its_group_and_nowhere_else(kind, wrong):
    x = drawn(2, 3, 2, 256)
    x[1, 0, 130] = wrong
    read = back(x, kind)
    assert read[1, 0, 128:].isnan().all()
    read[1, 0, 128:] = x[1, 0, 128:] = 0
    assert ((read - x).abs() <= bound(x, kind)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_and_the_largest_are_within_the_bound(kind):
    largest = 65504.0 * LARGEST[kind]
    x = torch.tensor([[1e-45, -1e-40], [2.0**-24, 1e-9], [largest, -largest / 2], [1.0, -1e-30], [65504.0, 1e-3]])
    assert ((back(x, kind) - x).abs() <= bound(x, kind)).all()


@given(size=st.integers(1, 200))
def test_a_rotation_undoes_itself_and_leaves_products_alone(size):
    h = hadamard(size, CPU)
    assert torch.allclose(h @ h, torch.eye(size), atol=1e-6)
    assert torch.equal(h, h.T)
    a, b = drawn(size, 4, size), drawn(size + 1, 4, size)
    assert torch.allclose((a @ h) @ (b @ h).T, a @ b.T, atol=1e-4)
    assert torch.allclose(rotate(a), a @ h, atol=1e-5)
    assert torch.equal(rotate(a)[2], rotate(a[2]))


def test_rotating_helps_a_vector_with_an_element_that_stands_out():
    x = drawn(3, 100, 2, 128)
    x[..., 7] *= 50
    h = hadamard(128, CPU)
    plain, rotated = (back(x, "int4") - x).norm(), (back(x @ h, "int4") @ h - x).norm()
    assert rotated < plain / 3


# -- how it is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "k", "v"),
    [
        ("int8", Storage("int8"), Storage("int8")),
        ("int8+hadamard", Storage("int8", hadamard=True), Storage("int8")),
        ("k=int8+hadamard,v=int4", Storage("int8", hadamard=True), Storage("int4")),
        (" k = fp8 , v = bfloat16 ", Storage("fp8"), Storage("bfloat16")),
        ("v=int4", None, Storage("int4")),
        ("k=auto,v=fp8", None, Storage("fp8")),
        ("auto", None, None),
    ],
)
def test_there_is_one_spelling(text, k, v):
    stored = StoredAs.parse(text)
    assert stored == StoredAs(k, v)
    assert StoredAs.parse(str(stored)) == stored
    assert (stored.of("k"), stored.of("v"), stored.of("latent")) == (k, v, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int5", "'int5'"),
        ("", "''"),
        ("q8_0", "fp8, int8, int4"),
        ("int8,int4", "k=int8"),
        ("k=int8,k=int4", "k=int8"),
        ("x=int8", "k=int8"),
        ("k=int8,", "k=int8"),
        ("k=", "''"),
        ("int8+", "hadamard"),
        ("int8+rotated", "rotated"),
        ("k=float16+hadamard", "quantised"),
        ("auto+hadamard", "'auto'"),
        ("v=int4+hadamard", "only keys"),
    ],
)
def test_other_spellings_are_refused(text, says):
    with pytest.raises(BadRequest, match=says.replace("+", r"\+")) as refused:
        StoredAs.parse(text)
    assert refused.value.param == "kv_dtype"


# -- a pool -----------------------------------------------------------------------------------------------------------


def pool(storage: Storage, arrangement: Arrangement = "token", *, cells: int = 20, size: int = 80) -> Pool:
    planes = (Plane("k", 3, size, storage), Plane("v", 2, 24, Storage(storage.kind)))
    backend = Wishes(arrangement)
    return Pool(Group("g", Causal(), planes, (4, 6)), backend, cells=cells, dtype=torch.float32, device=CPU)


def index(*cells: int) -> Tensor:
    return torch.tensor(cells)


def write(kept: Pool, layer: int, cells: Tensor, k: Tensor, v: Tensor) -> None:
    write_planes(kept.planes(layer), cells, {"k": k, "v": v})


def fill(kept: Pool) -> None:
    """Cells 3 to 6 as a run, and a few that lie anywhere."""
    write(kept, 6, index(3, 4, 5, 6), drawn(4, 1, 3, 4, 80), drawn(5, 1, 2, 4, 24))
    write(kept, 6, index(20, 1, 9), drawn(6, 1, 3, 3, 80), drawn(7, 1, 2, 3, 24))


EVERY = index(*range(21))


@pytest.mark.parametrize("storage", WAYS, ids=str)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_all_arrangements_hold_the_same_bit_for_bit(storage, arrangement):
    """After writing, moving and turning, whichever way one reads."""
    plain, other = pool(storage), pool(storage, arrangement)
    for kept in (plain, other):
        for layer in (4, 6):  # what a cell holds before it is written is undefined
            write(kept, layer, EVERY, torch.zeros(1, 3, 21, 80), torch.zeros(1, 2, 21, 24))
        fill(kept)
        kept.move(6, index(4, 9, 20), index(11, 2, 15), {"k": Rotation((1.0, 0.1), start=2)}, -5)
    for name in ("k", "v"):
        assert torch.equal(other.planes(6)[name].values(EVERY), plain.planes(6)[name].values(EVERY))
        one, two = other.planes(6)[name], plain.planes(6)[name]
        for cells in (slice(3, 12), index(9, 2, 2, 20)):
            for rotated in (False, True):
                read = one.read(cells, torch.float32, rotated=rotated)
                assert torch.equal(read, two.read(cells, torch.float32, rotated=rotated))
    assert not other.planes(4)["k"].values(EVERY).any(), "a write reached another layer"


def test_shapes_are_what_was_agreed():
    shapes = {
        "token": ((21, 3, 40), (21, 3, 1)),
        "head": ((3, 21, 40), (3, 21, 1)),
    }
    for arrangement in ARRANGEMENTS:
        kept = pool(Storage("int4"), arrangement).planes(4)["k"]
        assert kept.scales is not None
        assert (tuple(kept.codes.shape), tuple(kept.scales.shape)) == shapes[arrangement]
        assert kept.arrangement == arrangement


def test_what_is_plain_and_lies_in_a_run_is_read_without_a_copy():
    for arrangement in ARRANGEMENTS:
        kept = pool(Storage("float32"), arrangement).planes(4)["k"]
        view = kept.read(slice(2, 5), torch.float32)
        assert view.untyped_storage().data_ptr() == kept.codes.untyped_storage().data_ptr()
        assert view.shape == (3, 3, 80)


@pytest.mark.parametrize("storage", WAYS, ids=str)
def test_bytes_are_the_formula(storage):
    plane = Plane("k", 3, 80, storage), Plane("v", 2, 24, Storage(storage.kind))
    kept = pool(storage, "head")
    tensors = [
        t
        for layer in (4, 6)
        for name in ("k", "v")
        for t in (kept.planes(layer)[name].codes, kept.planes(layer)[name].scales)
    ]
    rotation = 80 * 80 * 4 * storage.hadamard
    assert kept.bytes == sum(t.nbytes for t in tensors if t is not None) + rotation
    of_planes = 21 * 2 * sum(p.bytes_per_cell(999) for p in plane)  # the memory's own type plays no part
    assert kept.bytes == of_planes + rotation


@pytest.mark.parametrize(
    ("kind", "size", "bytes_", "overhead"),
    [
        ("int8", 128, 130, 0.016),
        ("int8", 256, 260, 0.016),
        ("fp8", 128, 130, 0.016),
        ("int4", 128, 66, 0.031),
        ("int4", 256, 132, 0.031),
        ("int8", 64, 66, 0.031),
        ("int8", 192, 196, 0.021),
        ("int4", 5, 5, 0.667),
        ("bfloat16", 128, 256, 0.0),
        ("float32", 5, 20, 0.0),
    ],
)
def test_scales_cost_what_is_said(kind, size, bytes_, overhead):
    storage = Storage(kind)
    assert storage.bytes(size) == bytes_
    assert (storage.bytes(size) - 2 * storage.scales(size)) * (1 + overhead) == pytest.approx(bytes_, rel=1e-3)


def test_rotations_cost_no_bytes_a_cell():
    assert Storage("int8", hadamard=True).bytes(128) == Storage("int8").bytes(128)


@pytest.mark.parametrize("storage", WAYS, ids=str)
def test_what_does_not_turn_moves_bit_for_bit(storage):
    kept = pool(storage, "head")
    fill(kept)
    before = kept.planes(6)["k"].values(index(3, 20, 5))
    kept.move(6, index(3, 20, 5), index(12, 13, 2), {}, -7)
    assert torch.equal(kept.planes(6)["k"].values(index(12, 13, 2)), before)
    assert torch.equal(kept.planes(6)["k"].values(index(3, 20, 5)), before)


@pytest.mark.parametrize("storage", WAYS, ids=str)
def test_keys_turn_as_they_are_read_and_are_stored_again(storage):
    """Dequantise, rotate back, turn, rotate, quantise: within the storage's bound of turning what was read."""
    kept = pool(storage)
    fill(kept)
    rotation = Rotation(tuple(10.0**-i for i in range(6)), interleaved=True, start=4)
    expected = rope_rotated(kept.planes(6)["k"].values(index(3, 20)), rotation, -9).float()
    kept.move(6, index(3, 20), index(12, 13), {"k": rotation}, -9)
    turned = kept.planes(6)["k"].values(index(12, 13)).float()
    if not storage.quantised:
        assert torch.equal(turned, expected)
        return
    h = hadamard(80, CPU) if storage.hadamard else torch.eye(80)
    stored = expected @ h
    assert ((turned @ h - stored).abs() <= bound(stored, storage.kind) + 1e-5).all()


# -- a memory ---------------------------------------------------------------------------------------------------------


class ByHead(Reference):
    arrangement: Arrangement = "head"


class Narrow(Reference):
    """Reads nothing but float32."""

    name = "narrow"
    kinds = frozenset[Kind]({"float32"})


def memory(stored: StoredAs, backend: Reference | None = None) -> Memory:
    planes = (Plane("k", 2, 24, stored.k), Plane("v", 2, 16, stored.v))
    group = Group("causal", Causal(), planes, (0, 1))
    return Memory([group], cells={"causal": 90}, dtype=torch.float32, device="cpu", backend=backend or ByHead())


def feed(kept: Memory, seq: int, rows: slice) -> None:
    kept.begin(Batch((Feed(seq, Span(rows.start, rows.stop)),)))
    for layer in (0, 1):
        kept.put(layer, drawn(10 + layer, 40, 2, 24)[rows], drawn(20 + layer, 40, 2, 16)[rows])
    kept.commit()


def looked_at(kept: Memory, seq: int) -> list[Tensor]:
    end = kept.length(seq)
    kept.begin(Batch((Feed(seq, Span(end, end + 1)),)))
    found = [x[:end] for layer in (0, 1) for x in kept.get(layer).in_order()]
    kept.abandon()
    return found


@pytest.mark.parametrize("text", ["auto", "bfloat16", "fp8", "int8+hadamard", "k=int4+hadamard,v=int4"])
def test_bytes_of_a_memory_are_places_times_bytes_per_cell_and_one_rotation(text):
    kept = memory(StoredAs.parse(text))
    places = 91  # with the null one
    rotation = 24 * 24 * 4 * ("hadamard" in text)
    assert kept.storage.bytes == places * kept.storage.groups[0].bytes_per_cell(4) + rotation
    assert kept.storage.bytes == kept.storage.groups[0].bytes(90, 4)


@pytest.mark.parametrize("text", ["auto", "float16", "fp8", "int8+hadamard", "k=int4+hadamard,v=int8"])
@given(cuts=st.sets(st.integers(1, 39), max_size=6), upto=st.integers(1, 40))
def test_chunks_and_forks_change_nothing_of_what_is_stored(text, cuts, upto):
    whole, parts = memory(StoredAs.parse(text)), memory(StoredAs.parse(text))
    feed(whole, 0, slice(0, 40))
    marks = [0, *sorted(cuts), 40]
    for at, (a, b) in enumerate(pairwise(marks)):
        feed(parts, 0, slice(a, b))
        if at % 2:
            feed(parts, 9 + at, slice(0, 1))  # others lie in between
    parts.fork(0, 1, upto)
    if upto < 40:
        feed(parts, 1, slice(upto, 40))
    for seq in (0, 1):
        for a, b in zip(looked_at(parts, seq), looked_at(whole, 0), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_backend_that_cannot_read_a_kind_is_not_given_it(kind):
    stored = StoredAs(Storage(kind), None)
    if kind == "float32":
        assert memory(stored, Narrow()).storage.bytes
        return
    with pytest.raises(BadRequest, match=f"narrow cannot read k stored as {kind}"):
        memory(stored, Narrow())
