"""The wings: what serves one audience and joins the core's families, a package each.

Tables of names alone, so that commands answer before a wing is loaded; see `moe.guests`.
"""

MEMBERS = (  # modules that add members to families
    "wings.image_text.two_towers",
    "wings.image_text.contrastive",
    "wings.image_text.presets",
    "wings.language.decoder",
    "wings.language.next_token",
    "wings.language.sources",
)
EVALUATIONS = {  # evaluations -> module that defines them, and loads no large library
    "image_text": "wings.image_text.evaluations",
}
WEIGHTS = {"foreign": "wings.weights"}  # modules that recognise and import weights of other projects
FOLDERS = {  # format of `export` -> module that writes it
    "timm": "wings.weights",
    "huggingface": "wings.weights",
}
COMMANDS = {  # command -> module with its `main`
    "finetune": "wings.jobs.finetune",
    "import-weights": "wings.jobs.import_weights",
}
SWEEPS = {  # name -> module with a function of that name, in the order of `--list`
    "language": "wings.language.sweeps",
}
