"""replay: the tokens of a chat's prompt, in which replies have the tokens that they were generated with.

A client sends the text of a reply, not its tokens, and a tokenizer may give that text other tokens than the model drew:
what is in memory of the reply could not be used. So prompts and replies are kept (`turns`). A prompt whose text begins
with that of an earlier one begins with its tokens; the tokens of the reply follow, as far as the text does, then those
that the tokenizer gives the rest.

The text that the model reads is that of the template in any case:
  * the tokens of a reply are used only where their text is in the prompt, byte for byte;
  * after a part of a reply, other tokens follow only where the tokenizer's tokens begin at the same byte;
  * a control token of a reply is used only where the template has written it: what a client writes is text.

Safe to use from several threads. `Replays` is for tokenizers whose decoder changes no earlier text (`DecoderKind`);
with others, every prompt has the tokens that the tokenizer gives it.

`History` has the messages of a chat by digest, and tells which of them is not what it was in an earlier prompt.

`SharedReplies` are those of other front ends: where a chat was answered elsewhere, its last prompt and the replies to
it are looked up once, and used like those that are known here.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, NamedTuple, Protocol

from kvcellar.events import Rewrite
from kvcellar.images.image import is_row
from kvcellar.text.conversation import common, texts
from kvcellar.text.output import DecoderKind, decoder_kind
from kvcellar.text.template import Rendered
from kvcellar.text.tokens import KNOWN_BYTES, TextTokenizer
from kvcellar.text.turns import Node, PromptTurn, Turns, Walk, packed, prompt_key, unpacked

DIGEST = 8  # bytes, of one message


@dataclass(frozen=True, slots=True)
class History:
    """`said` has a digest of each message, `keys[n]` is one of the first `n`, of the namespace and of the settings of
    the template."""

    said: tuple[bytes, ...]
    keys: tuple[bytes, ...]

    @property
    def key(self) -> bytes:
        return self.keys[-1]


def history(rendered: Rendered, namespace: str) -> History:
    digest = blake2b(_json([namespace, rendered.settings]), digest_size=16)
    said, keys = list[bytes](), [digest.digest()]
    for message in rendered.messages:
        said.append(blake2b(_json(message), digest_size=DIGEST).digest())
        digest.update(said[-1])
        keys.append(digest.digest())
    return History(tuple(said), tuple(keys))


def changed(now: Sequence[bytes], before: Sequence[bytes]) -> int | None:
    """The first message that is another one than in an earlier request of the same conversation: one that has some of
    the messages from there on. None if there is none."""
    first = next((n for n, (one, other) in enumerate(zip(now, before, strict=False)) if one != other), None)
    return first if first is not None and not set(now[first:]).isdisjoint(before[first:]) else None


def as_generated(message: Mapping[str, Any], reply: str) -> bool:
    """Whether a client has sent a reply back as it was: what differs is the work of the template."""
    if message.get("tool_calls"):
        return True
    content = "".join(texts(message)).strip()
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str):
        return content == reply.strip()
    return reasoning.strip() in reply and content in reply


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


HEAD = 256  # characters of a text that its first token is compared with
TRIED = 4  # of the turns that a text begins with, how many are tried
FIRST_BORDERS, LAST_BORDERS = 2, 8  # of messages, where a prompt leaves checkpoints


class Fit(NamedTuple):
    """How a prompt goes on after that of a turn: with `ids`, which begin with the first `kept` tokens of a reply, whose
    text has `covers` bytes."""

    turn: PromptTurn
    reply: Sequence[int]
    kept: int
    covers: int
    ids: list[int]


class Known(NamedTuple):
    """What is known of the prompt of a chat. `key` is that of its tokens, `borders` are positions among them where
    messages begin, `rewrite` is what it has in another form than the conversation so far, and `images` are the places
    of its images: message and number in it."""

    key: bytes
    borders: tuple[int, ...]
    rewrite: Rewrite | None
    images: tuple[tuple[int, int], ...]


class Earlier(NamedTuple):
    """The last prompt of the same conversation, if one is known, with its text if the new prompt does not begin with
    that; and one that has the longest common text with the new prompt."""

    turn: PromptTurn | None
    text: str | None
    near: PromptTurn | None


class Answered(NamedTuple):
    """A prompt as another front end needs it, with its replies. `end`, `marks` and `history` are those of its turn, and
    tokens are as bytes."""

    namespace: str
    history: bytes
    end: int
    marks: tuple[int, ...]
    ids: bytes
    replies: tuple[bytes, ...]


class SharedReplies(Protocol):
    """Of all front ends of a model, by `owner`, the tenant that quotas count them for."""

    def find(self, owner: str, namespace: str, history: bytes) -> Answered | None:
        """The prompt with this `history`. None if it is not known, or not within a small time."""
        ...

    def keep(self, owner: str, made: Callable[[], Answered | None]) -> None:
        """Keep what `made` returns, which is called later, on another thread. Returns at once."""
        ...


class Replays:
    """What is known of the chats of one model: at most `most_bytes` of text and tokens, as `turns` counts them."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        most_bytes: int,
        *,
        borders: bool = False,
        shared: SharedReplies | None = None,
        placeholder: int | None = None,
    ) -> None:
        """`borders`: find where messages begin, which takes another rendering of each prompt. `placeholder`: the token
        that is written for each row of an image."""
        self._tokenizer, self._finds_borders, self._shared = tokenizer, borders, shared
        self._placeholder = placeholder
        self._most = 0 if decoder_kind(tokenizer.decoder_steps) is DecoderKind.WHOLE else most_bytes
        self._turns = Turns(self._most)
        self.used = False  # whether a chat was rendered
        self._lock = threading.Lock()
        self._arrived: deque[tuple[bytes, Sequence[int]]] = deque()  # replies, by key of the prompt
        self._bytes_of = lru_cache(KNOWN_BYTES)(partial(_bytes_of, tokenizer))
        self._leads = [(lead, tokenizer.encode_marked(lead, ())) for lead in self._ordered_leads()]

    def _ordered_leads(self) -> Sequence[str]:
        """Texts before a text that is tokenized as the rest of another one. Some tokenizers put a space in front of a
        text: for these, something has to be in front."""
        leads = ("\n", ".", "")
        alone = b"".join(map(self._tokenizer.token_bytes, self._tokenizer.encode_marked("a", ())))
        return ("", *leads[:2]) if alone == b"a" else leads

    def encode(self, rendered: Rendered, namespace: str, *, owner: str = "", limit: int | None = None) -> list[int]:
        """The tokens of a prompt. `owner`: whose shared replies it may have. Raises what `Rendered.encode` raises."""
        if 4 * len(rendered.text) > self._most:  # also where no replies are kept
            return rendered.encode(self._tokenizer, limit=limit)
        self._tokenizer.check_length(rendered.written, limit)
        with self._taken_in():
            walk = self._turns.walk(namespace, rendered.text)
        known = [turn for turn in walk.turns if rendered.until(turn.end).marks == turn.marks]
        now = history(rendered, namespace)
        if known and known[-1].end == len(rendered.text):
            ids, fit = known[-1].all_ids(), None
        elif (fit := self._best_fit(known, rendered, namespace, owner, now)) is not None:
            ids = fit.turn.all_ids() + fit.ids
        else:
            ids = rendered.encode(self._tokenizer, limit=limit)
        if limit is not None and len(ids) > limit:  # the tokenizer may need fewer
            return rendered.encode(self._tokenizer, limit=limit)
        self._remember(rendered, namespace, now, ids, fit)
        return ids

    def known(self, namespace: str, prompt: Sequence[int]) -> Known | None:
        """What is known of a prompt; None if it was not that of a chat. Costs O(tokens). To be called once chats were
        rendered (`used`)."""
        key = prompt_key(namespace, prompt)
        with self._taken_in():
            turn = self._turns.of_prompt(key)
            return Known(key, turn.borders, turn.rewrite, turn.images) if turn is not None else None

    def replied(self, key: bytes, owner: str | None, reply: Sequence[int]) -> None:
        """Know a reply to the prompt of this key, from the next call of another method on; share it for its `owner`,
        unless that is None. Costs nothing and waits for no lock: it is called on the engine's thread."""
        self._arrived.append((key, reply))
        if self._shared is not None and owner is not None:
            self._shared.keep(owner, partial(self._answered, key))

    def _answered(self, key: bytes) -> Answered | None:
        with self._taken_in():
            if (turn := self._turns.of_prompt(key)) is None or not turn.replies:
                return None
            ids, replies = packed(turn.all_ids()).tobytes(), tuple(reply.tobytes() for reply in turn.replies)
            return Answered(turn.node.namespace, turn.history, turn.end, turn.marks, ids, replies)

    @contextmanager
    def _taken_in(self) -> Generator[None]:
        """The lock is held in the block, where all replies are known that have arrived before it."""
        with self._lock:
            while self._arrived:
                key, reply = self._arrived.popleft()
                if (turn := self._turns.of_prompt(key)) is not None:
                    self._turns.reply(turn, reply)
            yield

    def clear(self) -> None:
        with self._taken_in():
            self._turns.clear()

    def check(self) -> None:
        """Assert what is always true."""
        with self._taken_in():
            self._turns.check()

    # -- a prompt that continues another one ------------------------------------------------------------------------

    def _best_fit(
        self, known: Sequence[PromptTurn], rendered: Rendered, namespace: str, owner: str, now: History
    ) -> Fit | None:
        here, elsewhere = self._fitting(known, rendered), self._from_elsewhere(rendered, namespace, owner, now)
        if here is None or (elsewhere is not None and elsewhere.turn.end > here.turn.end):
            return elsewhere
        return here

    def _from_elsewhere(self, rendered: Rendered, namespace: str, owner: str, now: History) -> Fit | None:
        """The fit of the last prompt of the conversation that was answered, if that was not here."""
        answers = (at for at in reversed(range(len(rendered.messages))) if rendered.messages[at]["role"] == "assistant")
        if self._shared is None or (last := next(answers, None)) is None:
            return None
        key = now.keys[last]
        with self._taken_in():
            turn = self._turns.of_history(key)
        if (turn is not None and turn.replies) or (found := self._shared.find(owner, namespace, key)) is None:
            return None
        before = rendered.until(found.end)
        rows = [row for image in before.images.among(before.text) for row in image.input.row_ids()]
        if found.end > len(rendered.text) or found.marks != before.marks or (rows and len(found.ids) % 8):
            return None
        ids, replies = unpacked(found.ids, wide=bool(rows)), tuple(map(unpacked, found.replies))
        if [*filter(is_row, ids)] != rows:
            return None
        tokens = (token for token in chain(ids, *replies) if not is_row(token))
        if any(self._tokenizer.written(token) is None for token in tokens) or not self._spells(ids, before.written):
            return None
        node = Node(None, "", namespace)
        return self._fit(
            PromptTurn(node, None, ids, found.end, len(ids), before.marks, (), b"", b"", replies=replies), rendered
        )

    def _spells(self, ids: Iterable[int], text: str) -> bool:
        """Whether the text is that of these tokens, but for spaces that some tokenizers put in front of texts."""
        written, at = text.encode(), 0
        for token in ids:
            spelled = self._spelled(token)
            if not written.startswith(spelled, at):
                spelled = spelled.removeprefix(b" ")
            if not written.startswith(spelled, at):
                return False
            at += len(spelled)
        return at == len(written)

    def _fitting(self, known: Sequence[PromptTurn], rendered: Rendered) -> Fit | None:
        """The fit of the longest prompt that has a reply with which the text goes on."""
        answered = [turn for turn in reversed(known) if turn.replies][:TRIED]
        return next((fit for turn in answered if (fit := self._fit(turn, rendered)) is not None), None)

    def _spelled(self, token: int) -> bytes:
        """The bytes of a token, and the text of a control token; of a row of an image, those of its placeholder."""
        if is_row(token):
            assert self._placeholder is not None
            return self._spelled(self._placeholder)
        written = self._tokenizer.control.get(token)
        return self._bytes_of(token) if written is None else written.encode()

    def _fit(self, turn: PromptTurn, rendered: Rendered) -> Fit | None:
        after = rendered.since(turn.end)
        rest = self._rest(after)
        if rest is None:
            return None
        fits = (self._fit_of(turn, reply, after, rest) for reply in reversed(turn.replies))
        return max((fit for fit in fits if fit.kept), key=lambda fit: fit.covers, default=None)

    def _fit_of(self, turn: PromptTurn, reply: Sequence[int], after: Rendered, rest: Sequence[int]) -> Fit:
        kept, used, covers = self._cut(reply, rest)
        if kept < len(reply) and (found := self._after(reply, after, rest)) is not None:
            covers, ids = found
            return Fit(turn, reply, len(reply), covers, [*reply, *ids])
        return Fit(turn, reply, kept, covers, [*reply[:kept], *rest[used:]])

    def _rest(self, after: Rendered) -> list[int] | None:
        """The tokens of a text that continues another one. None if every way of tokenizing it adds a space to it."""
        begins = after.written[:HEAD].encode()
        for lead, before in self._leads:
            ids = after.encode(self._tokenizer, lead=lead)
            rest = ids[len(before) :]
            if ids[: len(before)] == before and self._begins(rest, begins):
                return rest
        return None

    def _begins(self, ids: Sequence[int], text: bytes) -> bool:
        return not ids or ids[0] in self._tokenizer.control or is_row(ids[0]) or text.startswith(self._bytes_of(ids[0]))

    def _cut(self, reply: Sequence[int], rest: Sequence[int]) -> tuple[int, int, int]:
        """After how many tokens of a reply, and how many of `rest`, the tokens of `rest` can follow those of the reply:
        where both have the same text so far, and the bytes of that text. As many as possible."""
        ends, text = self._ends(reply)
        most = len(text)
        head: list[int] = []
        size = 0
        for token in rest:
            if size >= most:
                break
            head.append(token)
            size += len(self._bytes_of(token))
        places, other = self._ends(head)
        alike = common(text, other)
        after = {end: count for count, end in enumerate(places, start=1) if end <= alike}
        said, written = self._counts(reply), self._counts(head)  # of control tokens up to each place
        same = next(
            (n for n, (a, b) in enumerate(zip(self._controls(reply), self._controls(head), strict=False)) if a != b),
            min(said[-1], written[-1]),
        )
        for kept, end in reversed([*enumerate(ends, start=1)]):
            if end in after and said[kept] == written[after[end]] <= same:
                return kept, after[end], end
        return 0, 0, 0

    def _ends(self, ids: Sequence[int]) -> tuple[list[int], bytes]:
        """Where each token ends in the bytes of all of them, and these."""
        ends, parts, size = list[int](), list[bytes](), 0
        for token in ids:
            parts.append(self._bytes_of(token))
            size += len(parts[-1])
            ends.append(size)
        return ends, b"".join(parts)

    def _after(self, reply: Sequence[int], after: Rendered, rest: Sequence[int]) -> tuple[int, list[int]] | None:
        """The bytes of a whole reply, and the tokens of what follows it, where the tokenizer has a token across its
        end; `rest` are those that it gives to `text`. None if the text does not begin with the reply, or its control
        tokens would be others."""
        spoken = self._ends(reply)[1]
        try:
            said = spoken.decode()
        except UnicodeDecodeError:
            return None
        if not after.text.startswith(said):
            return None
        ids = self._rest(after.since(len(said)))
        return (len(spoken), ids) if ids is not None and self._controls(ids) == self._controls(rest) else None

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._tokenizer.control]

    def _counts(self, ids: Sequence[int]) -> list[int]:
        """How many control tokens are among the first n, for n from 0."""
        return [*accumulate((token in self._tokenizer.control for token in ids), initial=0)]

    # -- what is not as it was --------------------------------------------------------------------------------------

    def _remember(self, rendered: Rendered, namespace: str, now: History, ids: list[int], fit: Fit | None) -> None:
        self.used = True
        with self._taken_in():
            earlier = self._earlier(now, self._turns.walk(namespace, rendered.text))
        found = self._rewrite(rendered, now, ids, earlier, fit)
        borders = self._borders(rendered, ids) if self._finds_borders else ()
        with self._taken_in():
            parent = fit.turn if fit is not None and fit.turn in self._turns else None
            turn = self._turns.add(
                namespace,
                rendered.text,
                ids,
                parent=parent,
                marks=rendered.marks,
                said=now.said,
                history=now.key,
                borders=borders,
                images=tuple(rendered.images.places),
            )
            turn.rewrite = found

    def _borders(self, rendered: Rendered, ids: Sequence[int]) -> tuple[int, ...]:
        """Positions in the tokens of a prompt where messages begin: the first ones, where a system prompt ends, and the
        last ones. The tokens before a border have only text that is before the message."""
        starts, end = list[int](), 0
        for place in rendered.places():
            start = end if place.start is None else place.start
            if place.message or rendered.messages[0]["role"] not in ("system", "developer"):
                starts.append(start)
            end = place.end
        starts = sorted(starts)
        starts = [*starts[:FIRST_BORDERS], *starts[FIRST_BORDERS:][-LAST_BORDERS:]]
        return tuple(sorted({at for at in self._tokens_before(rendered, starts, ids) if 0 < at < len(ids)}))

    def _tokens_before(self, rendered: Rendered, places: Sequence[int], ids: Sequence[int]) -> list[int]:
        """How many of its tokens are whole before each of these places in a text, ascending. None if the tokens do not
        spell the text, but for spaces that some tokenizers put in front of texts."""
        written, found, at = rendered.written.encode(), list[int](), 0
        parts = (rendered.images.written(rendered.text[a:b])[0] for a, b in pairwise([0, *places]))
        ends = [*accumulate(len(part.encode()) for part in parts)]
        for number, token in enumerate(ids):
            spelled = self._spelled(token)
            if not written.startswith(spelled, at):
                spelled = spelled.removeprefix(b" ")
                if not written.startswith(spelled, at):
                    return []
            at += len(spelled)
            while len(found) < len(ends) and at > ends[len(found)]:
                found.append(number)
            if len(found) == len(ends):
                break
        return found

    def _earlier(self, now: History, walk: Walk) -> Earlier:
        known = (self._turns.of_history(key) for key in reversed(now.keys[1:]))
        turn = next((turn for turn in known if turn is not None), None)
        text = turn.node.text() if turn is not None and turn not in walk.turns else None
        return Earlier(turn, text, self._turns.below(walk.node))

    def _rewrite(
        self, rendered: Rendered, now: History, ids: Sequence[int], earlier: Earlier, fit: Fit | None
    ) -> Rewrite | None:
        """What of the conversation so far is in another form in this prompt."""
        turn, near = earlier.turn, earlier.near
        if turn is not None and earlier.text is not None:
            start = common(earlier.text, rendered.text)
            index = next((place.message for place in rendered.places() if place.end > start), None)
            if index is not None and index >= len(turn.said):
                return None  # only the beginning of the reply that was asked for is not there
            reply = turn.replies[-1] if turn.replies else ()
            return _lost(rendered, index, "template", turn, reply, ids)
        if turn is not None and turn.replies and (found := self._other_reply(rendered, turn, ids, fit)) is not None:
            return found
        if near is not None and (index := changed(now.said, near.said)) is not None:
            return _lost(rendered, index, "client", near, (), ids)
        return None

    def _other_reply(self, rendered: Rendered, turn: PromptTurn, ids: Sequence[int], fit: Fit | None) -> Rewrite | None:
        """Whether the prompt has a reply to `turn`, with whose text it begins, in another form."""
        index = len(turn.said)
        if index >= len(rendered.messages) or (message := rendered.messages[index])["role"] != "assistant":
            return None
        reply, kept = (fit.reply, fit.kept) if fit is not None and fit.turn is turn else (turn.replies[-1], 0)
        content = "".join(texts(message)).strip()
        if kept == len(reply) or (content and content in self._tokenizer.decode(reply[:kept])):
            return None  # what follows was never in the message, such as a stop string
        by = "template" if as_generated(message, self._tokenizer.decode(reply)) else "client"
        return _lost(rendered, index, by, turn, reply, ids)


def _bytes_of(tokenizer: TextTokenizer, token: int) -> bytes:
    """The bytes of a token in a text; of a control token, and of a row of an image, bytes that no text has."""
    if token in tokenizer.control or is_row(token):
        return b"\xff" + token.to_bytes(8, "little")
    return tokenizer.token_bytes(token)


def _lost(
    rendered: Rendered,
    index: int | None,
    by: Literal["template", "client"],
    turn: PromptTurn,
    reply: Sequence[int],
    ids: Sequence[int],
) -> Rewrite | None:
    """The record of a message that keeps a prompt from beginning with all of `turn` and its reply; None if it does."""
    same = common([*turn.all_ids(), *reply], ids)
    role = rendered.messages[index]["role"] if index is not None else ""
    lost = turn.count + len(reply) - same
    return Rewrite(index, role, by, lost) if lost else None
