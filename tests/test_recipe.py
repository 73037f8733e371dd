"""pod/recipe.py and pod/schema.py: every mistake in a recipe is one line that says what to do."""

import dataclasses
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from pod.recipe import Recipe, load_recipe, run
from pod.schema import build, explain, field_docs, section, to_yaml, type_name


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_defaults_and_overrides(tmp_path):
    path = write(tmp_path, "output_dir: runs/a\nmodel: {num_sink_tokens: 4}\ntrain:\n  learning_rate: 2e-5\n")
    recipe = load_recipe(path, ["train.max_steps=7", "model.num_sink_tokens=8", "data.sources=stdlib:"])
    assert recipe.output_dir == "runs/a"
    assert recipe.model.num_sink_tokens == 8
    assert recipe.model.num_recent_tokens is None
    assert recipe.model.windows() == {"num_sink_tokens": 8, "num_recent_tokens": 4080}
    assert recipe.train.learning_rate == 2e-5, "YAML 1.1 would read 2e-5 as text"
    assert recipe.train.max_steps == 7
    assert recipe.data.sources == ["stdlib:"], "the text, not the mapping {stdlib: null}"
    assert load_recipe(None, ["bench.lengths=8192,1_024"]).bench.lengths == [8192, 1024]
    assert load_recipe(None, ["bench.lengths=8192"]).bench.lengths == [8192]
    assert load_recipe(None, ["seed=010"]).seed == 10, "YAML 1.1 would read 8"
    assert load_recipe(None) == Recipe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: {}", "unknown key 'modle' (did you mean 'model'?)"),
        (
            "model: {num_sink_token: 3}",
            "unknown key 'num_sink_token' in model (did you mean 'model.num_sink_tokens'?)",
        ),
        ("learning_rate: 1.0", "(did you mean 'train.learning_rate'?)"),
        ("model: {num_sink_tokens: many}", "model.num_sink_tokens is 'many': it should be a valid integer"),
        ("model: {num_sink_tokens: 1.5}", "model.num_sink_tokens is 1.5: it should be a valid integer"),
        ("model: {num_sink_tokens: true}", "model.num_sink_tokens is True: it should be a number"),
        (
            "model: {num_sink_tokens: -1}",
            "model.num_sink_tokens is -1: it should be greater than or equal to 0",
        ),
        (
            "model: {dtype: bfloat}",
            "model.dtype is 'bfloat': it should be 'float32', 'bfloat16' or 'float64' (did you mean "
            "'bfloat16'?)",
        ),
        ("model: [1]", "model is [1]: it should be a section with the settings path, "),
        ("seed: 1:30", "seed is '1:30': it should be a valid integer"),
        ("train: {learning_rate: .inf}", "train.learning_rate is inf: it should be a finite number"),
        ("seed: -3", "seed is -3"),
        ("seed: 1\nseed: 2", "key 'seed' occurs twice"),
        ("model: {", "not valid YAML"),
        ("", "the recipe file is empty; `pod recipes demo_tiny` shows a recipe that works"),
        ("# nothing\n", "the recipe file is empty"),
        ("- a", "the file is a list; it should have sections: output_dir"),
        ("data: {sources: {a: 1}}", "data.sources is {'a': 1}: it should be a valid list"),
        ("data: {sources: [[a]]}", "data.sources[0] is ['a']: it should be a valid string"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        load_recipe(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_step=3", "unknown key 'max_step' in train (did you mean 'train.max_steps'?)"),
        ("max_steps=3", "(did you mean 'train.max_steps'?)"),
        ("train.max_steps", "expected NAME=VALUE"),
        (".max_steps=3", "expected NAME=VALUE"),
        ("train.max_steps=[", "the value is not valid YAML"),
        ("train.max_steps=ten", "train.max_steps is 'ten': it should be a valid integer"),
        ("train=3", "train is 3: it should be a section with the settings"),
        ("seed.x=1", "seed is a setting, not a section"),
        ("train.max_steps.x=1", "train.max_steps is a setting, not a section"),
        ("tarin.max_steps=1", "unknown key 'tarin' (did you mean 'train'?)"),
    ],
)
def test_mistakes_in_overrides(override, message):
    with pytest.raises(ValueError) as caught:
        load_recipe(None, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("seed: 0", "seed.x=1", "seed is a setting, not a section"),
        ("train: {allow_repeats: false}", "train.allow_repeats.x=1", "train.allow_repeats is a setting"),
        ("train: []", "train.max_steps=1", "train is [] in the recipe: it should be a section"),
        ("train: 0", "train.max_steps=1", "train is 0 in the recipe: it should be a section"),
    ],
)
def test_an_override_replaces_no_value_of_the_file_by_a_section(tmp_path, text, override, message):
    with pytest.raises(ValueError) as caught:
        load_recipe(write(tmp_path, text), [override])
    assert message in str(caught.value)


