"""transcript: the record of a conversation, by turns, and the prompt of its next turn. It computes nothing.

Sessions and their forks, named conversations and kept responses all have the last `Turn` of theirs: what several have
in common is in memory once.

With `shift`, a conversation may outgrow the context. The prompt of a turn then omits the oldest part: in a chat the
oldest turns after the system message, else as many tokens after the first `num_keep` as context shifts would have
dropped. The new message or text is never truncated.

Always true:
  * a turn never changes, and its text does not depend on what continues it;
  * the prompt of a turn depends on the tokens or the messages before it alone; only `conclude` adds a turn.
"""

import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, filterfalse
from typing import Any, Protocol, TypeGuard

import msgspec

from kvcellar.engine.request_options import shift_span
from kvcellar.errors import BadRequest, shown
from kvcellar.images.image import is_row
from kvcellar.memory.prefix.node import common_prefix
from kvcellar.sampling_params import SamplingParams

Message = Mapping[str, Any]


class Render(Protocol):
    """Tokenizes messages, as `Engine.render` does."""

    def __call__(self, messages: Sequence[Message], *, limit: int | None = None) -> list[int]: ...


class Turn:
    """What was added to the turn before it, its `parent`. `messages` are those of a chat as JSON, without brackets, the
    reply last; its tokens are the first `common` of those before it, and then `tail`. `prompt` is the length of its
    prompt, and `omitted` how many messages after those of the system it left out, counted from the first message of
    all. The turns of a conversation are `depth`, after a first one, which has what it began with; their messages have
    `total` bytes. `id` is that of the response of which it is the turn."""

    __slots__ = ("common", "depth", "id", "messages", "omitted", "parent", "prompt", "tail", "total")

    def __init__(
        self,
        parent: "Turn | None",
        messages: bytes = b"",
        omitted: int = 0,
        *,
        common: int = 0,
        tail: Iterable[int] = (),
        prompt: int = 0,
        id: str = "",
    ) -> None:
        self.parent, self.messages, self.omitted, self.id = parent, messages, omitted, id
        self.common, self.tail, self.prompt = common, array("q", tail), prompt
        self.depth = 0 if parent is None else parent.depth + 1
        self.total = len(messages) + (0 if parent is None else parent.total)

    def line(self) -> "Iterator[Turn]":
        """Itself, and what it continues, the last one first."""
        one: Turn | None = self
        while one is not None:
            yield one
            one = one.parent

    def tokens(self) -> list[int]:
        """The whole text; in a chat, the last prompt and completion."""
        found: list[int] = []
        for turn in reversed([*self.line()]):
            found[turn.common :] = turn.tail
        return found

    def own_messages(self) -> list[dict[str, Any]]:
        return json.loads(b"[%s]" % self.messages)

    def all_messages(self) -> list[dict[str, Any]]:
        return [message for turn in reversed([*self.line()]) for message in turn.own_messages()]


def as_json(messages: Iterable[Message]) -> bytes:
    """As a turn has them."""
    return ",".join(map(json.dumps, messages)).encode()


def shown_from(messages: Sequence[Any], start: int) -> list[Any]:
    """The messages of a prompt that omits those before `start`, but for those of the system, which begin it."""
    system = _system(messages)
    return [*messages[:system], *messages[max(start, system) :]]


def _system(messages: Sequence[Message]) -> int:
    """How many messages of the system a conversation begins with."""
    others = (at for at, one in enumerate(messages) if one["role"] not in ("system", "developer"))
    return next(others, len(messages))


