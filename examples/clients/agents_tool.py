"""An agent with a tool, by openai-agents. Run it: python examples/clients/agents_tool.py http://127.0.0.1:8080

`pip install openai-agents`. The server needs a model whose chat template knows tools. The agent calls its tool, and the
second question sends the call and its result back: the server has computed them already.
"""

import argparse
import asyncio

import openai
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

QUESTIONS = ("How many lines has the file?", "And how many has it now?")


@function_tool
def count_lines(recount: bool) -> str:
    """The number of lines of the file."""
    return "12 lines"


async def main(address: str) -> None:
    set_tracing_disabled(True)  # else every run is reported to OpenAI
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:  # or a key of the server
        model = (await client.models.list()).data[0].id
        agent = Agent(
            name="counter",
            instructions="Call the tool.",
            tools=[count_lines],
            model=OpenAIResponsesModel(model=model, openai_client=client),
            # A model that was not trained to call tools still calls this one: the server guides what it writes.
            model_settings=ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=200, temperature=0
            ),
            tool_use_behavior="stop_on_first_tool",
        )
        history = []
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            result = await Runner.run(agent, history)
            usage = result.raw_responses[-1].usage
            cached = usage.input_tokens_details.cached_tokens
            print(f"{cached} of {usage.input_tokens} tokens of the prompt came from memory")
            print(repr(result.final_output))
            history = result.to_input_list()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    asyncio.run(main(parser.parse_args().address))
