"""The names that `from orchestrator import ..` and `from moe import ..` offer."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import moe
import orchestrator


@pytest.mark.parametrize("package", [moe, orchestrator], ids=lambda package: package.__name__)
def test_every_public_name_is_there_and_described(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name).__doc__, name


def test_a_function_is_found_beside_a_module_of_its_name() -> None:
    """`attach` gives a module in place of a function that has its name, if the module is loaded."""
    for package in (moe, orchestrator):
        modules = {path.stem for path in Path(package.__file__ or "").parent.iterdir()}
        assert not modules & {*package.__all__}


def loaded_by(*statements: str) -> list[set[str]]:
    """Returns the modules that a new process has after each statement."""
    code = "\n".join(["import sys", *(f"{each}\nprint(*sys.modules)" for each in statements)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [{*line.split()} for line in done.stdout.splitlines()]


def test_what_is_loaded_to_read_a_config_and_to_train_one_model() -> None:
    """Heavy libraries load where they are used, and one model does not need the whole house."""
    config, train = loaded_by("import orchestrator.config", "from orchestrator import RunConfig, train")
    light = {"boto3", "obstore", "pyarrow", "torchvision", "PIL", "mlflow", "ray"}
    assert not config & {*light, "torch.distributed.tensor", "torch.utils.flop_counter"}
    assert not train & {"boto3", "obstore", "pyarrow", "mlflow", "ray", "sklearn"}
    ours = [name for name in train if name.partition(".")[0] in ("moe", "orchestrator", "wings", "papers")]
    assert len(ours) <= 110, sorted(ours)


def test_a_typo_is_named_before_data_and_weights_are_thought_of() -> None:
    (loaded,) = loaded_by(
        "from jobs.train import RunFlags, train; from jobs._cli import Places\n"
        "from orchestrator.errors import UsageError\n"
        "try: train(RunFlags(set=(('model.widht', 3),), places=Places()))\n"
        "except UsageError as error: assert \"did you mean 'width'\" in str(error)\n"
        "else: raise AssertionError"
    )
    assert not loaded & {"orchestrator.training.fit", "orchestrator.packing.pack", "pyarrow", "ray", "mlflow"}
