"""checks: the operations that `verify` runs on a memory through a `Harness`, one function for each check.

Texts are random. All checks work with a context of eight positions or more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.engine.models.rope import RECURRENT, stored_at
from kvcellar.engine.models.rope import TOKENS as PROBE
from kvcellar.memory.cells.layouts import Chunked, Sliding
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Memory
from kvcellar.memory.spans import Span
from kvcellar.verify.harness import CheckFailed, Harness

STATES = ("conv", "recurrent")  # kinds of recurrent state
DRAFT = 4  # tokens of a speculative step
SPAN = 40  # the largest end of a span that is removed from the middle of a text
BEYOND = 8  # the fewest tokens that a text must be longer than a window or chunk


class NotApplicable(Exception):
    """The check does not apply to this model; the message is the reason."""


def sharing(harness: Harness) -> None:
    """Sequences with a shared prefix continue in one batch."""
    begin = harness.draw(harness.length // 2)
    harness.read((0, begin))
    for seq in (1, 2):
        harness.fork(0, seq, len(begin))
    rest = harness.length - len(begin)
    harness.read((1, harness.draw(rest - 2)), (0, harness.draw(1)), (2, harness.draw(2)))
    harness.read((0, harness.draw(1)), (1, harness.draw(1)), (2, harness.draw(1)))


def forking(harness: Harness) -> None:
    text = harness.draw(harness.length - 2)
    points = sorted({1, len(text) // 4, len(text) // 2, len(text) - 1, len(text)})
    harness.read((0, text))
    for seq, point in enumerate(points, start=1):
        kept = harness.fork(0, seq, point)
        harness.read((seq, [*text[kept:point], *harness.draw(1)]))
    harness.read(*((seq, harness.draw(1)) for seq in (*range(1, len(points) + 1), 0)))


def chunked_prefill(harness: Harness) -> None:
    text = harness.draw(harness.length)
    for size in (len(text), 33, 17, 5):
        for start in range(0, len(text), size):
            harness.read((0, text[start : start + size]))
        harness.clear()
    for token in text[:12]:
        harness.read((0, [token]))
    if text[12:]:
        harness.read((0, text[12:]))


def mixed_batches(harness: Harness) -> None:
    """Prompts and single tokens of several sequences, in one step and one sequence at a time."""
    half, quarter = harness.length // 2, harness.length // 4
    steps = [{0: half}, {1: quarter, 0: 1}, {0: 1, 2: half, 1: 1}, {2: 3, 1: 2, 0: 1, 3: 1}, {3: quarter, 0: 1, 2: 1}]
    serial = harness.twin()
    for step in steps:
        pieces = [(seq, harness.draw(n)) for seq, n in step.items()]
        harness.read(*pieces)
        for piece in pieces:
            serial.read(piece)
    harness.compare(serial)


def sliding(harness: Harness) -> str:
    """Texts that are much longer than every window or chunk that is shorter than the longest text."""
    sizes = sorted({size for group in harness.guest.shape.groups if (size := _size(group.layout)) is not None})
    if not sizes:
        solo = harness.guest.mode == "solo"
        raise NotApplicable("it runs solo, so every key stays" if solo else "none of its layers has a window or chunks")
    reached = [size for size in sizes if size + BEYOND <= harness.most]
    if not reached:
        raise NotApplicable(f"a text of {harness.most} tokens is not beyond {sizes[0]} positions; longer ones may be")
    text = harness.draw(min(harness.most, 3 * reached[-1] + BEYOND))
    first, last = reached[-1] + 3, len(text) - 4
    harness.read((0, text[:first]))
    harness.fork(0, 1, first)
    for start in range(first, last, step := reached[-1] // 2 + 1):
        harness.read((0, text[start : min(start + step, last)]))
    kept = harness.remove_end(0, last - 1)
    harness.read((0, text[kept : last + 1]), (1, harness.draw(2)))
    for token in text[last + 1 :]:
        harness.read((0, [token]), (1, harness.draw(1)))
    left = [str(size) for size in sizes if size not in reached]
    return f"texts of {harness.most} tokens are not beyond {', '.join(left)} positions" if left else ""


def _size(layout: Layout) -> int | None:
    return layout.window if isinstance(layout, Sliding) else layout.size if isinstance(layout, Chunked) else None


def removal_at_the_end(harness: Harness) -> None:
    harness.read((0, harness.draw(harness.length - 3)))
    harness.fork(0, 1, harness.length - 3)
    for back in (1, 3, harness.length // 2):
        text = list(harness.texts[0])
        start = len(text) - back
        kept = harness.remove_end(0, start)
        harness.read((0, [*text[kept:start], *harness.draw(2)]))
    harness.read((1, harness.draw(1)), (0, harness.draw(1)))


def rollback(harness: Harness) -> str:
    reason = harness.guest.no_partial_commit
    _rollback(harness, parts=reason is None)
    return "" if reason is None else f"only whole drafts can be accepted: {reason}"


def _rollback(harness: Harness, *, parts: bool) -> None:
    """Drafts of several sequences in one step; each sequence keeps a different number. Then again in reverse order."""
    begin = harness.draw(harness.length // 2)
    size = min(DRAFT, (harness.length - len(begin) - 1) // 2)
    counts = list(range(size + 1)) if parts else [0, size]
    drafts = {seq: harness.draw(size) for seq in range(1, len(counts) + 1)}
    serial = harness.twin()
    for where in (harness, serial):
        where.read((0, begin))
        for seq in drafts:
            where.fork(0, seq, len(begin))
    for at in range(size):
        serial.read(*((seq, draft[at : at + 1]) for seq, draft in drafts.items()))
    _drafted(harness, drafts, counts, parts)
    harness.compare(serial)
    _drafted(harness, {seq: harness.draw(size) for seq in drafts}, counts[::-1], parts)
    harness.read(*((seq, harness.draw(1)) for seq in (*drafts, 0)))


def _drafted(harness: Harness, drafts: dict[int, list[int]], counts: Sequence[int], parts: bool) -> None:
    kept = dict(zip(drafts, counts, strict=True))
    for part in harness.parts(list(drafts.items())):
        harness.step(part, revertible=parts)
        harness.keep(part, [kept[seq] for seq, _ in part])


def abandoning(harness: Harness) -> None:
    """Steps abandoned before and after their forward leave no trace."""
    harness.read((0, harness.draw(harness.length // 2)))
    before = _books(harness.memory)
    for forward in (harness.begin, harness.step):
        for part in harness.parts([(0, harness.draw(3)), (1, harness.draw(2))]):
            forward(part, revertible=harness.guest.no_partial_commit is None)
            harness.memory.abandon()
            if (after := _books(harness.memory)) != before:
                raise CheckFailed(f"an abandoned step changed memory: {before} became {after}")
    harness.read((0, harness.draw(2)), (1, harness.draw(2)))
    harness.read((1, harness.draw(1)), (0, harness.draw(1)))


def _books(memory: Memory) -> dict[str, Any]:
    lengths = {seq: memory.length(seq) for seq in memory.sequences}
    return {
        "cells": memory.free(),
        "rows": memory.rows.free,
        "lengths": lengths,
        "points": memory.state_positions(0),
    }


def resumption(harness: Harness) -> None:
    """Resume and fork from checkpoints inside a text."""
    if harness.guest.shape.recurrent is None:
        raise NotApplicable("it has no recurrent layers, so every position can be resumed without a checkpoint")
    text = harness.draw(harness.length - 2)
    ends: list[int] = []
    for start in range(0, len(text), step := max(1, len(text) // 4)):
        harness.read((0, text[start : start + step]), keep_state=True)
        ends.append(len(harness.texts[0]))
    if missing := sorted(set(ends) - set(harness.memory.state_positions(0) or ())):
        raise CheckFailed(f"checkpoints were requested at {ends}; those at {missing} are missing")
    for seq, end in enumerate(ends[:4], start=1):
        point = min(end + 1, len(text))
        kept = harness.fork(0, seq, point)
        harness.read((seq, [*text[kept:point], *harness.draw(1)]))
    kept = harness.remove_end(0, ends[1])
    harness.read((0, [*text[kept : ends[1]], *harness.draw(2)]), (1, harness.draw(1)))
    harness.read((0, harness.draw(1)), (2, harness.draw(1)))


def context_shift(harness: Harness) -> None:
    """A span is removed, and the K/V of the probe tokens behind it are compared with those that the model computes at
    their new positions.

    In one memory the probe's K/V are stored at the old positions and moved, in the other (the twin) they are stored at
    the new ones. Both read the tokens before the span, and both continue with the same tokens.
    """
    why = [group.no_shift for group in harness.guest.shape.groups if group.no_shift is not None]
    if why or harness.guest.shape.recurrent is not None:
        raise NotApplicable(f"not supported, later tokens are computed again: {why[0] if why else RECURRENT}")
    gone = _removable([group.layout for group in harness.guest.shape.groups], harness.most)
    if gone is None:
        raise NotApplicable(f"no span inside {harness.most} tokens can be removed without computing others again")
    before, after, twin = harness.draw(gone.end), harness.draw(3), harness.twin()
    for where, start in ((harness, gone.end), (twin, gone.start)):
        _placed(where, before[:start], start)
    kept = harness.memory.remove(0, gone)
    if kept != len(twin.texts[0]):
        raise CheckFailed(f"{len(gone)} of {gone.end + PROBE} tokens were removed, and {kept} are left")
    harness.texts[0] = list(twin.texts[0])
    for token in after:
        harness.read((0, [token]))
        twin.read((0, [token]))
    harness.compare(twin)


def _removable(layouts: Sequence[Layout], most: int) -> Span | None:
    """The span with the largest minimum of length and start, that ends by `SPAN` and that all layouts shift exactly."""
    found = [
        Span(start, end)
        for end in range(2, min(SPAN, most - PROBE - 3) + 1)
        for start in range(1, end)
        if all(layout.can_shift(layout.keep(end + PROBE), end + PROBE, Span(start, end)) for layout in layouts)
    ]
    return max(found, key=lambda span: min(len(span), span.start), default=None)


def _placed(harness: Harness, text: list[int], place: int) -> None:
    """Sequence 0 reads `text`; then the K/V that the model computes for the probe at `place` are stored behind it."""
    harness.read((0, text))
    stored, _, ids = stored_at(harness.guest, place)
    probe = ids.tolist()
    harness.begin([(0, probe)])
    for layer, planes in stored.items():
        harness.memory.put(layer, planes["k"], planes["v"])
    harness.keep([(0, probe)])
    harness.derived.add(0)


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its name, the property that must hold, its function, and the kinds of layers that it covers."""

    name: str
    description: str
    act: Callable[[Harness], str | None]
    covers: Callable[[str], bool] = lambda kind: True


def _is_state(kind: str) -> bool:
    return kind in STATES


def _is_bounded(kind: str) -> bool:
    return kind.startswith(("sliding", "chunked"))


CHECKS = (
    Check("sharing", "sequences with a shared prefix continue in one batch", sharing),
    Check("forking", "forks at several points continue differently, and the original does not change", forking),
    Check("chunked prefill", "a prompt is computed whole, in chunks of several sizes, or by token", chunked_prefill),
    Check("mixed batches", "prompts and single tokens in one step, or one sequence per step", mixed_batches),
    Check("sliding", "a text continues far beyond windows and chunks", sliding, _is_bounded),
    Check("removal at the end", "the last tokens are removed, and others computed", removal_at_the_end),
    Check("rollback", "drafts are verified in one batch, and any number of them is accepted", rollback),
    Check("abandoning", "abandoned steps leave no trace", abandoning),
    Check("resumption", "sequences resume from checkpoints inside a text", resumption, _is_state),
    Check(
        "context shift",
        "K/V behind a removed span equal those computed at their new positions",
        context_shift,
        lambda kind: not _is_state(kind),
    ),
)
