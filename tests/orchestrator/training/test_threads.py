"""How many threads compute, and how they wait, in every process that imports the orchestrator."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from moe.vit import ViTConfig
from orchestrator.training import loop
from orchestrator.training.loop import one_thread, set_threads, threads_for

SMALL = ViTConfig(image_size=28, patch_size=7, width=48, depth=4, heads=3, mlp_dim=192, num_classes=10)
LARGE = ViTConfig(image_size=224, patch_size=32, width=384, depth=6, heads=6, mlp_dim=1536)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "CORES", 8)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_as_many_as_the_largest_matmul_keeps_busy():
    """64 images of 16 tokens, 48 x 192: 19 MFLOP; twice as wide: 75. 49 tokens, 384 x 1536: 58 per image."""
    assert threads_for(SMALL, 64) == 1
    assert threads_for(replace(SMALL, width=96, mlp_dim=384), 64) == 1
    assert threads_for(LARGE, 4) == 2
    assert threads_for(LARGE, 16) == 8
    assert threads_for(LARGE, 1) == 1


def test_torch_is_told():
    set_threads(LARGE, 4)
    assert torch.get_num_threads() == 2
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_no_process_shares_more_than_it_was_given(monkeypatch):
    monkeypatch.setattr(loop, "CORES", 1)
    assert threads_for(LARGE, 64) == 1


@pytest.mark.smoke
def test_threads_that_wait_give_up_their_core_soon():
    """Set before torch is loaded, whatever is imported first; what the user set stays."""
    code = "import orchestrator.config, os, ctypes; print(os.environ['GOMP_SPINCOUNT'])"
    for mine, told in ((None, "2000"), ("7", "7")):
        env = {"PATH": "/usr/bin:/bin"} | ({"GOMP_SPINCOUNT": mine} if mine else {})
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == told
    code = "import sys, orchestrator; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
