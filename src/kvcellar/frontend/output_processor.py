"""output_processor: the text of a request, from the tokens that the engine draws for it: detokenizing, stop strings,
reasoning and calls of tools. The engine knows no text: it is told that a choice has ended where its text ended it.

Always true, of one request:
  * a choice gets `Delta`s and then one `Finished`; nothing is delivered after `Done` or `Failed`;
  * what the engine has drawn behind the end of a text is neither delivered nor counted.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from kvcellar.engine.messages import Admitted, Drawn, Ended, EngineEvent
from kvcellar.errors import EngineFailed
from kvcellar.events import Delta, Done, Event, Failed, Finished, TokenLogprob
from kvcellar.sampling_params import SamplingParams
from kvcellar.text.output import Output

log = logging.getLogger("kvcellar.engine")


@dataclass(slots=True, eq=False)
class _Choice:
    output: Output
    count: int = 0  # tokens: those that were delivered, and one that ended it
    token_ids: list[int] = field(default_factory=list[int])  # that were delivered, if they are wanted in the end
    over: bool = False


class OutputProcessor:
    """Of one request. `receive` is called with its events in order, by one thread at a time."""

    def __init__(
        self,
        params: SamplingParams,
        output: Callable[[], Output],
        deliver: Callable[[Event], None],
        *,
        stop: Callable[[int, int], None],
        fail: Callable[[Exception], None],
        replied: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`output` makes that of a choice. `stop` tells the engine that a choice has ended, and with how many tokens,
        `fail` that the request has: both return at once. `replied` gets the tokens of each choice when it is over."""
        self._params, self._output, self._deliver = params, output, deliver
        self._stop, self._fail, self._replied = stop, fail, replied
        self._choices: dict[int, _Choice] = {}
        self._cached = 0
        self._error: Exception | None = None  # of the text
        self._over = False
        self.begun = False  # the engine computes it, or has done so

    def receive(self, event: EngineEvent) -> None:
        """Deliver what follows from an event. Raises what the receiver raises; an error of the text ends the request
        with `EngineFailed`."""
        match event:
            case _ if self._over:
                pass
            case Drawn() | Ended():
                if self._error is None:
                    self._go_on(event)
            case Admitted():
                self.begun = True
            case Done() if self._error is None:
                self._conclude()
                count = sum(choice.count for choice in self._choices.values())
                self._deliver(structs.replace(event, usage=replace(event.usage, completion_tokens=count)))
            case Done() | Failed():
                self._conclude()
                self._deliver(event if self._error is None else Failed(self._error))
            case _:
                self._deliver(event)

    def _go_on(self, event: Drawn | Ended) -> None:
        try:
            if event.choice not in self._choices:
                self._choices[event.choice] = _Choice(self._output())
            choice = self._choices[event.choice]
            if choice.over:
                return
            events = self._added(choice, event) if isinstance(event, Drawn) else self._ended(choice, event)
        except BaseException as error:  # a panic of a tokenizer, too
            log.exception("the text of a token could not be made")
            self._error = EngineFailed(f"making the text of a token failed with {type(error).__name__}: {error}")
            self._fail(self._error)
            return
        for made in events:
            self._deliver(made)

    def _added(self, choice: _Choice, event: Drawn) -> list[Event]:
        texts, output, self._cached = list[str](), choice.output, event.cached_tokens
        for token in event.token_ids:
            choice.count += 1
            texts.append(output.push(token, may_stop=choice.count >= self._params.min_tokens))
            if output.over:
                break
        count, logprobs = len(texts), event.logprobs
        shown = logprobs[:count] if logprobs is not None else None
        events = self._delta(choice, event.choice, "".join(texts), event.token_ids[:count], shown)
        if output.over:
            self._stop(event.choice, choice.count)
            events += self._rest(choice, Ended(event.choice, "stop", choice.count))
        return events

    def _ended(self, choice: _Choice, event: Ended) -> list[Event]:
        choice.count = event.tokens
        return self._rest(choice, event)

    def _rest(self, choice: _Choice, event: Ended) -> list[Event]:
        """The last events of a choice: the text that was held back, and `Finished`."""
        choice.over, output, scored = True, choice.output, self._params.logprobs is not None
        events = self._delta(choice, event.choice, output.flush(), (), () if scored else None)
        return [*events, Finished(event.choice, "stop" if output.met else event.reason, output.met, scored)]

    def _delta(
        self,
        choice: _Choice,
        index: int,
        text: str,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
    ) -> list[Event]:
        """None where there is nothing new."""
        pieces, reasoning = choice.output.told()
        if self._replied is not None:
            choice.token_ids += ids
        return [Delta(index, text, ids, logprobs, self._cached, pieces, reasoning)] if text or ids or pieces else []

    def _conclude(self) -> None:
        self._over = True
        if self._replied is not None:
            for choice in self._choices.values():
                self._replied(choice.token_ids)
