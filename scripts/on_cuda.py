"""Tokens per second of kvcellar and of transformers on one CUDA device: `python -m scripts.on_cuda`.

A random network of 1.2 billion parameters in bfloat16, in the shape of Llama 3.2 1B, made here. Decoding is greedy,
with the settings that Llama ships (temperature 0.6, top_p 0.9), and with top_k 40; prompts are read in groups of 1 and
16. Each number is that of the last of three runs: the first ones compile and capture. transformers has no prompts to
pad and samples nothing, which is its fastest way.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from kvcellar import Engine

TOKENS = 128  # of each completion
PROMPT = 2048  # tokens of a prompt that is read
RUNS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "as shipped": {"temperature": 0.6, "top_p": 0.9, "seed": 1},
    "top_k 40": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 1},
}
Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", choices=("triton", "sdpa"), default="triton")
    parser.add_argument("--record", choices=("auto", "off"), default="auto")
    parser.add_argument("--step-tokens", type=int, default=None)
    parser.add_argument("--host-bytes", type=int, default=None, help="0: no host memory for what leaves the device")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made(Path(folder))
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
        settings = {name: getattr(arguments, name) for name in ("attention", "record", "step_tokens", "host_bytes")}
        with Engine(folder, device="cuda", dtype="bfloat16", context=8192, **settings) as engine:
            ours(engine)
        theirs(folder)


def made(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            network = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    finally:
        torch.set_default_dtype(torch.float32)
    network.cpu().save_pretrained(folder)


def ours(engine: Engine) -> None:
    for sequences in (1, 8, 32, 64):
        for name, how in WAYS.items():

            def decode(prompts: Prompts, how: dict[str, Any] = how) -> object:
                return engine.generate(prompts, max_tokens=TOKENS, ignore_eos=True, **how)

            rate(f"kvcellar      {sequences:3} decode, {name}", decode, sequences, 16, TOKENS)
    for sequences in (1, 16):

        def read(prompts: Prompts) -> object:
            return engine.generate(prompts, max_tokens=1, ignore_eos=True, temperature=0)

        rate(f"kvcellar      {sequences:3} prompts of {PROMPT}", read, sequences, PROMPT, PROMPT)
    say(str(engine.stats().recording))


def theirs(folder: str) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    network.cuda()
    for sequences in (1, 8, 32, 64):

        def decode(prompts: Prompts) -> object:
            ids = torch.tensor(prompts, device="cuda")
            limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
            return network.generate(ids, attention_mask=torch.ones_like(ids), **limits)

        rate(f"transformers  {sequences:3} decode, greedy", decode, sequences, 16, TOKENS)
    for sequences in (1, 16):

        def read(prompts: Prompts) -> object:
            with torch.inference_mode():
                return network(torch.tensor(prompts, device="cuda"), use_cache=True, logits_to_keep=1)

        rate(f"transformers  {sequences:3} prompts of {PROMPT}", read, sequences, PROMPT, PROMPT)


def rate(what: str, run: Callable[[Prompts], object], sequences: int, length: int, counted: int) -> None:
    """Print tokens per second, `counted` for each sequence. No run finds a prompt of an earlier one in memory."""
    seconds = 0.0
    for number in range(RUNS):
        prompts = [[token(100 * number + i, j) for j in range(length)] for i in range(sequences)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(prompts)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    say(f"{what:40} {sequences * counted / seconds:10.0f} tokens/s {1000 * seconds:9.1f} ms")


def token(prompt: int, position: int) -> int:
    return 3 + (7919 * prompt + 31 * position) % 100_000


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
