"""Prompt tokens that llama.cpp's server computes on the traces of `python -m benchmarks replay`, with random weights.

    python -m scripts.replay_in_llama_cpp LLAMA_SERVER [--trace NAME] [-- OPTIONS OF THE SERVER]

LLAMA_SERVER is the path of a `llama-server`; the package `gguf` writes its model, of full attention. Without options
the server has its default settings. Answers are what the model draws, so that the texts differ from those of that
row: an ideal cache is counted on the same texts.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import gguf
import numpy as np

from benchmarks.replay import TRACES, Served, computed

PORT = 18_431
HIDDEN, VOCABULARY = 64, 50_016


def write_model(path: Path) -> None:
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1 << 15)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"t{number}" for number in range(3, VOCABULARY))]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[1] * (VOCABULARY - 3)])
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", draw.standard_normal((HIDDEN, HIDDEN), np.float32) / 8)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("token_embd.weight", draw.standard_normal((VOCABULARY, HIDDEN), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def wait_ready(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urlopen(f"http://127.0.0.1:{PORT}/health")
            return
        except URLError:
            time.sleep(0.2)
    raise SystemExit(f"the server ended with {server.returncode}")


def serve(prompt: list[int], new: int) -> Served:
    fields = {"prompt": prompt, "n_predict": new, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
    body = json.dumps(fields).encode()
    request = Request(f"http://127.0.0.1:{PORT}/completion", body, {"Content-Type": "application/json"})
    with urlopen(request) as response:
        found = json.load(response)
    assert len(found["tokens"]) == new
    return Served(found["tokens"], len(prompt) - found["timings"]["prompt_n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", type=Path, help="the path of a llama-server")
    parser.add_argument("--trace", choices=tuple(TRACES), action="append")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of all texts")
    parser.add_argument("options", nargs="*", help="of the server")
    options = parser.parse_args()
    for name in options.trace or TRACES:
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / "model.gguf"
            write_model(model)
            command = [options.server, "-m", model, "--port", str(PORT), *options.options]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
                try:
                    wait_ready(server)
                    found = computed(name, serve, scale=options.scale)
                finally:
                    server.terminate()
        print(f"{name:8} {found.tokens:9} {found.computed:9} {found.ideal:9}", flush=True)


if __name__ == "__main__":
    main()
