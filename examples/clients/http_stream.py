"""A streamed chat without a client package. Run it: python examples/clients/http_stream.py http://127.0.0.1:8080

`pip install httpx`; any HTTP client does. The response is lines: `data: ` and a JSON object, then `data: [DONE]`.
The name of a conversation stands in for its earlier turns: the server keeps them, and the second request sends one
message.
"""

import argparse
import json
import secrets

import httpx

QUESTIONS = ("Write a class for a stack of integers.", "Now write its test.")


def main(address: str) -> None:
    name = f"example-{secrets.token_hex(4)}"
    with httpx.Client(base_url=address, timeout=60) as client:
        client.post("/kvcellar/conversations", json={"name": name}).raise_for_status()
        for question in QUESTIONS:
            body = {
                "messages": [{"role": "user", "content": question}], "conversation": name, "max_tokens": 32,
                "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:  # the body of an error says what is wrong and in which field
                    raise SystemExit(response.read().decode())
                answer = ""
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if chunk["choices"]:
                        answer += chunk["choices"][0]["delta"].get("content") or ""
                    elif usage := chunk["usage"]:
                        cached = usage["prompt_tokens_details"]["cached_tokens"]
                        print(f"{cached} of {usage['prompt_tokens']} tokens of the prompt came from memory")
            print(repr(answer))
        client.delete(f"/kvcellar/conversations/{name}").raise_for_status()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
