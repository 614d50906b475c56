"""going_on: the completions that a request starts with. Those of one that another engine has answered in part are made
as if they had been preempted behind their last token. No torch.

Choices that have ended are done, and are only counted. Those that go on wait with all of their text: what context
shifts dropped is in it, and is dropped again when it is computed. Of those that have no tokens the first one waits, and
is forked to the others, as in any request.
"""

from kvcellar.engine import arguments
from kvcellar.engine.request import Completion, Request, Status
from kvcellar.errors import BadRequest
from kvcellar.messages import Produced
from kvcellar.sample.sampler import Sampler


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
