"""Registered models that MLflow opens by itself: in this process, and in an environment without us."""

import base64
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException
from PIL import Image

from moe.model import Output
from orchestrator.data.batch import normalize
from orchestrator.data.images import Transform
from orchestrator.evaluation.models import load_model
from orchestrator.tracking import pyfunc
from orchestrator.tracking.store import open_reader, open_tracking
from orchestrator.tracking.sync import Sync
from tests.orchestrator.data.images import encoded
from tests.orchestrator.evaluation.exported import exported
from tests.orchestrator.tracking.stores import wait_until
from tests.parts import free_port, png

ROOT = Path(__file__).parents[3]
NAME = "models:/tiny@pareto-knee"


def images(count: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [png(rng.integers(0, 255, (20 + 3 * i, 31 + i, 3))) for i in range(count)]


@pytest.fixture
def store(trained_home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"sqlite:///{trained_home}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(sys, "path", [*sys.path])  # MLflow puts the packed code there
    return uri


def test_it_is_the_model_that_was_trained(trained_home: Path, store: str) -> None:
    packed = mlflow.pyfunc.load_model(NAME)
    ours = load_model(NAME, root=str(trained_home), tracking_uri=store)
    transform = Transform(size=ours.config.image_size)
    found = packed.predict(pd.DataFrame({"image": images(9)}))
    pixels = torch.stack([transform(image) for image in images(9)])
    with torch.inference_mode():
        logits = torch.cat([ours(each).logits for each in normalize(pixels).split(1)])
    probability, label = logits.softmax(-1).max(-1)
    assert list(found["label"]) == [str(i) for i in label.tolist()]  # the digits are called so
    assert list(found["probability"]) == probability.double().tolist()
    with pytest.raises(MlflowException, match="image 1: not an image of a known format") as error:
        packed.predict(pd.DataFrame({"image": [images(1)[0], b"no image"]}))
    assert error.value.get_http_status_code() == 400
    frame = pd.DataFrame({"image": images(4)}, index=["a", "b", "c", "d"])
    assert list(packed.predict(frame[1:3]).index) == ["b", "c"]
    assert len(packed.predict(frame[:0])) == 0
    # Each image is a pass of its own: the others change no bit.
    turned = pd.DataFrame({"image": images(9)[::-1]})
    assert list(packed.predict(turned).probability)[::-1] == list(found["probability"])


def test_an_answer_depends_on_no_other_image_and_no_number_of_threads(tmp_path: Path) -> None:
    """To the bit, in 50 random requests, of an MLP so wide that torch sums in parts if it has threads."""
    changes = {"model.width": 64, "model.mlp_dim": 1024, "model.num_classes": 9, "task.loss": "sigmoid"}
    ref = exported(tmp_path / "model.safetensors", changes)
    pyfunc.write_pyfunc(ref, str(tmp_path / "packed"))
    packed: Any = mlflow.pyfunc.load_model(str(tmp_path / "packed"))._model_impl
    pool, rng, before = images(6), random.Random(0), torch.get_num_threads()
    found: dict[int, float] = {}
    try:
        for _ in range(50):
            chosen = [rng.randrange(len(pool)) for _ in range(rng.randint(1, 9))]
            torch.set_num_threads(threads := rng.choice([1, 2, 3, 8]))
            packed.threads = threads
            answers = packed.predict(pd.DataFrame({"image": [pool[i] for i in chosen]}))
            assert torch.get_num_threads() == threads
            for i, probability in zip(chosen, answers.probability, strict=True):
                assert found.setdefault(i, probability) == probability
    finally:
        torch.set_num_threads(before)


class Fixed:
    """A model of two classes with these logits for an image after the other."""

    def __init__(self, logits: list[list[float]]) -> None:
        self.rows = [torch.tensor([row]) for row in logits]

    def __call__(self, image: torch.Tensor) -> Output:
        assert len(image) == 1
        return Output({"logits": self.rows.pop(0)}, torch.zeros(()), {}, ())


def test_what_outputs_mean_and_how_images_are_prepared(tmp_path: Path) -> None:
    """Classes by themselves have probabilities of their own, outputs that are not finite name their row, and
    a transparent image is seen on the background of the data.
    """
    ref = exported(tmp_path / "model.safetensors", {"model.width": 16, "task.loss": "sigmoid"})
    ref = replace(ref, signature=replace(ref.signature, background="white"))
    pyfunc.write_pyfunc(ref, str(tmp_path / "packed"))
    packed: Any = mlflow.pyfunc.load_model(str(tmp_path / "packed"))._model_impl
    glass = encoded(Image.new("RGBA", (20, 20), (0, 0, 0, 0)))
    white = encoded(Image.new("RGB", (20, 20), (255, 255, 255)))
    answers = packed.predict(pd.DataFrame({"image": [glass, white]}))
    assert answers.probability[0] == answers.probability[1]
    packed.threads = 1  # so that passes come in order
    packed.model = Fixed([[2.0, 1.0], [-3.0, 3.0]])
    found = packed.predict(pd.DataFrame({"image": [glass, white]}))
    expected = torch.tensor([2.0, 3.0]).sigmoid().tolist()
    assert list(found.probability) == pytest.approx(expected, rel=1e-6)
    packed.model = Fixed([[2.0, 1.0], [float("nan"), 3.0]])
    with pytest.raises(MlflowException, match="image 1: the model's outputs are not finite"):
        packed.predict(pd.DataFrame({"image": [glass, white]}))


def test_nothing_of_the_machine_goes_along(trained_home: Path, store: str, tmp_path: Path) -> None:
    client = open_reader(store).client
    source = client.get_model_version_by_alias("tiny", "pareto-knee").source
    files = [file for file in Path(source).rglob("*") if file.is_file()]
    assert {"moe/exported.py", "orchestrator/tracking/served.py"} <= {
        str(file.relative_to(f"{source}/code")) for file in files if "code" in file.parts
    }
    for file in files:
        assert file.suffix in (".py", ".pyi", ".json", ".yaml", ".txt", ".safetensors", ""), file
        for path in (str(trained_home), str(ROOT), str(Path.home())):
            assert path.encode() not in file.read_bytes(), file


def test_a_large_model_stays_where_it_is(
    trained_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    empty_store: Callable[[Path], str],
) -> None:
    """MLflow says that it is elsewhere. The same version has it once it counts as small."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    tracking = open_tracking(empty_store(tmp_path), artifacts=f"{tmp_path}/artifacts")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    with monkeypatch.context() as patch:
        patch.setattr(pyfunc, "SMALL", 1)
        Sync(tracking, f"{trained_home}/tiny").update()
        with pytest.raises(MlflowException, match="artifacts are external"):
            mlflow.pyfunc.load_model(NAME)
    Sync(tracking, f"{trained_home}/tiny").update()
    assert len(mlflow.pyfunc.load_model(NAME).predict(pd.DataFrame({"image": images(1)}))) == 1


def environment_without_us(folder: Path) -> Path:
    """Makes a virtual environment that finds the packages of this one, and returns its folder of programs. An
    editable install is not a package: it is a `.pth` file, which counts in its own environment alone.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    for program in ("mlflow", "uvicorn"):
        script = Path(sysconfig.get_path("scripts"), program).read_text().partition("\n")[2]
        made = folder / "bin" / program
        made.write_text(f"#!{folder}/bin/python\n{script}")
        made.chmod(0o755)
    return folder / "bin"


@pytest.fixture
def server(trained_home: Path, store: str, tmp_path: Path) -> Iterator[str]:
    """The command of docs/weights.md, in an environment of its own, which has our packages but not us."""
    fresh = environment_without_us(tmp_path / "fresh")
    env = {name: os.environ[name] for name in os.environ if name not in ("MLFLOW_RUN_ID", "PYTHONPATH")}
    env["PATH"] = f"{fresh}:{env['PATH']}"
    code = "import importlib.util as u; print(u.find_spec('moe'), u.find_spec('orchestrator'))"
    missing = subprocess.check_output([f"{fresh}/python", "-c", code], cwd=tmp_path, env=env, text=True)
    assert missing == "None None\n"
    port, log = free_port(), tmp_path / "log"
    (command,) = re.findall("^mlflow models serve .*", (ROOT / "docs/weights.md").read_text(), re.MULTILINE)
    process = subprocess.Popen(
        shlex.split(command.replace("quickstart", "tiny").replace("5001", str(port))),
        cwd=tmp_path,
        env=env,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5).status == 200
        return False

    try:
        wait_until(answers, 600)
        yield f"http://127.0.0.1:{port}/invocations"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(url: str, content: object) -> tuple[int, dict]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(content).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.smoke
def test_it_answers_over_http(trained_home: Path, store: str, server: str) -> None:
    good = base64.b64encode(images(1)[0]).decode()
    expected = mlflow.pyfunc.load_model(NAME).predict(pd.DataFrame({"image": images(1)}))
    for content in (
        {"dataframe_split": {"columns": ["image"], "data": [[good]]}},
        {"dataframe_records": [{"image": good}]},
        {"inputs": {"image": [good]}},
    ):
        status, answer = post(server, content)
        assert (status, len(answer.get("predictions", ""))) == (200, 1), answer
        (found,) = answer["predictions"]
        assert found["label"] == expected["label"][0]
        assert found["probability"] == pytest.approx(expected["probability"][0], rel=1e-6)
    for bad, reason in (
        (base64.b64encode(b"no image").decode(), "image 0: not an image of a known format ("),
        (good[: len(good) // 8 * 4], "image 0: OSError"),
    ):
        status, answer = post(server, {"dataframe_records": [{"image": bad}]})
        assert status == 400
        assert answer["message"].splitlines()[-1].startswith(f"Error: {reason}")  # MLflow's own stand before
