"""ignored_fields: request fields of other servers that are accepted but not implemented.

Clients send default values of the servers they were written for. A field is accepted without being implemented only if
ignoring it cannot change the response. docs/reference/http-fields.md is generated from these tables.
"""

from collections.abc import Mapping

NO_EFFECT: Mapping[str, str] = {  # accepted with any value, and the reason
    "cache_prompt": "a hint for the prefix cache; the text does not depend on it",
    "length_penalty": "used only by beam search, which is refused",
    "metadata": "describes the caller",
    "parallel_tool_calls": "text completions call no tools",
    "request_id": "the caller's name for the request; the server's id is in the header x-request-id",
    "spaces_between_special_tokens": "special tokens are never part of the text",
}

NEUTRAL: Mapping[str, tuple[object, ...]] = {  # accepted only with these values, which have no effect
    # OpenAI's
    "audio": (None,),
    "echo": (None, False),  # in chats; completions implement it
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "prompt_cache_options": (None, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # vLLM's
    "add_special_tokens": (None, False),  # in chats; completions implement it
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
    "repetition_detection": (None,),
    "skip_special_tokens": (None, True),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
}
