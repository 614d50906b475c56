"""The compiled kernel, judged like every backend: by the definition, and by dense attention in float64."""

import platform
import shutil
import subprocess
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.errors import NoBackend
from kvcellar.kernels import compiled, layers
from kvcellar.kernels.compiled import COMPILERS
from kvcellar.memory.attention import cpu
from kvcellar.memory.attention.choose import choose
from kvcellar.memory.attention.cpu import CHUNK, Cpu
from kvcellar.memory.attention.reference import Reference, attend_dense
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Chunked, Input, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.history import Backend, StepTables
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, GroupPlan, Run, Segment
from kvcellar.memory.shapes import AttentionSpec, Plane, Scoring, StoredAs
from kvcellar.memory.spans import Span
from tests.attention.texts import LAYOUTS, SHAPES, Texts, assert_scores_are_as_exact_as_float32, scorings
from tests.cache.tagged import Tagged

ASK = AttentionSpec(14, 2, 64, 64, dtype="bfloat16", device="cpu")
NOWHERE = {"PATH": "", "HOME": "/nonexistent"}
compiles = pytest.mark.skipif(Cpu().refuse(ASK) is not None, reason=f"not compiled here: {Cpu().refuse(ASK)}")
MORE_SHAPES = [  # beside those of every backend: whole lines and parts of them, and more rows than one block has
    pytest.param((14, 2, 64, 64), id="seven share one"),
    pytest.param((9, 1, 128, 96), id="nine share one"),
    pytest.param((2, 2, 33, 31), id="odd sizes"),
]
FLOATS = [torch.float32, torch.bfloat16]
STEPS = ({0: 7, 1: 1}, {2: 3, 0: 1}, {0: 1, 1: 1, 2: 1}, {1: 9, 2: 2}, {2: 1}, {0: 16, 1: 17, 2: 2})


# -- its results -----------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.parametrize("scoring", scorings(1, 1))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES + MORE_SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_prompts_and_single_tokens_of_unequal_sequences(dtype, shape, layout, scoring) -> None:
    texts = Texts(layout, shape, 128, dtype=dtype, backend=Cpu())
    for feeds in STEPS:
        texts.step(feeds, scorings(shape[0], shape[2])[scoring])


@compiles
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets named here are those of x86-64")
@pytest.mark.parametrize("source", [cpu.SOURCE, layers.SOURCE, compiled.THREADS], ids=lambda source: source.stem)
@pytest.mark.parametrize(
    "target",
    ["x86-64", "haswell", pytest.param("skylake-avx512", marks=pytest.mark.slow), "sapphirerapids"],
)
def test_no_vector_is_wider_than_the_registers_of_its_instruction_set(target, source, tmp_path) -> None:
    """GCC keeps such a vector in memory between operations, 25 times slower, and warns that its ABI depends on it."""
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
    options = ("-std=c++17", "-O0", "-fPIC", f"-march={target}", "-Wpsabi")
    command = [compiler, *options, "-c", "-o", str(tmp_path / "kernel.o"), str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "bad value" in ran.stderr or "unknown target CPU" in ran.stderr:
        pytest.skip(f"{compiler} has no {target}")
    assert (ran.returncode, ran.stderr) == (0, "")


@compiles
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_are_as_exact_as_float32(dtype, tokens) -> None:
    assert_scores_are_as_exact_as_float32(Cpu(), dtype, tokens)


@compiles
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0, 1e4])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_small_and_huge_scores(size, softcap) -> None:
    texts = Texts(Causal(), (4, 2, 16, 16), 64, backend=Cpu())
    texts.step({0: 12}, Scoring(1.0))
    q = size * texts.begin({0: 3})
    expected = attend_dense(q, *texts.memory.get(7).dense(), Scoring(1.0, softcap))
    torch.testing.assert_close(texts.memory.attend(7, q, Scoring(1.0, softcap)), expected, atol=3e-5, rtol=1e-5)


@compiles
@pytest.mark.parametrize("way", ["auto", "bfloat16", "k=bfloat16", "v=bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("arrangement", ["head", "token"])
def test_any_dtypes_of_storage_and_queries(arrangement, dtype, way) -> None:
    """Planes by head and by token, queries wider or narrower than keys, values of another type than keys."""
    stored = StoredAs.parse(way)
    planes = (Plane("k", 2, 40, stored.k), Plane("v", 2, 24, stored.v))
    backend = Cpu()
    backend.arrangement = arrangement
    kept = Memory(
        [Group("g", Sliding(30), planes, (0,))],
        cells={"g": 99},
        dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32,
        device="cpu",
        backend=backend,
    )
    for feeds in ({0: 9, 1: 20}, {1: 1, 0: 2}, {0: 1, 1: 16}):
        q = stepped(kept, feeds).to(dtype)
        got = kept.attend(0, q, Scoring(0.2))
        assert got.dtype is dtype
        expected = attend_dense(q.double(), *kept.get(0).dense(), Scoring(0.2))
        bound = 1e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), expected, atol=bound, rtol=bound)
        kept.commit()


