"""engine: the public face. Load a model, ask it things, from any thread.

with Engine() as engine:
    print(engine.generate("def main():", max_tokens=32).text)

Named conversations are kept in the store (see `documents`), or, without one, in memory.
"""

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

from kvcellar.engine import arguments
from kvcellar.engine.card import EngineCard, ModelCard
from kvcellar.engine.load.settings import EngineOptions, Settings, settings_of
from kvcellar.engine.messages import CheckInvariants, ClearCache, DescribeCapacity, ReadStats
from kvcellar.engine.request_options import RequestOptions, SubmitOptions
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import BadRequest, shown
from kvcellar.events import Event, Usage
from kvcellar.frontend.chat_images import ChatImages
from kvcellar.frontend.client import EngineClient
from kvcellar.frontend.control_clients import AdaptersClient, CacheClient
from kvcellar.frontend.conversations import Conversations, TokenSource
from kvcellar.frontend.documents import Documents, documents_of
from kvcellar.frontend.embeddings import Embeddings
from kvcellar.frontend.process_client import ProcessClient, plain_settings
from kvcellar.frontend.reply_formats import Replies
from kvcellar.frontend.request_builder import RequestBuilder
from kvcellar.frontend.result import Result, Stream, Ticket
from kvcellar.frontend.session import Session
from kvcellar.frontend.shared_replies import open_replies
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.frontend.transcript import Transcript, chat_prefix, is_chat
from kvcellar.images.image import ProcessedImage
from kvcellar.images.store import Images
from kvcellar.memory.prefix.node import EVERYONE
from kvcellar.memory.retention import RetentionOptions
from kvcellar.memory.tiers.identity import FileDigests
from kvcellar.places import NoPlace, cache
from kvcellar.progress import Progress, listening, report
from kvcellar.sampling_params import SamplingOptions, SamplingParams
from kvcellar.text.template import RenderOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcellar.engine.core.device import DeviceThread
    from kvcellar.engine.core.loop import Loop
    from kvcellar.engine.load.build import Built
    from kvcellar.frontend.fork_server import Starter

log = logging.getLogger("kvcellar.engine")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def open_conversations(documents: Documents, model: ModelCard, tokenizer: str | None) -> Conversations:
    """`tokenizer`: the digest of its files; None: there is none, and conversations end with this process. Nothing is
    read or written yet."""
    place = documents if tokenizer is not None else Documents(share=documents.share)
    return Conversations(place.archive("conversations"), TokenSource(model.name, tokenizer or "", model.vocab_size))


def _tokenizer(documents: Documents, path: Path | None) -> str | None:
    if not documents.durable or path is None:
        return None
    directory = None
    with suppress(NoPlace):
        directory = cache(os.environ)
    try:
        return FileDigests(directory).of(file for name in TOKENIZER_FILES if (file := path / name).is_file())
    except OSError as error:
        log.warning("named conversations end with this process: the tokenizer cannot be read: %s", error)
        return None


Prompt = str | Sequence[int]
Prompts = Sequence[str] | Sequence[Sequence[int]]


