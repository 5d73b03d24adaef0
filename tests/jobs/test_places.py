"""Where commands may write."""

from pathlib import Path

import pytest

from jobs._cli import check_file, check_out
from orchestrator.errors import UsageError


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
    """Its own earlier results it may hold; sources lie neither in it nor around it."""
    out, images = tmp_path / "out", tmp_path / "images"
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
