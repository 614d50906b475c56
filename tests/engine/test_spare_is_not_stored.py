"""Spare checkpoints are in memory only: in a store, a row every 16 tokens would take more bytes than all else."""

import random
from pathlib import Path

from kvcellar import Engine
from kvcellar.memory.kv.record import from_bytes
from tests.engine.mixes import tokens
from tests.engine.test_conversations import acknowledged
from tests.zoo import ARCHS


def test_a_store_has_the_checkpoints_that_last_and_no_spare_ones(tmp_path: Path) -> None:
    ARCHS["lfm2"].build().save_pretrained(tmp_path / "model")
    with Engine(tmp_path / "model", cache_bytes=16_000_000, threads=1, store=str(tmp_path / "store")) as engine:
        engine.generate(list(tokens(random.Random(1), 130)), max_tokens=2, temperature=0.0, ignore_eos=True)
        acknowledged(engine)
        manager = engine._loop.manager
        kept = [one for node in manager.prefixes.tree.nodes() for one in node.checkpoints.values()]
        assert manager.store is not None
        stored = {mark.pos for one in manager.store.catalogue for mark in from_bytes(one.record).checkpoints}
    assert len([one for one in kept if one.spare]) > 5
    assert stored == {one.pos for one in kept if not one.spare}
