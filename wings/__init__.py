"""The wings: what serves one audience and joins the core's families, a package each.

Tables of names alone, so that commands answer before a wing is loaded; see `moe.guests`.
"""

MEMBERS = (  # modules that add members to families
    "wings.language.decoder",
    "wings.language.next_token",
    "wings.language.sources",
)
SWEEPS = {  # name -> module with a function of that name, in the order of `--list`
    "language": "wings.language.sweeps",
}
