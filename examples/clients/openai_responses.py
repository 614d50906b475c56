"""The Responses API with OpenAI's package. Run it: python examples/clients/openai_responses.py http://127.0.0.1:8080

`pip install openai`. The server keeps the conversation, so the second turn sends only what is new, with the id of the
first response.
"""

import argparse

import openai

QUESTIONS = ("Write a class for a stack of integers.", "Now write its test.")


def main(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:  # or a key of the server
        model = client.models.list().data[0].id
        before = openai.omit
        for question in QUESTIONS:
            response = client.responses.create(
                model=model, input=question, previous_response_id=before, max_output_tokens=32
            )
            usage = response.usage
            cached = usage.input_tokens_details.cached_tokens
            print(f"{cached} of {usage.input_tokens} tokens of the prompt came from memory")
            print(repr(response.output_text))
            before = response.id


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
