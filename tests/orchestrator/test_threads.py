"""The number of threads that a process computes with, and how long they wait for each other."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from moe import ViTConfig
from orchestrator import threads
from orchestrator.threads import one_thread, set_threads, threads_for

LARGE = ViTConfig(image_size=224, patch_size=32, width=384, depth=6, heads=6, mlp_dim=1536)


def test_as_many_threads_as_the_largest_matmul_keeps_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 images of 16 tokens, 48 x 192: 19 MFLOP. 49 tokens, 384 x 1536: 58 MFLOP per image."""
    monkeypatch.setattr(threads, "CORES", 8)
    small = replace(LARGE, image_size=28, patch_size=7, width=48, heads=3, mlp_dim=192)
    assert threads_for(small, 64) == 1
    assert [threads_for(LARGE, images) for images in (1, 4, 16)] == [1, 2, 8]
    before = torch.get_num_threads()
    set_threads(LARGE, 4)
    assert torch.get_num_threads() == 2
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    monkeypatch.setattr(threads, "CORES", 1)
    assert threads_for(LARGE, 64) == 1


@pytest.mark.smoke
def test_threads_that_wait_give_up_their_core_soon() -> None:
    """The variable is set before torch is loaded, whatever is imported first; a user's value stays."""
    code = "import orchestrator.config, os; print(os.environ['GOMP_SPINCOUNT'])"
    for mine, expected in ((None, "2000"), ("7", "7")):
        env = {"PATH": "/usr/bin:/bin"} | ({"GOMP_SPINCOUNT": mine} if mine else {})
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
    code = "import sys, orchestrator; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