def shortened(messages: Sequence[Message], omitted: int, context: int, render: Render) -> tuple[list[int], int]:
    """The prompt of a chat and how many messages it omits: `omitted`, or, if that is too long, whole turns until half
    of the context is free."""
    prompt = render(shown_from(messages, omitted))
    if len(prompt) <= context:
        return prompt, omitted
    later = range(max(omitted, _system(messages)) + 1, len(messages))
    starts = [at for at in later if messages[at]["role"] == "user"] or [omitted]
    at = bisect_left(starts, True, key=lambda start: len(render(shown_from(messages, start))) <= context // 2)
    omitted = starts[min(at, len(starts) - 1)]
    return render(shown_from(messages, omitted)), omitted


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a new turn, the whole text before context shifts, and its new `messages` and `omitted`."""

    ids: list[int]
    text: list[int]
    params: SamplingParams
    messages: Sequence[Message] = ()
    omitted: int = 0


class _Saved(msgspec.Struct, omit_defaults=True):
    """As it is kept under a name. Of each turn: `prompt` and `common`, what followed the common tokens before it, and
    how many messages there were, and were omitted."""

    tokens: list[int]
    messages: list[dict[str, Any]]
    omitted: int
    turns: list[tuple[int, int, list[int], int, int]]
    adapter: str | None = None


class Transcript:
    """A conversation that can be continued: its last turn. Not thread-safe."""

    def __init__(
        self,
        *,
        chat: bool,
        messages: Iterable[Message] = (),
        tokens: Iterable[int] = (),
        adapter: str | None = None,
    ) -> None:
        """`messages` or `tokens` are what it begins with. `adapter` is the name of the one that turns are computed with
        (see `HowOptions`)."""
        self.chat, self.adapter = chat, adapter
        self.last = Turn(None, as_json(messages), tail=tokens)

    @property
    def tokens(self) -> list[int]:
        return self.last.tokens()

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.last.all_messages()

    @property
    def turns(self) -> int:
        """How many can be rewound."""
        return self.last.depth

    def copy(self) -> "Transcript":
        return copy(self)

    # -- prompts ------------------------------------------------------------------------------------------------

    def continued(
        self,
        new: str | Sequence[int],
        params: SamplingParams,
        context: int,
        encode: Callable[..., list[int]],
    ) -> Prompt:
        """All tokens so far and the new ones; `encode` is that of the engine. `num_keep` -1 keeps the prompt of the
        first turn."""
        before = self.tokens
        if isinstance(new, str):  # begin-of-text only at the beginning
            new = encode(new, special=False if before else None, limit=context)
        if params.num_keep < 0 and before:
            first = next((turn.prompt for turn in self.last.line() if turn.depth == 1), len(before))
            params = replace(params, num_keep=first)
        whole = [*before, *new]
        return Prompt(self._cut(whole, len(new), params, context) if params.shift else whole, whole, params)

    def _cut(self, whole: list[int], new: int, params: SamplingParams, context: int) -> list[int]:
        """`whole` after the context shifts that make it fit the context, all of which keep its last `new` tokens."""
        old = len(whole) - new
        if len(whole) <= context or not old:  # in a first turn, nothing can be dropped
            return whole
        span = shift_span(context, params.num_keep)
        if old <= span.start:
            return whole
        shifts = -(-(len(whole) - context) // len(span))
        return whole[: span.start] + whole[min(span.start + shifts * len(span), old) :]

    def chatted(self, new: Sequence[Message], params: SamplingParams, context: int, render: Render) -> Prompt:
        """The conversation with more messages, `shortened` if that is allowed."""
        messages, omitted = [*self.messages, *new], self.last.omitted
        if params.shift:
            prompt, omitted = shortened(messages, omitted, context, render)
        else:
            prompt = render(shown_from(messages, omitted), limit=context)
        return Prompt(prompt, prompt, params, new, omitted)

    def checkpoint_positions(self, prompt: Sequence[int]) -> list[int]:
        """Positions in `prompt` where turns and their completions begin, from which a rewound conversation resumes.
        Only positions in the prefix that `prompt` shares with these turns."""
        same = common_prefix(self.tokens, prompt)
        positions = {same}
        for turn in self.last.line():
            positions.update(pos for pos in (turn.prompt - 1, turn.common) if pos <= same)
            same = min(same, turn.common)
        return sorted(pos for pos in positions if pos > 0)

    # -- turns --------------------------------------------------------------------------------------------------

    def conclude(self, prompt: Prompt, answer: Sequence[int], message: Message) -> None:
        """Add the turn of `prompt`, whose completion has the tokens `answer`; in a chat, they are `message`."""
        tokens, before = [*prompt.text, *answer], self.tokens
        said = as_json((*prompt.messages, message)) if self.chat else b""
        common = common_prefix(before, tokens)
        self.last = Turn(self.last, said, prompt.omitted, common=common, tail=tokens[common:], prompt=len(prompt.ids))

    def rewind(self, turns: object) -> None:
        """Discard the last turns. Raises `BadRequest` for another number than there are."""
        plain = int.__int__(turns) if isinstance(turns, int) and not isinstance(turns, bool) else -1
        if not 0 <= plain <= self.turns:
            raise BadRequest(f"{shown(turns)} turns cannot be discarded; there are {self.turns}", "turns")
        depth = self.turns - plain
        self.last = next(turn for turn in self.last.line() if turn.depth == depth)

    # -- as it is kept ------------------------------------------------------------------------------------------

    def encoded(self) -> bytes:
        """As JSON."""
        saved = _Saved([], [], 0, [], self.adapter)
        for turn in reversed([*self.last.line()]):
            if turn.parent is not None:
                rest = saved.tokens[turn.common :]
                saved.turns.append((turn.prompt, turn.common, rest, len(saved.messages), saved.omitted))
            saved.tokens[turn.common :] = turn.tail
            saved.messages += turn.own_messages()
            saved.omitted = turn.omitted
        return msgspec.json.encode(saved)

    @classmethod
    def decoded(cls, content: bytes, *, chat: bool, vocab_size: int) -> "Transcript":
        """Raises `ValueError` for what `encoded` does not return, and for tokens that the vocabulary does not have."""
        saved = msgspec.json.decode(content, type=_Saved)
        tokens, messages, omitted = saved.tokens, saved.messages, saved.omitted
        every = [*filterfalse(is_row, chain(tokens, *(rest for _, _, rest, _, _ in saved.turns)))]
        if every and not 0 <= min(every) <= max(every) < vocab_size:
            raise ValueError("it has tokens that the model does not have")
        if not all(isinstance(message.get("role"), str) for message in messages) or (messages and not chat):
            raise ValueError("its messages are none of a chat")
        added: list[Callable[[Turn], Turn]] = []
        for prompt, common, rest, count, before in reversed(saved.turns):
            if not (0 <= common <= len(tokens) and 0 <= count <= len(messages) and before <= omitted <= len(messages)):
                raise ValueError("it contradicts itself")
            tail, said = tokens[common:], as_json(messages[count:])
            added.append(partial(Turn, messages=said, omitted=omitted, common=common, tail=tail, prompt=prompt))
            tokens[common:], messages[count:], omitted = rest, [], before
        if not 0 <= omitted <= len(messages):
            raise ValueError("it omits messages that it does not have")
        made = cls(chat=chat, adapter=saved.adapter)
        made.last = Turn(None, as_json(messages), omitted, tail=tokens)
        for add in reversed(added):
            made.last = add(made.last)
        return made

    def without_tokens(self) -> "Transcript":
        """A chat for a model with other tokens: its prompts depend on the messages alone."""
        other = Transcript(chat=self.chat, adapter=self.adapter)
        first, *rest = reversed([*self.last.line()])
        other.last = Turn(None, first.messages, first.omitted)
        for turn in rest:
            other.last = Turn(other.last, turn.messages, turn.omitted)
        return other


def is_chat(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_prefix(render: Render, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens that all chats have in common which begin with these messages. After one of the user, that is the
    prompt of the answer; after others, what comes before the text of the user's next message."""
    if messages and messages[-1].get("role") == "user":
        return render(messages)
    one, other = (render([*messages, {"role": "user", "content": text}]) for text in ("a", "b"))
    if not (common := one[: common_prefix(one, other)]):
        raise BadRequest("chats that begin with these messages have no tokens in common", "messages")
    return common
