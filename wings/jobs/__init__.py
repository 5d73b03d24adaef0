"""The commands of the wings, which `moe-frontier` offers beside its own."""
