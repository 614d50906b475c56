"""Objects of a class, by a named tool, by JSON in free form, and by a schema."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    rivers: int = Field(ge=0, le=9)


found = {}
with openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0) as client:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        city = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Which city?"}],
            response_model=City,
            max_retries=0,
            max_tokens=200,
            seed=1,
        )
        found[mode.name] = city.model_dump()
json.dump(found, sys.stdout)
