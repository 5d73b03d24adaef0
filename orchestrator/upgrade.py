"""Configs as version 0.2 recorded them, in today's form: in directories of runs and sweeps, checkpoints,
exports and `config.toml`. Each function makes JSON values of JSON values, and leaves today's form as it is.
"""

from collections.abc import Mapping
from typing import Any

from moe.upgrade import renamed, upgraded_model

# data.augment was a name and its members further fields of `data`, which acted in this order:
# field -> (kind, what the number is)
_AUGMENTED = {
    "randaugment": ("randaugment", "operations"),
    "three_augment": ("three_augment", ""),
    "color_jitter": ("color_jitter", "strength"),
    "random_erasing": ("random_erasing", "fraction"),
    "mixup": ("mixup", "alpha"),
    "cutmix": ("cutmix", "alpha"),
}
_MAGNITUDE = "randaugment_magnitude"
_WHOLE = {"eval_crop", "max_bad_frac", "tail"}  # in a record, though not in a file of a user's
_OF_AUGMENT = ("augment", _MAGNITUDE, *_AUGMENTED)


def upgraded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a run in today's form."""
    if isinstance(model := config.get("model"), Mapping):
        config = {**config, "model": upgraded_model(model)}
    data = config.get("data")
    if isinstance(data, Mapping) and data.keys() >= _WHOLE and "eval_pixels" not in data:
        # The first models of 0.2 and all before saw parts of pixels.
        config = {**config, "data": (data := {**data, "eval_pixels": "parts"})}
    if not isinstance(data, Mapping) or not _is_old(data):
        return dict(config)
    rest = {name: value for name, value in data.items() if name not in _OF_AUGMENT}
    return {**config, "data": {**rest, "augment": _members(data)}}


def upgraded_arm(changes: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dotted changes of an arm in today's form, given the base as it was recorded."""
    changes = {_todays_name(name, changes, base): renamed(value) for name, value in changes.items()}
    before = base.get("data", {})
    own = {name: changes[f"data.{name}"] for name in _OF_AUGMENT if f"data.{name}" in changes}
    if not own or not _is_old(before):
        return changes
    rest = {name: value for name, value in changes.items() if name.removeprefix("data.") not in own}
    return {**rest, "data.augment": _members({**before, **own})}


def _todays_name(name: str, changes: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Returns today's name of a dotted field of token choice, which the arm or its base may choose."""
    router, _, field = name.rpartition(".")
    if field != "balance_weight":
        return name
    there: Any = base
    for part in router.split("."):
        there = there.get(part) if isinstance(there, Mapping) else None
    kind = changes.get(f"{router}.kind", there.get("kind") if isinstance(there, Mapping) else None)
    return f"{router}.gshard_balance_weight" if kind == "token_choice" else name


def _is_old(data: Mapping[str, Any]) -> bool:
    return any(name in data for name in (_MAGNITUDE, *_AUGMENTED))


def _members(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns today's `data.augment` of the fields of `data`."""
    first = data.get("augment", "none")
    found: list[dict[str, Any]] = [] if first == "none" else [{"kind": first}]
    for name, (kind, field) in _AUGMENTED.items():
        if data.get(name):
            found.append({"kind": kind, field: data[name]} if field else {"kind": kind})
            if name == "randaugment" and _MAGNITUDE in data:
                found[-1]["magnitude"] = data[_MAGNITUDE]
    return found
