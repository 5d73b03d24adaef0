"""The commands a user runs, one file each."""
