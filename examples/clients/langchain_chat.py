"""A chat with LangChain. Run it: python examples/clients/langchain_chat.py http://127.0.0.1:8080

`pip install langchain-openai`. The last question asks for an object: the server lets the model write nothing that does
not match the schema of the class.
"""

import argparse

import httpx
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTIONS = ("Write a class for a stack of integers.", "Now write its test.")


class Review(BaseModel):
    """What a reader thinks of the code."""

    good: bool
    mark: int = Field(ge=1, le=5)


def main(address: str) -> None:
    name = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
    model = ChatOpenAI(model=name, base_url=f"{address}/v1", api_key="none", max_tokens=32)
    messages = []
    for question in QUESTIONS:
        messages.append(("user", question))
        message = model.invoke(messages)
        usage = message.usage_metadata
        cached = usage["input_token_details"]["cache_read"]
        print(f"{cached} of {usage['input_tokens']} tokens of the prompt came from memory")
        print(repr(message.text))
        messages.append(message)
    print(model.with_structured_output(Review, method="json_schema").invoke([*messages, ("user", "Is it good?")]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
