"""selftest: compare a guest's logits with those of the model's own eager forward, on the real weights.

So are those of a step in which some sequences have an adapter, before any request has it.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar.engine.models.features import Features
from kvcellar.engine.models.guest import Guest, Verdict
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.input_limits import context_of, random_tokens
from kvcellar.engine.models.registered import our_attention, own_attention
from kvcellar.engine.models.vision import ImageRows, StepImages, Vision
from kvcellar.errors import ModelRefused
from kvcellar.kernels.layers import OwnExperts, OwnLinear
from kvcellar.memory.plan import Ahead, Batch, Feed
from kvcellar.memory.spans import Span

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2,
}  # fmt: skip


def judged_as(network: PreTrainedModel) -> torch.dtype:
    """The type whose bound and rule hold for a network: its own, but bfloat16 if inputs of its layers are rounded to 8
    bits: there, an ulp in an input can become a 127th of it."""
    own = (one for one in network.modules() if isinstance(one, OwnLinear | OwnExperts))
    return torch.bfloat16 if any(one.rounds for one in own) else network.dtype


@dataclass(frozen=True, slots=True)
class Reference:
    """Token ids of sequences, and the logits [L,V] of the model's own eager forward over each."""

    texts: Mapping[int, list[int]]
    logits: Mapping[int, Tensor]


def reference_of(model: PreTrainedModel, seed: int) -> Reference:
    """Sequences 0 and 1 share a prefix. Leaves the model with its own attention."""
    most = min(24, context_of(model))
    draw = torch.Generator().manual_seed(seed)
    ids = random_tokens(model, 3 * most, draw)
    half = most // 2
    texts = {0: ids[:most], 1: ids[: half - 2] + ids[most : most + 6], 2: ids[2 * most : 2 * most + half]}
    own_attention(model)
    with torch.inference_mode():
        logits = {
            seq: model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0].float()
            for seq, text in texts.items()
        }
    if len(logits[0]) != most:
        raise ModelRefused(f"its forward gives {len(logits[0])} rows of logits for {most} tokens, not one for each")
    if not all(bool(rows.isfinite().all()) for rows in logits.values()):
        raise ModelRefused(
            f"its logits are not finite: the weights are damaged, or {model.dtype} is too narrow for them"
        )
    return Reference(texts, logits)


def whole_step_test(guest: Guest, reference: Reference) -> Verdict:
    """Chunked prefill beside decoding, a fork, an abandoned step; every step is committed whole, or not at all."""
    return _verdict(_Replay(guest, reference), _whole_steps)


def partial_commit_test(guest: Guest, reference: Reference) -> Verdict:
    """Of some steps only a part is committed, as after drafts of which the first few are accepted."""
    return _verdict(_Replay(guest, reference), _partial_steps)


