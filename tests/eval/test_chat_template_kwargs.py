"""Variables for the chat template: they reach prompts, tell answers apart, and unused ones are named."""

import json
import shutil
from pathlib import Path

import own_runs
import pytest

import pod
from pod.eval import runner
from pod.eval.answer.answer_cache import Unanswered
from pod.eval.lm.command import CommandLM
from pod.eval.suites import task_data
from pod.models import resolve_model
from pod.recipe import load_recipe
from pod.tokenizer import with_template_variables

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}{% endif %}"
)
QUIET = {"enable_thinking": False}
ASK = [{"role": "user", "content": "Why?"}]
NEEDLES = {"lengths": [400], "depths": [0.5], "samples": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, a plan and, in `model`, the tiny model with a chat template."""
    folder = own_runs.write_place(tmp_path_factory.mktemp("chat"))
    shutil.copytree(resolve_model("package:tiny"), folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def make_run(place, settings, said=None):
    """An evaluation; said: a list that its messages go to."""
    settings = {
        **own_runs.SETTINGS,
        "output_dir": str(place / "out"),
        "model.path": str(place / "model"),
        "model.plan": str(place / "plan.json"),
        "eval.text": [str(place / "text.txt")],
        "eval.methods": ["full"],
        **settings,
    }
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    return runner.prepare(recipe, log=([] if said is None else said).append)


def passkey_run(place, variables, said=None, changes=None):
    settings = {
        "eval.tasks": ["passkey"],
        "eval.passkey_lengths": [300],
        "eval.passkey_depths": [0.5],
        "eval.passkey_samples": 1,
        "eval.passkey_new_tokens": 2,
        "eval.passkey_chat_template": True,
        "eval.chat_template_kwargs": variables,
    }
    return make_run(place, settings | (changes or {}), said)


def test_passkey_prompts_hold_what_the_variable_says(place):
    (plain,) = passkey_run(place, {}).tasks["passkey"].items
    (quiet,) = passkey_run(place, QUIET).tasks["passkey"].items
    assert plain.text.endswith("<assistant>The pass key is")
    assert quiet.text.endswith("<assistant><no thoughts>The pass key is")
    assert len(quiet.token_ids) <= 300


@pytest.mark.parametrize("task", ["niah", "multi_query"])
def test_other_own_tasks_have_it_in_their_prompts(place, task):
    options = NEEDLES | {"haystack": [str(place / "text.txt")], "chat_template": True}
    if task == "multi_query":
        options.pop("depths")
    settings = {
        "eval.tasks": [task],
        "eval.task_options": {task: options},
        "eval.chat_template_kwargs": QUIET,
    }
    run = make_run(place, settings)
    item = run.tasks[task].items[0]
    ids = item.token_ids if task == "niah" else item.questions[0]
    assert "<assistant><no thoughts>" in run.tokenizer.decode(ids)


def test_prompts_of_lm_eval_tasks_hold_it(place):
    def prompt(variables):
        settings = {
            "eval.tasks": ["pod_longbench_qasper"],
            "eval.data_dir": str(Path(__file__).parent / "data"),
            "eval.limit": 1,
            "eval.chat_template_kwargs": variables,
        }
        task = make_run(place, settings).tasks["pod_longbench_qasper"]
        (leaf,) = task.leaves.values()
        task._prompts(leaf)
        return leaf.task.instances[0].args[0]

    assert prompt(QUIET) == prompt({}) + "<no thoughts>"


def test_results_of_lm_eval_tasks_record_it(place):
    settings = {
        "eval.tasks": ["pod_longbench_qasper"],
        "eval.data_dir": str(Path(__file__).parent / "data"),
        "eval.limit": 1,
        "eval.max_length": 256,
        "eval.chat_template_kwargs": QUIET,
    }
    run = make_run(place, settings)
    part = runner.measure(run, run.method_runners["full"], run.tasks["pod_longbench_qasper"])
    assert part["settings"]["chat_template_kwargs"] == QUIET


def test_other_variables_are_other_answers_and_other_results(place):
    first, second = passkey_run(place, {}), passkey_run(place, QUIET)

    def measured(run):
        return runner.measure(run, run.method_runners["full"], run.tasks["passkey"])

    part = measured(first)
    assert "chat_template_kwargs" not in part["settings"]
    again = passkey_run(place, {})
    with again.store.closed():
        measured(again)
    with pytest.raises(Unanswered), second.store.closed():
        measured(second)
    answer_caches = [runner.answers_of(run, run.method_runners["full"]) for run in (first, second)]
    assert answer_caches[0].identity != answer_caches[1].identity
    part = measured(second)
    assert part["settings"]["chat_template_kwargs"] == QUIET
    first, second, again = (
        runner.open_results(run, run.method_runners["full"]).content for run in (first, second, again)
    )
    assert first["row"] == again["row"] != second["row"]
    assert second["config"]["chat_template_kwargs"] == QUIET


def test_one_warning_names_what_the_template_uses(place):
    said = []
    passkey_run(place, QUIET | {"thinking": 1}, said)
    assert said == [
        "warning: eval.chat_template_kwargs: the tokenizer's chat template does not use thinking; "
        "it uses enable_thinking"
    ]
    said.clear()
    passkey_run(place, QUIET, said)
    assert not said


def test_a_tokenizer_without_template_is_named(place):
    said = []
    passkey_run(place, QUIET, said, {"model.path": "package:tiny", "eval.passkey_chat_template": False})
    assert said == [
        "warning: eval.chat_template_kwargs: the tokenizer has no chat template, "
        "so enable_thinking changes nothing"
    ]


def test_what_evaluation_sets_itself_is_refused(place):
    with pytest.raises(ValueError, match=r"eval.chat_template_kwargs: add_generation_prompt is set by"):
        passkey_run(place, {"add_generation_prompt": False})


@pytest.mark.parametrize(
    "arguments", [{"enable_thinking": False}, {"chat_template_args": QUIET}], ids=["own", "mapping"]
)
def test_lm_evals_model_arguments(place, arguments):
    stock = CommandLM(str(place / "model"))
    lm = CommandLM(str(place / "model"), **arguments)
    assert stock.apply_chat_template(ASK) == "<user>Why?<assistant>"
    assert lm.apply_chat_template(ASK) == "<user>Why?<assistant><no thoughts>"
    assert lm.get_model_info()["pod"]["chat_template_args"] == QUIET
    assert "chat_template_args" not in stock.get_model_info()["pod"]
    assert lm._answer_cache.name != stock._answer_cache.name
    # --cache_requests of lm-eval keeps finished prompts under this name
    assert lm.tokenizer_name != stock.tokenizer_name


def test_our_tasks_warn_of_thoughts_that_are_scored():
    tokenizer = pod.load_tokenizer("package:tiny")
    lines = []
    with_template_variables(tokenizer, {"enable_thinking": True}, "eval.chat_template_kwargs", lines.append)
    assert (
        "eval.chat_template_kwargs: enable_thinking is true: the model's thoughts are part of its answers"
        in lines[-1]
    )
    lines.clear()
    with_template_variables(tokenizer, QUIET, "eval.chat_template_kwargs", lines.append)
    assert not any("thoughts" in line for line in lines)


def test_enable_thinking_goes_before_the_mapping_as_in_hflm(place):
    lm = CommandLM(str(place / "model"), enable_thinking=False, chat_template_args={"enable_thinking": True})
    assert lm.apply_chat_template(ASK).endswith("<no thoughts>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_thinking": "no"}, "enable_thinking='no': give true or false"),
        ({"chat_template_args": "low"}, "chat_template_args='low': a mapping is needed"),
        ({"enable_thinking": True}, "the thoughts would stay in the answers and be scored"),
        ({"chat_template_args": {"enable_thinking": True}}, "enable_thinking=True is not supported"),
        ({"think_end_token": "</think>"}, "think_end_token is not supported"),
        ({"chat_template_args": {"tokenize": True}}, "chat_template_args: tokenize is set by"),
    ],
)
def test_wrong_model_arguments_are_refused(place, arguments, message):
    with pytest.raises(ValueError, match=message):
        CommandLM(str(place / "model"), **arguments)


def test_lm_eval_mode_warns_of_an_unused_variable(place, caplog):
    CommandLM(str(place / "model"), chat_template_args={"thinking": True})
    assert [record.message for record in caplog.records if "thinking" in record.message] == [
        "chat_template_args: the tokenizer's chat template does not use thinking; it uses enable_thinking"
    ]


def test_tasks_that_fill_a_length_count_the_variables_in_lm_eval_mode(place):
    found = task_data.load_tokenizer({"pretrained": str(place / "model"), "enable_thinking": False})
    text = found.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<no thoughts>")


@pytest.mark.parametrize(
    ("template", "used"),
    [
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", "thinking"),
        (
            "{% for m in messages %}{% generation %}{{ style }}{{ bos_token }}"
            "{% endgeneration %}{% endfor %}",
            "style",
        ),
        (
            "{% set ns = namespace(x=1) %}{{ strftime_now('%d') }}{{ ns.x }}{% break %}",
            "no variables of its own",
        ),
    ],
    ids=["set", "generation", "globals"],
)
def test_variables_of_a_template(template, used):
    tokenizer = pod.load_tokenizer(resolve_model("package:tiny"))
    tokenizer.chat_template = template
    said = []
    with_template_variables(tokenizer, {"other": 1}, "here", said.append)
    assert said == [f"here: the tokenizer's chat template does not use other; it uses {used}"]


def test_the_tokenizer_that_is_handed_over_stays_as_it_is():
    tokenizer = pod.load_tokenizer(resolve_model("package:tiny"))
    tokenizer.chat_template = TEMPLATE
    found = with_template_variables(tokenizer, QUIET, "here", lambda line: None)
    ask = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(ASK, **ask) == "<user>Why?<assistant>"
    assert found.apply_chat_template(ASK, **ask) == "<user>Why?<assistant><no thoughts>"
    assert found.encode("as before") == tokenizer.encode("as before")
