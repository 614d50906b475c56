"""A chat with Ollama's package, streamed. Run it: python examples/clients/ollama_chat.py http://127.0.0.1:8080

`pip install ollama`. The second turn sends the whole conversation again; its beginning comes from memory, so reading a
longer prompt takes less time. The lines of the server say how many tokens that were (`prompt_eval_cached_count`), but
this package drops fields that it does not know.
"""

import argparse

import ollama

QUESTIONS = ("Write a class for a stack of integers.", "Now write its test.")


def main(address: str) -> None:
    with ollama.Client(host=address) as client:
        model = client.list().models[0].model
        messages = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = ""
            for line in client.chat(model, messages, options={"num_predict": 32}, stream=True):
                answer += line.message.content or ""
                if line.done:
                    milliseconds = line.prompt_eval_duration / 1e6
                    print(f"{line.prompt_eval_count} tokens of the prompt were read in {milliseconds:.0f} ms")
            print(repr(answer))
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