class Engine:
    """A model with its memory. Usable from several threads at once; close it, or use it as a context manager.

    `model` is a directory, a name in the local Hugging Face cache, a transformers model, or None for the embedded one.
    A transformers model is not changed, and can be called, saved, copied and moved meanwhile: the engine runs a copy of
    its modules, made now, on the same weights. On a CPU, weights of linear layers are in memory a second time, packed
    for oneDNN, until the engine is freed; each engine on one model has its own packed copies, and with `pack=False`
    none. Answers are undefined once weights are written into: packed copies keep the old values.
    `progress` is called on the caller's thread with what is being done while the model is loaded, which may take
    minutes; what it raises ends the load. Engines that are given one `thread` are stepped by it in turn; None: a thread
    of its own. With `process` the engine is in a process of its own, which is started again if it dies: requests go on
    from their last token. `process` may be the `Starter` of several engines, which stays open until they are closed.
    The other keyword arguments are the fields of `Settings`. Raises `ModelNotFound`,
    `ModelRefused`, `CapacityTooSmall`, `BadRequest`.
    """

    def __init__(
        self,
        model: "str | Path | PreTrainedModel | None" = None,
        *,
        progress: Callable[[Progress], None] | None = None,
        thread: "DeviceThread | None" = None,
        process: "bool | Starter" = False,
        **settings: Unpack[EngineOptions],
    ) -> None:
        checked = settings_of(settings)
        with ExitStack() as opened:
            with listening(progress):
                if process:
                    starter = None if process is True else process
                    client: EngineClient = ProcessClient(*plain_settings(model, settings, checked), starter)
                    opened.callback(client.close)
                else:
                    client = _on_a_thread(model, checked, opened, thread)
            self._open(client, checked)
            opened.pop_all()

    @classmethod
    def of(cls, client: EngineClient, **settings: Unpack[EngineOptions]) -> Self:
        """The engine that a client has, wherever it is; closing it closes the client."""
        engine = cls.__new__(cls)
        engine._open(client, settings_of(settings))
        return engine

    def _open(self, client: EngineClient, settings: Settings) -> None:
        self._client, card = client, client.card
        self.model = card.model
        self.documents = documents_of(settings)  # where conversations, responses and replies are kept
        tokenizer = _tokenizer(self.documents, self.model.path)
        self._codec = TextCodec(
            card.text, open_replies(self.documents, tokenizer), images_of(card, settings.image_hosts)
        )
        self._requests = RequestBuilder(client, self._codec)
        # what sessions were saved as, by name; it outlives the engine where that has a store
        self.conversations: Conversations = open_conversations(self.documents, self.model, tokenizer)
        self.cache = CacheClient(client)  # what the prefix cache and the store have
        self.adapters = AdaptersClient(client)  # those that requests can name
        self.embeddings = Embeddings(self._requests, card, self._codec)  # vectors of texts
        self.replies = Replies(self._codec)  # how answers are read: reasoning, content, calls of tools
        # A thread inside torch must not outlive the interpreter: an engine that is not closed is closed at its end.
        # It is not closed while a session or a batch needs it.
        self._closing = weakref.finalize(self._requests, client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. Requests that are not done raise `EngineClosed`. Idempotent."""
        self._closing()
        if self._client.close():
            self._codec.rest()

    @property
    def healthy(self) -> bool:
        """False once it has failed for ever, or is closed."""
        return self._client.alive

    @property
    def starting(self) -> bool:
        """Whether its process has died and is started again: requests wait for it."""
        return self._client.starting

    # -- text ---------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        """Token ids of a text. Raises `BadRequest` without a tokenizer, and for more text than `text_bytes` are for.

        `special`: with what the tokenizer puts around a text (None: as the model wants it). `limit`: raise
        `PromptTooLong` for more tokens, without tokenizing where the length of the text says that there must be.
        """
        if not isinstance(text, str):
            raise BadRequest(f"text is a string, not {shown(text)}", "text")
        if special is not None and not isinstance(special, bool):
            raise BadRequest(f"special is True, False or None, not {shown(special)}", "special")
        return self._codec.encode(text, special=special, limit=limit)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids; with `special`, special tokens are written out. Raises `BadRequest` for ids that this
        model does not have."""
        checked = arguments.tokens(ids, self.model.vocab_size, "ids")
        return self._codec.decode(checked, special=special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; they may be a part of a character."""
        return self._codec.token_bytes(*arguments.tokens((token,), self.model.vocab_size, "ids"))

    def written(self, token: int) -> str:
        """The entry of a token in the vocabulary, which is not decoded, such as "Ġthe"; "" for an id without one."""
        return self._codec.written(*arguments.tokens((token,), self.model.vocab_size, "ids"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: int | None = None,
        namespace: str = "",
        owner: str = "",
        replay: bool = True,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer. Raises `BadRequest`, `TemplateFailed`, and
        `PromptTooLong` for more than `limit`.

        `variables` are read by the chat template (`enable_thinking`, for one), `effort` is how much the model should
        reason, in OpenAI's words ("none" to "xhigh"), `tools` are what it may call, in the form of OpenAI's chat API.
        Each has no effect where the template does not read it. With `continue_final_message`, the answer continues the
        last message, which is the assistant's.

        With `replay`, replies to earlier requests of the `namespace` have the tokens that they were generated with,
        also where another front end has them in the store for this `owner`; otherwise they have those that the
        tokenizer gives their text.
        """
        return self._codec.render(messages, limit=limit, namespace=namespace, owner=owner, replay=replay, **options)

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        **how: Unpack[SubmitOptions],
    ) -> Ticket:
        """Submit a request, and return at once. `deliver` is called with every event, on the engine's thread; it must
        not block.

        The request begins with what others of its `namespace` have computed of the same tokens, and leaves what it
        computes for them. `checkpoint_positions` are positions of the prompt, ascending, from which later requests may
        resume; None: where messages begin. `breakpoints` are more of them, such as a client has set. A model with
        windows or recurrent layers keeps checkpoints there when the prompt is prefilled; others can resume anywhere.

        Raises `BadRequest`, `PromptTooLong`, `Overloaded` or `EngineClosed`; then no event is delivered.
        """
        return self._requests.submit(prompt_ids, params, deliver, how)

    @overload
    def generate(self, prompt: str, **options: Unpack[RequestOptions]) -> Result: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def generate(self, prompt: Sequence[int], **options: Unpack[RequestOptions]) -> Result: ...
    @overload
    def generate(self, prompt: Prompts, **options: Unpack[RequestOptions]) -> list[Result]: ...
    def generate(self, prompt: Any, **options: Unpack[RequestOptions]) -> Result | list[Result]:
        """Continue a text or token ids; a list of them as one batch, with one result each. Blocks until the end.

        Keyword arguments are the fields of `SamplingParams`, where the others have the model's defaults, as over HTTP:
        sampling at temperature 1.0, unless its files say otherwise (`params` returns them); and those of `HowOptions`.
        Raises `BadRequest`, `PromptTooLong`, `Overloaded`, `EngineClosed`, `EngineFailed`.
        """
        params, how = self._requests.divided(options)
        if not _is_batch(prompt):
            return self._requests.result(self._ids(prompt), params, how)
        every = [self._ids(one) for one in prompt]
        for ids in every:
            self._requests.prompt(ids, params)
        return self._requests.results(every, params, how)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """The completion as it is generated, with `for` or `async for`. Leaving the iteration cancels the request."""
        params, how = self._requests.divided(options)

        def submit(deliver: Callable[[Event], None]) -> Ticket:
            self._client.check_caller()
            return self.submit(self._ids(prompt), params, deliver=deliver, **how)

        return Stream(submit, params.n)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[RequestOptions]) -> Result:
        """The assistant's next message of a conversation. Blocks until the end; raises what `generate` and
        `render` raise."""
        params, how = self._requests.divided(options)
        ids = self.render(messages, limit=self.model.context, namespace=how.get("namespace", ""))
        return self._requests.result(ids, params, how)

    def pin(
        self,
        prompt: Prompt | Sequence[Mapping[str, Any]],
        *,
        namespace: str | None = None,
        ttl: float | None = None,
        adapter: str | None = None,
    ) -> Usage:
        """Compute a prompt, or read it back from the store, and let it not be evicted: later requests that begin with
        it need not compute it. Blocks until it is in memory; returns how many tokens came from memory or the store.

        Of messages, what is pinned is what all chats that begin with them have in common. Requests of all namespaces
        that have this `adapter` find it, or only those of `namespace`; for `ttl` seconds after the last use, or without
        a limit. `clear_cache` evicts what is pinned, too, and the oldest pin is released where a request that runs
        alone needs its memory. Raises `BadRequest` if more than `pin_share` of the cache would be pinned.
        """
        ids = chat_prefix(self.render, prompt) if is_chat(prompt) else self._ids(cast(Prompt, prompt))
        namespace, retention = EVERYONE if namespace is None else namespace, RetentionOptions(pinned=True, ttl=ttl)
        how = SubmitOptions(namespace=namespace, retention=retention, adapter=adapter)
        params = self.params(max_tokens=1, temperature=0.0)
        found = self._requests.result(ids, params, how)
        if not found.pinned:
            raise BadRequest(
                f"a prompt of {len(ids)} tokens cannot be pinned beside {self.stats().pinned} tokens that are; "
                f"shorten it, pin fewer, or raise pin_share or cache_bytes",
                "prompt",
            )
        return found.usage

    def session(
        self,
        *,
        chat: bool = True,
        system: str | None = None,
        retention: RetentionOptions | None = None,
        adapter: str | None = None,
    ) -> Session:
        """A conversation whose K/V stay in memory: each `send` prefills only what is new. `retention` is that of turns,
        `adapter` the name of theirs.

        With `chat`, and a chat template, what is sent are the user's messages, and `system` is the message that they
        follow; otherwise it is text to continue. Raises `BadRequest` for `system` where it is no chat.
        """
        chats = chat and self.model.has_chat
        if system is not None and not chats:
            raise BadRequest("a system message needs a chat, and a model with a chat template", "system")
        first = () if system is None else ({"role": "system", "content": system},)
        return self._session(Transcript(chat=chats, messages=first, adapter=adapter), retention)

    def load(self, name: str, *, retention: RetentionOptions | None = None) -> Session:
        """A session that continues a conversation which one was saved as (`Session.save`). What it adds is kept under
        the name when it is saved again. Raises what `Conversations.read` raises."""
        return self._session(self.conversations.read(name)[1], retention)

    def params(self, **sampling: Unpack[SamplingOptions]) -> SamplingParams:
        """The model's default sampling parameters with these fields replaced. Raises `BadRequest`.

        None is ignored for a field that cannot be None.
        """
        return self._requests.params(sampling)

    # -- inspection ---------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The current statistics. Waits for the running step."""
        return self._client.ask(ReadStats())

    def image(self, source: Any) -> ProcessedImage:
        """What the model gets of an image, given as in a message, and a thumbnail. A chat that has it then need not
        wait for it. Raises `BadRequest`."""
        return self._codec.images.process(source, "image")

    def images_in(self, ids: Sequence[int]) -> list[tuple[int, ProcessedImage]]:
        """The images whose first row is among tokens, and where that is; those that the front end still keeps."""
        return self._codec.images.begun_in(ids)

    @property
    def sees(self) -> bool:
        """Whether the model takes images in chats."""
        return self.model.has_chat and self._codec.images.sees

    @property
    def last_stats(self) -> EngineStats:
        """The statistics that the engine has told last: some tenths of a second after something has changed, once the
        running step has ended. Waits for nothing, so also while a step takes long, or the engine is started again."""
        return self._client.last_stats

    def clear_cache(self) -> None:
        """Evict all that no running completion uses from the prefix cache, pinned prompts, too, and forget the texts
        that drafts are made of."""
        self._client.ask(ClearCache())

    def check(self) -> None:
        """Assert every invariant of the scheduler and of memory, between two steps."""
        self._client.ask(CheckInvariants())

    def capacity(self) -> str:
        """What fits into the granted bytes: a line of text with the sum, and one for each part."""
        return self._client.ask(DescribeCapacity())

    @property
    def cache_bytes(self) -> int:
        """The most bytes that it takes on its device beside weights and adapters: cells, states, and the largest step,
        those of drafts included, and on a CPU what evicted prefixes may take. At most the setting of the name."""
        return self._client.card.cache_bytes

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _built(self) -> "Built":
        """The parts of an engine on a thread of this process."""
        from kvcellar.frontend.thread_client import ThreadClient

        assert isinstance(self._client, ThreadClient), "the engine is in another process"
        return self._client.built

    @property
    def _loop(self) -> "Loop":
        return self._built.loop

    def _session(self, transcript: Transcript, retention: RetentionOptions | None) -> Session:
        return Session(self._requests, self.conversations, transcript, arguments.retention_options(retention))

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise BadRequest("the prompt is empty; at least one character is needed", "prompt")
            return self.encode(prompt, limit=self.model.context)
        return arguments.prompt_ids(prompt, vocab_size=self.model.vocab_size, context=self.model.context)


def images_of(card: EngineCard, hosts: Sequence[str]) -> ChatImages:
    vision, model = card.vision, card.model
    if vision.path is None:
        return ChatImages(None, why_not=vision.why_not)
    images = Images(
        vision.path, model=model.architecture, placeholder=vision.placeholder, most_rows=model.context, hosts=hosts
    )
    return ChatImages(images, placeholder=vision.placeholder)


def _on_a_thread(
    model: "str | Path | PreTrainedModel | None", settings: Settings, opened: ExitStack, thread: "DeviceThread | None"
) -> EngineClient:
    import_needed()
    from kvcellar.engine.load.build import build  # these import torch, so not at the top
    from kvcellar.frontend.thread_client import ThreadClient

    client = ThreadClient(build(model, settings, opened, thread))
    opened.callback(client.close)
    client.start()
    return client


def import_needed() -> None:
    """Import torch, which takes seconds, and report it. Only where there is a model to load."""
    if "torch" not in sys.modules:
        report("importing torch")
    import_module("kvcellar.engine.load.build")


def _is_batch(prompt: Any) -> bool:
    """Is this a list of prompts? One prompt is a text, or a list that begins with a token id."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and isinstance(prompt[0], Sequence)
    )
