"""with_openvino: OpenVINO GenAI as a peer: its continuous batching, stepped by hand.

The model is exported beside the weights by optimum-intel, in a process of its own, so that the memory and the CPU time
of the export are not the peer's. int8 has a scale for each output, int4 one for 128 inputs.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

STEP_TOKENS = 512
GIB = 1 << 30
QUANTISED: Mapping[str, Mapping[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "sym": True, "group_size": 128, "ratio": 1.0},
}


def library(options: Mapping[str, Any]) -> str:
    return f"openvino-genai {import_module('openvino_genai').__version__}"


class Peer:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._numpy, self._openvino = import_module("numpy"), import_module("openvino")
        genai = import_module("openvino_genai")
        made = Path(options["model"]) / f"openvino-{options['precision']}"
        if not made.is_dir():
            command = [sys.executable, __file__, options["model"], str(made), options["precision"]]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = -(-options["cache_bytes"] // GIB)
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = options["sequences"]
        how = {"INFERENCE_NUM_THREADS": options["threads"]}
        self._pipeline = genai.ContinuousBatchingPipeline(str(made), scheduler, "CPU", how)
        self._how = genai.GenerationConfig()
        self._how.max_new_tokens, self._how.do_sample = options["new"], False
        self._how.ignore_eos = True
        self._how.set_eos_token_id(0)  # there has to be one
        self._how.stop_token_ids = {0}
        self.flags = f"K/V of {scheduler.cache_size} GiB, {STEP_TOKENS} tokens of a step"
        self._opened = 0
        self._handles: list[Any] = []

    def open(self, prompts: Sequence[Sequence[int]], sampled: Mapping[str, float] | None) -> list[list[int]]:
        self._how.do_sample = sampled is not None
        for name, value in (sampled or {}).items():
            setattr(self._how, name, value)
        self._handles = [self._added(prompt) for prompt in prompts]
        return self.step()

    def _added(self, prompt: Sequence[int]) -> Any:
        self._opened += 1
        ids = self._openvino.Tensor(self._numpy.array([prompt], dtype="int64"))
        return self._pipeline.add_request(self._opened, ids, self._how)

    def step(self) -> list[list[int]]:
        new: list[list[int]] = [[] for _ in self._handles]
        while not all(new):
            self._pipeline.step()
            for ids, handle in zip(new, self._handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        ids.extend(output.generated_ids)
        return new

    def close(self) -> None:
        for handle in self._handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def export(model: str, made: str, precision: str) -> None:
    optimum = import_module("optimum.intel.openvino")
    how: dict[str, Any] = {"load_in_8bit": False}
    if precision in QUANTISED:
        how = {"quantization_config": optimum.OVWeightQuantizationConfig(**QUANTISED[precision])}
    exported = optimum.OVModelForCausalLM.from_pretrained(model, export=True, compile=False, **how)
    exported.save_pretrained(made)


if __name__ == "__main__":
    export(*sys.argv[1:])
