"""Copies of a sharded model (HSDP) train as one process does, their gradients summed over the copies too."""

import pytest
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe.parallel import ParallelConfig, build_sharded, make_mesh
from tests.moe.parity import SEED, one_process, read, share, spawn
from tests.moe.test_parallel_options import ALL, BATCH, CASES, check_equal, check_rounded


def worker(rank: int, ranks: int, folder: str) -> None:
    expected, mine = read(folder), share(rank, ranks, BATCH)
    for ep in (1, 2):
        mesh = make_mesh("cpu", ep=ep, dp_replicate=2)
        assert mesh.shape == (2, 2 // ep, ep)
        assert mesh.mesh_dim_names == ("dp_replicate", "dp", "ep")
        for name in CASES:
            for options, microbatches in [(ParallelConfig(dp_replicate=2), 1), (ALL, 2)]:
                check_equal(name, options, microbatches, mesh, mine, expected[name])
            check_rounded(name, mesh, mine, ALL)
        for name, p in build_sharded(CASES["soft"].config, mesh, seed=SEED).named_parameters():
            assert isinstance(p, DTensor)
            axes = [Replicate(), Shard(1), Shard(0)] if "experts" in name else [Replicate(), Shard(0)]
            assert list(p.placements) == axes, f"{name}: {p.placements}"
            if "experts" in name or p.shape[0] % 2 == 0:
                assert p.to_local().numel() == p.numel() / 2, name


@pytest.mark.slow
def test_copies_equal_one_process(tmp_path):
    one_process(CASES, tmp_path)
    spawn(4, worker, str(tmp_path))
