"""A newcomer's first recipe: `own_text_8b` with only its marked lines changed.

Also what `pod data` says ahead of the other commands.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from pod.commands import data, later_refusals
from pod.recipe import RECIPES, load_recipe, run

MARKED = {
    "sources": '["texts/*.txt"]',
    "context_length": "&length 1024",
    "target_tokens": "&tokens 32_768",
    "path": "package:tiny",
    "dtype": "&dtype float32",
    "num_recent_tokens": "240",
    "target_saving": "0.5",
    "num_sequences": "4",
    "tokens_per_step": "4096",
    "text_sequences": "2",
    "min_context": "256",
    "passkey_lengths": "[512, 1000]",
    "efficiency_lengths": "[512]",
}
"""Field → value for the model `package:tiny`, which reads 8,192 bytes."""


def own_recipe(folder: Path, values: dict[str, str]) -> Path:
    """`own_text_8b.yaml` with these values in its marked lines.

    A field that no marked line has is an error.
    """
    left, lines = dict(values), []
    for line in (RECIPES / "own_text_8b.yaml").read_text(encoding="utf-8").splitlines():
        name = line.strip().partition(":")[0]
        if "# <-" in line and name in left:
            line = re.sub(r":.*?(?=\s+# <-)", f": {left.pop(name)}", line)
        lines.append(line)
    assert not left, f"no marked line has {', '.join(left)}"
    path = folder / "my.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def texts(tmp_path):
    """Sixty texts of about five thousand bytes in `tmp_path/texts`."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        words = (f"word{(number * 7919 + index * index) % 997}" for index in range(700))
        (folder / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


def test_every_number_that_depends_on_model_or_text_is_marked_or_follows_a_marked_one():
    lines = (RECIPES / "own_text_8b.yaml").read_text(encoding="utf-8").splitlines()
    sizes = re.compile(r"^\s+(\w*(length|lengths|tokens|sequences|per_step|min_context|path|dtype|sources)):")
    free = [line.strip() for line in lines if sizes.match(line) and "# <-" not in line and ": *" not in line]
    assert not free


def test_the_lengths_follow_the_marked_one(tmp_path):
    recipe = load_recipe(own_recipe(tmp_path, MARKED))
    assert recipe.data.context_length == 1024
    assert recipe.explore.sequence_length == recipe.eval.text_length == 1024
    assert recipe.train.total_tokens == recipe.data.target_tokens == 32_768
    assert recipe.model.dtype == recipe.train.dtype == "float32"


def test_rows_that_are_too_long_for_the_model_are_refused_before_anything_is_read(
    tmp_path, monkeypatch, capsys
):
    """One line names every length to lower, so that the next command has nothing to add."""
    (tmp_path / "unreadable.bin").write_bytes(b"\0")  # an error of its own, as soon as it is read
    config = own_recipe(tmp_path, {"path": "package:tiny", "sources": "[unreadable.bin]"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run(data.main, sections=data.SECTIONS, argv=["--config", str(config)])
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    for name in ("data.context_length 16384", "explore.sequence_length 16384", "eval.text_length 16384"):
        assert name in told
    assert "eval.passkey_lengths 16000, eval.efficiency_lengths 16000: lower them to at most 8192" in told
    estimate = data.estimate(load_recipe(config))
    assert "note: `pod data` will refuse this: the model package:tiny reads 8192 tokens" in estimate


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ([], 8192),
        (["model.max_position_embeddings=16384", "model.rope_theta=1e6"], 16_384),
        (["model.rope_type=yarn", "model.rope_factor=4"], 32_768),
        (["model.path=/nowhere/at/all"], None),
    ],
)
def test_the_longest_context_is_that_of_the_extended_model(settings, longest):
    recipe = load_recipe(None, ["model.path=package:tiny", *settings])
    assert later_refusals.longest_context(recipe.model) == longest


def test_longer_rows_for_a_named_tokenizer_are_a_note(tmp_path):
    """They may be for another model."""
    LlamaConfig(max_position_embeddings=512).save_pretrained(tmp_path)
    settings = [f"model.path={tmp_path}", "data.context_length=1024", "eval.text_length=512"]
    settings += [
        "data.shortest_interval=256",
        "explore.sequence_length=512",
        "eval.passkey_lengths=[400]",
        "eval.efficiency_lengths=[400]",
    ]
    with pytest.raises(
        ValueError, match=r"reads 512 tokens, and the recipe has data.context_length 1024: lower"
    ):
        later_refusals.check_lengths(load_recipe(None, settings))
    (note,) = later_refusals.check_lengths(load_recipe(None, [*settings, "data.tokenizer=another"]))
    assert note.startswith("note: ") and "data.context_length 1024" in note
    shorter = [*settings, "data.context_length=512"]
    assert later_refusals.check_lengths(load_recipe(None, shorter)) == []
    (note,) = later_refusals.check_lengths(load_recipe(None, [*shorter, "eval.text_length=600"]))
    assert "the recipe has eval.text_length 600" in note


ENOUGH = {"context_length": 1024, "num_rows": 40, "held_out": {"documents": 9, "tokens": 9000}}


@pytest.mark.parametrize(
    ("settings", "manifest", "says"),
    [
        ([], {}, None),
        (
            ["model.num_recent_tokens=1008"],
            {},
            "will refuse sequences of 1024 tokens, which the windows of 1024 tokens",
        ),
        (["model.num_recent_tokens=1007"], {}, None),
        (
            ["train.tokens_per_step=3000"],
            {},
            "train.tokens_per_step is 3000, no multiple of the rows' 1024 tokens",
        ),
        (
            ["train.tokens_per_step=65536"],
            {},
            "`pod train` will refuse train.tokens_per_step = 65536: the data has 40 rows",
        ),
        ([], {"num_rows": 31}, "set train.total_tokens to at most 28672"),
        (["train.allow_repeats=true"], {"num_rows": 31}, None),
        (["train.max_steps=10"], {}, None),
        (["train.max_steps=11"], {}, "`pod train` will refuse 45056 tokens: the data has 40 rows"),
        (
            [],
            {"held_out": {"documents": 0, "tokens": 0}},
            "`pod explore` asks for 4 sequences of 1024 held-out tokens, and 0",
        ),
        ([], {"held_out": {"documents": 1, "tokens": 4095}}, "and 4095 tokens (1 documents) were held out"),
        (["explore.sources=[other]"], {"held_out": {"documents": 1, "tokens": 4095}}, None),
        (["eval.text_sequences=9"], {}, "`pod eval` asks for 9 sequences of 1024 held-out tokens, and 9000"),
        (["eval.text_sequences=9", "eval.text=[other]"], {}, None),
    ],
)
def test_what_later_commands_would_refuse_is_said_once_rows_are_there(tmp_path, settings, manifest, says):
    recipe = load_recipe(own_recipe(tmp_path, MARKED), settings)
    notes = later_refusals.notes_on_rows(recipe, {**ENOUGH, **manifest})
    assert bool(notes) == (says is not None), notes
    assert says is None or says in notes[0]


def test_no_held_out_text_is_said_by_the_command(tmp_path, texts, monkeypatch, capsys):
    for text in list(texts.iterdir())[1:]:
        text.unlink()
    monkeypatch.chdir(tmp_path)
    settings = ["--set", "data.target_tokens=1024", "--set", "data.workers=1"]
    run(data.main, sections=data.SECTIONS, argv=["--config", str(own_recipe(tmp_path, MARKED)), *settings])
    told = capsys.readouterr().out
    assert "`pod explore` asks for 4 sequences of 1024 held-out tokens, and 0 tokens (0 documents)" in told


@pytest.mark.slow
@pytest.mark.nightly
def test_the_marked_lines_are_all_that_a_first_run_has_to_change(tmp_path, texts):
    """The marked lines are all that a first run has to change.

    data → explore → train → export → eval, each in a process of its own; none warns of a missing accelerator.
    """
    own_recipe(tmp_path, MARKED)
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for command in ("data", "explore", "train", "export", "eval"):
        done = subprocess.run(
            [sys.executable, "-m", "pod", command, "--config", "my.yaml"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}:\n{printed[-3000:]}"
        assert "will refuse" not in printed and "held-out tokens, and" not in printed
        assert "accelerator" not in printed, f"{command}:\n{printed}"
    run_folder = tmp_path / "runs" / "own_text"
    assert (run_folder / "train" / "step-00000008").is_dir()
    assert (run_folder / "export" / "config.json").is_file()
    report = (run_folder / "eval" / "report.md").read_text(encoding="utf-8")
    assert all(method in report for method in ("full", "pod", "int4", "snapkv"))
