"""The ViT sizes of the papers. Source: Soft MoE, section 3.3, and its released code."""

from dataclasses import replace

from moe.vit import ViTConfig

_DEBUG = ViTConfig(image_size=8, patch_size=2, width=32, depth=2, heads=2, mlp_dim=128, num_classes=10)
_S = ViTConfig(width=384, depth=12, heads=6, mlp_dim=1536)
_B = ViTConfig(width=768, depth=12, heads=12, mlp_dim=3072)
_L = ViTConfig(width=1024, depth=24, heads=16, mlp_dim=4096)
_H = ViTConfig(width=1280, depth=32, heads=16, mlp_dim=5120)

PRESETS = {"debug": _DEBUG} | {
    f"{name}/{patch}": replace(size, patch_size=patch)
    for name, size, patches in (
        ("S", _S, (32, 16, 14, 8)),
        ("B", _B, (32, 16)),
        ("L", _L, (32, 16)),
        ("H", _H, (14,)),
    )
    for patch in patches
}
