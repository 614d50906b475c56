"""Objects of a class with instructor. Run it: python examples/clients/instructor_objects.py http://127.0.0.1:8080

`pip install instructor`. The server guides the model by the schema of the class, so no answer has to be asked for
twice, even from a model that knows nothing about books.
"""

import argparse

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Book(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else the schema lets the model add keys
    title: str = Field(max_length=20)
    pages: int = Field(ge=1, le=999)


def main(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:  # or a key of the server
        model = client.models.list().data[0].id
        guided = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        book = guided.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Name a book."}],
            response_model=Book,
            max_retries=0,
            max_tokens=200,
            temperature=0,
        )
        print(f"{book.title!r} has {book.pages} pages")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
