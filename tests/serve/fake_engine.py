"""A deterministic engine without a model, which runs in a thread of its own and follows a script.

A token is a byte. Completions repeat the prompt, rotated by one token for each choice. Delays, errors and other events
are set in the `Script` that is current when a request is submitted.
"""

import codecs
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from kvcellar.constraint import Constraint
from kvcellar.engine.arguments import prompt_ids, tokens
from kvcellar.engine.stats import EngineStats, GroupStats, PrefixStats, RecordingStats
from kvcellar.errors import BadRequest, EngineClosed, PromptTooLong, TemplateFailed
from kvcellar.events import Delta, Done, Event, Failed, Finished, Speculation, Timings, TokenLogprob, Usage
from kvcellar.frontend.chat_images import ChatImages
from kvcellar.frontend.conversations import Conversations, TokenSource
from kvcellar.frontend.documents import Documents
from kvcellar.frontend.result import Ticket
from kvcellar.memory.retention import RetentionOptions
from kvcellar.memory.tiers.archive import Archive
from kvcellar.sampling_params import SamplingParams, check_ids
from kvcellar.text.conversation import Caps, checked
from kvcellar.text.pieces import Content, Piece
from kvcellar.text.replies.form import ReplyForm
from kvcellar.text.replies.machine import Machine, Outline, joined
from kvcellar.text.replies.tools import checked as checked_tools

VOCABULARY = 256
CONTEXT = 20_000
PATIENCE = 120.0  # seconds; only a test that fails waits so long


@dataclass(frozen=True)
class FakeModel:
    name: str = "cellar/fake-1"
    path: Path | None = None
    context: int = CONTEXT
    vocab_size: int = VOCABULARY
    has_text: bool = True
    has_chat: bool = True
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    special_tokens: Mapping[str, str] = field(default_factory=lambda: {"bos_token": "\x01"})
    chat_template: str | None = "{{ messages }}"


@dataclass(frozen=True)
class Script:
    output: bytes | None = None  # None: the prompt
    cached: int = 0  # tokens of the prompt that came from memory
    speculation: Speculation | None = None
    delay: float = 0.0  # seconds between two events of a request
    queued: bool = False  # stays in the queue of the engine
    gate: threading.Event | None = None  # events are delivered only while it is set
    reject: Exception | None = None  # raised by submit
    rejections: int | None = None  # how often; None: always
    fail: Exception | None = None  # delivered instead of the event number `fail_at`
    fail_at: int = 0


def engine_stats(**changes: Any) -> EngineStats:
    """Of an engine with one group, which has done nothing yet, but for `changes`."""
    zeros: dict[str, Any] = {field.name: 0 for field in fields(EngineStats)}
    prefixes = PrefixStats(0, 0, 0, {}, {}, 0, 0, 0, 0, 0)
    found: dict[str, Any] = {
        "groups": (GroupStats("full", 1, 100, 0, 0, 800, "reference"),),
        "prefixes": prefixes,
        "store": None,
        "speculation": None,
        "recording": RecordingStats(None, None, (), 0, {}),
        "cluster": None,
        "recomputes": {},
    }
    return EngineStats(**zeros | found | changes)


@dataclass(eq=False)
class Run:
    prompt: tuple[int, ...]
    params: SamplingParams
    script: Script
    deliver: Callable[[Event], None]
    events: list[Event]
    cancelled: bool = False
    delivered: int = 0  # events
    over: bool = False  # before its last event is delivered: a client that has its answer finds no request running

    def step(self) -> bool:
        """Deliver the next event. Returns whether it was the last."""
        if self.cancelled:
            self.over = True
            finished = {event.choice for event in self.events[: self.delivered] if isinstance(event, Finished)}
            for choice in sorted(set(range(self.params.n)) - finished):
                self.deliver(Finished(choice, "cancelled"))
            told = sum(len(event.token_ids) for event in self.events[: self.delivered] if isinstance(event, Delta))
            self.deliver(Done(Usage(len(self.prompt), 0, told), Timings(0.0, 0.0, 0.0)))
            return True
        if self.script.fail is not None and self.delivered == self.script.fail_at:
            self.over = True
            self.deliver(Failed(self.script.fail))
            return True
        event = self.events[self.delivered]
        self.delivered += 1
        self.over = self.delivered == len(self.events)
        self.deliver(event)
        return self.over


