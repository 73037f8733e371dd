"""Explorations of the tiny model, and refused ones."""

import pytest

from pod.commands import explore
from pod.recipe import run


@pytest.fixture
def explore_refused(tmp_path, capsys):
    """`(settings, words)`: `pod explore` refuses these settings in one line that has the words.

    It writes no plan.
    """

    def check(settings: list[str], words: str) -> None:
        argv = [part for setting in settings for part in ("--set", setting)]
        with pytest.raises(SystemExit) as ended:
            run(explore.main, sections=("model", "explore"), argv=argv)
        assert ended.value.code == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and words in error
        assert not (tmp_path / "run" / "plan" / "plan.json").exists()

    return check


@pytest.fixture
def explore_overrides(tmp_path) -> list[str]:
    """Settings of an exploration of the tiny model on a text of its own, for `load_recipe(None, …)`."""
    text = tmp_path / "texts" / "a.txt"
    text.parent.mkdir()
    text.write_text(" ".join(f"word{number} of a long text" for number in range(200)))
    return [
        f"output_dir={tmp_path / 'run'}",
        "model.path=package:tiny",
        f"explore.sources=[{text.parent}]",
        "explore.num_sequences=3",
        "explore.sequence_length=48",
        "explore.num_queries=5",
    ]
