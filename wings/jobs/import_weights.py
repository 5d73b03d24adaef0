"""Make a model of ours from weights of timm, Hugging Face, torchvision, big_vision, AugReg or V-MoE.

python wings/jobs/import_weights.py vit_base_patch16_224.augreg/ --out augreg-b16   a folder of timm
python wings/jobs/import_weights.py dinov2-small/ --out dinov2-s14   a folder of transformers
python wings/jobs/import_weights.py vit_b_16.pth --out tv-b16 --mean imagenet   a state dict of torchvision
python wings/jobs/import_weights.py B_16.npz --out b16 --set model.image_size=384   big_vision or AugReg
python wings/jobs/import_weights.py dino.pth --out dino --mean imagenet --set model.heads=6   timm's names
python wings/jobs/import_weights.py vmoe_s32/ckpt --out vmoe-s32   V-MoE: the part before .index

The kind is recognised from the content. Every tensor is accounted for before any is read. The folder is a
model for every command, e.g. `--init-from DIR`; so is the source itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jobs._cli import check_out, command
from jobs._flags import assignment, flag, parse
from orchestrator.errors import UsageError
from orchestrator.names import run_name


@dataclass(frozen=True, kw_only=True)
class ImportFlags:
    source: str = flag(help="folder, file or prefix of an index of weights", positional=True)
    out: str = flag(help="local folder, or file ending in .safetensors, to write")
    name: str | None = flag(None, "name of the model; default: that of --out", read=run_name)
    mean: str | None = flag(
        None,
        "by which pixels in 0..1 were normalised, where the weights do not say: imagenet, half, or three"
        " numbers as 0.485,0.456,0.406",
    )
    std: str | None = flag(
        None, "the same for the standard deviation; default: the one of a mean with a name"
    )
    copy: str | None = flag(
        None, "the model that is wanted of several in a file, as student; default: the average of the others"
    )
    set: tuple[tuple[str, Any], ...] = flag(
        (),
        "what the weights do not say, or another size: model.heads=6, model.image_size=384,"
        " model.moe.router.k=1 (repeatable)",
        metavar="FIELD=VALUE",
        read=assignment,
        nargs="+",
    )
    fresh: bool = flag(False, "replace an earlier export at --out")


def main() -> None:
    flags = parse(ImportFlags, __doc__)
    with command(f"importing {flags.source}", None):
        import_weights(flags)


def import_weights(flags: ImportFlags) -> None:
    from moe.exported import WEIGHTS
    from orchestrator import storage
    from orchestrator.checkpoint.export import check_export
    from orchestrator.checkpoint.files import SUFFIX
    from wings.weights import plan_import, write_import

    out = storage.absolute(flags.out)
    check_export(out, fresh=flags.fresh)
    name = flags.name or out.rpartition("/")[2].removesuffix(SUFFIX)
    said = {"data.mean": flags.mean, "data.std": flags.std}
    changes = dict(flags.set) | {field: value for field, value in said.items() if value is not None}
    planned = plan_import(flags.source, name=name, changes=changes, copy=flags.copy)
    print(planned, flush=True)
    if not out.endswith(SUFFIX):
        check_out(out, own=(WEIGHTS,), apart=(storage.absolute(flags.source),))
    try:
        write_import(planned, out, fresh=flags.fresh)
    except UsageError:
        storage.delete_empty_folder(out)
        raise
    print(f"written to {out}: from moe import load; model = load({out!r})")


if __name__ == "__main__":
    main()
