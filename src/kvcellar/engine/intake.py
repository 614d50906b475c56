"""intake: from checked arguments (`arguments.py`) to a request that this model can serve, and the memory that it holds
until it is over. No torch.

Always true: bytes of `PromptMemory` and the use of an adapter are taken before a request reaches the engine's thread,
and given back once: when it is over, or at once if it could not be submitted, or was interrupted before that thread had
it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from kvcellar.engine.arguments import namespace_name, prompt_ids
from kvcellar.engine.output_processor import OutputProcessor
from kvcellar.engine.request import Completion, Request, fresh_seed
from kvcellar.errors import BadRequest, Overloaded, PromptTooLong
from kvcellar.events import Event
from kvcellar.layout import Layout
from kvcellar.messages import EngineEvent, Submission
from kvcellar.sample.params import SamplingParams, check_ids
from kvcellar.sample.sampler import Sampler
from kvcellar.text.meter import caps_for
from kvcellar.text.output import LONG_RUN, Output, Stops, open_stream
from kvcellar.text.preamble import NO_PREAMBLE, Preamble
from kvcellar.text.replay import FIRST_BORDERS, LAST_BORDERS, Known, Replays
from kvcellar.text.replies.read_output import ReadOutput
from kvcellar.text.replies.reading import ReplyReading
from kvcellar.text.template import ChatTemplate, RenderOptions, checked_options
from kvcellar.text.tokens import TextTokenizer, longest_text
from kvcellar.text.trial import try_tokenizer

if TYPE_CHECKING:  # imports transformers
    from kvcellar.engine.adapters import Adapters
    from kvcellar.models.text_assets import TextAssets
    from kvcellar.sample.grammars import Grammars  # imports NumPy

TOKEN_BYTES = 44  # of a token id in a tuple, and of the id itself
COPY_BYTES = 8  # of a token id in the list of one completion
SCORE_BYTES = 144  # of a token id with its log-probability


@dataclass(frozen=True, slots=True)
class Intake:
    """What an engine checks of a request, and makes of it. Safe to use from several threads."""

    codec: "TextCodec"
    prompts: "PromptMemory"
    context: int
    vocab_size: int
    end_ids: frozenset[int]
    padding: int | None  # the padding token, in models that do not count it as a position
    groups: Mapping[str, tuple[Layout, int]]  # layout and cells of each
    adapters: "Adapters"
    grammars: "Grammars"

    def prompt(self, ids: Any, params: SamplingParams) -> tuple[int, ...]:
        """The prompt as a tuple. Raises `BadRequest` or `PromptTooLong` if this model cannot serve it with `params`."""
        found = prompt_ids(ids, vocab_size=self.vocab_size, context=self.context)
        self._check_padding(found)
        check_ids(params, self.vocab_size)
        if params.stop and not self.codec.has_text:
            raise BadRequest("stop strings need a tokenizer, and this model has none; use stop_token_ids", "stop")
        self._check_fits(len(found))
        return found

    def submit(
        self,
        submission: Submission,
        deliver: Callable[[EngineEvent], None],
        take_in: Callable[[Request, Completion], None],
    ) -> Request:
        """Make a request, take the memory that it holds until it is over, and pass it to `take_in` with its first
        completion. After an error, which is raised, it holds nothing."""
        params = submission.params
        scores = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
        size, use, request = self.prompts.take(len(submission.prompt), params.n, scores), None, None
        try:
            if (submission.adapter, self.adapters.default) != (None, None):
                use = self.adapters.take(submission.adapter)
            request = Request(submission, deliver, use)
            request.on_done = partial(self.ended, request, size)
            take_in(request, self.completion(request, fresh_seed() if params.seed is None else params.seed))
        except BaseException:
            if request is None or request.claim():
                self.prompts.give(size)
                self.adapters.give(use)
            else:  # an interrupt has come after it was submitted: it is cancelled, and gives back what it holds then
                request.unreachable = True
            raise
        return request

    def processor(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        deliver: Callable[[Event], None],
        reading: ReplyReading | None,
        chat: Known | None,
        *,
        stop: Callable[[int, int], None],
        fail: Callable[[Exception], None],
    ) -> OutputProcessor:
        """What makes the text of a request. `reading`: how its answers are read; `chat`: what is known of its prompt,
        whose replies are known from then on. `stop` and `fail` as `OutputProcessor` has them."""
        replays, output = self.codec.replays, partial(self.codec.output, Stops(params.stop), prompt, reading)
        replied = partial(replays.replied, chat.key) if replays is not None and chat is not None else None
        return OutputProcessor(params, output, deliver, stop=stop, fail=fail, replied=replied)

    def chat(self, namespace: str, prompt: Sequence[int]) -> Known | None:
        """What is known of the chat whose prompt this is."""
        replays = self.codec.replays
        return replays.known(namespace, prompt) if replays is not None and replays.used else None

    def borders(self, prompt: Sequence[int], chat: Known | None) -> tuple[int, ...]:
        """Where messages of a chat begin in a prompt: the first ones, where a system prompt ends, and the last ones. If
        that is not known from how it was rendered: at tokens that are no text."""
        if chat is not None and chat.borders:
            return chat.borders
        special = self.codec.special_ids
        found = [pos for pos, token in enumerate(prompt) if token in special and pos]
        return (*found[:FIRST_BORDERS], *found[FIRST_BORDERS:][-LAST_BORDERS:])

    def completion(self, request: Request, seed: int) -> Completion:
        """The completion of `request` that prefills its prompt. Compiles its constraint: see `Grammars.matcher`."""
        matcher, owner = None, request.retention.owner
        if (constraint := request.params.constraint) is not None:
            matcher = self.grammars.matcher(constraint, owner=owner, namespace=request.submission.namespace)
        sampler = Sampler(
            request.params,
            seed=seed,
            index=0,
            prompt_ids=request.prompt,
            vocab_size=self.vocab_size,
            end_ids=self.end_ids,
            never_ids=frozenset() if self.padding is None else frozenset({self.padding}),
            matcher=matcher,
        )
        return Completion(request, sampler, list(request.prompt))

    def siblings(self, completion: Completion, most: int) -> list[Completion]:
        """The next outputs, up to `most`, of a request whose prompt `completion` has prefilled; none if it has drawn a
        token already."""
        request = completion.request
        first = len(request.completions)
        missing = range(first, min(request.params.n, first + most)) if not completion.sampler.produced else ()
        return [Completion(request, completion.sampler.fork(index), list(completion.tokens)) for index in missing]

    def ended(self, request: Request, size: int) -> None:
        """A request is over, whose prompt took `size` bytes. Runs on the engine's thread."""
        self.prompts.give(size)
        if request.adapter is not None:
            self.adapters.give(request.adapter)
        for completion in request.completions:
            if completion.sampler.matcher is not None:
                completion.sampler.matcher.close()

    def _check_padding(self, prompt: Sequence[int]) -> None:
        """Raise `BadRequest` for a prompt that contains the padding token.

        Such a model leaves it out when it counts positions in a forward without a cache, and counts it in one with a
        cache: no positions would be right.
        """
        if self.padding is not None and self.padding in prompt:
            raise BadRequest(
                f"prompt has token {self.padding} at {prompt.index(self.padding)}, which is padding: this model does "
                f"not count it as a position, so it cannot be part of a text. Leave it out",
                "prompt",
            )

    def _check_fits(self, tokens: int) -> None:
        """Raise `PromptTooLong` if a prompt of so many tokens could not be in memory, even alone."""
        for name, (layout, cells) in self.groups.items():
            if layout.most_cells(tokens, 1) > cells:
                raise PromptTooLong(tokens, cells, f"the memory for {name} layers", hint="Or raise cache_bytes.")


