"""Adding a router takes one file and an import, shown on a copy with hash routing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROUTER = '''
"""Hash routing: token t goes to expert t mod E; only the weight of outputs is learned."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from moe.init import constant
from moe.overrides import AS_TRAINED
from moe.routers.choice import gather_routing
from moe.routing import Router, RouterConfig


@dataclass(frozen=True, kw_only=True)
class HashConfig(RouterConfig):
    kind: Literal["hash"] = "hash"
    weight_init: float = 1.0

    def build(self, *, dim, num_experts):
        return HashRouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens, num_experts):
        return -(-num_tokens // num_experts)


class HashRouter(Router):
    def __init__(self, config, *, dim, num_experts):
        super().__init__()
        self.config, self.num_experts = config, num_experts
        self.weight = nn.Parameter(torch.empty(1))

    def draws(self):
        return {"weight": constant(self.config.weight_init)}

    def forward(
        self, x_GSD, valid_GS, keys_GS=None, overrides=AS_TRAINED, random_GS=None, return_stats=True
    ):
        G, S, _ = x_GSD.shape
        C = self.config.slots(num_tokens=S, num_experts=self.num_experts)
        token_EC = torch.arange(self.num_experts * C).view(C, -1).T.clamp(max=S)
        valid_GS1 = torch.cat([valid_GS, valid_GS.new_zeros(G, 1)], 1)
        gates_GSE = torch.eye(self.num_experts)[torch.arange(S) % self.num_experts].expand(G, -1, -1)
        return gather_routing(
            torch.where(valid_GS1[:, token_EC] > 0, token_EC, S),
            chosen_GSE=gates_GSE * valid_GS.unsqueeze(-1) if return_stats else None,
            weights_GSE=gates_GSE * self.weight,
            gates_GSE=gates_GSE,
            valid_GS=valid_GS,
            overrides=overrides,
            aux_G=x_GSD.new_zeros(G),
        )
'''

CHECK = """
import torch
from moe import MoEConfig, RoutingOverrides, ViT, ViTConfig
from moe.routing import RouterConfig
from orchestrator import codec
from orchestrator.config import RunConfig

assert "hash" in RouterConfig.kinds
run = codec.override(RunConfig(), {"model.moe.router.kind": "token_choice"})
run = codec.override(run, {"model.moe.router.kind": "hash", "model.moe.router.weight_init": 0.5})
assert codec.read_config(RunConfig, codec.to_dict(run)) == run

moe = MoEConfig(num_experts=3, images_per_group=2, router=run.model.moe.router)
model = ViT(ViTConfig(image_size=8, patch_size=2, width=32, depth=2, heads=2, mlp_dim=128, moe=moe))
torch.nn.init.normal_(model.head.weight)
valid = torch.tensor([1.0, 1, 1, 0])
two = RoutingOverrides(experts=2)
output = model(torch.randn(4, 3, 8, 8), valid, routing_overrides=two, return_stats=True)
(output.logits.square().sum() + output.aux).backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
weight = model.blocks[1].mlp.router.weight
assert weight.item() == 0.5 and weight.grad.abs() > 0
assert 0.2 < output.stats["dropped_frac"].item() < 0.5, "a third of the tokens, those of the expert left out"
print("a hash router")
"""


@pytest.mark.smoke
def test_adding_a_router_takes_one_file_and_an_import(tmp_path):
    for package in ("moe", "orchestrator"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "moe/routers/hash.py").write_text(ROUTER.lstrip())
    registry = tmp_path / "moe/routers/__init__.py"
    before = registry.read_text()
    an_import = "from moe.routers.mixture import"
    assert before.count(an_import) == 1
    registry.write_text(before.replace(an_import, f"from moe.routers.hash import HashConfig\n{an_import}"))
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.endswith("a hash router\n")
