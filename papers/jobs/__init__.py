"""The commands of the papers, which `moe-frontier` offers beside its own."""