def test_an_override_makes_the_sections_and_mappings_that_the_file_leaves_empty(tmp_path):
    path = write(tmp_path, "train:\neval: {method_options: }\n")
    recipe = load_recipe(path, ["train.max_steps=7", "eval.method_options.snapkv.window=16"])
    assert recipe.train.max_steps == 7
    assert recipe.eval.method_options == {"snapkv": {"window": 16}}


def test_the_keys_of_a_section_are_listed_where_none_is_very_near():
    with pytest.raises(ValueError) as caught:
        load_recipe(None, ["train.learning_rat=1"])
    assert str(caught.value) == "unknown key 'learning_rat' in train (did you mean 'train.learning_rate'?)"
    with pytest.raises(ValueError, match="unknown key 'lr' in train.*; valid keys: .*learning_rate, "):
        load_recipe(None, ["train.lr=1"])


def test_a_recipe_extends_another_field_by_field(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "seed: 3\ntrain: {learning_rate: 2e-5, max_steps: 7}\neval: {methods: [full, pod]}"
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "middle.yaml").write_text(
        "extends: ../base.yaml\ntrain: {max_steps: 8}\neval: {methods: [full]}"
    )
    own = tmp_path / "own.yaml"
    own.write_text("extends: more/middle.yaml\noutput_dir: here")
    recipe = load_recipe(own, ["train.max_steps=9"])
    assert (recipe.seed, recipe.output_dir, recipe.eval.methods) == (3, "here", ["full"])
    assert (recipe.train.learning_rate, recipe.train.max_steps) == (2e-5, 9)
    assert load_recipe(own).train.max_steps == 8


@pytest.mark.parametrize("name", ["own.yaml", "3", "[base.yaml]"])
def test_a_recipe_extends_the_name_of_another(tmp_path, name):
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: {name}")
    with pytest.raises(ValueError, match=r"own.yaml: extends is .*: it should be the name of another recipe"):
        load_recipe(own)


@pytest.mark.parametrize("name", ["demo_tiny", "demo_tiny.yaml", "configs/demo_tiny.yaml"])
@pytest.mark.parametrize("file", ["own.yaml", "demo_tiny.yaml"])
def test_a_recipe_extends_one_that_comes_along_by_its_name(tmp_path, name, file):
    """A recipe extends one that comes along by its name.

    It does so also under the same name, as a copy that changes one field has it, unless that says the file's
    own full name.
    """
    own = tmp_path / file
    own.write_text(f"extends: {name}\nseed: 7")
    if name == file:
        with pytest.raises(ValueError, match="it should be the name of another recipe"):
            load_recipe(own)
        return
    recipe, base = load_recipe(own), load_recipe("demo_tiny")
    assert recipe.seed == 7 and replace(recipe, seed=base.seed) == base


def test_a_recipe_beside_it_wins_over_one_that_comes_along(tmp_path):
    (tmp_path / "demo_tiny.yaml").write_text("output_dir: beside")
    (tmp_path / "own.yaml").write_text("extends: demo_tiny")
    assert load_recipe(tmp_path / "own.yaml").output_dir == "beside"


def test_an_extended_recipe_that_there_is_not_is_named(tmp_path):
    (tmp_path / "own.yaml").write_text("extends: nowhere")
    with pytest.raises(ValueError, match="nowhere: there is no such file, .*`pod recipes` lists"):
        load_recipe(tmp_path / "own.yaml")


def test_an_option_that_main_takes_is_handed_to_it(tmp_path):
    told = []

    def main(recipe, overwrite=False):
        told.append(overwrite)

    def add(parser):
        parser.add_argument("--overwrite", action="store_true")

    where = ["--set", f"output_dir={tmp_path}"]
    for argv in (where, [*where, "--overwrite"]):
        run(main, sections=("model",), add_arguments=add, argv=argv)
    assert told == [False, True]


def test_missing_file_points_to_examples(tmp_path):
    with pytest.raises(
        ValueError, match=r"nowhere.yaml: there is no such file.*`pod recipes` lists the recipes"
    ):
        load_recipe(tmp_path / "nowhere.yaml")


@section
class Inner:
    rate: float
    """Steps per
    second."""


