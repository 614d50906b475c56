"""An agent that must call a tool, and again after its result, as a stream: by the Responses API and by chats."""

import asyncio
import json
import sys

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

URL, MODEL = sys.argv[1:]
set_tracing_disabled(True)
called = []


@function_tool
def rivers(city: bool) -> str:
    """The number of rivers."""
    called.append(city)
    return "two rivers"


async def main() -> dict[str, object]:
    found = {}
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0) as client:
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
            settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=100, temperature=0.0)
            agent = Agent(
                name="a",
                instructions="Call it.",
                tools=[rivers],
                model=kind(model=MODEL, openai_client=client),
                model_settings=settings,
                tool_use_behavior="stop_on_first_tool",
            )
            called.clear()
            run = await Runner.run(agent, "How many?")
            history = run.to_input_list()
            streamed = Runner.run_streamed(agent, [*history, {"role": "user", "content": "And now?"}])
            events = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
            found[kind.__name__] = {
                "calls": len(called),
                "outputs": [run.final_output, streamed.final_output],
                "kinds": [item.get("type", "message") for item in history],
                "events": sorted(set(events)),
            }
    return found


json.dump(asyncio.run(main()), sys.stdout)