def image_test(
    guest: Guest, vision: Vision, whole: Sequence[int], inputs: Mapping[str, Tensor], features: Features
) -> Verdict:
    """A text with the same image twice, or with it in front, in chunks, beside a text without one. `whole` are the
    tokens that stand for the image, some of which may be around its placeholders, `inputs` what its processor made of
    it, `features` what its tower did."""
    model, device = guest.model, guest.device
    text = random_tokens(model, 48, torch.Generator().manual_seed(2))
    text = [token for token in text if token != vision.placeholder][:24]
    ours = [*whole, *text[5:14]] if vision.in_front else [*text[:5], *whole, *text[5:8], *whole, *text[8:14]]
    places = [at for at, token in enumerate(ours) if token == vision.placeholder]
    count = 1 if vision.in_front else 2
    half = len(places) // count
    spans = [Span(places[at], places[at + half - 1] + 1) for at in range(0, len(places), half)]
    with torch.inference_mode():
        own_attention(model)
        drawn, others = (6, len(text)) if guest.whole else (None, None)
        if vision.in_front:
            given, logits = inputs, vision.logits(ours, inputs)
        else:
            given, logits = vision.of_two(ours, inputs, drawn)
        reference = {0: logits, 1: vision.logits(text, {}, others)}
        replay = _Replay(guest, Reference({0: ours, 1: text}, reference))
    if guest.mode == "flat" and not (guest.whole or vision.in_front or vision.sees):
        vision.check_apart(ours, given, [span.start for span in spans])
    placed = vision.positions(ours, given)
    cuts, looking = _cut(guest, vision, spans, len(ours), ahead=features.ahead)
    for number, (start, end) in enumerate(pairwise(cuts)):
        beside = [Feed(1, Span(4 * number, 4 * number + 4))] if guest.mode == "flat" else []
        parts = [(place - start, features, places.index(place) % half) for place in places if start <= place < end]
        seeing = range(max(0, places[0] - start), end - start)
        if vision.sees is None:
            rows = ImageRows.of(parts, device)
        else:
            rows = ImageRows.seeing([(seeing, [features])] if seeing else [], device)
        positions = None
        if placed is not None:
            positions = placed[:, start:end] if rows is not None else placed[0, start:end]
            for feed in beside:
                others = torch.arange(feed.pos.start, feed.pos.end)
                positions = torch.cat([positions, others.expand(*positions.shape[:-1], -1)], -1)
            positions = positions.to(device)
        ahead = tuple((0, span) for span in looking if start <= span.start and span.end <= end)
        before = None if placed is None else placed[:, :start].to(device)
        replay.step(Feed(0, Span(start, end)), *beside, ahead=ahead, images=StepImages(positions, rows, before))
    kind = judged_as(model)
    if not all(bool(gap.isfinite().all()) for gap in replay.gaps):
        return Verdict(float("inf"), TOLERANCE[kind])
    return Verdict(worst(replay.gaps, kind), TOLERANCE[kind])


