"""Writes the released folder: model files, manifest, evaluation, card and notices."""

import logging
import os
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .card import render
from .corpus import gather
from .evaluation import listen, measure
from .export import export, write_json
from .network import count_parameters
from .notice import notice
from .prepare import Prepared
from .training import LOOK_WINDOWS, ModelTask, Run

log = logging.getLogger(__name__)

HEAD_FILE = "mtp.safetensors"
COMPARED_TOKENS = 600  # of held-out text, longer than several windows


def machine() -> str:
    """The processor and how much of it was used, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{torch.get_num_threads()} thread of {os.cpu_count()} shared cores ({name})"


def described(run: Run, task: ModelTask, prepared: Prepared) -> dict[str, Any]:
    """What was trained, and how."""
    progress = run.progress
    return {
        "shape": task.shape.as_json(),
        "parameters": count_parameters(task.shape),
        "recipe": asdict(run.recipe),
        "steps_done": progress.step,
        "tokens": progress.tokens,
        "stream_tokens": {name: len(stream) for name, stream in prepared.streams.items()},
        "seconds": round(progress.seconds),
        "machine": machine(),
        "torch": torch.__version__,
        "look_windows": LOOK_WINDOWS,
        "looks": [asdict(look) for look in progress.looks],
    }


def release(run: Run, task: ModelTask, prepared: Prepared, stdlib: Path, licence: Path, out: Path) -> None:
    """Exports the run as it stands, measures it, and writes manifest, card and notices into `out`. A head that was
    trained for another model is deleted."""
    masters = run.optimiser.masters
    ids = prepared.streams["held_library"][: COMPARED_TOKENS + 1].long()[None]
    differences = export(out, task.shape, masters, prepared, ids)
    (out / HEAD_FILE).unlink(missing_ok=True)
    log.info("exported to %s; differences from transformers: %s", out, differences)
    record = described(run, task, prepared)
    corpus = gather(stdlib, with_tests=len(prepared.streams["tests"]) > 0)
    record["found"] = measure(task.shape, masters, prepared, corpus)
    record["heard"] = listen(out, prepared)
    manifest = {**prepared.manifest, "run": record}
    write_json(out / "manifest.json", manifest)
    (out / "CARD.md").write_text(render(manifest))
    (out / "NOTICE").write_text(notice(prepared.manifest["python"], corpus))
    shutil.copyfile(licence, out / "LICENSE.txt")
    log.info("held out: %s", record["found"]["library"])
