"""A world without a network: tables of real cells, requests that come and go, and turns of the real scheduler.

What the runner and the loop do with a network is done here in integers: tokens are numbers, an answer goes on until its
`max_tokens`. Everything is deterministic, and nothing here needs torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcellar.cache.cells import Cells
from kvcellar.cache.rows import Rows
from kvcellar.cache.tables import Table, Tables
from kvcellar.engine.manager import SequenceManager
from kvcellar.engine.request import Completion, Request, Status
from kvcellar.engine.scheduler import Scheduled, Scheduler
from kvcellar.events import Delta, Done, Event, Failed, Finished
from kvcellar.layout import Layout
from kvcellar.sample.params import SamplingParams
from kvcellar.sample.sampler import Sampler
from kvcellar.spans import Span
from kvcellar.text.output import Output, Stops

VOCABULARY = 1000


class TableMemory:
    """What a manager needs of `Memory`: tables of cells in every group, and nothing stored in them."""

    def __init__(self, layouts: Mapping[str, Layout], cells: Mapping[str, int]) -> None:
        self.layouts = dict(layouts)
        self.cells = {name: Cells(count) for name, count in cells.items()}
        self.tables = {name: Tables(each) for name, each in self.cells.items()}
        self._tables: dict[int, dict[str, Table]] = {}
        self.rows = Rows(None)

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._tables)

    @property
    def storage(self) -> "TableMemory":
        return self

    def free(self) -> dict[str, int]:
        return {name: cells.free for name, cells in self.cells.items()}

    def has(self, seq: int) -> bool:
        return seq in self._tables

    def length(self, seq: int) -> int:
        return next(iter(self._tables[seq].values())).end if seq in self._tables else 0

    def feed(self, shares: Sequence[Scheduled]) -> None:
        """A step: cells for all its tokens first, then what slides out of sight is forgotten."""
        taken: list[tuple[Table, str, list]] = []
        for completion, tokens in shares:
            assert completion.seq is not None
            tables = self._tables.setdefault(
                completion.seq, {name: Table(all_of) for name, all_of in self.tables.items()}
            )
            for name, table in tables.items():
                assert table.end == completion.computed, (
                    f"memory goes on at {table.end}, the completion at {completion.computed}"
                )
                taken.append((table, name, self.cells[name].take(tokens, after=table.last_cell)))
        for table, name, runs in taken:
            table.append(runs)
            table.forget_below(self.layouts[name].keep(table.end))

    def can_cut(self, seq: int, pos: int) -> int:
        kept, before = min(pos, self.length(seq)), -1
        while kept != before:
            before = kept
            for name, table in self._tables.get(seq, {}).items():
                kept = self.layouts[name].can_cut(table.first, table.end, kept)
        return kept

    def derived(self, seq: int) -> int | None:
        return None

    def fork(self, src: int, dst: int, upto: int) -> int:
        kept = self.can_cut(src, upto)
        self._tables[dst] = {name: table.share(kept) for name, table in self._tables[src].items()}
        return kept

    def remove(self, seq: int, span: Span) -> int:
        assert span.end == self.length(seq)
        assert self.can_cut(seq, span.start) == span.start
        for table in self._tables[seq].values():
            table.cut(span.start)
        return span.start

    def drop(self, seq: int) -> None:
        for table in self._tables.pop(seq).values():
            table.cut(0)

    def check(self) -> None:
        for name, cells in self.cells.items():
            cells.check()
            for tables in self._tables.values():
                tables[name].check()
            cells.check_holders([run for tables in self._tables.values() for run in tables[name].runs])
            self.tables[name].check([tables[name] for tables in self._tables.values()])


@dataclass(frozen=True)
class Ask:
    """A request to come: at turn `at`, with that prompt. Cancelled in turn `cancel`, if that is before its end."""

    at: int
    prompt: int
    max_tokens: int
    n: int = 1
    cancel: int | None = None
    session: int | None = None


@dataclass
class Heard:
    """What one request was told. Asserts the order of events as they come."""

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        assert not self.over, f"{event} came after the end"
        if isinstance(event, Delta | Finished):
            assert event.choice not in self.reasons, f"{event} came after its choice had finished"
        self.events.append(event)

    @property
    def over(self) -> bool:
        return any(isinstance(event, Done | Failed) for event in self.events)

    @property
    def reasons(self) -> dict[int, str]:
        return {event.choice: event.reason for event in self.events if isinstance(event, Finished)}

    def tokens(self, choice: int) -> int:
        return sum(len(e.token_ids) for e in self.events if isinstance(e, Delta) and e.choice == choice)


class World:
    """Plays requests against the real scheduler and manager, and asserts the scheduler's laws in every turn."""

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        cells: Mapping[str, int],
        *,
        context: int = 10_000,
        max_sequences: int = 4,
        step_tokens: int = 8,
    ) -> None:
        self.layouts, self.capacity = dict(layouts), dict(cells)
        self.context, self.max_sequences, self.step_tokens = context, max_sequences, step_tokens
        self.memory = TableMemory(layouts, cells)
        self.manager = SequenceManager(self.memory)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.manager, layouts, context=context, max_sequences=max_sequences, step_tokens=step_tokens
        )
        self.heard: dict[int, Heard] = {}
        self.requests: dict[int, Request] = {}
        self.turns = 0
        self.fed = 0

    def play(self, asks: Sequence[Ask]) -> None:
        """All of them, to the end."""
        coming = dict(enumerate(asks))
        limit = sum(a.at + 2 * a.n * (a.prompt + a.max_tokens + 2) for a in asks) * 2 + 50
        while coming or self.scheduler.running or self.scheduler.waiting:
            for number, ask in list(coming.items()):
                if ask.at <= self.turns and not self._session_busy(ask.session):
                    self.submit(number, ask)
                    del coming[number]
            for number, request in self.requests.items():
                if asks[number].cancel == self.turns:
                    self.cancel(request)
            self.turn()
            assert self.turns < limit, "it does not come to an end"

    def _session_busy(self, session: int | None) -> bool:
        return session is not None and any(r.session == session and not r.done for r in self.requests.values())

    def submit(self, number: int, ask: Ask) -> None:
        heard = self.heard[number] = Heard()
        params = SamplingParams(max_tokens=ask.max_tokens, n=ask.n, temperature=0.0)
        # Prompts of a session begin alike, others differ from their first token on.
        first = 2 * ask.session if ask.session is not None else 2 * number + 1
        prompt = (first, *range(VOCABULARY - ask.prompt + 1, VOCABULARY))
        request = self.requests[number] = Request(prompt, params, heard, ask.session, number=len(self.requests))
        request.completions.append(self._completion(request, list(prompt), 0))
        self.scheduler.enqueue(request.completions[0])

    def _completion(self, request: Request, tokens: list[int], choice: int) -> Completion:
        state = Sampler(request.params, seed=0, index=choice, prompt_ids=(), vocab_size=VOCABULARY, end_ids=frozenset())
        return Completion(request, state, Output(None, Stops(())), tokens)

    def cancel(self, request: Request) -> None:
        for completion in list(request.completions):
            if completion.status is not Status.DONE:
                self._end(completion, "cancelled")

    def turn(self) -> None:
        """What the loop does in a turn: build, read, draw, end."""
        self.turns += 1
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        shares, stuck = self.scheduler.schedule()
        self.check_laws(shares, stuck, waiting, running)
        for completion in stuck:
            self._end(completion, "length")
        self.memory.feed(shares)
        self.fed += sum(share.tokens for share in shares)
        for completion, tokens in shares:
            completion.computed += tokens
        for completion, _ in shares:
            if not completion.uncomputed and completion.status is not Status.DONE:
                for writer in self._writers(completion):
                    if reason := writer.accept([(len(writer.tokens) % VOCABULARY, None)], self.context).reason:
                        self._end(writer, reason)
        self.check()

    def _writers(self, completion: Completion) -> list[Completion]:
        if completion.status is Status.DECODE:
            return [completion]
        completion.become(Status.DECODE)
        request = completion.request
        if completion.sampler.produced:
            return [completion]
        for choice in range(1, request.params.n):
            twin = self._completion(request, list(completion.tokens), choice)
            self.manager.fork(completion, twin)
            twin.become(Status.PREFILL)
            twin.become(Status.DECODE)
            request.completions.append(twin)
            self.scheduler.add_running(twin)
        return list(request.completions)

    def _end(self, completion: Completion, reason: str) -> None:
        self.scheduler.remove(completion)
        if completion.request.session is not None and completion.seq is not None:
            self.manager.keep(completion.request.session, completion)
        else:
            self.manager.release(completion)
        completion.finish(reason)  # type: ignore[arg-type]

    # -- laws ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check()
        self.manager.check(self.scheduler.running)

    def check_laws(
        self, shares: list[Scheduled], stuck: list[Completion], waiting: list[Completion], running: list[Completion]
    ) -> None:
        given = {id(share.completion): share.tokens for share in shares}
        total = sum(given.values())
        assert len(given) == len(shares), "a completion was given two shares"
        assert all(share.tokens > 0 for share in shares)
        assert total <= self.step_tokens, "more than the budget"
        for name, free in self.memory.free().items():
            assert total <= free, f"{total} tokens for {free} free cells of {name}"
        for share in shares:
            assert share.tokens <= share.completion.uncomputed
            assert share.completion in self.scheduler.running

        now = self.scheduler.running
        if running:
            oldest = running[0]
            assert oldest in now, "the oldest was sent back"
            decoding = sum(completion.status is Status.DECODE for completion in now)
            assert (id(oldest) in given) != (oldest in stuck) or decoding >= self.step_tokens, "the oldest has to wait"
        assert all(completion is now[0] and len(now) == 1 for completion in stuck), (
            "ended although others could be sent back"
        )
        readers_served = [share.completion for share in shares if share.completion.status is Status.PREFILL]
        if readers_served:
            unserved = [x for x in now if x.status is Status.DECODE and id(x) not in given]
            assert not unserved, "a completion that reads was served before one that writes"
        admitted = [completion for completion in waiting if completion in now]
        assert admitted == sorted(admitted, key=lambda completion: completion.key)
        passed_over = [
            completion for completion in self.scheduler.waiting if admitted and completion.key < admitted[-1].key
        ]
        assert not passed_over, "somebody who came later was admitted first"
        assert sum(r.params.n if len(r.completions) == 1 else 1 for r in (x.request for x in now)) <= self.max_sequences
        assert shares or stuck or not (waiting or running), "nothing happens"