class TextCodec:
    """Text to token ids and back, with the model's tokenizer and chat template. Safe to use from several threads.

    All methods raise `BadRequest` where the model has none.
    """

    def __init__(
        self,
        assets: "TextAssets | None",
        why_not: str,
        end_ids: frozenset[int],
        *,
        context: int,
        text_bytes: int,
        replay_bytes: int,
        borders: bool = False,
        preamble: Preamble = NO_PREAMBLE,
    ) -> None:
        """`why_not` is the reason where `assets` is None. `text_bytes` of memory are for tokenizing, `replay_bytes` for
        the tokens of chats. `borders`: the model can resume only at checkpoints, so where messages begin is found.
        `preamble` comes before all messages. Raises `ModelRefused` for a tokenizer or a template that cannot be
        used."""
        self._tokenizer: TextTokenizer | None = None
        self._template: ChatTemplate | None = None
        self.replays: Replays | None = None  # where there is a tokenizer
        self._why_not, self._preamble, self._context = why_not, preamble, context
        self.response_template = None if assets is None else assets.response_template  # of the checkpoint's template
        if assets is not None:
            most = longest_text(text_bytes)
            self._tokenizer = TextTokenizer(
                assets.tokenizer, end_ids=end_ids, special_tokens=assets.special, most_bytes=most
            )
            try_tokenizer(self._tokenizer, assets.tokenizer)
            self.replays = Replays(self._tokenizer, replay_bytes, borders=borders)
            self._template = self._opened(assets.chat_template, self._tokenizer)

    def variant(self, assets: "TextAssets | None", preamble: Preamble) -> "TextCodec":
        """The same tokenizer, and memory of replies, with the chat template of `assets` and another preamble."""
        made = copy(self)
        made._preamble = preamble
        if assets is not None and made._tokenizer is not None:
            made.response_template = assets.response_template
            made._template = self._opened(assets.chat_template, made._tokenizer)
        return made

    def _opened(self, template: str | None, tokenizer: TextTokenizer) -> ChatTemplate | None:
        caps = caps_for(tokenizer.bound.characters, self._context)
        return None if template is None else ChatTemplate(template, tokenizer, caps)

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    @property
    def tokenizer(self) -> TextTokenizer | None:
        return self._tokenizer

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text; empty without a tokenizer."""
        return self._tokenizer.special_ids if self._tokenizer is not None else frozenset()

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        return self._checked().encode(text, special=special, limit=limit)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._checked().decode(ids, skip_special=not special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: int | None = None,
        namespace: str = "",
        replay: bool = True,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """As `Engine.render`."""
        namespace, tokenizer = namespace_name(namespace), self._checked()
        rendered = self.template.render(self._preamble.before(messages), **checked_options(options))
        if replay and self.replays is not None:
            return self.replays.encode(rendered, namespace, limit=limit)
        return rendered.encode(tokenizer, limit=limit)

    def rest(self) -> None:
        """End the threads of the tokenizer, unless they are at work. The next text starts others."""
        if self._tokenizer is not None:
            self._tokenizer.limit.rest()

    def output(self, stops: Stops, prompt: Sequence[int], reading: ReplyReading | None = None) -> Output:
        """The text of one completion, which continues that of the prompt."""
        if self._tokenizer is None:
            return Output(None, stops)
        after = prompt[-LONG_RUN:] if prompt[-1] not in self._tokenizer.special_ids else ()
        if reading is not None:
            return ReadOutput(self._tokenizer, stops, after, reading.machine())
        return Output(open_stream(self._tokenizer, after=after), stops)

    @property
    def added(self) -> Mapping[str, int]:
        """Texts that are one token each, whatever is around them, with their ids."""
        return self._checked().added

    @property
    def template(self) -> ChatTemplate:
        self._checked()
        if self._template is None:
            raise BadRequest("this model has no chat template; send a prompt instead of messages", "messages")
        return self._template

    def token_bytes(self, token: int) -> bytes:
        return self._checked().token_bytes(token)

    def written(self, token: int) -> str:
        return self._checked().written(token) or ""

    def _checked(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise BadRequest(
                "this model has no tokenizer; send a prompt of token ids instead of text",
                "prompt",
                hint=f"The reason: {self._why_not}.",
            )
        return self._tokenizer


class PromptMemory:
    """Bounds the memory of prompts of requests that are not over: each has one copy, and one per completion. Safe to
    use from several threads."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._lock = threading.Lock()

    def take(self, tokens: int, completions: int, scores: int = 0) -> int:
        """Take bytes for a prompt of so many tokens, each with `scores` log-probabilities; returns them, for `give`.
        Raises `Overloaded`, or `BadRequest` if a prompt alone takes more than `most`."""
        size = tokens * (TOKEN_BYTES + COPY_BYTES * completions + SCORE_BYTES * scores)
        if size > self.most:
            raise BadRequest(
                f"a prompt of {tokens} tokens with n {completions} takes {size} bytes; {self.most} are for prompts. "
                f"Shorten the prompt, or lower n",
                "n",
                hint="The limit is half of text_bytes; prompt_logprobs count as well.",
            )
        with self._lock:
            if self.taken + size > self.most:
                raise Overloaded(f"other prompts take {self.taken} of {self.most} bytes for prompts; try again later")
            self.taken += size
        return size

    def give(self, size: int) -> None:
        """Return bytes that `take` returned, once."""
        with self._lock:
            self.taken -= size
            assert self.taken >= 0, "a prompt was given back twice"
