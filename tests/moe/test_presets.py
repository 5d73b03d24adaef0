"""The presets are the papers' models; tests of costs count their parameters."""

from moe.presets import PRESETS


def test_presets_are_the_papers_sizes():
    """Soft MoE, section 3.3: tokens, width, depth, heads, hidden."""
    sizes = {
        name: (c.tokens(), c.width, c.depth, c.heads, c.mlp_dim)
        for name, c in PRESETS.items()
        if name != "debug" and not c.moe and c.pooling == "gap"
    }
    assert sizes == {
        "S/32": (49, 384, 12, 6, 1536),
        "S/16": (196, 384, 12, 6, 1536),
        "S/14": (256, 384, 12, 6, 1536),
        "S/8": (784, 384, 12, 6, 1536),
        "B/32": (49, 768, 12, 12, 3072),
        "B/16": (196, 768, 12, 12, 3072),
        "L/32": (49, 1024, 24, 16, 4096),
        "L/16": (196, 1024, 24, 16, 4096),
        "H/14": (256, 1280, 32, 16, 5120),
    }


def test_presets_with_experts():
    """Soft MoE, section 3.4; V-MoE, sections 3.1 and 3.6."""

    def experts(name: str) -> tuple:
        config = PRESETS[name]
        assert config.moe
        return config.tokens(), config.moe.num_experts, config.slots(), config.moe_blocks()

    assert experts("soft-S/14-256e") == (256, 256, 1, (6, 7, 8, 9, 10, 11))
    assert experts("soft-L/16-128e") == (196, 128, 1, tuple(range(12, 24)))
    assert experts("soft-H/14-256e") == (256, 256, 1, tuple(range(16, 32)))
    # C = round(k N P c / E), V-MoE section 2.4: 2 * 8 * 197 * 1.05 / 32 = 103.4
    assert experts("vmoe-B/16") == (197, 32, 103, (1, 3, 5, 7, 9, 11))
    assert experts("vmoe-S/32") == (50, 32, 26, (1, 3, 5, 7))
    assert experts("vmoe-H/14-last-5") == (257, 32, 135, (23, 25, 27, 29, 31))
    assert experts("vmoe-15B") == (257, 32, 135, tuple(range(1, 48, 2)))
