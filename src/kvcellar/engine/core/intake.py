"""intake: from a submission to a request of the engine, and the memory that it holds until it is over. No torch.

The completions of a request that another engine has answered in part (`Submission.produced`) are made as if they had
been preempted behind their last token. Choices that have ended are done, and are only counted. Those that go on wait
with all of their text: what context shifts dropped is in it, and is dropped again when it is computed. Of those that
have no tokens the first one waits, and is forked to the others, as in any request.

Always true: bytes of `PromptMemory` and the use of an adapter are taken before a request reaches the engine's thread,
and given back once: when it is over, or at once if it could not be submitted, or was interrupted before that thread had
it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse, islice
from typing import TYPE_CHECKING

from kvcellar.engine import arguments
from kvcellar.engine.core.prompt_images import PromptImages
from kvcellar.engine.core.request import Completion, Request, Status
from kvcellar.engine.messages import EngineEvent, Produced, Submission
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import BadRequest, Overloaded
from kvcellar.images.image import has_rows, is_row
from kvcellar.memory.prefix.node import ids_of

if TYPE_CHECKING:  # imports transformers
    from kvcellar.engine.load.adapters import Adapters
    from kvcellar.engine.sample.grammars import Grammars  # imports NumPy

TOKEN_BYTES = 44  # of a token id in a tuple, and of the id itself
COPY_BYTES = 8  # of a token id in the list of one completion
SCORE_BYTES = 144  # of a token id with its log-probability


@dataclass(frozen=True, slots=True)
class ImageRules:
    """What images a model takes. `why_not`: why none; "": it takes some. `ahead`: tokens of an image see each other
    both ways, so that one step has all of them, `step_tokens` at most. `in_front`: there is one, before all text.
    `whole`: all tokens of a prompt see each other, which has at most so many; 0: they do not. `crossed`: tokens see
    images by cross-attention."""

    why_not: str = ""
    ahead: bool = False
    in_front: bool = False
    step_tokens: int = 0
    whole: int = 0
    crossed: bool = False

    def of(self, submission: Submission) -> PromptImages | None:
        """The images of a submission. Raises `BadRequest`."""
        prompt = ids_of(submission.prompt)
        if not submission.images and not has_rows(prompt) and not self.whole:
            return None
        if self.why_not:
            raise BadRequest(self.why_not, "messages")
        if self.whole:
            self._check_whole(len(prompt), submission)
        images = PromptImages(
            prompt,
            submission.images,
            ahead=self.ahead,
            whole_prompt=bool(self.whole),
            crossed=self.crossed,
            namespace=submission.namespace,
        )
        if self.in_front and images.spans and (images.spans[-1].start or images.count == len(prompt)):
            raise BadRequest("this model takes one image, in front of a text", "messages")
        if self.ahead and (longest := max(map(len, images.spans), default=0)) > self.step_tokens:
            raise BadRequest(
                f"an image has {longest} tokens, which see each other, and a step at most {self.step_tokens}. Send a "
                f"smaller one, or raise step_tokens",
                "messages",
            )
        return images

    def _check_whole(self, tokens: int, submission: Submission) -> None:
        if tokens > self.whole:
            raise BadRequest(
                f"the prompt has {tokens} tokens, which see each other, so that a step has to have all of them, in "
                f"windows: {self.whole} at most. Send a shorter one",
                "prompt",
                hint="step_tokens is how many tokens a step has",
            )
        if submission.params.prompt_logprobs is not None:
            raise BadRequest(
                "tokens of a prompt see those behind them: they have no log-probabilities", "prompt_logprobs"
            )


@dataclass(frozen=True, slots=True)
class Intake:
    """What an engine makes of submissions. Safe to use from several threads."""

    prompts: "PromptMemory"
    context: int
    vocab_size: int
    end_ids: frozenset[int]
    padding: int | None  # the padding token, in models that do not count it as a position
    adapters: "Adapters"
    grammars: "Grammars"
    images: ImageRules = field(default_factory=lambda: ImageRules("this model takes no images"))

    def submit(
        self,
        submission: Submission,
        deliver: Callable[[EngineEvent], None],
        take_in: Callable[[Request, Sequence[Completion]], None],
    ) -> Request:
        """Make a request, take the memory that it holds until it is over, and pass it to `take_in` with its first
        completions. After an error, which is raised, it holds nothing: `BadRequest` for an adapter, a constraint, or
        what cannot have been produced, `Overloaded`."""
        params = submission.params
        scores = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
        images = self.images.of(submission)
        size = self.prompts.take(len(ids_of(submission.prompt)), params.n, scores, images.bytes if images else 0)
        use, request = None, None
        try:
            if (submission.adapter, self.adapters.default) != (None, None):
                use = self.adapters.take(submission.adapter)
            request = Request(submission, deliver, use, images, on_done=partial(self.ended, size))
            take_in(request, self.completions(request))
        except BaseException:
            if request is None or request.claim():
                self.prompts.give(size)
                self.adapters.give(use)
            else:  # an interrupt has come after it was submitted: it is cancelled, and gives back what it holds then
                request.unreachable = True
            raise
        return request

    def completions(self, request: Request) -> list[Completion]:
        """The first completions of `request`: one that prefills its prompt, and those that go on. Compiles its
        constraint: see `Grammars.matcher`. Raises `BadRequest` for what cannot have been produced."""
        matcher, owner = None, request.retention.owner
        if (constraint := request.params.constraint) is not None:
            matcher = self.grammars.matcher(constraint, owner=owner, namespace=request.submission.namespace)
        start = Sampler(
            request.params,
            seed=request.submission.seed,
            index=0,
            prompt_ids=request.prompt if request.images is None else [*filterfalse(is_row, request.prompt)],
            vocab_size=self.vocab_size,
            end_ids=self.end_ids,
            never_ids=frozenset() if self.padding is None else frozenset({self.padding}),
            matcher=matcher,
        )
        return first_completions(request, start, self.context)

    def siblings(self, completion: Completion, most: int) -> list[Completion]:
        """The next outputs, up to `most`, of a request whose prompt `completion` has prefilled; none if it has drawn a
        token already."""
        if completion.sampler.produced:
            return []
        request = completion.request
        begun = {one.sampler.index for one in request.completions}
        missing = islice((index for index in range(request.params.n) if index not in begun), most)
        return [Completion(request, completion.sampler.fork(index), list(completion.tokens)) for index in missing]

    def ended(self, size: int, request: Request) -> None:
        """A request is over, whose prompt took `size` bytes. Runs on the engine's thread."""
        self.prompts.give(size)
        if request.adapter is not None:
            self.adapters.give(request.adapter)
        for completion in request.completions:
            if completion.sampler.matcher is not None:
                completion.sampler.matcher.close()


