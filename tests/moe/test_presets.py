"""The presets are the papers' models; tests of costs count their parameters and MACs."""

from moe.presets import PRESETS


def test_presets_of_soft_moe():
    """Section 3.3: tokens and width of each dense model, whose depth and hidden size `test_cost` counts."""
    sizes = {
        name: (c.tokens(), c.width)
        for name, c in PRESETS.items()
        if name != "debug" and not c.moe and c.pooling == "gap"
    }
    small = {"S/32": (49, 384), "S/16": (196, 384), "S/14": (256, 384), "S/8": (784, 384)}
    large = {"B/32": (49, 768), "B/16": (196, 768), "L/32": (49, 1024), "L/16": (196, 1024)}
    assert sizes == small | large | {"H/14": (256, 1280)}


def test_presets_with_experts():
    """Soft MoE, section 3.4; V-MoE, sections 3.1 and 3.6: tokens, experts, slots, MoE blocks."""

    def experts(name: str) -> tuple:
        config = PRESETS[name]
        assert config.moe
        return config.tokens(), config.moe.num_experts, config.slots(), config.moe_blocks()

    assert experts("soft-S/14-256e") == (256, 256, 1, (6, 7, 8, 9, 10, 11))
    assert experts("soft-L/16-128e") == (196, 128, 1, tuple(range(12, 24)))
    # C = round(k N P c / E), V-MoE section 2.4: 2 * 8 * 197 * 1.05 / 32 = 103.4
    assert experts("vmoe-B/16") == (197, 32, 103, (1, 3, 5, 7, 9, 11))
    assert experts("vmoe-S/32") == (50, 32, 26, (1, 3, 5, 7))
    assert experts("vmoe-H/14-last-5") == (257, 32, 135, (23, 25, 27, 29, 31))
    assert experts("vmoe-15B") == (257, 32, 135, tuple(range(1, 48, 2)))
