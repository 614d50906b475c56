"""fields: request fields of other servers that are accepted here although nothing is done with them.

Clients send the defaults of the server that they were written for. A field is accepted without being implemented only
where ignoring it cannot change the answer; docs/reference/http-fields.md is made from these
tables.
"""

from collections.abc import Mapping
from types import MappingProxyType

NO_EFFECT: Mapping[str, str] = MappingProxyType(  # accepted with any value; why ignoring it cannot change the answer
    {
        "cache_prompt": "the answer does not depend on what was kept in memory",
        "cache_salt": "separate requests share no memory, so none can observe what another one left in it",
        "length_penalty": "read by beam search only, which is refused",
        "metadata": "about the caller",
        "parallel_tool_calls": "tool calls are not generated",
        "prompt_cache_key": "the answer does not depend on what was kept in memory",
        "request_id": "a name that the caller gives to the request; the server's own is in the header x-request-id",
        "safety_identifier": "about the caller",
        "spaces_between_special_tokens": "special tokens are never part of the text",
        "user": "about the caller",
    }
)

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(  # accepted with these values, which ask for nothing
    {
        # OpenAI's
        "audio": (None,),
        "echo": (None, False),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None, "in_memory"),
        "reasoning_effort": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "suffix": (None, ""),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
        # vLLM's
        "add_special_tokens": (None, False),  # of a chat; a completion implements it
        "allowed_token_ids": (None,),
        "bad_words": (None, []),
        "chat_template": (None,),
        "chat_template_kwargs": (None, {}),
        "continue_final_message": (None, False),
        "documents": (None, []),
        "guided_choice": (None,),
        "guided_decoding_backend": (None,),
        "guided_grammar": (None,),
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_whitespace_pattern": (None,),
        "include_reasoning": (None, True),
        "include_stop_str_in_output": (None, False),
        "kv_transfer_params": (None,),
        "logits_processors": (None, []),
        "media_io_kwargs": (None, {}),
        "mm_processor_kwargs": (None, {}),
        "priority": (None, 0),
        "prompt_embeds": (None,),
        "prompt_logprobs": (None,),
        "repetition_detection": (None,),
        "skip_special_tokens": (None, True),
        "structured_outputs": (None,),
        "thinking_token_budget": (None,),
        "truncate_prompt_tokens": (None,),
        "use_beam_search": (None, False),
        "vllm_xargs": (None, {}),
    }
)
