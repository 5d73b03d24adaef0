"""Checkpoints: a folder of safetensors files, whose manifest names every file with its SHA-256.

    checkpoints/step-00000100/
      weights-00000-001.3f9a1c2b.safetensors     rank 0's share of the weights
      optimizer-00000-002.3f9a1c2b.safetensors   its share of the optimiser's state
      manifest.json                              step, progress, config, every file's SHA-256; written last

`manager.py` saves, resumes and removes checkpoints; `files.py` moves tensors to files and back; `manifest.py`
commits a checkpoint and finds the newest whole one; `weights.py` reads weights apart from their run;
`start.py` starts models from them; `export.py` writes them for use without a run; `models.py` loads models.
"""
