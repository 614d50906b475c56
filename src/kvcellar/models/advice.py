"""advice: what a model's generation config says of its answers, field by field. None is passed over in silence.

Every field of transformers' GenerationConfig is one of these:

* followed: a field of `SamplingParams` that a request may override (`_ALWAYS`, `_SAMPLING`), or where an answer ends;
* about how transformers runs it, not about which tokens come (`_NO_EFFECT`): taken, and without effect;
* a rule that is not done here (`_NOT_FOLLOWED`): reported when the model is loaded, unless it has a value that asks for
  nothing. All that it changes is how an answer is chosen, which a request decides in the end;
* `guidance_scale`: refused, for every score would be another one.

What is no field of it is reported, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.sample.params import SamplingParams

_SAMPLING = {  # names in transformers and here; only where a config samples
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h")},
    **{name: name for name in ("epsilon_cutoff", "eta_cutoff")},
}
_ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words_ids": "bad_words_ids",
    "sequence_bias": "sequence_bias",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "exponential_decay_length_penalty": "exponential_decay_length_penalty",
    "min_length": "min_length",
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
_WHOLE = frozenset(("top_k", "no_repeat_ngram_size", "min_length", "min_new_tokens", "max_new_tokens"))
_NO_EFFECT = frozenset({
    "do_sample", "eos_token_id",  # followed below
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory",
    "compile_config", "disable_compile", "continuous_batching_config",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp",
    "early_stopping", "length_penalty",  # of beams, which are reported themselves
    "renormalize_logits",  # the same draw
    "transformers_version",
})  # fmt: skip
_BEAMS = "answers are written one by one, without beams"
_ENCODER = "it is for models with an encoder"
_SEARCH = "tokens are drawn, or the best is taken"
_NOT_FOLLOWED: dict[str, tuple[str, tuple[object, ...]]] = {  # why, and the values that ask for nothing
    "max_length": ("max_tokens bounds an answer, and the context both together", (20,)),  # 20 was once the default
    "max_time": ("an answer is bounded in tokens, not in seconds", ()),
    "num_beams": (_BEAMS, (1,)),
    "num_beam_groups": (_BEAMS, (1,)),
    "diversity_penalty": (_BEAMS, (0,)),
    "num_return_sequences": ("a request says n itself", (1,)),
    "penalty_alpha": (_SEARCH, (0,)),
    "dola_layers": (_SEARCH, ()),
    "constraints": (_SEARCH, ()),
    "force_words_ids": (_SEARCH, ()),
    "token_healing": ("a prompt is taken as it is", (False,)),
    "watermarking_config": ("answers are not marked", ()),
    "remove_invalid_values": ("an answer whose scores are no numbers ends with an error", (False,)),
    "forced_bos_token_id": (_ENCODER, ()),
    "forced_eos_token_id": ("an answer of max_tokens ends without it; its finish_reason is length", ()),
    "encoder_repetition_penalty": (_ENCODER, (1,)),
    "encoder_no_repeat_ngram_size": (_ENCODER, (0,)),
}
FIELDS = frozenset((*_SAMPLING, *_ALWAYS, *_NO_EFFECT, *_NOT_FOLLOWED, "guidance_scale"))


@dataclass(frozen=True, slots=True)
class Advice:
    """What is followed (`SamplingParams` by our names), and a sentence for each thing that is not."""

    sampling: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def without(self, name: str, why: str) -> "Advice":
        """The same if this one cannot be followed by the model at hand."""
        if name not in self.sampling:
            return self
        rest = {key: value for key, value in self.sampling.items() if key != name}
        return Advice(rest, (*self.notes, _note(name, self.sampling[name], why)))


def advice(fields: Mapping[str, Any], *, context: int | None = None) -> Advice:
    """Of the fields of a generation config. Raises `ModelRefused` for what is followed and makes no sense, and for
    guidance. `context`: the positions of the model, if they are known, beyond which a `max_length` has no effect.

    Without `do_sample`, or with a `top_p` that leaves only the most likely token, answers are greedy: of what chooses
    among tokens nothing counts then. A `top_k` of -1 and a `typical_p` of 0 say that there is none, as do the cutoffs
    of 0 and 1. A forbidden word that is only the end of the text is left out, as in transformers.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    _check_guidance(fields.get("guidance_scale"))
    greedy = not fields.get("do_sample") or _number("top_p", fields.get("top_p", 1.0)) == 0
    names = _ALWAYS if greedy else {**_ALWAYS, **_SAMPLING}
    advised = {ours: _value(theirs, fields[theirs]) for theirs, ours in names.items() if theirs in fields}
    if greedy:
        advised["temperature"] = 0.0
    if advised.get("top_k") == -1:
        advised["top_k"] = 0
    if advised.get("typical_p") == 0:
        advised["typical_p"] = 1.0
    if "bad_words_ids" in advised:
        ends = _ends(fields.get("eos_token_id"))
        advised["bad_words_ids"] = [word for word in advised["bad_words_ids"] if word not in ends]
    if {"min_tokens", "max_tokens"} <= advised.keys() and advised["min_tokens"] > advised["max_tokens"]:
        advised["min_tokens"] = advised["max_tokens"]
    try:
        SamplingParams(**advised)
    except BadRequest as error:
        raise ModelRefused(f"generation_config.json cannot be followed: {error}") from error
    return Advice(advised, tuple(_unfollowed(fields, context)))


def _unfollowed(fields: Mapping[str, Any], context: int | None) -> Iterable[str]:
    for name, value in sorted((name, value) for name, value in fields.items() if not name.startswith("_")):
        if name in _NOT_FOLLOWED:
            why, nothing = _NOT_FOLLOWED[name]
            beyond = name == "max_length" and context is not None and isinstance(value, int) and value >= context
            if not beyond and not any(value == same for same in nothing):
                yield _note(name, value, why)
        elif name not in FIELDS:
            yield _note(name, value, "it is no field of this transformers' GenerationConfig")


def _note(name: str, value: object, why: str) -> str:
    said = repr(value)
    said = said if len(said) <= 60 else f"{said[:57]}..."
    return f"generation config: {name}={said} is not followed: {why}"


def _check_guidance(scale: object) -> None:
    if scale is not None and scale != 1:
        raise ModelRefused(
            f"generation_config.json says guidance_scale is {scale!r}: each score would be made of two forwards, with "
            f"and without the prompt, and answers without that are other ones. Remove it to serve the model without."
        )


def _value(name: str, value: Any) -> Any:
    """As `SamplingParams` takes it, which checks it."""
    if name == "stop_strings":
        return (value,) if isinstance(value, str) else value
    if name == "bad_words_ids" and not (isinstance(value, list | tuple) and all(isinstance(w, list) for w in value)):
        raise ModelRefused(f"generation_config.json says bad_words_ids is {value!r:.80}; lists of token ids are needed")
    if isinstance(value, list | tuple | Mapping):
        return value
    return _number(name, value)


def _number(name: str, value: Any) -> int | float:
    """A whole `top_k` as int: programs write 50.0, too."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1 << 31:
        raise ModelRefused(f"generation_config.json says {name} is {value!r}; a number of common size is needed")
    return int(value) if name in _WHOLE and value == int(value) else value


def _ends(ids: Any) -> list[list[Any]]:
    return [[one] for one in (ids if isinstance(ids, list) else [ids])]
