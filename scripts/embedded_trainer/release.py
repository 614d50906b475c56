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
from .training import LOOK_WINDOWS, Run

log = logging.getLogger(__name__)

COMPARED_TOKENS = 600  # of held-out text, longer than several windows


def machine() -> str:
    """The processor and how much of it was used, in words."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{torch.get_num_threads()} thread of {os.cpu_count()} shared cores ({name})"


def described(run: Run, prepared: Prepared) -> dict[str, Any]:
    """What was trained, and how."""
    progress = run.progress
    return {
        "shape": run.shape.as_json(),
        "parameters": count_parameters(run.shape),
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


def release(run: Run, prepared: Prepared, stdlib: Path, licence: Path, out: Path) -> None:
    """Exports the run as it stands, measures it, and writes manifest, card and notices into `out`."""
    masters = run.optimiser.masters
    ids = prepared.streams["held_library"][: COMPARED_TOKENS + 1].long()[None]
    differences = export(out, run.shape, masters, prepared, ids)
    log.info("exported to %s; differences from transformers: %s", out, differences)
    record = described(run, prepared)
    corpus = gather(stdlib, with_tests=len(prepared.streams["tests"]) > 0)
    record["found"] = measure(run.shape, masters, prepared, corpus)
    record["heard"] = listen(out, prepared)
    manifest = {**prepared.manifest, "run": record}
    write_json(out / "manifest.json", manifest)
    (out / "CARD.md").write_text(render(manifest))
    (out / "NOTICE").write_text(notice(prepared.manifest["python"], corpus))
    shutil.copyfile(licence, out / "LICENSE.txt")
    log.info("held out: %s", record["found"]["library"])
