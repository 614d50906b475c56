"""bits: whether a row's logits are the same bits, however its text came into memory and whatever else is in the step.

A text is computed token by token, alone: these logits are the reference. Then the same text is computed in other ways:
as a whole prompt, in chunks, beside other sequences, from a fork, as drafts. Where a row differs, both ways are run
again with every module of the network watched, and the first one in which the row differs is reported: its order of
sums depends on the number of rows, or that of what is computed before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.engine.models.guest import MODEL_ERRORS, Guest
from kvcellar.engine.models.input_limits import context_of, random_tokens
from kvcellar.errors import KvcellarError
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span

LENGTH = 48  # tokens of the text, if the context has so many
BATCHES = (2, 8, 64)  # sequences that decode together, the text among them
CHUNKS = (3, 16)  # tokens of a chunk
COMPANY = 6  # tokens of the text that are computed in one step with other sequences
DRAFT = 4  # tokens of a speculative step
ALONE = "token by token, alone"
SEQ = 0  # the sequence of the text


@dataclass(frozen=True, slots=True)
class SameBits:
    """Of `rows` rows that were computed in this way, `differing` have other bits than alone. `first` is where the first
    of them differs; None if no row does, or if modules alone do not show it. `failed` is why the text could not be
    computed in this way."""

    way: str
    rows: int
    differing: int
    first: str | None = None
    failed: str | None = None

    @property
    def holds(self) -> bool:
        return not self.differing and self.failed is None

    def __str__(self) -> str:
        if self.failed is not None:
            return f"{self.way}: {self.failed}"
        if self.holds:
            return f"{self.way}: the same bits in all {self.rows} rows"
        where = f"; first in {self.first}" if self.first is not None else ""
        return f"{self.way}: {self.differing} of {self.rows} rows have other bits{where}"


Way = Callable[["_Runs"], None]


class _Runs:
    """A text, computed once in a memory of its own. `logits` has the row [V] of each position that was asked for."""

    def __init__(self, guest: Guest, text: Sequence[int], others: Sequence[int]) -> None:
        self.guest, self.text, self.others = guest, text, others
        sequences = max(BATCHES) + 1
        cells = {group.name: (COMPANY + 1) * sequences + 4 * len(text) for group in guest.shape.groups}
        self.memory: Memory = guest.memory(cells, rows=4 * sequences)
        self.logits: dict[int, Tensor] = {}
        self.watch: _Watch | None = None

    def step(self, tokens: int, beside: Sequence[tuple[int, int]] = (), *, keep: int | None = None) -> None:
        """Compute the next tokens of the text in one step with `beside`: sequences, and how many tokens each gets.
        `keep`: how many tokens of the text are committed, if not all; the step is revertible then."""
        start = self.memory.length(SEQ) if SEQ in self.memory.sequences else 0
        count = tokens if keep is None else keep
        ids = [*self.text[start : start + count], *self.others[: tokens - count]]
        feeds = [Feed(SEQ, Span(start, start + tokens), revertible=keep is not None)]
        for seq, more in beside:
            at = self.memory.length(seq) if seq in self.memory.sequences else 0
            feeds.insert(seq % 2 * len(feeds), Feed(seq, Span(at, at + more)))  # before and behind the text
        for part in [feeds] if self.guest.mode == "flat" else [[feed] for feed in feeds]:
            self._run(part, ids, start, count)

    def drop(self, *sequences: int) -> None:
        """Free those of them that are in memory."""
        for seq in set(sequences).intersection(self.memory.sequences):
            self.memory.drop(seq)

    def _run(self, feeds: Sequence[Feed], ids: Sequence[int], start: int, count: int) -> None:
        plan = self.memory.begin(Batch(tuple(feeds)))
        rows, first = list[int](), None
        for feed in feeds:
            if feed.seq == SEQ:
                first = len(rows)
                rows += ids
            else:
                rows += [self.others[(feed.seq + i) % len(self.others)] for i in range(len(feed.pos))]
        want = range(len(rows)) if first is None else range(first, first + count)
        if self.watch is not None:
            self.watch.rows = {} if first is None else {start + i: first + i for i in range(count)}
            self.watch.tokens = len(rows)
        logits = self.guest.forward(self.memory, plan, rows, want)
        self.memory.commit({feed.seq: count if feed.seq == SEQ else len(feed.pos) for feed in feeds})
        if first is not None:
            self.logits |= {start + i: row for i, row in enumerate(logits)}


class _Watch:
    """What each module without children reads and writes for the rows of the text, by position: hooks, for one run."""

    def __init__(self) -> None:
        self.rows: Mapping[int, int] = {}  # of the running step: its row for each position
        self.tokens = 0
        self.seen: dict[int, dict[tuple[str, int, str], Tensor]] = {}

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if not any(True for _ in module.children()):
                    stack.callback(module.register_forward_hook(self._hook(name), with_kwargs=True).remove)
            yield

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
            for kind, parts in (
                ("reads", (*args, *kwargs.values())),
                ("writes", out if isinstance(out, tuple | list) else (out,)),
            ):
                for part in parts:
                    if isinstance(part, Tensor):
                        self._note(name, kind, part)

        return hook

    def _note(self, name: str, kind: str, x: Tensor) -> None:
        """Keep the rows of x [1,T,...], or [T,...]; other tensors are not rows of the step."""
        if x.dim() > 1 and x.shape[:2] == (1, self.tokens):
            x = x[0]
        if x.dim() < 2 or x.shape[0] != self.tokens:
            return
        for position, row in self.rows.items():
            kept = self.seen.setdefault(position, {})
            number = sum(1 for key in kept if key[0] == name and key[2] == kind)
            kept[name, number, kind] = x[row].flatten().clone()


def same_bits(guest: Guest, *, seed: int) -> tuple[SameBits, ...]:
    """Each way in which the guest can compute a text, compared with computing it token by token, alone."""
    draw = torch.Generator().manual_seed(seed)
    length = min(LENGTH, context_of(guest.model))
    text, others = (random_tokens(guest.model, length, draw) for _ in range(2))
    found: list[SameBits] = []
    try:
        reference = _computed(guest, text, others, _alone, None)
    except MODEL_ERRORS as error:
        return (_failed(ALONE, error),)
    alone = cache(lambda: _watched(guest, text, others, _alone))  # a model that differs does in most ways
    for name, way in _ways(guest):
        try:
            found.append(_compared(_computed(guest, text, others, way, None), reference, name, way, alone))
        except MODEL_ERRORS as error:
            found.append(_failed(name, error))
    return tuple(found)


def _failed(way: str, error: Exception) -> SameBits:
    text = str(error) if isinstance(error, KvcellarError) else f"{type(error).__name__}: {error}"
    return SameBits(way, 0, 0, failed=f"an operation raised {text}")


def _ways(guest: Guest) -> Iterator[tuple[str, Way]]:
    yield "a whole prompt", lambda runs: runs.step(len(runs.text))
    for size in CHUNKS:
        yield f"chunks of {size} tokens", lambda runs, size=size: _chunks(runs, size)
    for batch in BATCHES if guest.mode == "flat" else ():  # solo guests run one sequence per forward
        yield f"in a batch of {batch}", lambda runs, batch=batch: _batch(runs, batch)
    if guest.mode == "flat":
        yield "beside a prompt", _beside_a_prompt
    yield "from a fork", _forked
    if guest.no_partial_commit is None:
        yield f"as {DRAFT} drafts, half of them accepted", _drafted


def _alone(runs: _Runs) -> None:
    for _ in runs.text:
        runs.step(1)


def _chunks(runs: _Runs, size: int) -> None:
    for start in range(0, len(runs.text), size):
        runs.step(min(size, len(runs.text) - start))


def _batch(runs: _Runs, batch: int) -> None:
    for _ in _late(runs):
        runs.step(1, [(seq, 1) for seq in range(1, batch)])


def _beside_a_prompt(runs: _Runs) -> None:
    for number in _late(runs):
        runs.drop(1)
        runs.step(1, [(1, min(2 + 5 * number, len(runs.text)))])


def _late(runs: _Runs) -> Iterator[int]:
    """Numbers of the last steps of a text whose first tokens are computed alone."""
    late = min(COMPANY, len(runs.text) - 1)
    for _ in range(len(runs.text) - late):
        runs.step(1)
    yield from range(late)


def _forked(runs: _Runs) -> None:
    """The text continues from a fork of itself."""
    half = len(runs.text) // 2
    for _ in range(half):
        runs.step(1)
    runs.memory.fork(SEQ, 1, half)
    runs.drop(SEQ)
    kept = runs.memory.fork(1, SEQ, half)
    for _ in range(kept, len(runs.text)):
        runs.step(1)


def _drafted(runs: _Runs) -> None:
    left = len(runs.text)
    while left > DRAFT:
        runs.step(DRAFT, keep=DRAFT // 2)
        left -= DRAFT // 2
    for _ in range(left):
        runs.step(1)


def _computed(guest: Guest, text: Sequence[int], others: Sequence[int], way: Way, watch: _Watch | None) -> _Runs:
    runs = _Runs(guest, text, others)
    runs.watch = watch
    way(runs)
    return runs


def _watched(guest: Guest, text: Sequence[int], others: Sequence[int], way: Way) -> _Watch:
    watch = _Watch()
    with watch.hooked(guest.model):
        _computed(guest, text, others, way, watch)
    return watch


def _compared(runs: _Runs, reference: _Runs, name: str, way: Way, alone: Callable[[], _Watch]) -> SameBits:
    logits = runs.logits
    differing = [position for position, row in logits.items() if not _equal(row, reference.logits[position])]
    if not differing:
        return SameBits(name, len(logits), 0)
    other = _watched(runs.guest, runs.text, runs.others, way)
    return SameBits(name, len(logits), len(differing), _first(runs.guest.model, alone(), other))


def _first(model: nn.Module, alone: _Watch, other: _Watch) -> str | None:
    """Where the first difference is: at the lowest position, in the order in which modules ran."""
    for position in sorted(alone.seen.keys() & other.seen.keys()):
        expected = alone.seen[position]
        before = "the inputs"
        for (name, number, kind), row in other.seen[position].items():
            at = f"{name} ({type(model.get_submodule(name)).__name__})"
            if (known := expected.get((name, number, kind))) is not None and not _equal(row, known):
                return at if kind == "writes" else f"what is computed between {before} and {at}"
            before = at
    return None


def _equal(one: Tensor, two: Tensor) -> bool:
    """Bit for bit, but for NaN, which equals NaN."""
    return one.shape == two.shape and bool(((one == two) | (one.isnan() & two.isnan())).all())