def stepped(kept: Memory, feeds: dict[int, int], heads: int = 6, seed: int = 0) -> Tensor:
    """Open a step of random tokens, stored; queries [T,H,D] for it."""
    numbers = torch.Generator().manual_seed(seed + sum(feeds.values()))
    starts = {seq: kept.length(seq) if kept.has(seq) else 0 for seq in feeds}
    kept.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items())))
    (group,), rows = kept.storage.groups, sum(feeds.values())
    new = [torch.randn(rows, plane.heads, plane.size, generator=numbers) for plane in group.planes]
    kept.put(0, *(x.to(kept.dtype) for x in new))
    return torch.randn(rows, heads, group.planes[0].size, generator=numbers)


LONG = 2 * CHUNK + 77


def long_memory(backend: Backend, layout: Layout, *, dtype: torch.dtype = torch.float32, fill: float = 0.0) -> Memory:
    """Three sequences of more than two chunks, which lie in turns of a hundred cells."""
    group = Group("g", layout, (Plane("k", 2, 32), Plane("v", 2, 64)), (0,))
    kept = Memory([group], cells={"g": 3 * LONG + 99}, dtype=dtype, device="cpu", backend=backend)
    kept.begin(Batch((Feed(0, Span(0, 1)),)))
    for name in ("k", "v"):
        kept.get(0).planes[name].codes.fill_(fill)
    kept.abandon()
    for start in range(0, LONG, 100):
        for seq in range(3):
            stepped(kept, {seq: min(100, LONG - start)}, seed=seq + start)
            kept.commit()
    return kept


LONG_LAYOUTS = [Causal(), Sliding(CHUNK + 5), Sliding(CHUNK), Sliding(3, 900), Chunked(CHUNK + 20)]


@compiles
@pytest.mark.parametrize("layout", LONG_LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_several_chunks_are_one_softmax(dtype, layout) -> None:
    """Cells that no row may see are NaN, which does not change the result."""
    kept = long_memory(Cpu(), layout, dtype=dtype, fill=torch.nan)
    scoring = Scoring(0.5, softcap=4.0, sinks=torch.linspace(-3, 3, 6))
    for feeds in ({0: 1, 2: 1, 1: 1}, {1: 16, 0: 15}, {2: 17, 1: 1}):
        q = stepped(kept, feeds).to(dtype)
        expected = attend_dense(q.double(), *kept.get(0).dense(), scoring)
        bound = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(kept.attend(0, q, scoring).double(), expected, atol=bound, rtol=bound)
        kept.commit()


@compiles
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_cells_in_many_pieces(layout) -> None:
    texts, most = Texts(layout, (4, 2, 8, 12), 26, backend=Cpu()), 0
    for seq in 12 * list(range(5)):
        if texts.memory.free()["g"] < 1:
            oldest = max(texts.memory.sequences, key=texts.memory.length)
            texts.memory.drop(oldest)
            del texts.known[oldest]
        texts.step({seq: 1}, Scoring(0.5))
        most = max(most, texts.runs)
    assert most > 2 or isinstance(layout, Chunked), "this test needs sequences in pieces"


@compiles
@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 9), min_size=1), min_size=1, max_size=4), st.data())
def test_rows_that_look_ahead(steps, data) -> None:
    """On all layouts, against the dense view of the same plan."""
    tagged = Tagged(Cpu(), 128)
    for feeds in steps:
        tagged.begin(feeds, tagged.some_ahead(feeds, lambda low, most: data.draw(st.integers(low, most))))
        for group in tagged.groups:
            tagged.attends(group.layers[0])
        tagged.memory.commit()


@compiles
@pytest.mark.parametrize("start", [0, 5, 6, 9])
def test_rows_that_only_ask(start) -> None:
    tagged = Tagged(Cpu(), 128, names=["full"])
    tagged.step({0: 6, 1: 3})
    tagged.memory.begin(Batch((Feed(0, Span(start, start + 3), stores=False), Feed(1, Span(3, 4)))))
    tagged.put([900])
    tagged.attends(0)


@compiles
def test_an_input_is_visible_whole_and_rows_without_one_are_zero() -> None:
    """With sinks, too: what takes part and adds nothing leaves nothing."""
    planes = (Plane("k", 2, 16), Plane("v", 2, 16))
    groups = [Group("text", Causal(), planes, (0,)), Group("input", Input(20), planes, (1,))]
    kept = [
        Memory(groups, cells={"text": 40, "input": 40}, dtype=torch.float32, device="cpu", backend=backend)
        for backend in (Cpu(), Reference())
    ]
    numbers = torch.Generator().manual_seed(3)
    given, new = (torch.randn(n, 2, 16, generator=numbers) for n in (13, 5))
    q = torch.randn(5, 4, 16, generator=numbers)
    scoring = Scoring(0.3, sinks=torch.tensor([0.0, 1.0, -1.0, 2.0]))
    outputs: list[list[Tensor]] = []
    for memory in kept:
        memory.inputs.write(0, len(given), {1: (given, -given)})
        memory.begin(Batch((Feed(0, Span(0, 3)), Feed(1, Span(0, 2)))))
        memory.put(0, new, new)
        outputs.append([memory.attend(layer, q, scoring) for layer in (0, 1)])
    for ours, wanted in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    assert outputs[0][1][:3].ne(0).all()
    assert outputs[0][1][3:].eq(0).all()