@section
class Outer:
    """A schema with every kind of type."""

    inner: Inner
    """One of these."""
    names: list[str] = field(default_factory=list)
    """Names."""
    sizes: tuple[int, int] = (1, 2)
    """Two sizes."""
    either: int | str = 3
    """A number or a word."""
    maybe: float | None = None
    """A number."""
    mode: Literal["fast", "slow", 3] = "fast"
    """How."""
    table: dict[str, float] = field(default_factory=dict)
    """Weights."""
    many: list[Inner] = field(default_factory=list)
    """Several."""
    path: Path = Path("a")
    """Where."""
    anything: Any = None
    """Anything."""
    flag: bool = False
    """Yes or no."""


def test_every_kind_of_type():
    made = build(
        Outer,
        {
            "inner": {"rate": 2},
            "names": "full, imdc(snapkv,4096),1",
            "sizes": [3, 4.0],
            "either": "5 tokens",
            "maybe": 1,
            "mode": 3,
            "table": {"a": 1},
            "many": [{"rate": 1.5}],
            "path": "b/c",
            "anything": {"x": [1]},
            "flag": True,
        },
    )
    assert made == Outer(
        inner=Inner(rate=2.0),
        names=["full", "imdc(snapkv,4096)", "1"],
        sizes=(3, 4),
        either="5 tokens",
        maybe=1.0,
        mode=3,
        table={"a": 1.0},
        many=[Inner(rate=1.5)],
        path=Path("b/c"),
        anything={"x": [1]},
        flag=True,
    )
    assert isinstance(made.inner.rate, float)
    assert isinstance(made.sizes[1], int)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "inner is missing: set it in the recipe or with --set inner=…"),
        ({"inner": {}}, "inner.rate is missing"),
        ({"inner": {"rate": "x"}}, "inner.rate is 'x': it should be a valid number"),
        (
            {"inner": {"rate": 1}, "many": [{"rat": 1}]},
            "unknown key 'rat' in many[0] (did you mean 'many[0].rate'?)",
        ),
        ({"inner": {"rate": 1}, "sizes": [1]}, "sizes[1] is missing"),
        ({"inner": {"rate": 1}, "mode": "4"}, "mode is '4': it should be 'fast', 'slow' or 3"),
        ({"inner": {"rate": 1}, "mode": True}, "mode is True: it should be 'fast'"),
        ({"inner": {"rate": 1}, "table": {"a": "b"}}, "table.a is 'b': it should be a valid number"),
        ({"inner": {"rate": 1}, "table": 3}, "table is 3: it should be a valid dictionary"),
        ({"inner": {"rate": 1}, "flag": "perhaps"}, "flag is 'perhaps': it should be a valid boolean"),
        ({"inner": {"rate": True}}, "inner.rate is True: it should be a number"),
        ({"inner": {"rate": 1}, "maybe": "high"}, "maybe is 'high': it should be a valid number"),
    ],
)
def test_mistakes_name_their_place(content, message):
    with pytest.raises(ValueError) as caught:
        build(Outer, content)
    assert message in str(caught.value)


def test_documentation_comes_from_the_text_under_each_field():
    assert field_docs(Inner) == {"rate": "Steps per second."}
    assert list(field_docs(Outer)) == [item.name for item in dataclasses.fields(Outer)]
    lines = explain(Outer, "outer")
    assert "  outer.mode  ('fast' | 'slow' | 3, default 'fast')" in lines
    assert "      One of these." in lines
    assert type_name(float | None) == "float | null"


def test_yaml_round_trip_keeps_small_numbers(tmp_path):
    recipe = load_recipe(None, ["train.learning_rate=1e-7", "output_dir='007'", "model.plan=null"])
    assert load_recipe(write(tmp_path, to_yaml(recipe))) == recipe


def test_the_plan_that_is_named_or_was_made(tmp_path):
    recipe = load_recipe(None, [f"output_dir={tmp_path}"])
    assert recipe.model.plan_file(tmp_path) is None
    recipe.plan_dir.mkdir()
    (recipe.plan_dir / "plan.json").write_text("{}")
    assert recipe.model.plan_file(tmp_path) == tmp_path / "plan" / "plan.json"
    recipe.model.plan = str(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"model.plan: .*other.json does not exist; run `pod explore`"):
        recipe.model.plan_file(tmp_path)


def started(main, argv, **settings):
    run(main, sections=("model",), argv=argv, description="Test.", **settings)


