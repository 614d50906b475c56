"""generation_defaults: sampling parameters from a model's generation config, and a note for each field not followed.

Every field of transformers' GenerationConfig is one of these:

* followed: a field of `SamplingParams` that a request may override, or an end-of-text id;
* without effect on which tokens are generated (`_NO_EFFECT`): accepted and ignored;
* not implemented (`_NOT_FOLLOWED`): reported at load, unless its value leaves the feature off. Such fields only change
  how tokens are chosen, which a request can override anyway;
* `guidance_scale`: refused, since it changes the logits themselves.

A name that is no field of it is reported, too.

Without `do_sample`, tokens are sampled, at temperature 1.0 where the config has none, as with vLLM and OpenAI (and not
greedy, as in transformers). `do_sample` false is greedy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.sampling_params import SamplingParams, names_in
from kvcellar.values import Kind, Whole

_FOLLOWED = names_in("config")
SAMPLING = {name: one for name, one in _FOLLOWED.items() if one.filters}  # not followed where a config is greedy
_NO_EFFECT = frozenset({
    "do_sample", "eos_token_id",  # read below
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp",
    "early_stopping", "length_penalty",  # of beam search, which is reported itself
    "renormalize_logits",  # does not change what is drawn
    "transformers_version",
})  # fmt: skip
_BEAMS = "beam search is not supported"
_ENCODER = "it is for models with an encoder"
_SEARCH = "this decoding method is not supported"
_NOT_FOLLOWED: dict[str, tuple[str, tuple[object, ...]]] = {  # why, and the values that leave it off
    "max_length": ("max_tokens limits the new tokens, and the context all of them", (20,)),  # 20: a former default
    "max_time": ("a completion is limited in tokens, not in seconds", ()),
    "num_beams": (_BEAMS, (1,)),
    "num_beam_groups": (_BEAMS, (1,)),
    "diversity_penalty": (_BEAMS, (0,)),
    "num_return_sequences": ("n is a parameter of each request", (1,)),
    "penalty_alpha": (_SEARCH, (0,)),
    "dola_layers": (_SEARCH, ()),
    "constraints": (_SEARCH, ()),
    "force_words_ids": (_SEARCH, ()),
    "token_healing": ("the tokens of a prompt are not changed", (False,)),
    "watermarking_config": ("watermarking is not supported", ()),
    "remove_invalid_values": ("a completion whose logits are NaN or infinite ends with an error", (False,)),
    "forced_bos_token_id": (_ENCODER, ()),
    "forced_eos_token_id": ("a completion that reaches max_tokens ends without it, with finish_reason length", ()),
    "encoder_repetition_penalty": (_ENCODER, (1,)),
    "encoder_no_repeat_ngram_size": (_ENCODER, (0,)),
}
FIELDS = frozenset((*_FOLLOWED, *_NO_EFFECT, *_NOT_FOLLOWED, "guidance_scale"))


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values by field of `SamplingParams`, why tokens are chosen with them, and a note for each field that is not
    followed."""

    sampling: Mapping[str, Any]
    because: str
    notes: tuple[str, ...] = ()

    def without(self, name: str, why: str) -> "GenerationDefaults":
        """The same without the parameter `name`, which this model cannot follow, and with a note about it."""
        if name not in self.sampling:
            return self
        rest = {key: value for key, value in self.sampling.items() if key != name}
        return GenerationDefaults(rest, self.because, (*self.notes, _note(name, self.sampling[name], why)))


def generation_defaults(fields: Mapping[str, Any], *, context: int | None = None) -> GenerationDefaults:
    """From the fields of a generation config. Raises `ModelRefused` for invalid values, and for `guidance_scale`.

    `context` is the context length, if it is known: a `max_length` of that or more has no effect. With `do_sample`
    false, or a `top_p` that leaves only the most likely token, decoding is greedy, and sampling filters are ignored.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if (scale := fields.get("guidance_scale", 1)) != 1:
        raise ModelRefused(
            f"generation_config.json: guidance_scale is {scale!r}: classifier-free guidance needs two forwards for "
            f"each token and is not supported. Remove the field to serve the model without it."
        )
    greedy = _why_greedy(fields)
    followed = [(name, one) for name, one in _FOLLOWED.items() if name in fields and not (greedy and one.filters)]
    values = {one.name: _value(name, fields[name], one.kind) for name, one in followed}
    if greedy:
        values["temperature"] = 0.0
    _normalise(values, fields.get("eos_token_id"))
    try:
        SamplingParams(**values)
    except BadRequest as error:
        raise ModelRefused(f"generation_config.json cannot be followed: {error}") from error
    because = greedy or ("its generation config" if SAMPLING.keys() & fields.keys() else "its files set nothing else")
    return GenerationDefaults(values, because, tuple(_unfollowed(fields, context)))


def _why_greedy(fields: Mapping[str, Any]) -> str:
    """Empty where tokens are sampled."""
    samples = fields.get("do_sample", True)
    if not isinstance(samples, bool):
        raise ModelRefused(f"generation_config.json: do_sample is {samples!r:.80}; true or false is needed")
    if not samples:
        return "do_sample is false in its generation config"
    return "top_p is 0 in its generation config" if _number("top_p", fields.get("top_p", 1.0)) == 0 else ""


def _normalise(values: dict[str, Any], end_ids: Any) -> None:
    """Replace what transformers accepts and `SamplingParams` does not by its equivalent."""
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if values.get("typical_p") == 0:
        values["typical_p"] = 1.0
    if "bad_words_ids" in values:  # an end-of-text id alone is not a bad word, as in transformers
        ends = [[end] for end in (end_ids if isinstance(end_ids, list) else [end_ids])]
        values["bad_words_ids"] = [word for word in values["bad_words_ids"] if word not in ends]
    if {"min_tokens", "max_tokens"} <= values.keys() and values["min_tokens"] > values["max_tokens"]:
        values["min_tokens"] = values["max_tokens"]


def _unfollowed(fields: Mapping[str, Any], context: int | None) -> Iterable[str]:
    for name, value in sorted((name, value) for name, value in fields.items() if not name.startswith("_")):
        if name in _NOT_FOLLOWED:
            why, off = _NOT_FOLLOWED[name]
            beyond = name == "max_length" and context is not None and isinstance(value, int) and value >= context
            if not beyond and not any(value == same for same in off):
                yield _note(name, value, why)
        elif name not in FIELDS:
            yield _note(name, value, "it is no field of this transformers' GenerationConfig")


def _note(name: str, value: object, why: str) -> str:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"generation config: {name}={text} is not followed: {why}"


def _value(name: str, value: Any, kind: Kind) -> Any:
    """In the type that `SamplingParams` takes, which checks it."""
    if name == "stop_strings":
        return [value] if isinstance(value, str) else value
    if name == "bad_words_ids" and not (isinstance(value, list | tuple) and all(isinstance(w, list) for w in value)):
        raise ModelRefused(f"generation_config.json: bad_words_ids is {value!r:.80}; lists of token ids are needed")
    if isinstance(value, list | tuple | Mapping):
        return value
    found = _number(name, value)
    return int(found) if isinstance(kind, Whole) and found == int(found) else found  # some files have a top_k of 50.0


def _number(name: str, value: Any) -> int | float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1 << 31:
        raise ModelRefused(f"generation_config.json: {name} is {value!r}; a number below 2^31 is needed")
    return value