def _cut(
    guest: Guest, vision: Vision, spans: Sequence[Span], end: int, *, ahead: bool
) -> tuple[Sequence[int], Sequence[Span]]:
    """Where the chunks of a text with images begin and end, and what of it sees both ways."""
    if guest.whole:
        prompt = Span(0, end - 6)
        return (0, prompt.end, end - 1, end), (prompt,)
    before = () if vision.in_front else (2,)
    inside = () if ahead else (spans[0].start + len(spans[0]) // 2,)
    return (0, *before, *inside, *(span.end + 1 for span in spans), end - 1, end), spans if ahead else ()


def _verdict(replay: "_Replay", steps: Callable[["_Replay"], None]) -> Verdict:
    steps(replay)
    kind = judged_as(replay.guest.model)
    bound = TOLERANCE[kind]
    if not all(bool(gap.isfinite().all()) for gap in replay.gaps):
        return Verdict(float("inf"), bound)
    return Verdict(worst(replay.gaps, kind), bound)


def worst(gaps: Sequence[Tensor], dtype: torch.dtype) -> float:
    """The largest of the differences `gaps`, [l] for the rows of each feed; in half precision the largest median.

    In half precision a router's near tie may select another expert for single tokens. So each feed counts with its
    median row, and feeds of fewer than five tokens are pooled.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return max((float(gap.max()) for gap in gaps), default=0.0)
    short = [gap for gap in gaps if len(gap) < 5]
    pooled = [*([torch.cat(short)] if short else []), *(gap for gap in gaps if len(gap) >= 5)]
    return max((float(gap.median()) for gap in pooled), default=0.0)


def relative_gaps(ours: Tensor, theirs: Tensor) -> Tensor:
    """The difference of each row, relative to the largest value."""
    theirs = theirs.float()
    return (ours.float() - theirs).abs().amax(-1) / max(1.0, float(theirs.abs().max()))


def check_rows(difference: float, target: Guest) -> None:
    """Raise `ModelRefused` if rows of a head differ by so much from its own forward."""
    bound = TOLERANCE[judged_as(target.model)]
    if not difference <= bound:
        raise ModelRefused(f"rows differ by {difference:.1e} from its own forward ({bound:.0e} is allowed)")


class _Replay:
    """Feeds the texts of a reference through a small memory; `gaps` are the relative differences [l] of each feed."""

    def __init__(self, guest: Guest, reference: Reference) -> None:
        self.guest, self.texts = guest, reference.texts
        self.gaps: list[Tensor] = []
        self.memory = guest.memory({group.name: 4 * len(self.texts[0]) for group in guest.shape.groups}, rows=8)
        self._logits = reference.logits
        self._scale = max(1.0, max(float(logits.abs().max()) for logits in reference.logits.values()))
        if guest.mode == "flat":
            our_attention(guest.model)

    def step(
        self,
        *feeds: Feed,
        kept: Mapping[int, int] | None = None,
        ahead: tuple[Ahead, ...] = (),
        images: StepImages | None = None,
    ) -> dict[int, int]:
        """In one step, or one step per feed if the guest runs solo; returns the claims made, by sequence.

        `kept`: tokens to commit, by sequence, if not all. The tokens of the feed after them differ from the text.
        """
        claims: dict[int, int] = {}
        for part in [feeds] if self.guest.mode == "flat" else [(feed,) for feed in feeds]:
            counts = {feed.seq: (kept or {}).get(feed.seq, len(feed.pos)) for feed in part}
            logits = self.forward(part, counts, ahead=ahead, images=images).split([len(feed.pos) for feed in part])
            claims |= self.memory.commit(counts)
            for feed, rows in zip(part, logits, strict=True):
                if count := counts[feed.seq]:
                    wanted = self._logits[feed.seq][feed.pos.start : feed.pos.start + count]
                    self.gaps.append((rows[:count] - wanted).abs().amax(-1) / self._scale)
        return claims

    def forward(
        self,
        feeds: Sequence[Feed],
        counts: Mapping[int, int],
        wanted: int | None = None,
        ahead: tuple[Ahead, ...] = (),
        images: StepImages | None = None,
    ) -> Tensor:
        """Rows are requested from the last to the first, to test that the model respects `want`."""
        plan = self.memory.begin(Batch(tuple(feeds), ahead))
        ids: list[int] = []
        for feed in feeds:
            text, end = self.texts[feed.seq], feed.pos.start + counts[feed.seq]
            ids += text[feed.pos.start : end] + text[::-1][end : feed.pos.end]
        rows = range(len(ids))[::-1][:wanted]
        return self.guest.forward(self.memory, plan, ids, rows, images).float().flip(0)


def _whole_steps(replay: _Replay) -> None:
    """Chunked prompts beside decoding, sequence 1 forked from 0, an abandoned step, then single tokens."""
    step, memory = replay.step, replay.memory
    a, b, c = (len(text) for text in replay.texts.values())
    half = a // 2
    step(Feed(0, Span(0, half - 2), keep_state=True), Feed(2, Span(0, 1)))
    step(Feed(0, Span(half - 2, half)))
    shared = memory.fork(0, 1, upto=half - 2)
    step(Feed(1, Span(shared, b - 2)), Feed(0, Span(half, half + 1)), Feed(2, Span(1, c - 2)))
    step(Feed(0, Span(half + 1, a - 2)), Feed(1, Span(b - 2, b - 1)))
    step(Feed(2, Span(c - 2, c - 1)), Feed(1, Span(b - 1, b)), Feed(0, Span(a - 2, a - 1)))
    replay.forward([Feed(2, Span(c - 1, c))], {2: 1}, wanted=0)
    memory.abandon()
    step(Feed(2, Span(c - 1, c)))
    step(Feed(0, Span(a - 1, a)))


def _partial_steps(replay: _Replay) -> None:
    """Sequence 1 starts at a checkpoint inside a feed of 0; then parts of feeds of equal and unequal lengths are kept;
    then the rest of every text."""
    texts, memory = replay.texts, replay.memory
    first, end = len(texts[0]) // 3, max(map(len, texts.values()))
    inside = first // 2
    claims = replay.step(Feed(0, Span(0, first), checkpoints=(inside,)))
    memory.claims.assemble(1, [claims[0]], inside)
    rounds: list[dict[int, tuple[int, int]]] = [  # by sequence: tokens of its feed, and how many of these are kept
        {0: (4, 2), 1: (4, 3), 2: (4, 0)},
        {0: (5, 1), 1: (3, 3), 2: (2, 1)},
        dict.fromkeys(texts, (end, end)),
    ]
    for shares in rounds:
        spans = {
            seq: Span(memory.length(seq), min(memory.length(seq) + tokens, len(texts[seq])))
            for seq, (tokens, _) in shares.items()
        }
        feeds = [Feed(seq, span, revertible=True) for seq, span in spans.items() if len(span)]
        replay.step(*feeds, kept={seq: min(count, len(spans[seq])) for seq, (_, count) in shares.items()})


LONG, SHORT = 6, 4  # tokens of a sequence with the adapter, and of one without


def check_adapted(guest: Guest, number: int) -> Iterator[None]:
    """Raise `ModelRefused` unless the guest computes an adapter as the network does. Its K/V are stored as computed.

    Yields after each forward, which has at most `LONG` + `SHORT` tokens; then, the guest can run other steps.
    """
    bound = TOLERANCE[judged_as(guest.model)]
    found = yield from _difference(guest, number, 0)
    if not found <= bound:  # a near tie of a router's experts can fall either way
        found = yield from _difference(guest, number, 1)
    if not found <= bound:
        raise ModelRefused(f"with it, logits of a batch differ by {found:.1e} from those of the network's own forward")


@contextmanager
def _forward(guest: Guest) -> Iterator[None]:
    """Around one forward: afterwards, the guest is as it was."""
    with silence_transformers(), torch.inference_mode():
        try:
            yield
        finally:
            guest.adapted.whole = 0
            guest.adapted.restore()
            (our_attention if guest.mode == "flat" else own_attention)(guest.model)


def _difference(guest: Guest, number: int, seed: int) -> Generator[None, None, float]:
    ids = random_tokens(guest.model, LONG + SHORT, torch.Generator().manual_seed(seed))
    texts = {0: ids[:LONG], 1: ids[LONG:]}
    expected = yield from _own(guest, texts, {0: number, 1: 0})
    if not all(bool(rows.isfinite().all()) for rows in expected.values()):
        raise ModelRefused(f"with it, logits are not finite: it is damaged, or {guest.dtype} is too narrow for it")
    replay = _Replay(guest, Reference(texts, expected))
    yield from _in_steps(replay, number)
    return worst(replay.gaps, judged_as(guest.model))


def _own(
    guest: Guest, texts: dict[int, list[int]], adapters: dict[int, int]
) -> Generator[None, None, dict[int, Tensor]]:
    """Logits [L,V] of each text by the network's own attention."""
    found: dict[int, Tensor] = {}
    for seq, text in texts.items():
        with _forward(guest):
            own_attention(guest.model)
            guest.adapted.replace()
            guest.adapted.whole = adapters[seq]
            ids = torch.tensor([text], device=guest.model.device)
            found[seq] = guest.model(input_ids=ids, use_cache=False).logits[0].float()
        yield
    return found


def _in_steps(replay: _Replay, number: int) -> Iterator[None]:
    """Two steps of both texts, of which the second has them in the other order."""
    guest = replay.guest
    first, second = Feed(0, Span(0, LONG - 1), adapter=number), Feed(1, Span(0, SHORT - 2))
    for feeds in ((first, second), (Feed(1, Span(SHORT - 2, SHORT)), Feed(0, Span(LONG - 1, LONG), adapter=number))):
        for part in [feeds] if guest.mode == "flat" else [(feed,) for feed in feeds]:
            with _forward(guest), ExitStack() as hooks:
                called = _counted(guest, number, hooks)
                replay.step(*part)
                if any(feed.adapter for feed in part):
                    _check_called(guest, number, called)
            yield


def _counted(guest: Guest, number: int, hooks: ExitStack) -> Counter[str]:
    """How often each layer is called that the adapter changes."""
    called: Counter[str] = Counter()

    def count(name: str) -> Any:
        return lambda *_: called.update((name,))

    for name, module in guest.adapted.modules(number).items():
        hooks.callback(module.register_forward_pre_hook(count(name)).remove)
    return called


def _check_called(guest: Guest, number: int, called: Counter[str]) -> None:
    """Raise `ModelRefused` for a layer that is not called for all tokens: code that reads its weights would leave out
    what the adapter adds."""
    if silent := [name for name in guest.adapted.modules(number) if not called[name]]:
        raise ModelRefused(
            f"the layer {silent[0]} is not called as a module in every forward, so that what is added to its output is "
            f"left out ({len(silent)} layers)"
        )
