"""Where commands may write."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs._cli import check_file, check_out
from orchestrator.errors import UsageError
from orchestrator.tracking.lost import open_store


@pytest.mark.parametrize(
    ("file", "holds"),
    [
        ("config.json", "a run or a sweep"),
        ("sweep.json", "a run or a sweep"),
        ("manifest.json", "a data set"),
        ("_plan.json", "predictions"),
    ],
)
def test_a_file_never_lies_among_results(file: str, holds: str, digits: str, tmp_path: Path):
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / file).write_bytes(Path(digits, "manifest.json").read_bytes())
    with pytest.raises(UsageError, match=f"/soup.safetensors: {folder} holds {holds}, choose another place"):
        check_file("--out", f"{folder}/below/soup.safetensors")
    check_file("--out", f"{tmp_path}/new/soup.safetensors")


def test_a_folder_of_results_holds_nothing_else(tmp_path: Path):
    """Its own earlier results it may hold; sources lie neither in it nor around it. It is made with what
    is put into it.
    """
    out, images = tmp_path / "out", tmp_path / "images"
    check_out(str(out), own=("page.html",))
    assert not out.exists()
    out.mkdir()
    check_out(str(out), own=("page.html",))
    (out / "page.html").write_text("mine")
    check_out(str(out), own=("page.html",))
    with pytest.raises(UsageError, match=r"holds other files \(page.html\): choose a new or an empty folder"):
        check_out(str(out), own=("plan.json",))
    for place in (images, images / "a", tmp_path):
        with pytest.raises(UsageError, match="lie in each other"):
            check_out(str(place), own=(), apart=(str(images),))
    with pytest.raises(UsageError, match="--out /proc/x cannot be written to: "):
        check_out("/proc/x", own=())


def test_a_manifest_of_another_project_is_not_a_data_set(tmp_path: Path):
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    check_file("--out", f"{tmp_path}/soup.safetensors")


@pytest.mark.parametrize("name", ["50%25", "a?b=c"])
def test_a_storage_whose_name_differs_in_a_uri(name: str, tmp_path: Path, empty_store: Callable[[Path], str]):
    """It holds no database, which would lie elsewhere. With one elsewhere, its artifacts lie in it."""
    root = str(tmp_path / name)
    with pytest.raises(UsageError, match="rename the folder, or name another store with `tracking_uri`"):
        open_store(root)
    store = open_store(root, empty_store(tmp_path / "database"))
    run = store.client.create_run(store.experiment_id)
    store.client.log_text(run.info.run_id, "<p>", "page.html")
    assert list(Path(root, "mlartifacts").rglob("page.html"))
    assert {path.name for path in tmp_path.iterdir()} == {name, "database"}
