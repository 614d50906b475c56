"""Attention reads what is stored: every backend, on every storage and arrangement, in whatever chunks."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import Tensor

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.errors import NoBackend
from kvcellar.memory.attention.choose import choose
from kvcellar.memory.attention.cpu import Cpu
from kvcellar.memory.attention.products import BLOCK
from kvcellar.memory.attention.reference import Reference, attend_dense
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Sliding
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Arrangement, AttentionSpec, Kind, Plane, Scoring, StoredAs
from kvcellar.memory.spans import Span
from tests.zoo import ARCHS

WAYS = ("auto", "bfloat16", "fp8", "int8", "int4", "k=int8+hadamard,v=int4", "k=float16,v=fp8", "int4+hadamard")
TOKENS = BLOCK + 30
HEADS, KV_HEADS, SIZE, VALUE_SIZE = 6, 2, 40, 24


class TokenMajor(Sdpa):
    arrangement = "token"


class HeadMajor(Sdpa):
    arrangement = "head"


class Fused(Sdpa):
    def __init__(self) -> None:
        super().__init__(fused=True)


class FusedTokenMajor(Fused):
    arrangement = "token"


class ByHead(Reference):
    arrangement: Arrangement = "head"


BACKENDS = (Sdpa, TokenMajor, HeadMajor, Fused, FusedTokenMajor, Reference, ByHead)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def memory(backend: Sdpa | Reference, layout: Layout, way: str) -> Memory:
    stored = StoredAs.parse(way)
    planes = (Plane("k", KV_HEADS, SIZE, stored.k), Plane("v", KV_HEADS, VALUE_SIZE, stored.v))
    group = Group("g", layout, planes, (0,))
    return Memory([group], cells={"g": 3 * TOKENS}, dtype=torch.float32, device="cpu", backend=backend)


def attended(kept: Memory, cuts: list[int], scoring: Scoring) -> Tensor:
    """[TOKENS,H,Dv]: one sequence in the steps that `cuts` part it into, with another one in between."""
    q, k, v = drawn(1, TOKENS, HEADS, SIZE), drawn(2, TOKENS, KV_HEADS, SIZE), drawn(3, TOKENS, KV_HEADS, VALUE_SIZE)
    out: list[Tensor] = []
    marks = [0, *cuts, TOKENS]
    for a, b in pairwise(marks):
        kept.begin(Batch((Feed(0, Span(a, b)), Feed(1, Span(a, b)))))
        kept.put(0, torch.cat([k[a:b], v.new_ones(b - a, KV_HEADS, SIZE)]), torch.cat([v[a:b], -v[a:b]]))
        out.append(kept.attend(0, torch.cat([q[a:b], q[a:b]]), scoring)[: b - a])
        expected = attend_dense(torch.cat([q[a:b], q[a:b]]), *kept.get(0).dense(), scoring)[: b - a]
        torch.testing.assert_close(out[-1], expected, atol=1e-5, rtol=1e-5)
        kept.commit()
    return torch.cat(out)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [Causal(), Sliding(17)], ids=str)
def test_no_arrangement_and_no_chunk_changes_what_is_seen(way, layout):
    """Each step also equals dense attention, in float64, over the K/V that the memory returns."""
    scoring = Scoring(SIZE**-0.5)
    judge = attended(memory(Reference(), layout, way), [], scoring)
    served = () if Cpu().refuse(ASK) or "float16" in way else (Cpu, Cpu)
    for number, backend in enumerate((*served, *BACKENDS)):
        cuts = [[], [1, 2, 40], [TOKENS - 1]][number % 3]
        got = attended(memory(backend(), layout, way), cuts, scoring)
        torch.testing.assert_close(got, judge, atol=1e-5, rtol=1e-5)


def test_softcap_and_sinks_read_what_is_stored_too():
    scoring = Scoring(SIZE**-0.5, softcap=3.0, sinks=drawn(5, HEADS))
    judge = attended(memory(Reference(), Causal(), "int8+hadamard"), [], scoring)
    for fused in (False, True):
        got = attended(memory(Sdpa(fused=fused), Causal(), "int8+hadamard"), [7, 90], scoring)
        torch.testing.assert_close(got, judge, atol=1e-5, rtol=1e-5)


# -- refusing ---------------------------------------------------------------------------------------------------------


class Halves(Sdpa):
    name = "halves"
    kinds = frozenset[Kind]({"float16", "bfloat16"})


ASK = AttentionSpec(6, 2, 40, 40, dtype="bfloat16", device="cpu")


def test_a_backend_refuses_what_it_cannot_read_and_lists_what_it_can():
    assert Halves().refuse(ASK) is None
    spec = replace(ASK, stored=StoredAs.parse("k=float16,v=int4"))
    assert Halves().refuse(spec) == "it cannot read values stored as int4, only bfloat16, float16"
    assert Halves().refuse(replace(ASK, dtype="float32")) == (
        "it cannot read keys stored as float32, only bfloat16, float16"
    )
    assert choose(spec, [Halves(), Sdpa()]).refused == {"halves": Halves().refuse(spec)}
    with pytest.raises(NoBackend, match=r"stored as k=float16,v=int4. halves: it cannot read values stored as int4"):
        choose(spec, [Halves()])


@pytest.mark.parametrize("kind", get_args(Kind))
def test_ours_read_every_kind(kind):
    for backend in (Sdpa(), Reference()):
        assert backend.refuse(replace(ASK, stored=StoredAs.parse(kind))) is None


# -- whole models -----------------------------------------------------------------------------------------------------


def stepped(
    guest: Guest, texts: dict[int, list[int]], forks: dict[int, tuple[int, int]], steps: list[int]
) -> dict[int, Tensor]:
    """Logits [L,V] of every text but what was forked, all texts read in the same steps, `steps` tokens each."""
    kept = guest.memory({group.name: 200 for group in guest.shape.groups})
    got: dict[int, list[Tensor]] = {seq: [] for seq in texts}
    for size in steps:
        for seq, (src, upto) in forks.items():
            if not kept.has(seq) and kept.has(src) and kept.length(src) >= upto:
                assert kept.fork(src, seq, upto) == upto
        feeds = [Feed(s, Span(kept.length(s), min(len(t), kept.length(s) + size))) for s, t in texts.items()]
        feeds = [f for f in feeds if len(f.pos) and (f.seq not in forks or kept.has(f.seq))]
        plan = kept.begin(Batch(tuple(feeds)))
        ids = torch.tensor([texts[f.seq][pos] for f in feeds for pos in range(f.pos.start, f.pos.end)])
        logits = guest.forward(kept, plan, ids, torch.arange(len(ids)))
        kept.commit()
        for f, part in zip(feeds, logits.split([len(f.pos) for f in feeds]), strict=True):
            got[f.seq].append(part)
    return {seq: torch.cat(parts) for seq, parts in got.items()}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek-v3"])
@pytest.mark.parametrize("way", ["fp8", "int8+hadamard", "k=int4+hadamard,v=int8"])
def test_logits_of_chunks_batches_and_forks_are_those_of_one_forward_through_the_same_storage(name, way):
    backends = [Sdpa()]
    guest = build_guest(ARCHS[name].build(), backends)
    twin = guest.storing(StoredAs.parse(way), backends)
    ids = torch.randint(0, 100, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    texts = {0: ids, 1: ids[:6] + ids[20:], 2: ids[7:19]}
    mixed = stepped(twin, texts, {1: (0, 6)}, [6, 1, 1, 9, 40])
    for seq, text in texts.items():
        fresh = stepped(twin, {seq: text}, {}, [len(text)])[seq][-len(mixed[seq]) :]
        assert (mixed[seq] - fresh).abs().max() <= 1e-4 * fresh.abs().max().clamp(min=1)
    plain = stepped(guest, {0: ids}, {}, [40])[0]
    assert (mixed[0] - plain).abs().max() > 1e-4, "nothing was quantised"
    assert not {group.planes[0].storage for group in guest.shape.groups} - {None}
