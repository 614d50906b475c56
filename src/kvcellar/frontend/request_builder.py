"""request_builder: what a front end checks of a request, and makes of it: the submission, which it sends to the engine,
and what makes text of the tokens that the engine draws. No torch."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, cast

from kvcellar.engine import arguments
from kvcellar.engine.messages import Submission
from kvcellar.engine.request_options import HowOptions, RequestOptions, SubmitOptions, fresh_seed
from kvcellar.errors import BadRequest, Overloaded, PromptTooLong, shown
from kvcellar.events import Event
from kvcellar.frontend.client import EngineClient
from kvcellar.frontend.output_processor import OutputProcessor
from kvcellar.frontend.result import Collector, Result, Ticket
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.images.image import has_rows
from kvcellar.memory.prefix.node import ids_of, key_of
from kvcellar.sampling_params import SamplingOptions, SamplingParams, check_ids, merged
from kvcellar.text.output import Stops
from kvcellar.text.replay import FIRST_BORDERS, LAST_BORDERS, Known

Started = tuple[Collector, Ticket]


_OPTIONAL = frozenset(field.name for field in fields(SamplingParams) if field.default is None)
_OPTIONS = sorted(SubmitOptions.__annotations__)


class RequestBuilder:
    """Of one engine, which is closed when nothing refers to this any more; one that was started again may have other
    bounds. Safe to use from several threads."""

    def __init__(self, client: EngineClient, codec: TextCodec) -> None:
        self.client, self.codec = client, codec

    def params(self, sampling: SamplingOptions) -> SamplingParams:
        """As `Engine.params`."""
        unknown = sorted(set(sampling) - arguments.FIELDS)
        if unknown:
            names = sorted(arguments.FIELDS)
            raise BadRequest(f"there is no sampling parameter {shown(unknown[0])}; there are {names}", unknown[0])
        given = {name: value for name, value in sampling.items() if value is not None or name in _OPTIONAL}
        return merged(self.client.card.model.default_sampling, given)

    def divided(self, options: RequestOptions) -> tuple[SamplingParams, SubmitOptions]:
        how = {name: value for name, value in options.items() if name in HowOptions.__annotations__}
        sampling = {name: value for name, value in options.items() if name not in how}
        return self.params(cast(SamplingOptions, sampling)), cast(SubmitOptions, how)

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, deliver: Callable[[Event], None], how: SubmitOptions
    ) -> Ticket:
        """As `Engine.submit`."""
        params, deliver = arguments.parameters(params), arguments.receiver(deliver)
        client, replays, reading = self.client, self.codec.replays, how.get("reading")
        submission, chat = self._submission(prompt_ids, params, how)
        owner = submission.retention.owner if submission.retention.stored else None  # of replies that are shared
        number, machine = submission.number, None if reading is None else reading.opened
        processor = OutputProcessor(
            params,
            partial(self.codec.output, Stops(params.stop), ids_of(submission.prompt), machine),
            deliver,
            stop=partial(client.stop, number),
            fail=partial(client.fail, number),
            replied=None if replays is None or chat is None else partial(replays.replied, chat.key, owner),
        )
        client.submit(submission, processor.receive)
        return Ticket(partial(client.cancel, number), lambda: processor.begun)

    def start(self, ids: Sequence[int], params: SamplingParams, how: SubmitOptions) -> Started:
        """Submit a request whose result the caller waits for."""
        self.client.check_caller()
        collector = Collector(params.n)
        return collector, self.submit(ids, params, collector.deliver, how)

    def result(self, ids: Sequence[int], params: SamplingParams, how: SubmitOptions) -> Result:
        """The result of a request. Blocks."""
        collector, ticket = self.start(ids, params, how)
        try:
            return collector.result()
        finally:
            ticket.cancel()  # after an interrupted wait

    def results(self, every: Sequence[Sequence[int]], params: SamplingParams, how: SubmitOptions) -> list[Result]:
        """The results of a batch, which does not fill the queue. Blocks; an error of one request cancels the others."""
        results, waiting, running = list[Result](), deque(every), deque[Started]()
        try:
            while waiting or running:
                if waiting and len(running) <= self.client.card.max_waiting // 2:
                    try:
                        running.append(self.start(waiting[0], params, how))
                        waiting.popleft()
                        continue
                    except Overloaded:
                        if not running:
                            raise
                results.append(running[0][0].result())
                running.popleft()
        finally:
            for _, ticket in running:
                ticket.cancel()
        return results

    def prompt(self, ids: Any, params: SamplingParams) -> tuple[int, ...]:
        """The prompt as a tuple. Raises `BadRequest` or `PromptTooLong` if this model cannot serve it with `params`."""
        model = self.client.card.model
        found = arguments.prompt_ids(ids, vocab_size=model.vocab_size, context=model.context)
        self._check_padding(found)
        check_ids(params, model.vocab_size)
        if params.stop and not self.codec.has_text:
            raise BadRequest("stop strings need a tokenizer, and this model has none; use stop_token_ids", "stop")
        for name, cells in self.client.card.cells.items():
            if len(found) > cells:
                raise PromptTooLong(len(found), cells, f"the memory for {name} layers", hint="Or raise cache_bytes.")
        return found

    def _submission(
        self, prompt_ids: Sequence[int], params: SamplingParams, how: SubmitOptions
    ) -> tuple[Submission, Known | None]:
        """With what is known of the chat whose prompt this is. Raises what `Engine.submit` raises for its arguments."""
        if unknown := sorted(how.keys() - set(_OPTIONS)):
            raise BadRequest(f"there is no option {shown(unknown[0])} of a request; there are {_OPTIONS}", unknown[0])
        namespace = arguments.namespace_name(how.get("namespace", ""))
        prompt = self.prompt(prompt_ids, params)
        replays = self.codec.replays
        chat = replays.known(namespace, prompt) if replays is not None and replays.used else None
        positions = self._borders(prompt, chat)
        if (given := how.get("checkpoint_positions")) is not None:
            positions = arguments.positions(given, len(prompt))
        if breakpoints := how.get("breakpoints", ()):
            positions = tuple(sorted({*positions, *arguments.positions(breakpoints, len(prompt))}))
        made = Submission(
            retention=arguments.retention_options(how.get("retention")),
            number=self.client.number(),
            prompt=key_of(prompt),
            images=self.codec.images.inputs(prompt, namespace) if has_rows(prompt) else (),
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            namespace=namespace,
            checkpoint_positions=positions,
            adapter=how.get("adapter"),
            pooling=how.get("pooling"),
            image_places=chat.images if chat is not None else (),
            rewrite=chat.rewrite if chat is not None else None,
        )
        return made, chat

    def _borders(self, prompt: Sequence[int], chat: Known | None) -> tuple[int, ...]:
        """Where messages of a chat begin in a prompt: the first ones, where a system prompt ends, and the last ones. If
        that is not known from how it was rendered: at tokens that are no text."""
        if chat is not None and chat.borders:
            return chat.borders
        special = self.codec.special_ids
        found = [pos for pos, token in enumerate(prompt) if token in special and pos]
        return (*found[:FIRST_BORDERS], *found[FIRST_BORDERS:][-LAST_BORDERS:])

    def _check_padding(self, prompt: Sequence[int]) -> None:
        """Raise `BadRequest` for a prompt that contains the padding token.

        Such a model leaves it out when it counts positions in a forward without a cache, and counts it in one with a
        cache: no positions would be right.
        """
        padding = self.client.card.padding
        if padding is not None and padding in prompt:
            raise BadRequest(
                f"prompt has token {padding} at {prompt.index(padding)}, which is padding: this model does not count "
                f"it as a position, so it cannot be part of a text. Leave it out",
                "prompt",
            )
