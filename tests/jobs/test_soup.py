"""`jobs/soup.py` as a user runs it."""

from jobs import soup
from orchestrator.checkpoint.models import read_model
from tests.orchestrator.evaluation.exported import SOFT, exported


def table(said: str) -> list[list[str]]:
    """Cells of its rows: model, step, images, acc1, loss."""
    rows = [line.split("│")[1:-1] for line in said.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_a_soup_and_how_good_it_is(digits, empty_home, call, tmp_path):
    """A soup of one model twice named is that model, and as good as it."""
    one, two = (exported(tmp_path / f"{n}.safetensors", seed=n).location for n in (1, 2))
    out = f"{tmp_path}/soup.safetensors"
    flags = ("--out", out, "--evaluate", "--data", digits)
    code, said = call(soup.main, one, two, *flags)
    assert code == ""
    assert [row[0].partition("@")[0] for row in table(said)] == ["1", "2", "soup"]
    assert said.splitlines()[-1].startswith(f"soup of 2  {out}  ")
    assert read_model(out).run.name == "soup"

    code, said = call(soup.main, one, one, *flags)
    assert code == f"error: {out} exists already; --fresh replaces it"
    code, said = call(soup.main, one, one, *flags, "--fresh")
    assert code == ""
    first, second = table(said)
    assert first[2:] == second[2:]


def test_what_is_refused(empty_home, call, tmp_path):
    one = exported(tmp_path / "1.safetensors").location
    wide = exported(tmp_path / "2.safetensors", {**SOFT, "model.width": 32}).location
    out = f"{tmp_path}/soup.safetensors"
    for args, message in [
        (
            (one, wide, "--out", out),
            f"error: cannot average different models: model.width is 16 in {one}, 32 in",
        ),
        ((one, "--out", f"{tmp_path}/soup.pt"), "error: --out "),
        ((one, f"{tmp_path}/3.safetensors", "--out", out), "error: no file "),
        ((one, "--out", out, "--data", "x"), "2"),
    ]:
        stopped, said = call(soup.main, *args)
        assert stopped.startswith(message)
        assert len(said.splitlines()) <= 1
