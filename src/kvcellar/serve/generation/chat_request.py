"""chat_request: what the bodies of all APIs become before prompts are made of them, and after."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcellar.constraint import Constraint
from kvcellar.engine.request_options import RequestReading
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.sampling_params import SamplingParams
from kvcellar.serve.generation.field_names import Place

Json = dict[str, object]
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What requests of all APIs have in common."""

    # fields of `SamplingParams` that replace the defaults of the model; None: the default
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stream: bool = False
    salt: str | None = None  # memory is shared only with requests of the same salt
    users: tuple[str | None, ...] = ()  # and with those of the same names of users
    retention: RetentionOptions = NO_OPTIONS  # without the owner
    conversation: str | None = None  # the name of one that the request continues
    constraint: Constraint | None = None  # what the answers have to match
    returns_prompts: bool = False  # the response has the token ids of the prompts
    # of the fields that parameters come from, by name of the parameter, where the API has another name for it
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    places: Sequence[Place] = ()  # of the messages of a chat in the body; empty: it has the same messages


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(GenerationRequest):
    """Texts to be completed. `prompts` are texts or token ids; `special` is that of `Engine.encode`."""

    prompts: Sequence[str | list[int]]
    special: bool | None = None


Mode = Literal["none", "auto", "required"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`none`: the model calls no tool; `auto`: it decides; `required`: it calls one. `names`: only tools of these."""

    mode: Mode = "auto"
    names: tuple[str, ...] = ()

    @property
    def named(self) -> bool:
        """One tool is required by its name. Clients then expect one call and read the first only."""
        return self.mode == "required" and len(self.names) == 1


AUTO = ToolChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    """A chat to be continued. `messages` are in the form that `Engine.render` takes, which checks them."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()  # in the form of OpenAI's chat API; checked by `Replies.reading`
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True  # else an answer ends with its first call
    truncate: bool = False  # the oldest turns are omitted from a prompt that is too long
    variables: Mapping[str, Any] | None = None  # of the chat template
    effort: str | None = None  # of reasoning
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is the beginning of the answer
    replay: bool = True  # earlier replies have the tokens that they were generated with
    breakpoints: Sequence[int] = ()  # numbers of first messages behind which later requests may resume


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose prompts were made. Choice i of prompt p has the index p * n + i."""

    prompt_tokens: tuple[int, ...]  # of each prompt
    params: SamplingParams
    stream: bool
    namespace: str  # of its memory
    retention: RetentionOptions  # without the owner
    breakpoints: tuple[int, ...] = ()  # positions of the prompt, ascending
    reading: RequestReading | None = None  # of the answers to a chat
    omitted: int = 0  # how many messages of a chat its prompt omits, as in `Turn`
    prompts: Sequence["array[int]"] = ()  # their token ids, where the response has them

    @property
    def choices(self) -> int:
        return len(self.prompt_tokens) * self.params.n
