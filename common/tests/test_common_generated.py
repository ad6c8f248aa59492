"""Text between markers, and the command that writes or checks what is made from results."""

import json
import pathlib

import pytest
from hpc_common.generated import between, command


def test_only_what_is_between_the_markers_changes() -> None:
    assert between("head\n<a>\nold\n<b>\ntail\n", "<a>", "<b>", "new") == "head\n<a>\nnew\n<b>\ntail\n"


@pytest.mark.parametrize("text", ["<a>", "<b>", "<b> <a>", "<a> <a> <b>", "<a> <b> <b>", ""])
def test_markers_that_are_not_there_once_in_order(text: str) -> None:
    with pytest.raises(ValueError, match="<a> and <b> once each, in this order"):
        between(text, "<a>", "<b>", "new")


def test_check_writes_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, readme, other = (tmp_path / name for name in ("r.json", "README.md", "plot.svg"))
    results.write_text(json.dumps({"value": 3}))
    readme.write_text("<a>\n<b>\n")

    def outputs(document: dict, text: str) -> dict[pathlib.Path, str]:
        return {readme: between(text, "<a>", "<b>", str(document["value"])), other: "plot"}

    def run(*arguments: str) -> int:
        return command(outputs, results, readme, "about", arguments)

    assert run("--check") == 1 and readme.read_text() == "<a>\n<b>\n" and not other.exists()
    assert "README.md: out of date" in capsys.readouterr().out
    assert run() == 0 and readme.read_text() == "<a>\n3\n<b>\n" and other.read_text() == "plot"
    assert run("--check") == 0 and not capsys.readouterr().out.count("out of date")
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="README.md: expected the lines"):
        run()
