"""A chat with OpenAI's package, streamed. Run it: python examples/clients/openai_chat.py http://127.0.0.1:8080

`pip install openai`. The second turn sends the whole conversation again, as every chat does; the server has computed
its beginning already, and says how much of it came from memory.
"""

import argparse

import openai

QUESTIONS = ("Write a class for a stack of integers.", "Now write its test.")


def main(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:  # or a key of the server
        model = client.models.list().data[0].id
        messages = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            stream = client.chat.completions.create(
                model=model, messages=messages, max_tokens=32, stream=True, stream_options={"include_usage": True}
            )
            answer = ""
            for chunk in stream:
                if chunk.choices:
                    answer += chunk.choices[0].delta.content or ""
                elif (usage := chunk.usage) is not None:  # the last chunk has no choices
                    cached = usage.prompt_tokens_details.cached_tokens
                    print(f"{cached} of {usage.prompt_tokens} tokens of the prompt came from memory")
            print(repr(answer))
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