class FakeReading:
    """Reads answers in `form`."""

    def __init__(self, outline: Outline, constraint: Constraint | None) -> None:
        self._outline, self.constraint = outline, constraint
        self._numbers = iter(range(1000))

    def machine(self) -> Machine:
        return Machine(self._outline, lambda kind: f"call_{next(self._numbers)}")

    def read(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events, with what their texts are made of; an answer is over when its machine says so."""
        machines: dict[int, Machine] = {}
        for event in events:
            if isinstance(event, Done):
                yield event
                continue
            assert isinstance(event, Delta | Finished)
            machine = machines.setdefault(event.choice, self.machine())
            if isinstance(event, Delta) and not machine.over:
                reasoned = machine.reasons
                yield _told(event, machine.push(event.text), reasoned or machine.reasons)
            elif isinstance(event, Finished):
                if rest := machine.end():
                    yield _told(Delta(event.choice, "", ()), rest, False)
                yield Finished(event.choice, "stop") if machine.over else event


def _told(delta: Delta, pieces: Sequence[Piece], reasons: bool) -> Delta:
    text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return structs.replace(delta, text=text, pieces=tuple(joined(pieces)), reasoning_tokens=int(reasons))


PLAIN = ReplyForm("plain", "nothing")


class FakeReplies:
    """Without a form, all is content. `asked`: how readings were wanted."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.use(None)

    def use(self, form: ReplyForm | None) -> None:
        """Answers are written in this form from now on."""
        self._form = form
        self.form = None if form is None else form.name
        self.refusal = "it is no model" if form is None else None
        self.reasons = form is not None and bool(form.thoughts)
        self.asked.clear()

    def reading(
        self,
        *,
        tools: Any = None,
        choice: str = "auto",
        names: Sequence[str] = (),
        parallel: bool = True,
        deltas: bool = True,
        answer: Constraint | None = None,
        **how: Any,
    ) -> FakeReading:
        if tools and self.refusal is not None:
            raise BadRequest(f"tools cannot be used with this model: {self.refusal}", "tools")
        if (choice == "required" or names) and not tools:
            raise BadRequest("tool_choice requires a call, and there are no tools", "tool_choice")
        self.asked.append({"choice": choice, "names": names, "parallel": parallel, "deltas": deltas, "answer": answer})
        found = checked_tools(tools).only(names) if tools else None
        outline = Outline(self._form or PLAIN, found, deltas=deltas, parallel=parallel, answers=answer is not None)
        return FakeReading(outline, answer)


class NoEmbeddings:
    """Of a model that does not embed."""

    refused = "it is a fake"

    def check(self, dimensions: int | None = None) -> None:
        raise BadRequest("model does not do embeddings: it is a fake", "model")


class FakeEngine:
    """A context manager; closing fails running requests, as in the real engine."""

    def __init__(self, model: FakeModel | None = None, images: Any = None) -> None:
        self.model = model or FakeModel()
        self.images = ChatImages(images, why_not="this model takes no images: it is a fake")
        self.healthy, self.starting, self.cache_bytes, self.embeddings = True, False, 0, NoEmbeddings()
        self.replies = FakeReplies()
        self.tools: Sequence[Mapping[str, Any]] | None = None  # of the last prompt
        self.continues = False  # whether the last prompt ends with a message that the answer continues
        self.documents = Documents()
        self.conversations = Conversations(Archive(), TokenSource(self.model.name, "bytes", VOCABULARY))
        self.script = Script()
        self.seen: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.namespaces: list[str] = []  # of each request in `seen`
        self.retentions: list[RetentionOptions | None] = []
        self.breakpoints: list[tuple[int, ...]] = []
        self.cancels = 0  # requests cancelled before their end
        self.rejected = 0
        self.adapters: list[str | None] = []  # of all requests
        self.counted = engine_stats()
        self.rendered: list[dict[str, Any]] = []  # options of each call
        self._running: list[Run] = []
        self._turn = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="fake-engine", daemon=True)
        self._thread.start()

    @property
    def sees(self) -> bool:
        return self.images.sees

    @property
    def last_stats(self) -> EngineStats:
        """The test sets what it returns."""
        return self.counted

    def stats(self) -> EngineStats:
        return self.counted

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        """Tokenizes to bytes; with `special`, byte 1 comes first."""
        if not self.model.has_text:
            raise BadRequest("this model has no tokenizer; send token ids", "prompt")
        if limit is not None and len(text) > limit:
            raise PromptTooLong(len(text), limit, "the model's context")
        return [1] * (special is True) + list(text.encode())

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return bytes(tokens(ids, VOCABULARY, "ids")).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes(tokens([token], VOCABULARY, "ids"))

    def written(self, token: int) -> str:
        """As Python writes bytes."""
        return repr(self.token_bytes(token))[2:-1]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] | None = None,
        effort: str | None = None,
        add_generation_prompt: bool = True,
        limit: int | None = None,
        namespace: str = "",
        owner: str = "",
        replay: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        if not self.model.has_chat:
            raise BadRequest("this model has no chat template", "messages")
        found = checked(self.images.taken(messages, namespace)[0], Caps())
        if found[0]["role"] == "assistant":
            raise TemplateFailed("the first turn must be the user's", "messages")
        self.rendered.append({"variables": variables, "effort": effort, "add_generation_prompt": add_generation_prompt})
        self.tools, self.continues = tools, continue_final_message
        return self.encode("".join(map(_turn, found)), limit=limit)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        namespace: str = "",
        retention: RetentionOptions | None = None,
        adapter: str | None = None,
        breakpoints: Sequence[int] = (),
        reading: FakeReading | None = None,
    ) -> Ticket:
        self.adapters.append(adapter)
        script = self.script
        if script.reject is not None and self.rejected != script.rejections:
            self.rejected += 1
            raise script.reject
        if self._closed:
            raise EngineClosed("the engine has been closed")
        self._admit(prompt_ids, params)
        events = plan(tuple(prompt_ids), params, script, self.model.context)
        if reading is not None:
            events = reading.read(events)
        run = Run(tuple(prompt_ids), params, script, deliver, list(events))
        with self._turn:
            self.seen.append((run.prompt, params))
            self.namespaces.append(namespace)
            self.retentions.append(retention)
            self.breakpoints.append(tuple(breakpoints))
            self._running.append(run)
            self._turn.notify_all()
        return Ticket(partial(self.cancel, run), lambda: not script.queued)

    def cancel(self, run: Run) -> None:
        with self._turn:
            if run in self._running and not run.cancelled:
                run.cancelled = True
                self.cancels += 1
                self._turn.notify_all()

    @property
    def running(self) -> int:
        with self._turn:
            return sum(not run.over for run in self._running)

    def rest(self, seconds: float = PATIENCE) -> bool:
        """Wait until no request is running. Returns False after `seconds`."""
        with self._turn:
            return self._turn.wait_for(lambda: not self._running, seconds)

    def cancelled(self, count: int, seconds: float = PATIENCE) -> bool:
        """Wait until `count` requests have been cancelled. Returns False after `seconds`."""
        with self._turn:
            return self._turn.wait_for(lambda: self.cancels >= count, seconds)

    @contextmanager
    def scripted(self, **changes: object) -> Iterator[None]:
        """Change the script for requests that are submitted within the block."""
        before, self.script = self.script, replace(self.script, **changes)
        try:
            yield
        finally:
            self.script = before

    def close(self) -> None:
        with self._turn:
            self._closed, self.healthy = True, False
            self._turn.notify_all()
        self._thread.join()

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _admit(self, prompt: Sequence[int], params: SamplingParams) -> None:
        prompt_ids(prompt, vocab_size=self.model.vocab_size, context=self.model.context - 1)
        check_ids(params, self.model.vocab_size)

    def _work(self) -> None:
        while True:
            with self._turn:
                while not self._closed and not any(map(self._can_step, self._running)):
                    self._turn.wait(0.01 if self._running else None)  # a gate is set without a notification
                if self._closed:
                    break
                ready = [run for run in self._running if self._can_step(run)]
            ended = [run for run in ready if run.step()]
            with self._turn:
                self._running = [run for run in self._running if run not in ended]
                self._turn.notify_all()
            if delay := max((run.script.delay for run in ready), default=0.0):
                time.sleep(delay)
        for run in self._running:
            run.deliver(Failed(EngineClosed("the engine has been closed")))
        self._running = []

    def _can_step(self, run: Run) -> bool:
        return run.cancelled or run.script.gate is None or run.script.gate.is_set()


