"""dialogue: the text of a conversation by turns, and the prompt of its next turn. It computes nothing.

With `shift`, a conversation may outgrow the context. The prompt of a turn then omits the oldest part: in a chat the
oldest turns after the system message, else as many tokens after the first `num_keep` as context shifts would have
dropped. The new message or text is never truncated.

Always true:
  * the prompt of a turn depends on `tokens` or `messages` alone;
  * a prompt changes nothing; only `conclude` adds a turn, and `rewind` restores what was there before it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvcellar.engine.request import shift_span
from kvcellar.errors import BadRequest, shown
from kvcellar.prefix.node import common_prefix
from kvcellar.sample.params import SamplingParams


class Render(Protocol):
    """Tokenizes messages, as `Engine.render` does."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, limit: int | None = None) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a new turn, the whole text before context shifts, and the new `messages` and `omitted`."""

    ids: list[int]
    text: list[int]
    params: SamplingParams
    messages: Sequence[dict[str, Any]] = ()
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The length of its prompt, and the state to restore in `rewind`: the tokens before the turn were the first
    `common` tokens of those after it, followed by `rest`."""

    prompt: int
    common: int
    rest: tuple[int, ...]
    messages: int
    omitted: int


class Dialogue:
    """The state of a session. Not thread-safe."""

    def __init__(self, *, chat: bool, adapter: str | None = None) -> None:
        """`adapter` is the name of the one that turns are computed with (see `HowOptions`)."""
        self.chat, self.adapter = chat, adapter
        self.tokens: list[int] = []  # the whole text; in a chat, the last turn's prompt and completion
        self.messages: list[dict[str, Any]] = []  # all messages of a chat
        self.omitted = 0  # messages after those of the system that prompts omit, counted from the first message
        self.turns: list[Turn] = []

    def copy(self) -> "Dialogue":
        other = Dialogue(chat=self.chat, adapter=self.adapter)
        other.tokens, other.messages, other.turns = list(self.tokens), list(self.messages), list(self.turns)
        other.omitted = self.omitted
        return other

    # -- prompts ------------------------------------------------------------------------------------------------

    def continued(self, new: Sequence[int], params: SamplingParams, context: int) -> Prompt:
        """All tokens so far and the new ones. `num_keep` -1 keeps the prompt of the first turn."""
        if params.num_keep < 0 and self.tokens:
            params = replace(params, num_keep=self.turns[0].prompt if self.turns else len(self.tokens))
        whole = [*self.tokens, *new]
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

    def chatted(self, new: Sequence[dict[str, Any]], params: SamplingParams, context: int, render: Render) -> Prompt:
        """The conversation with more messages. If it is too long, whole turns are omitted until half of the context is
        free."""
        messages, omitted = [*self.messages, *new], self.omitted
        system = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), 0)

        def shown_from(start: int) -> list[dict[str, Any]]:
            return messages[:system] + messages[max(start, system) :]

        prompt = render(shown_from(omitted), limit=None if params.shift else context)
        if params.shift and len(prompt) > context:
            later = range(max(omitted, system) + 1, len(messages))
            starts = [at for at in later if messages[at]["role"] == "user"] or [omitted]
            at = bisect_left(starts, True, key=lambda start: len(render(shown_from(start))) <= context // 2)
            omitted = starts[min(at, len(starts) - 1)]
            prompt = render(shown_from(omitted))
        return Prompt(prompt, prompt, params, messages, omitted)

    def checkpoint_positions(self, prompt: Sequence[int]) -> list[int]:
        """Positions in `prompt` where turns and their completions begin, from which a rewound conversation resumes.
        Only positions in the prefix that `prompt` shares with these turns."""
        same = common_prefix(self.tokens, prompt)
        positions = {same}
        for turn in reversed(self.turns):
            positions.update(pos for pos in (turn.prompt - 1, turn.common) if pos <= same)
            same = min(same, turn.common)
        return sorted(positions - {0})

    # -- turns --------------------------------------------------------------------------------------------------

    def conclude(self, prompt: Prompt, answer: Sequence[int], message: Mapping[str, Any]) -> None:
        """Add the turn of `prompt`, whose completion has the tokens `answer`; in a chat, they are `message`."""
        tokens = [*prompt.text, *answer]
        common = common_prefix(self.tokens, tokens)
        rest = tuple(self.tokens[common:])
        self.turns.append(Turn(len(prompt.ids), common, rest, len(self.messages), self.omitted))
        self.tokens, self.omitted = tokens, prompt.omitted
        if prompt.messages:
            self.messages = [*prompt.messages, dict(message)]

    def rewind(self, turns: object) -> None:
        """Discard the last turns. Raises `BadRequest` for another number than there are."""
        plain = int.__int__(turns) if isinstance(turns, int) and not isinstance(turns, bool) else -1
        if not 0 <= plain <= len(self.turns):
            raise BadRequest(f"{shown(turns)} turns cannot be discarded; there are {len(self.turns)}", "turns")
        for _ in range(plain):
            turn = self.turns.pop()
            self.tokens[turn.common :] = turn.rest
            del self.messages[turn.messages :]
            self.omitted = turn.omitted

    # -- as JSON ------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        turns = [[turn.prompt, turn.common, list(turn.rest), turn.messages, turn.omitted] for turn in self.turns]
        text = {"tokens": self.tokens, "messages": self.messages, "omitted": self.omitted, "turns": turns}
        return text if self.adapter is None else text | {"adapter": self.adapter}

    @classmethod
    def from_json(cls, value: Any, *, chat: bool, vocab_size: int) -> "Dialogue":
        """Raises `ValueError` for what `to_json` does not return, and for tokens that the vocabulary does not have."""
        dialogue = cls(chat=chat)
        try:
            dialogue.tokens, dialogue.messages = list(value["tokens"]), list(value["messages"])
            dialogue.omitted, dialogue.adapter = value["omitted"], value.get("adapter")
            turns = value["turns"]
            dialogue.turns = [Turn(prompt, common, tuple(rest), *ends) for prompt, common, rest, *ends in turns]
            valid = dialogue._is_valid(vocab_size) and isinstance(dialogue.adapter, str | None)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no conversation: {error}") from error
        if not valid:
            raise ValueError("it contradicts itself")
        return dialogue

    def without_tokens(self) -> "Dialogue":
        """A chat for a model with other tokens: its prompts depend on the messages alone."""
        other = self.copy()
        other.tokens, other.turns = [], [replace(turn, prompt=0, common=0, rest=()) for turn in self.turns]
        return other

    def _is_valid(self, vocab_size: int) -> bool:
        """Whether all tokens and counts are possible. Raises `LookupError` and `TypeError` for other types."""
        parts = (self.tokens, *(turn.rest for turn in self.turns))
        if not all(type(token) is int and 0 <= token < vocab_size for part in parts for token in part):
            return False
        if not all(isinstance(one["role"], str) for one in self.messages) or (self.messages and not self.chat):
            return False
        tokens, messages, omitted = len(self.tokens), len(self.messages), self.omitted
        for turn in reversed(self.turns):
            if not (0 <= turn.common <= tokens and 0 <= turn.messages <= messages and turn.omitted <= omitted):
                return False
            if not all(type(number) is int for number in (turn.prompt, turn.common, turn.messages, turn.omitted)):
                return False
            tokens, messages, omitted = turn.common + len(turn.rest), turn.messages, turn.omitted
        return type(omitted) is int and 0 <= omitted <= len(self.messages)

    def check(self) -> None:
        """Assert what is always true."""
        assert self._is_valid(1 << 62)
