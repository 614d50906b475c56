"""Structured output by a schema and by a named tool, a tool that is bound, and a stream."""

import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    rivers: int = Field(ge=0, le=9)


model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="any", max_retries=0, max_tokens=200, seed=1)
found = {}
for method in ("json_schema", "function_calling"):
    found[method] = model.with_structured_output(City, method=method).invoke("Which city?").model_dump()
message = model.bind_tools([City], tool_choice="any").invoke("Which city?")
found["call"] = [call["name"] for call in message.tool_calls]
parts = list(model.stream("Which city?", max_tokens=8, stream_usage=True))
whole = parts[0]
for part in parts[1:]:
    whole = whole + part
found["stream"] = {"tokens": whole.usage_metadata["output_tokens"], "text": whole.text}
found["invoke"] = model.invoke("Which city?", max_tokens=8).text
json.dump(found, sys.stdout)
