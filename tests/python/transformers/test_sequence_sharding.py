"""anyflash.integrations.transformers where each rank holds a part of each sequence."""

from __future__ import annotations

from pathlib import Path

import torch

from calls import ulysses
from run import ranks


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    right = {name: ulysses.train(name, 0, 1) for name in ulysses.CASES}
    assert right["packed"] != right["plain"]
    assert right["packed"][0] == right["packed, by cu_seq_lens"][0]
    for found in ranks.run("calls.ulysses", 2, tmp_path):
        assert found.keys() == right.keys()
        for name, results in found.items():
            for values in zip(results, right[name], strict=True):
                ours, alone = (torch.tensor(x, dtype=torch.float64) for x in values)
                error = (ours - alone).abs().max() / alone.abs().max()
                print(name, float(error))
                assert error < 1e-6
