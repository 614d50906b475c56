"""selftest: does a guest give the logits of the model's own eager forward over the same tokens, on the real weights?"""

from collections.abc import Mapping, Sequence
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
    """A mixed batch through a small memory of its own, against the trial."""
    if guest.mode == "flat":
        our_attention(guest.model)
    scale = max(1.0, max(float(logits.abs().max()) for logits in trial.logits.values()))
    gaps = [
        (ours - theirs).abs().amax(-1) / scale
        for seq, parts in _played(guest, trial.texts).items()
        for ours, theirs in zip(parts, trial.logits[seq].split([len(part) for part in parts]), strict=True)
    ]
    bound = TOLERANCE[guest.dtype]
    if not all(bool(gap.isfinite().all()) for gap in gaps):
        return Verdict(float("inf"), bound)
    return Verdict(worst(gaps, guest.dtype), bound)


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


def _played(guest: Guest, texts: Mapping[int, list[int]]) -> dict[int, list[Tensor]]:
    """Logits [l,V] of each text by feed: chunks of prompts beside decoding, 1 forked from 0, then single tokens."""
    cells = {group.name: 4 * len(texts[0]) for group in guest.shape.groups}
    memory = guest.memory(cells, rows=8)
    got: dict[int, list[Tensor]] = {seq: [] for seq in texts}
    a, b, c = (len(texts[seq]) for seq in texts)
    half = a // 2

    def forward(feeds: Sequence[Feed], wanted: int | None = None) -> Tensor:
        """Rows are asked for from the last to the first, to see that the model heeds what is asked."""
        plan = memory.begin(Batch(tuple(feeds)))
        read = [texts[f.seq][pos] for f in feeds for pos in range(f.pos.start, f.pos.end)]
        ids = torch.tensor(read, device=guest.device)
        rows = torch.arange(len(ids), device=guest.device).flip(0)[:wanted]
        return guest.forward(memory, plan, ids, rows).float().flip(0)

    def step(*feeds: Feed) -> None:
        for part in [feeds] if guest.mode == "flat" else [(feed,) for feed in feeds]:
            logits = forward(part).split([len(feed.pos) for feed in part])
            memory.commit()
            for feed, rows in zip(part, logits, strict=True):
                got[feed.seq].append(rows)

    step(Feed(0, Span(0, half - 2), capture=True), Feed(2, Span(0, 1)))
    step(Feed(0, Span(half - 2, half)))
    shared = memory.fork(0, 1, upto=half - 2)
    if shared:
        got[1].append(got[0][0])
    step(Feed(1, Span(shared, b - 2)), Feed(0, Span(half, half + 1)), Feed(2, Span(1, c - 2)))
    step(Feed(0, Span(half + 1, a - 2)), Feed(1, Span(b - 2, b - 1)))
    step(Feed(2, Span(c - 2, c - 1)), Feed(1, Span(b - 1, b)), Feed(0, Span(a - 2, a - 1)))
    forward([Feed(2, Span(c - 1, c))], wanted=0)
    memory.abandon()
    step(Feed(2, Span(c - 1, c)))
    step(Feed(0, Span(a - 1, a)))
    return got
