"""A chat with Anthropic's package. Run it: python examples/clients/anthropic_messages.py http://127.0.0.1:8080

`pip install anthropic`. A block with `cache_control` is a place where the server keeps what models with windows or
recurrent layers need to resume, and says for how long. Other prompts are found in memory without it, too.
"""

import argparse

import anthropic

RULES = "You write short Python without comments. You use the standard library only."
QUESTIONS = ("Write a class for a stack of integers.", "Now write its test.")


def main(address: str) -> None:
    system = [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    with anthropic.Anthropic(base_url=address, api_key="none") as client:  # the address has no /v1
        model = client.models.list().data[0].id
        messages = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            message = client.messages.create(model=model, max_tokens=32, system=system, messages=messages)
            usage = message.usage
            # These three are the prompt: Anthropic counts as `input_tokens` only what stands behind the breakpoint.
            prompt = usage.cache_read_input_tokens + usage.cache_creation_input_tokens + usage.input_tokens
            print(f"{usage.cache_read_input_tokens} of {prompt} tokens of the prompt came from memory")
            answer = "".join(block.text for block in message.content if block.type == "text")
            print(repr(answer))
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