def _turn(message: dict[str, Any]) -> str:
    """One message as rendered by this engine's template: `<role>content`, in which an image is the beginning of its
    digest in brackets, then its other fields as JSON."""
    content = message.pop("content", "")
    text = (
        content
        if isinstance(content, str)
        else "+".join(part.get("text") or f"[{part['image'][:6]}]" for part in content)
    )
    rest = {name: value for name, value in message.items() if name not in ("role", "name", "thinking")}
    return f"<{message['role']}>{text}" + (json.dumps(rest) if rest else "")


def plan(prompt: tuple[int, ...], params: SamplingParams, script: Script, context: int) -> Iterator[Event]:
    """All events of a request, with the choices interleaved token by token."""
    lines = [list(_line(prompt, params, script, choice, context)) for choice in range(params.n)]
    for at in range(max(map(len, lines))):
        for line in lines:
            yield from line[at : at + 1]
    written = sum(len(e.token_ids) for line in lines for e in line if isinstance(e, Delta))
    timings = Timings(queued=0.25, first_token=0.5, decoding=2.0)
    yield Done(Usage(len(prompt), script.cached, written), timings, speculation=script.speculation)


def _line(
    prompt: tuple[int, ...], params: SamplingParams, script: Script, choice: int, context: int
) -> Iterator[Event]:
    output = list(script.output if script.output is not None else prompt)
    turn = choice % len(output) if output else 0
    output = output[turn:] + output[:turn]
    most = min(params.max_tokens or context, max(1, context - len(prompt)))
    if params.ignore_eos:
        output = (output * (most // len(output) + 1))[:most]
    met = _first_stop(bytes(output[:most]), params.stop)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    room = len(bytes(output[:most])) if met is None else met[0]  # bytes of text before the stop string
    tokens = output[:most] if met is None else output[: met[0] + len(met[1].encode())]
    for at, token in enumerate(tokens):
        text = decoder.decode(bytes([token]), final=met is None and at == len(tokens) - 1) if at < room else ""
        yield Delta(choice, text, (token,), _logprobs(token, at, params.logprobs), script.cached)
    ended = "stop" if met is not None or (len(output) <= most and not params.ignore_eos) else "length"
    yield Finished(choice, ended, None if met is None else met[1])


def _first_stop(output: bytes, stops: tuple[str, ...]) -> tuple[int, str] | None:
    found = [(output.find(stop.encode()), stop) for stop in stops if stop.encode() in output]
    return min(found) if found else None


def _logprobs(token: int, at: int, top: int | None) -> tuple[TokenLogprob, ...] | None:
    """The sampled token is the most likely; the others follow it in the alphabet."""
    if top is None:
        return None
    first = -(at + 1) / 8
    likeliest = tuple(((token + i) % VOCABULARY, first - i) for i in range(top))
    return (TokenLogprob(token, first, likeliest),)
