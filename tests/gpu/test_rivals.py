"""Rivals of the mover copy what they are asked to: what is compared is the same work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forebay.bench.rival_movers import loaders
from forebay.measure.link import MIB, Link

BLOCK, LOAD = 2 * MIB, 16 * MIB


@pytest.fixture(scope="module")
def link():
    made = Link("cuda", 80 * MIB)
    yield made
    made.close()


@pytest.mark.parametrize("fragment", [64 << 10, BLOCK])
def test_every_way_brings_whole_fragments_to_their_layer(link, fragment):
    slots, parts = link.pool_bytes // BLOCK, BLOCK // fragment
    words = link.host.bytes.view(np.int32).reshape(slots, parts, fragment // 4)
    words[:] = 1 + np.arange(slots * parts, dtype=np.int32).reshape(slots, parts, 1)
    with loaders(link, fragment, LOAD) as ways:
        assert {"forebay", "copy_loop", "fifo_batch"} <= set(ways)
        for name, loader in ways.items():
            link.device.zero_()
            torch.cuda.synchronize()
            loader.load()
            there = link.device.view(torch.int32).reshape(parts, slots, fragment // 4)
            first = there[:, :, 0]
            assert bool((there == first[:, :, None]).all()), name
            assert int((first > 0).sum()) == LOAD // fragment, name
            layer = torch.arange(parts, device="cuda")[:, None]
            assert bool(((first == 0) | ((first - 1) % parts == layer)).all()), name
            # A block's fragments all come from one block, and no block comes twice.
            blocks = torch.where(first > 0, (first - 1) // parts, -1)
            assert bool((blocks == blocks[:1]).all()), name
            assert len(blocks[0][blocks[0] >= 0].unique()) == LOAD // BLOCK, name
