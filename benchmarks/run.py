"""run: `python -m benchmarks`: measures rows, one after the other, and prints a table and one line of JSON."""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from benchmarks import (
    against,
    attached,
    attention,
    bookkeeping,
    checkpoints,
    cluster_cost,
    cluster_kills,
    cluster_replay,
    cluster_roles,
    cluster_sim,
    cluster_store,
    conversation,
    drafts,
    fragmented,
    gaps,
    hits,
    images,
    levels,
    linear,
    policies,
    prefix,
    profile,
    replay,
    replay_engines,
    replay_peers,
    restart,
    revertible,
    sampled,
    serve_load,
    speculate,
    start,
    structured,
    threads,
    threads_sim,
    two_models,
    waits,
)
from benchmarks.row import Given, Lines, Row
from kvcellar.bench.compared import about
from kvcellar.engine.load.settings import RECORD

ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "attached": attached.row,
        "attention": attention.row,
        "bookkeeping": bookkeeping.row,
        "checkpoints": checkpoints.row,
        "cluster-cost": cluster_cost.row,
        "cluster-kills": cluster_kills.row,
        "cluster-kills-ray": cluster_kills.ray_row,
        "cluster-replay": cluster_replay.row,
        "cluster-roles": cluster_roles.row,
        "cluster-sim": cluster_sim.row,
        "cluster-store": cluster_store.row,
        "drafts": drafts.row,
        "fragmented": fragmented.row,
        "gaps": gaps.row,
        "hits": hits.row,
        "images": images.row,
        "levels": levels.row,
        "linear": linear.row,
        "policies": policies.row,
        "prefix": prefix.row,
        "profile": profile.row,
        "replay": replay.row,
        "replay-engines": replay_engines.row,
        "replay-peers": replay_peers.row,
        "replay-transformers": against.row,
        "restart": restart.row,
        "revertible": revertible.row,
        "sampled": sampled.row,
        "serve-load": serve_load.row,
        "speculate": speculate.row,
        "start": start.row,
        "structured": structured.row,
        "threads": threads.row,
        "threads-sim": threads_sim.row,
        "turns": conversation.row,
        "two-models": two_models.row,
        "waits": waits.row,
    }
)
FEW = ("bookkeeping", "turns", "revertible", "prefix")  # that are run where no row is named
RECORDING = ("profile", "start", "threads")  # that run an engine with the setting `record`


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure kvcellar, part by part.")
    listed = f"one of {', '.join(ROWS)}; without it, {', '.join(FEW)}"
    parser.add_argument("row", nargs="?", choices=(*ROWS,), metavar="ROW", help=listed)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the rows: their numbers mean nothing")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--record", choices=RECORD, help=f"that setting, of {', '.join(RECORDING)}")
    steps = f"the row profile, of one of these steps: {', '.join(profile.PROFILES)}; with --record auto, recorded"
    parser.add_argument("--profile", choices=(*profile.PROFILES,), metavar="STEP", help=steps)
    given = parser.parse_args(arguments)
    row = "profile" if given.row is None and given.profile else given.row
    if given.profile and row != "profile":
        parser.error(f"--profile is for the row profile, not for {row}")
    if given.record and row not in RECORDING:
        parser.error(f"--record is for the rows {', '.join(RECORDING)}")
    torch.set_num_threads(given.threads)
    found = {}
    for name in FEW if row is None else (row,):
        with tempfile.TemporaryDirectory() as directory:
            how = Given(Path(directory), given.quick, given.threads, given.record, given.profile or "decode-512")
            found[name] = printed(ROWS[name](how))
    print(json.dumps({**about(threads=given.threads, quick=given.quick), "rows": found}), flush=True)


def printed(lines: Lines) -> object:
    """Print the lines of a row; returns what it has found."""
    while True:
        try:
            print(next(lines), flush=True)
        except StopIteration as end:
            return end.value