def first_completions(request: Request, start: Sampler, context: int) -> list[Completion]:
    """In order of their choices. `start` is the sampler of a choice without tokens, and is not changed. Raises
    `BadRequest` where `produced` cannot be what an engine has told of this request. Where the request has a constraint,
    waits until it is known whether the tokens match it."""
    made = dict[int, Completion]()
    for one in request.submission.produced:
        if not 0 <= one.choice < request.params.n or one.choice in made:
            raise _wrong(one, f"the choices of this request are 0 to {request.params.n - 1}, each named once at most")
        made[one.choice] = _continued(request, start.fork(one.choice), one, context)
    if (index := next((index for index in range(request.params.n) if index not in made), None)) is not None:
        made[index] = Completion(request, start.fork(index), list(request.prompt))
    return [made[index] for index in sorted(made)]


def _continued(request: Request, sampler: Sampler, produced: Produced, context: int) -> Completion:
    params, new = request.params, arguments.tokens(produced.token_ids, sampler.vocab_size, "produced")
    tokens = [*request.prompt, *new]
    if params.max_tokens is not None and max(len(new), produced.ended or 0) > params.max_tokens:
        raise _wrong(produced, f"max_tokens is {params.max_tokens}")
    if len(tokens) > context + 1 and not params.shift:
        raise _wrong(produced, f"with the prompt there are {len(tokens)} tokens, in a context of {context}")
    if produced.ended is not None:
        if produced.ended < 0:
            raise _wrong(produced, f"it has ended with {produced.ended} tokens")
        return Completion(request, sampler, tokens, Status.DONE, told=produced.ended)
    for token in new:
        if sampler.ends_with(token) or token in sampler.never_ids:
            raise _wrong(produced, f"token {token} is in no text of this request")
    if (refused := sampler.resume(new)) is not None:
        raise _wrong(produced, f"its tokens do not match {params.constraint and params.constraint.param}: {refused}")
    return Completion(request, sampler, tokens)


def _wrong(produced: Produced, why: str) -> BadRequest:
    return BadRequest(f"choice {produced.choice} cannot have produced these {len(produced.token_ids)} tokens: {why}")


class PromptMemory:
    """Bounds the memory of prompts of requests that are not over: each has one copy, and one per completion. Safe to
    use from several threads."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._lock = threading.Lock()

    def take(self, tokens: int, completions: int, scores: int = 0, images: int = 0) -> int:
        """Take bytes for a prompt of so many tokens, each with `scores` log-probabilities, and for so many bytes of
        images; returns them, for `give`. Raises `Overloaded`, or `BadRequest` if a prompt alone takes more than
        `most`."""
        size = tokens * (TOKEN_BYTES + COPY_BYTES * completions + SCORE_BYTES * scores) + images
        if 2 * images > size > self.most:
            raise BadRequest(
                f"the images of the prompt take {images} bytes as the model gets them; {self.most} are for prompts. "
                f"Send fewer, or smaller ones",
                "messages",
                hint="The limit is half of text_bytes.",
            )
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