@compiles
@pytest.mark.parametrize("dtype", FLOATS)
def test_keys_that_are_computed_give_the_bits_of_stored_ones(dtype) -> None:
    """Whether heads share them or not, of sequences in pieces that share cells."""
    texts = Texts(Sliding(CHUNK), (4, 1, 16, 4), 4 * CHUNK, dtype=dtype, backend=Cpu())
    for feeds in ({0: 60, 1: 2}, {0: 3, 1: 40}, {0: CHUNK}, {1: 5}):
        texts.begin(feeds)
        texts.memory.commit()
    texts.memory.fork(0, 2, texts.memory.length(0))
    for feeds in ({1: 3, 0: 1, 2: 17}, {2: 1, 0: 1, 1: 1}):
        q = texts.begin(feeds)
        k, v, visible = texts.memory.get(7).dense()
        scoring = Scoring(0.5, softcap=4.0, sinks=torch.linspace(-1, 1, 4))
        expected = texts.memory.attend(7, q, scoring)
        for heads in (1, 4):
            dense = k.expand(-1, heads, -1), v.expand(-1, heads, -1)
            assert torch.equal(texts.memory.attend(7, q, scoring, dense=dense), expected)
        exact = attend_dense(q.double(), k.double(), v.double(), visible, scoring)
        torch.testing.assert_close(expected.double(), exact, atol=2e-5 if dtype is FLOATS[0] else 2e-2, rtol=1e-2)
        texts.memory.commit()


@compiles
def test_queries_may_lie_as_a_model_left_them() -> None:
    texts = Texts(Causal(), (4, 2, 8, 8), 32, backend=Cpu())
    q = texts.begin({0: 6, 1: 1})
    wanted = texts.memory.attend(7, q, Scoring(0.5))
    for order in ((1, 0, 2), (2, 0, 1), (1, 2, 0)):
        turned = q.permute(order).contiguous().permute([order.index(axis) for axis in range(3)])
        assert torch.equal(turned, q)
        assert torch.equal(texts.memory.attend(7, turned, Scoring(0.5)), wanted)


def test_a_plan_does_not_grow_with_what_is_remembered() -> None:
    """Nor does making one: a sequence of a million tokens costs what one of a hundred does."""
    sizes: list[list[int]] = []
    for length in (100, 1_000_000):
        segment = Segment(0, 0, Span(length - 1, length), 0, length, (Run(1, length),), (Run(length, 1),))
        made = Cpu().prepare(GroupPlan("g", Causal(), (segment,)), StepTables(torch.device("cpu"), torch.float32))
        sizes.append([len(table) for table in made])
    assert sizes[0] == sizes[1]


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (replace(ASK, device="cuda"), "it runs on a CPU, not on cuda"),
        (replace(ASK, query_heads=13), "13 query heads cannot share 2 KV heads evenly"),
        (
            replace(ASK, dtype="float16"),
            "it cannot read keys stored as float16, only bfloat16, float32, fp8, int4, int8",
        ),
        (
            replace(ASK, stored=StoredAs.parse("v=float16")),
            "it cannot read values stored as float16, only bfloat16, float32, fp8, int4, int8",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_compiled(spec, why) -> None:
    assert Cpu(NOWHERE).refuse(spec) == why


def test_without_a_compiler_everything_is_as_it_was() -> None:
    """The next backend serves, and doctor prints why; a step that was planned all the same fails with the reason."""
    why = "there is no C++ compiler (c++, g++, clang++); install one, or name it in $CXX"
    backend = Cpu(NOWHERE)
    chosen = choose(ASK, [backend, Sdpa()])
    assert (chosen.backend.name, chosen.refused) == ("sdpa", {"cpu": why})
    texts = Texts(Causal(), (4, 2, 8, 8), 32, backend=backend)
    q = texts.begin({0: 2})
    with pytest.raises(NoBackend, match=r"cpu: there is no C\+\+ compiler"):
        texts.memory.attend(7, q, Scoring(0.5))


@compiles
def test_it_comes_first_where_it_can() -> None:
    from kvcellar.memory.attention.choose import backends

    served = partial(choose, candidates=backends())
    assert served(ASK).backend.name == "cpu"
    assert served(replace(ASK, stored=StoredAs.parse("k=int8+hadamard,v=int4"))).backend.name == "cpu"
    assert served(replace(ASK, stored=StoredAs.parse("k=float16"))).backend.name == "sdpa"
