"""One conversation through three APIs with LiteLLM. Run it: python examples/clients/litellm_chat.py http://127.0.0.1:8080

`pip install litellm`. The same messages go to the routes of OpenAI, Anthropic and Ollama. The first of them computes
the prompt; the others find it, because all routes of a server share one memory.
"""

import argparse

import httpx
import litellm

MESSAGES = [{"role": "user", "content": "Write a class for a stack of integers."}]


def main(address: str) -> None:
    model = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
    for route, base in (("openai", f"{address}/v1"), ("anthropic", address), ("ollama_chat", address)):
        answer = litellm.completion(
            model=f"{route}/{model}", api_base=base, api_key="none", messages=MESSAGES, max_tokens=32, temperature=0
        )
        details = answer.usage.prompt_tokens_details  # None where a route of LiteLLM does not pass it on
        cached = "not told" if details is None else details.cached_tokens
        print(f"{route}: {answer.usage.prompt_tokens} tokens of the prompt; from memory: {cached}")
        print(repr(answer.choices[0].message.content))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
