"""A question about an image as OpenAI's chat, as Anthropic's message and as Ollama's chat, whole and as streams."""

import json
import sys

import litellm

URL, MODEL, IMAGE, QUESTION = sys.argv[1:]
litellm.telemetry = False
ROUTES = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL},
    "ollama": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
}
found = {}
for name, route in ROUTES.items():
    content = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": QUESTION}]
    asked = {
        **route,
        "api_key": "any",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0.0,
        "num_retries": 0,
    }
    whole = litellm.completion(**asked)
    parts = [part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)]
    found[name] = {
        "text": whole.choices[0].message.content,
        "streamed": "".join(parts),
        "prompt_tokens": whole.usage.prompt_tokens,
    }
json.dump(found, sys.stdout)
