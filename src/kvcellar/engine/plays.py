"""plays: what `verify` does with a memory on a `Stage`, one function for each check.

Texts are random, and short enough for a context of eight positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.cache.layouts import Chunked, Sliding
from kvcellar.cache.memory import Memory
from kvcellar.contracts import Layout
from kvcellar.engine.stage import Broken, Stage
from kvcellar.errors import NotSupported
from kvcellar.models.rope import RECURRENT, stored_at
from kvcellar.models.rope import TOKENS as PLACED
from kvcellar.spans import Span

STATES = ("conv", "recurrent")  # kinds of recurrent state
DRAFT = 4  # tokens of a speculative step
SPAN = 40  # how far on in a text what is removed from its middle ends, at most
BEYOND = 8  # tokens behind a window or chunk, at least


class NotHere(Exception):
    """A play that means nothing for this model; says why."""


def sharing(stage: Stage) -> None:
    """Sequences that begin with the same cells read on in one batch."""
    begin = stage.draw(stage.length // 2)
    stage.read((0, begin))
    for seq in (1, 2):
        stage.fork(0, seq, len(begin))
    rest = stage.length - len(begin)
    stage.read((1, stage.draw(rest - 2)), (0, stage.draw(1)), (2, stage.draw(2)))
    stage.read((0, stage.draw(1)), (1, stage.draw(1)), (2, stage.draw(1)))


def forking(stage: Stage) -> None:
    text = stage.draw(stage.length - 2)
    points = sorted({1, len(text) // 4, len(text) // 2, len(text) - 1, len(text)})
    stage.read((0, text))
    for seq, point in enumerate(points, start=1):
        kept = stage.fork(0, seq, point)
        stage.read((seq, [*text[kept:point], *stage.draw(1)]))
    stage.read(*((seq, stage.draw(1)) for seq in (*range(1, len(points) + 1), 0)))


def chunked_prefill(stage: Stage) -> None:
    text = stage.draw(stage.length)
    for size in (len(text), 33, 17, 5):
        for start in range(0, len(text), size):
            stage.read((0, text[start : start + size]))
        stage.clear()
    for token in text[:12]:
        stage.read((0, [token]))
    if text[12:]:
        stage.read((0, text[12:]))


def mixed_batches(stage: Stage) -> None:
    """Prompts and single tokens of several sequences in one step, and each by itself."""
    half, quarter = stage.length // 2, stage.length // 4
    steps = [{0: half}, {1: quarter, 0: 1}, {0: 1, 2: half, 1: 1}, {2: 3, 1: 2, 0: 1, 3: 1}, {3: quarter, 0: 1, 2: 1}]
    serial = stage.twin()
    for step in steps:
        pieces = [(seq, stage.draw(n)) for seq, n in step.items()]
        stage.read(*pieces)
        for piece in pieces:
            serial.read(piece)
    stage.compare(serial)


def sliding(stage: Stage) -> str:
    """Far beyond every window or chunk that texts of this length can leave behind."""
    sizes = sorted({size for group in stage.guest.shape.groups if (size := _size(group.layout)) is not None})
    if not sizes:
        solo = stage.guest.mode == "solo"
        raise NotHere("it runs solo, so every key stays" if solo else "none of its layers has a window or chunks")
    reached = [size for size in sizes if size + BEYOND <= stage.most]
    if not reached:
        raise NotHere(f"a text of {stage.most} tokens is not beyond {sizes[0]} positions; longer ones may be")
    text = stage.draw(min(stage.most, 3 * reached[-1] + BEYOND))
    first, last = reached[-1] + 3, len(text) - 4
    stage.read((0, text[:first]))
    stage.fork(0, 1, first)
    for start in range(first, last, step := reached[-1] // 2 + 1):
        stage.read((0, text[start : min(start + step, last)]))
    kept = stage.remove_end(0, last - 1)
    stage.read((0, text[kept : last + 1]), (1, stage.draw(2)))
    for token in text[last + 1 :]:
        stage.read((0, [token]), (1, stage.draw(1)))
    left = [str(size) for size in sizes if size not in reached]
    return f"texts of {stage.most} tokens are not beyond {', '.join(left)} positions" if left else ""


def _size(layout: Layout) -> int | None:
    return layout.window if isinstance(layout, Sliding) else layout.size if isinstance(layout, Chunked) else None


def removal_at_the_end(stage: Stage) -> None:
    stage.read((0, stage.draw(stage.length - 3)))
    stage.fork(0, 1, stage.length - 3)
    for back in (1, 3, stage.length // 2):
        text = list(stage.texts[0])
        start = len(text) - back
        kept = stage.remove_end(0, start)
        stage.read((0, [*text[kept:start], *stage.draw(2)]))
    stage.read((1, stage.draw(1)), (0, stage.draw(1)))


def rollback(stage: Stage) -> str:
    try:
        _rollback(stage, every=True)
    except NotSupported as error:
        stage.clear()
        _rollback(stage, every=False)
        return f"all of a draft or nothing of it: {error.reason}"
    return ""


def _rollback(stage: Stage, *, every: bool) -> None:
    """Drafts of several sequences at once; of each another number is kept. Then again, the other way round."""
    begin = stage.draw(stage.length // 2)
    size = min(DRAFT, (stage.length - len(begin) - 1) // 2)
    counts = list(range(size + 1)) if every else [0, size]
    drafts = {seq: stage.draw(size) for seq in range(1, len(counts) + 1)}
    serial = stage.twin()
    for where in (stage, serial):
        where.read((0, begin))
        for seq in drafts:
            where.fork(0, seq, len(begin))
    for at in range(size):
        serial.read(*((seq, draft[at : at + 1]) for seq, draft in drafts.items()))
    _drafted(stage, drafts, counts)
    stage.compare(serial)
    _drafted(stage, {seq: stage.draw(size) for seq in drafts}, counts[::-1])
    stage.read(*((seq, stage.draw(1)) for seq in (*drafts, 0)))


def _drafted(stage: Stage, drafts: dict[int, list[int]], counts: Sequence[int]) -> None:
    kept = dict(zip(drafts, counts, strict=True))
    for part in stage.parts(list(drafts.items())):
        stage.step(part, revertible=True)
        stage.keep(part, [kept[seq] for seq, _ in part])


def abandoning(stage: Stage) -> None:
    """Steps that are given up before and after their forward leave no trace."""
    stage.read((0, stage.draw(stage.length // 2)))
    before = _books(stage.memory)
    for forward in (stage.begin, stage.step):
        for part in stage.parts([(0, stage.draw(3)), (1, stage.draw(2))]):
            forward(part, revertible=True)
            stage.memory.abandon()
            if (after := _books(stage.memory)) != before:
                raise Broken(f"a step that was given up changed what is there: {before} became {after}")
    stage.read((0, stage.draw(2)), (1, stage.draw(2)))
    stage.read((1, stage.draw(1)), (0, stage.draw(1)))


def _books(memory: Memory) -> dict[str, Any]:
    lengths = {seq: memory.length(seq) for seq in memory.sequences}
    return {"cells": memory.free(), "rows": memory.free_rows(), "lengths": lengths, "points": memory.points(0)}


def resumption(stage: Stage) -> None:
    """From states that were kept on the way, forked and gone back to."""
    if stage.guest.shape.recurrent is None:
        raise NotHere("it has no recurrent layers, so it needs no states to go on from")
    text = stage.draw(stage.length - 2)
    ends: list[int] = []
    for start in range(0, len(text), step := max(1, len(text) // 4)):
        stage.read((0, text[start : start + step]), capture=True)
        ends.append(len(stage.texts[0]))
    if missing := sorted(set(ends) - set(stage.memory.points(0) or ())):
        raise Broken(f"states were to be kept at {ends}; those at {missing} are not there")
    for seq, end in enumerate(ends[:4], start=1):
        point = min(end + 1, len(text))
        kept = stage.fork(0, seq, point)
        stage.read((seq, [*text[kept:point], *stage.draw(1)]))
    kept = stage.remove_end(0, ends[1])
    stage.read((0, [*text[kept : ends[1]], *stage.draw(2)]), (1, stage.draw(1)))
    stage.read((0, stage.draw(1)), (2, stage.draw(1)))


def context_shift(stage: Stage) -> None:
    """A span is removed before tokens of which the model itself says what their K/V are where they then stand.

    In one memory they are put at their old place and moved, in the other they are put at the new one. What lies before
    the span is read in both, and both go on with the same tokens.
    """
    why = [group.no_shift for group in stage.guest.shape.groups if group.no_shift is not None]
    if why or stage.guest.shape.recurrent is not None:
        raise NotHere(f"not supported, what lies behind is read again: {why[0] if why else RECURRENT}")
    gone = _removable([group.layout for group in stage.guest.shape.groups], stage.most)
    if gone is None:
        raise NotHere(f"nothing in the middle of {stage.most} tokens can go without reading again")
    before, after, twin = stage.draw(gone.end), stage.draw(3), stage.twin()
    for where, start in ((stage, gone.end), (twin, gone.start)):
        _placed(where, before[:start], start)
    kept = stage.memory.remove(0, gone)
    if kept != len(twin.texts[0]):
        raise Broken(f"{len(gone)} of {gone.end + PLACED} tokens were removed, and {kept} are left")
    stage.texts[0] = list(twin.texts[0])
    for token in after:
        stage.read((0, [token]))
        twin.read((0, [token]))
    stage.compare(twin)


def _removable(layouts: Sequence[Layout], most: int) -> Span | None:
    """The longest span that begins no later than it is long and is no further on than `SPAN`, where that is exact."""
    found = [
        Span(start, end)
        for end in range(2, min(SPAN, most - PLACED - 3) + 1)
        for start in range(1, end)
        if all(layout.can_shift(layout.keep(end + PLACED), end + PLACED, Span(start, end)) for layout in layouts)
    ]
    return max(found, key=lambda span: min(len(span), span.start), default=None)


def _placed(stage: Stage, text: list[int], place: int) -> None:
    """Sequence 0 reads a text, and then gets K/V of the probe's tokens, as the model computes them at `place`."""
    stage.read((0, text))
    stored, _, ids = stored_at(stage.guest, place)
    probe = ids.tolist()
    stage.begin([(0, probe)])
    for layer, planes in stored.items():
        stage.memory.put(layer, planes["k"], planes["v"])
    stage.keep([(0, probe)])
    stage.derived.add(0)


