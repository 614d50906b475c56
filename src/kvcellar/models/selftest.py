"""selftest: does a guest give the logits of the model's own eager forward over the same tokens, on the real weights?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar.errors import ModelRefused
from kvcellar.models.facts import context_of, random_text
from kvcellar.models.guest import Guest, Verdict
from kvcellar.models.seam import our_attention, own_attention
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """Token ids of three sequences, and the logits [L,V] of the model's own eager forward over each."""

    texts: Mapping[int, list[int]]
    logits: Mapping[int, Tensor]


def trial_of(model: PreTrainedModel, seed: int) -> Trial:
    """Sequence 1 begins as 0 does; 2 is of its own. Leaves the model with its own attention."""
    most = min(24, context_of(model))
    draw = torch.Generator().manual_seed(seed)
    ids = random_text(model, 3 * most, draw)
    half = most // 2
    texts = {0: ids[:most], 1: ids[: half - 2] + ids[most : most + 6], 2: ids[2 * most : 2 * most + half]}
    own_attention(model)
    with torch.inference_mode():
        logits = {
            seq: model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0].float()
            for seq, text in texts.items()
        }
    if not all(bool(rows.isfinite().all()) for rows in logits.values()):
        raise ModelRefused(
            f"its logits are not finite: the weights are damaged, or {model.dtype} is too narrow for them"
        )
    return Trial(texts, logits)


def verdict_of(guest: Guest, trial: Trial) -> Verdict:
    """Chunks of prompts beside decoding, a fork, an abandoned step: every step is committed whole, or not at all."""
    return _judged(_Reader(guest, trial), _read_whole)


def partial_verdict_of(guest: Guest, trial: Trial) -> Verdict:
    """Of some steps a part is committed, as after drafts of which the first few are accepted, or is a checkpoint."""
    return _judged(_Reader(guest, trial), _read_in_part)


def _judged(reader: "_Reader", read: Callable[["_Reader"], None]) -> Verdict:
    read(reader)
    bound = TOLERANCE[reader.guest.dtype]
    if not all(bool(gap.isfinite().all()) for gap in reader.gaps):
        return Verdict(float("inf"), bound)
    return Verdict(worst(reader.gaps, reader.guest.dtype), bound)


def worst(gaps: Sequence[Tensor], dtype: torch.dtype) -> float:
    """The difference that counts, of the gaps [l] of the rows of feeds: the largest, or in half precision a middle one.

    A router's near tie falls either way on a token now and then there: each feed is judged by its middle row, not its
    worst, and the feeds of a token or two together.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return max((float(gap.max()) for gap in gaps), default=0.0)
    short = [gap for gap in gaps if len(gap) < 5]
    judged = [*([torch.cat(short)] if short else []), *(gap for gap in gaps if len(gap) >= 5)]
    return max((float(gap.median()) for gap in judged), default=0.0)


class _Reader:
    """Reads the texts of a trial through a small memory of its own; `gaps` are the differences [l] of every feed."""

    def __init__(self, guest: Guest, trial: Trial) -> None:
        self.guest, self.texts = guest, trial.texts
        self.gaps: list[Tensor] = []
        self.memory = guest.memory({group.name: 4 * len(trial.texts[0]) for group in guest.shape.groups}, rows=8)
        self._logits = trial.logits
        self._scale = max(1.0, max(float(logits.abs().max()) for logits in trial.logits.values()))
        if guest.mode == "flat":
            our_attention(guest.model)

    def step(self, *feeds: Feed, kept: Mapping[int, int] | None = None) -> dict[int, int]:
        """In one step, or one by one if the guest runs solo; returns the claims that they leave, by sequence. Where not
        all of a feed is kept, by sequence, the rest of its tokens are others than those of the text."""
        claims: dict[int, int] = {}
        for part in [feeds] if self.guest.mode == "flat" else [(feed,) for feed in feeds]:
            counts = {feed.seq: (kept or {}).get(feed.seq, len(feed.pos)) for feed in part}
            logits = self.forward(part, counts).split([len(feed.pos) for feed in part])
            claims |= self.memory.commit(counts)
            for feed, rows in zip(part, logits, strict=True):
                if count := counts[feed.seq]:
                    theirs = self._logits[feed.seq][feed.pos.start : feed.pos.start + count]
                    self.gaps.append((rows[:count] - theirs).abs().amax(-1) / self._scale)
        return claims

    def forward(self, feeds: Sequence[Feed], counts: Mapping[int, int], wanted: int | None = None) -> Tensor:
        """Rows are wanted from the last to the first, to see that the model respects that."""
        plan = self.memory.begin(Batch(tuple(feeds)))
        ids: list[int] = []
        for feed in feeds:
            text, end = self.texts[feed.seq], feed.pos.start + counts[feed.seq]
            ids += text[feed.pos.start : end] + text[::-1][end : feed.pos.end]
        rows = torch.arange(len(ids), device=self.guest.device).flip(0)[:wanted]
        return self.guest.forward(self.memory, plan, torch.tensor(ids, device=self.guest.device), rows).float().flip(0)


def _read_whole(reader: _Reader) -> None:
    """Chunks of prompts beside decoding, 1 forked from 0, then single tokens."""
    step, memory = reader.step, reader.memory
    a, b, c = (len(text) for text in reader.texts.values())
    half = a // 2
    step(Feed(0, Span(0, half - 2), capture=True), Feed(2, Span(0, 1)))
    step(Feed(0, Span(half - 2, half)))
    shared = memory.fork(0, 1, upto=half - 2)
    step(Feed(1, Span(shared, b - 2)), Feed(0, Span(half, half + 1)), Feed(2, Span(1, c - 2)))
    step(Feed(0, Span(half + 1, a - 2)), Feed(1, Span(b - 2, b - 1)))
    step(Feed(2, Span(c - 2, c - 1)), Feed(1, Span(b - 1, b)), Feed(0, Span(a - 2, a - 1)))
    reader.forward([Feed(2, Span(c - 1, c))], {2: 1}, wanted=0)
    memory.abandon()
    step(Feed(2, Span(c - 1, c)))
    step(Feed(0, Span(a - 1, a)))


def _read_in_part(reader: _Reader) -> None:
    """1 begins at a checkpoint inside a feed of 0. Then feeds of one length, and of several, of which parts are kept;
    then the rest of every text."""
    texts, memory = reader.texts, reader.memory
    first, end = len(texts[0]) // 3, max(map(len, texts.values()))
    inside = first // 2
    claims = reader.step(Feed(0, Span(0, first), checkpoints=(inside,)))
    memory.claims.assemble(1, [claims[0]], inside)
    rounds: list[dict[int, tuple[int, int]]] = [  # by sequence: tokens of its feed, and how many of these are kept
        {0: (4, 2), 1: (4, 3), 2: (4, 0)},
        {0: (5, 1), 1: (3, 3), 2: (2, 1)},
        dict.fromkeys(texts, (end, end)),
    ]
    for shares in rounds:
        feeds: list[Feed] = []
        kept: dict[int, int] = {}
        for seq, (tokens, count) in shares.items():
            start = memory.length(seq)
            feed = Feed(seq, Span(start, min(start + tokens, len(texts[seq]))), revertible=True)
            kept[seq] = min(count, len(feed.pos))
            if len(feed.pos):
                feeds.append(feed)
        reader.step(*feeds, kept=kept)