def test_run_hands_over_the_recipe_and_shorthands_win():
    seen = []
    add = lambda parser: parser.add_argument("--dtype", dest="model.dtype")  # noqa: E731
    started(
        seen.append,
        ["--set", "model.dtype=float64", "--dtype", "bfloat16", "--local_rank", "1"],
        add_arguments=add,
    )
    assert seen[0].model.dtype == "bfloat16"


@pytest.mark.parametrize(("section", "setting"), [("model", "output_dir"), ("export", "export.path")])
def test_run_refuses_a_file_in_the_place_of_its_folder_before_the_work(tmp_path, capsys, section, setting):
    (tmp_path / "file").write_text("")
    argv = ["--set", f"{setting}={tmp_path / 'file'}"]
    with pytest.raises(SystemExit) as stopped:
        run(lambda recipe: pytest.fail("main ran"), sections=(section,), argv=argv)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"error: {setting} = " in error and "is not a folder" in error


def test_dry_run_prints_recipe_and_estimate_and_does_nothing(capsys):
    started(
        lambda recipe: pytest.fail("main ran"),
        ["--dry-run", "--set", "seed=5"],
        estimate=lambda r: f"needs {r.seed} GB",
    )
    assert capsys.readouterr().out == "needs 5 GB\n"


def test_an_estimate_gets_the_options_that_are_its_parameters(capsys):
    def add(parser):
        parser.add_argument("--gpus")
        parser.add_argument("--other")

    argv = ["--dry-run", "--gpus", "8x24", "--other", "x"]
    asked = {"estimate": lambda recipe, gpus=None: f"on {gpus}", "add_arguments": add}
    started(lambda recipe: pytest.fail("main ran"), argv, **asked)
    assert capsys.readouterr().out == "on 8x24\n"


def test_the_resolved_recipe_is_printed_on_request(capsys, tmp_path):
    """Alone, as a recipe that gives the same one again; with --dry-run, below the estimate."""
    argv = ["--print-config", "--set", "seed=5"]
    started(lambda recipe: pytest.fail("main ran"), argv)
    shown = capsys.readouterr().out
    path = write(tmp_path, shown)
    assert load_recipe(path) == load_recipe(None, ["seed=5"])
    started(lambda recipe: pytest.fail("main ran"), [*argv, "--dry-run"], estimate=lambda r: "needs 5 GB")
    assert capsys.readouterr().out == f"needs 5 GB\n---\n{shown}"


@pytest.mark.parametrize(
    "error", [ValueError("bad\nthing"), OSError("disk full"), RuntimeError("NaN loss"), ImportError("wandb")]
)
def test_errors_are_one_line_and_code_2(error, capsys, monkeypatch):
    monkeypatch.delenv("POD_TRACEBACK", raising=False)
    monkeypatch.delenv("RANK", raising=False)

    def main(_):
        raise error

    with pytest.raises(SystemExit) as caught:
        started(main, [])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: " + " ".join(str(error).split()))
    assert printed.count("\n") == 1
    monkeypatch.setenv("POD_TRACEBACK", "1")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        started(main, [])
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "error (rank 3): " in printed


def test_a_bug_keeps_its_traceback():
    def main(_):
        raise KeyError("bug")

    with pytest.raises(KeyError):
        started(main, [])


def test_help_explains_the_sections_asked_for_and_no_others(capsys):
    with pytest.raises(SystemExit) as caught:
        started(print, ["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "model.num_recent_tokens  (int | null, default null)" in text
    assert "output_dir  (str" in text
    assert "train.max_steps  (" not in text


@pytest.mark.parametrize(
    ("rank", "local", "printed"), [("0", "0", True), ("3", "3", False), ("8", "0", True)]
)
def test_what_all_ranks_find_is_said_once_a_machine(rank, local, printed, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    with pytest.raises(SystemExit) as ended:
        run(lambda recipe: None, sections=("train",), argv=["--set", "train.max_step=3"])
    assert ended.value.code == 2
    assert ("unknown key 'max_step'" in capsys.readouterr().err) == printed

    def fails(recipe):
        raise RuntimeError("this rank's own")

    with pytest.raises(SystemExit):
        run(fails, sections=("train",), argv=[])
    assert "this rank's own" in capsys.readouterr().err
    run(lambda recipe: None, sections=("train",), argv=["--dry-run"])
    assert bool(capsys.readouterr().out) == (rank == "0")


def test_the_printed_recipe_has_the_sections_of_the_command(capsys):
    run(lambda recipe: None, sections=("model", "train"), argv=["--print-config"])
    shown = capsys.readouterr().out
    assert "\nmodel:" in shown and "\ntrain:" in shown and "output_dir:" in shown and "eval:" not in shown