@dataclass(frozen=True, slots=True)
class Play:
    """A check: what it is called, what must hold, what is done, and which kinds of layers it is about."""

    name: str
    says: str
    act: Callable[[Stage], str | None]
    about: Callable[[str], bool] = lambda kind: True


def _remembers(kind: str) -> bool:
    return kind in STATES


PLAYS = (
    Play("sharing", "sequences that share a prefix read on in one batch", sharing),
    Play("forking", "a sequence forked at several points goes on otherwise, and the first one is as it was", forking),
    Play("chunked prefill", "a prompt is read whole, in chunks of several sizes, and token by token", chunked_prefill),
    Play("mixed batches", "prompts and single tokens in one step, and each sequence by itself", mixed_batches),
    Play(
        "sliding",
        "a text goes on far beyond windows and chunks",
        sliding,
        lambda kind: kind.startswith(("sliding", "chunked")),
    ),
    Play("removal at the end", "the last tokens are forgotten and others read", removal_at_the_end),
    Play("rollback", "drafts are checked in one batch, and every number of them is accepted", rollback),
    Play("abandoning", "steps that are given up leave no trace", abandoning),
    Play("resumption", "sequences go on from states that were kept on the way", resumption, _remembers),
    Play(
        "context shift",
        "what lies behind a removed span is as if computed where it then stands",
        context_shift,
        lambda kind: not _remembers(kind),
    ),
)
