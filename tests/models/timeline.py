"""A timeline: seeded random operations on several sequences of one model; every row is compared with a reference.

Sequences are fed in chunks and token by token, several in one step; steps are committed, committed in part, or
abandoned before or after their forward; sequences are forked anywhere, cut and continued with other tokens, and
dropped. Cells are scarce, so they are reused often, and hold NaN until something is stored in them.
"""

import copy
import random
import zlib
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.input_limits import context_of, padding_token
from kvcellar.errors import CacheFull, NotSupported
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.zoo import ARCHS, WINDOW, reference_logits

BOUND = 1e-4  # of the largest logit, in float32
MOST = 5 * WINDOW  # tokens of one sequence
CHUNK = 3 * WINDOW + 2  # tokens of the longest feed: more than three windows
SEQUENCES = range(5)
CAPTURES = 4  # state rows of checkpoints

Row = tuple[int, Tensor]  # a position, and the logits [V] there


@cache
def guest_and_reference(name: str) -> tuple[Guest, PreTrainedModel]:
    """A guest, and the same network unchanged. Shared between tests, which must not change them."""
    return build_guest(ARCHS[name].build(), backends()), ARCHS[name].build()


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest logit (to 1, if that is smaller)."""
    return float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))


def small_memory(guest: Guest, tokens: int, sequences: int = 3) -> Memory:
    """A memory for so many sequences of so many tokens, with NaN in every cell."""
    cells = {g.name: sequences * g.layout.most_cells(tokens, CHUNK) for g in guest.shape.groups}
    memory = guest.memory(cells, rows=len(SEQUENCES) + sequences + CAPTURES)
    for planes in memory.states._planes.values():
        for plane in planes.values():
            plane[1:] = torch.nan
    memory.begin(Batch((Feed(0, Span(0, 1)),)))
    for group in memory.storage.groups:
        for layer in group.layers:
            for plane in group.planes:
                memory.get(layer).planes[plane.name].codes.fill_(torch.nan)
    memory.abandon()
    return memory


def run(
    guest: Guest,
    memory: Memory,
    texts: Sequence[tuple[int, Sequence[int]]],
    *,
    revertible: bool = False,
    keep_state: Callable[[], bool] = lambda: False,
) -> list[Tensor]:
    """Feed each sequence more tokens, in one step, which stays open -> logits [L,V] of each."""
    feeds = tuple(
        Feed(
            seq,
            Span(memory.length(seq), memory.length(seq) + len(ids)),
            keep_state=keep_state(),
            revertible=revertible,
        )
        for seq, ids in texts
    )
    plan = memory.begin(Batch(feeds))
    ids = torch.tensor([token for _, ids in texts for token in ids], device=guest.device)
    logits = guest.forward(memory, plan, ids, torch.arange(len(ids), device=guest.device))
    return list(logits.float().split([len(ids) for _, ids in texts]))


def read(guest: Guest, memory: Memory, *texts: tuple[int, Sequence[int]]) -> list[Tensor]:
    """The same, committed, in as many steps as the guest needs."""
    seen: list[Tensor] = []
    for part in [texts] if guest.mode == "flat" else [[text] for text in texts]:
        seen += run(guest, memory, part)
        memory.commit()
    return seen


class Timeline:
    """Runs on `guest` and records all logits; `worst_difference` compares them with `reference`."""

    def __init__(self, guest: Guest, reference: PreTrainedModel, seed: int) -> None:
        self.guest, self.reference = guest, reference
        self.draw = random.Random(seed)
        self.most = min(MOST, context_of(reference))
        self.memory = small_memory(guest, self.most)
        self.texts: dict[int, list[int]] = {}
        self.next: dict[int, int] = {}  # the greedy token of a sequence whose last logits are known
        self.seen: dict[tuple[int, ...], list[Row]] = {}  # by all tokens up to the last of the feed

    def play(self) -> None:
        acts = [*["keep"] * 9, *["part"] * 4, "abandon", "give up", *["fork"] * 5, *["rewind"] * 5, "drop", "drop"]
        self.draw.shuffle(acts)
        self.step("keep", long=True)
        for act in acts:
            {"fork": self.fork, "rewind": self.rewind, "drop": self.drop}.get(act, lambda act=act: self.step(act))()
            self.memory.check()
            assert {seq: self.memory.length(seq) for seq in self.memory.sequences} == {
                seq: len(text) for seq, text in self.texts.items()
            }
        self.step("keep", long=True)
        self.step("keep", decode=True)
        self.memory.clear()
        assert self.memory.free() == self.memory.storage.capacity()
        assert self.memory.rows.free in (None, self.memory.rows.capacity)

    def worst_difference(self) -> float:
        """The largest difference of any row, relative to the largest logit. Asserts that greedy text is the same.

        Where a row differs by more than `BOUND`, the network in float64 judges: a sum over a chunk, as the reference
        computes it, can be further from it than ours.
        """
        worst, reference, longest = 0.0, torch.empty(0), ()
        for text in sorted(self.seen, reverse=True):  # so that a text follows its continuations
            if longest[: len(text)] != text:
                reference, longest = reference_logits(self.reference, list(text)), text
            bound = BOUND * max(1.0, float(reference.abs().max()))
            for pos, logits in self.seen[text]:
                difference = relative(logits, reference[pos])
                if difference > BOUND:
                    difference = relative(logits.double(), self.exact_logits(text)[pos])
                worst = max(worst, difference)
                first, second = reference[pos].topk(2).values.tolist()
                assert first - second <= 2 * bound or logits.argmax() == reference[pos].argmax(), (
                    f"greedy text differs at {pos}"
                )
        return worst

    def exact_logits(self, text: tuple[int, ...]) -> Tensor:
        """Logits [L,V] of the reference in float64, one forward over all tokens."""
        exact = copy.deepcopy(self.reference).double()
        exact.set_experts_implementation("eager")  # grouped products take no float64
        with torch.no_grad():
            return exact(input_ids=torch.tensor([text]), use_cache=False).logits[0]

    # -- acts -------------------------------------------------------------------------------------------------------

    def step(self, outcome: str, *, long: bool = False, decode: bool = False) -> None:
        fed = self.feeds(long=long, decode=decode)
        for part in [fed] if self.guest.mode == "flat" else [[one] for one in fed]:
            while part:
                try:
                    self.forward(part, outcome)
                    break
                except CacheFull:  # memory is unchanged
                    self.memory.check()
                    self.drop() if self.texts else part.pop()

    def forward(self, fed: list[tuple[int, list[int]]], outcome: str) -> None:
        if outcome == "abandon":
            self.memory.begin(Batch(tuple(Feed(seq, self.after(seq, len(ids))) for seq, ids in fed)))
            self.memory.abandon()
            return
        seen = run(
            self.guest,
            self.memory,
            fed,
            revertible=outcome == "part",
            keep_state=lambda: self.draw.random() < 0.4,
        )
        kept = {seq: self.draw.randint(0, len(ids)) for seq, ids in fed} if outcome == "part" else None
        if outcome == "give up":
            self.memory.abandon()
        else:
            self.memory.commit(kept)
        for (seq, ids), logits in zip(fed, seen, strict=True):
            text = self.texts.get(seq, [])
            rows = [(len(text) + row, logits[row]) for row in range(len(ids))]
            self.seen.setdefault((*text, *ids), []).extend(rows)
            if outcome != "give up":
                count = len(ids) if kept is None else kept[seq]
                self.texts[seq] = [*text, *ids[:count]]
                greedy = int(logits[count - 1].argmax()) if count else self.token()
                self.next[seq] = self.token() if greedy == padding_token(self.reference) else greedy

    def fork(self) -> None:
        if not self.texts:
            return
        src = self.draw.choice(list(self.texts))
        dst = self.draw.choice([seq for seq in SEQUENCES if seq != src])
        upto = self.draw.randint(0, len(self.texts[src]))
        could = self.memory.can_cut(src, upto)
        kept = self.memory.fork(src, dst, upto)
        assert kept == could <= upto
        self.texts[dst], self.next[dst] = self.texts[src][:kept], self.token()

    def rewind(self) -> None:
        """To any position; where decoding cannot resume there, to the position that the memory returns."""
        if not self.texts:
            return
        seq = self.draw.choice(list(self.texts))
        length = len(self.texts[seq])
        start = self.draw.randint(0, length)
        kept = self.memory.can_cut(seq, start)
        if kept < start:
            with pytest.raises(NotSupported) as refused:
                self.memory.remove(seq, Span(start, length))
            assert (refused.value.kept, self.memory.length(seq)) == (kept, length)
        assert self.memory.remove(seq, Span(kept, length)) == kept
        self.texts[seq], self.next[seq] = self.texts[seq][:kept], self.token()

    def drop(self) -> None:
        if self.texts:
            seq = max(self.texts, key=lambda seq: (len(self.texts[seq]), seq))
            self.memory.drop(seq)
            del self.texts[seq]

    # -- draws ------------------------------------------------------------------------------------------------------

    def token(self) -> int:
        return self.draw.randrange(3, 101)

    def after(self, seq: int, tokens: int) -> Span:
        return Span(self.memory.length(seq), self.memory.length(seq) + tokens)

    def feeds(self, *, long: bool, decode: bool) -> list[tuple[int, list[int]]]:
        """Sequences in any order, each with its greedy token and perhaps a draft, or with a chunk of a prompt."""
        chosen = self.draw.sample(SEQUENCES, self.draw.randint(2, len(SEQUENCES)))
        fed: list[tuple[int, list[int]]] = []
        for index, seq in enumerate(chosen):
            room = self.most - len(self.texts.get(seq, ()))
            count = CHUNK if long and index == 0 else self.draw.choice([1, 1, 1, 3, 7, 12])
            count = min(room, 1 if decode else count)
            if count > 0:
                first = [self.next[seq]] if seq in self.next and seq in self.texts else []
                fed.append((seq, [*first, *(self.token() for _ in range(count - len(first)))]))
        return fed


def seed_of(name: str, times: int = 0) -> int:
    return zlib.crc32(f"{name}/{times}".encode())


def play(name: str, times: int = 0) -> float:
    """The largest difference over a timeline of one architecture."""
    timeline = Timeline(*guest_and_reference(name), seed_of(name, times))
    timeline.play()
    return timeline.worst_difference()
