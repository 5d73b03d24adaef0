"""Parameters of google-research/vmoe (Flax names and layouts) under our names."""

import torch
from torch import Tensor

from moe.vit import ViTConfig


def from_flax(flax: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The state dict (or its gradients) of `ViT(config)`."""

    def norm(ours: str, theirs: str) -> dict[str, Tensor]:
        return {f"{ours}.weight": flax[f"{theirs}/scale"], f"{ours}.bias": flax[f"{theirs}/bias"]}

    def linear(ours: str, theirs: str) -> dict[str, Tensor]:
        return {f"{ours}.weight": flax[f"{theirs}/kernel"].T, f"{ours}.bias": flax[f"{theirs}/bias"]}

    def mlp(ours: str, theirs: str) -> dict[str, Tensor]:
        return linear(f"{ours}.up", f"{theirs}/Dense_0") | linear(f"{ours}.down", f"{theirs}/Dense_1")

    def projections(ours: str, theirs: str, *parts: str) -> dict[str, Tensor]:
        kernels = torch.cat([flax[f"{theirs}/{part}/kernel"].flatten(1).T for part in parts])
        biases = torch.cat([flax[f"{theirs}/{part}/bias"].flatten() for part in parts])
        return {f"{ours}.weight": kernels, f"{ours}.bias": biases}

    def attention_end(ours: str, theirs: str) -> dict[str, Tensor]:
        out = {
            f"{ours}.out.weight": flax[f"{theirs}/out/kernel"].flatten(0, 1).T,
            f"{ours}.out.bias": flax[f"{theirs}/out/bias"],
        }
        if f"{theirs}/query_ln/scale" in flax:
            out[f"{ours}.norm_q.weight"] = flax[f"{theirs}/query_ln/scale"]
            out[f"{ours}.norm_k.weight"] = flax[f"{theirs}/key_ln/scale"]
        return out

    def moe(ours: str, theirs: str) -> dict[str, Tensor]:
        experts = {
            f"{ours}.experts.w_in_EDF": flax[f"{theirs}/Mlp/Dense_0/kernel"],
            f"{ours}.experts.b_in_EF": flax[f"{theirs}/Mlp/Dense_0/bias"],
            f"{ours}.experts.w_out_EFD": flax[f"{theirs}/Mlp/Dense_1/kernel"],
            f"{ours}.experts.b_out_ED": flax[f"{theirs}/Mlp/Dense_1/bias"],
        }
        if f"{theirs}/Router/mu" in flax:
            phi, scale = flax[f"{theirs}/Router/mu"], flax[f"{theirs}/Router/scale"].view(1)
            return experts | {f"{ours}.router.phi_DEC": phi, f"{ours}.router.scale": scale}
        return experts | {f"{ours}.router.gate_DE": flax[f"{theirs}/Router/dense/kernel"]}

    kernel = flax["embedding/kernel"]
    state = {"embed.weight": kernel.permute(3, 2, 0, 1), "embed.bias": flax["embedding/bias"]}  # HWIO -> OIHW
    if config.position == "learned":
        state["position_SD"] = flax["Encoder/posembed_input/pos_embedding"][0]
    if config.pooling == "token":
        state["class_token_D"] = flax["cls"].flatten()
    for i in range(config.depth):
        ours, theirs = f"blocks.{i}", f"Encoder/encoderblock_{i}"
        state |= norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0") | norm(
            f"{ours}.norm2", f"{theirs}/LayerNorm_1"
        )
        state |= projections(f"{ours}.attention.qkv", f"{theirs}/SelfAttention", "query", "key", "value")
        state |= attention_end(f"{ours}.attention", f"{theirs}/SelfAttention")
        is_moe = i in config.moe_blocks()
        state |= moe(f"{ours}.mlp", f"{theirs}/Moe") if is_moe else mlp(f"{ours}.mlp", f"{theirs}/Mlp")
    if config.pooling == "map":
        attention = "MapHead/MultiHeadDotProductAttention"
        state["pool.probe_D"] = flax["MapHead/probe"].flatten()
        state |= projections("pool.q", attention, "query") | projections("pool.kv", attention, "key", "value")
        state |= attention_end("pool", attention)
        state |= norm("pool.norm", "MapHead/LayerNorm") | mlp("pool.mlp", "MapHead/Mlp")
    if config.representation_size:
        state |= linear("pre_logits", "pre_logits")
    return state | norm("norm", "Encoder/encoder_norm") | linear("head", "head")
