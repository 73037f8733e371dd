"""Which FlashAttention runs on GPUs.

It is named by a recipe or the environment, and activated before any attention, or refused. A stand-in is
registered with PyTorch under the real names, as packages of kernels do.
"""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from torch.nn import attention

import pod
from pod.commands import bench, doctor, evaluate, explore
from pod.measure.machine import environment
from pod.modeling.model import flash_version
from pod.modeling.model.attend import IMPLEMENTATIONS
from pod.modeling.model.flash_version import active_version, unsupported_by_version, use, use_asked
from pod.modeling.model.llama import PodForCausalLM
from pod.recipe import load_recipe
from pod.training.predict import layout_search
from pod.training.run import start

TINY = ["bench.shapes=tiny", "model.path=package:tiny"]


class Handle:
    """What an activated implementation leaves with PyTorch."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def remove(self):
        self.log.append(f"without {self.name}")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with one GPU of capability 9.0, on which both packages are installed.

    `log`: what was activated, in order. `packages`: versions by name. `fails`: what registering raises, by
    name.
    """
    here = SimpleNamespace(
        log=[], packages={"flash-attn-4": "4.0.0b18"}, fails={}, gpus=[(9, 0)], torch="2.13.0"
    )
    before = dict(attention._registry._FLASH_ATTENTION_IMPLS)

    def register(name):
        def activate():
            if name in here.fails:
                raise here.fails[name]
            here.log.append(name)
            return Handle(here.log, name)

        attention.register_flash_attention_impl(name, register_fn=activate)

    for name in ("FA3", "FA4"):
        register(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(here.gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here.gpus))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device=None: here.gpus[getattr(device, "index", device) or 0],
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Stand-in")
    monkeypatch.setattr(flash_version, "installed", here.packages.get)
    monkeypatch.setattr(flash_version.torch, "__version__", here.torch)
    monkeypatch.setattr(flash_version, "_chosen", None)
    monkeypatch.delenv(flash_version.VARIABLE, raising=False)
    yield here
    attention.restore_flash_attention_impl(_raise_warn=False)
    attention._registry._FLASH_ATTENTION_IMPLS.clear()
    attention._registry._FLASH_ATTENTION_IMPLS.update(before)


# -- what is named runs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "variable", "runs"),
    [
        (None, None, "fa2"),
        ("fa3", None, "fa3"),
        (None, "fa4", "fa4"),
        (None, "", "fa2"),
        ("fa2", "fa4", "fa2"),
        ("fa4", "fa3", "fa4"),
    ],
)
def test_the_recipe_goes_before_the_environment(machine, monkeypatch, setting, variable, runs):
    if variable is not None:
        monkeypatch.setenv(flash_version.VARIABLE, variable)
    assert use(setting) == runs == active_version()
    use_asked()  # as a model that the command loads
    assert active_version() == runs
    assert machine.log == ([] if runs == "fa2" else [runs.upper()])


def test_a_command_that_names_none_runs_what_pytorch_brings(machine):
    use("fa3")
    assert use() == "fa2" == active_version()
    assert machine.log == ["FA3", "without FA3"]


def test_what_was_activated_by_hand_stays_where_nothing_is_named(machine):
    attention.activate_flash_attention_impl("FA4")
    use_asked()
    assert active_version() == "fa4" and machine.log == ["FA4"]


def tiny_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))


@pytest.mark.parametrize("how", ["load_model", "from_pretrained"])
def test_a_loaded_model_attends_after_the_switch(machine, monkeypatch, tmp_path, how):
    stock = tiny_model()
    pod.load_model(stock).save_pretrained(tmp_path)
    monkeypatch.setenv(flash_version.VARIABLE, "fa3")
    model = pod.load_model(stock) if how == "load_model" else PodForCausalLM.from_pretrained(tmp_path)
    attend = IMPLEMENTATIONS["flash"]

    def logged(call):
        machine.log.append("attention")
        return attend.run(call)

    monkeypatch.setitem(IMPLEMENTATIONS, "flash", attend._replace(run=logged))
    with torch.no_grad():
        model(torch.arange(8)[None])
    assert machine.log == ["FA3", "attention"]


def work_of(command, monkeypatch, note):
    """The command's function, with `note()` in place of its work."""
    if command == "train":

        def read(*arguments):
            note()
            raise InterruptedError

        monkeypatch.setattr(start, "model_config", read)
        return start.train
    places = {
        "explore": (explore, "pod.plan.exploration.process_group"),
        "eval": (evaluate, "pod.eval.runner.evaluate"),
        "bench": (bench, "pod.bench.run.run_bench"),
    }
    module, work = places[command]

    def stand_in(*arguments):
        note()
        raise InterruptedError

    monkeypatch.setattr(work, stand_in)
    return module.main


@pytest.mark.parametrize("command", ["train", "explore", "eval", "bench"])
def test_every_command_switches_before_it_works(machine, monkeypatch, command, capsys):
    run = work_of(command, monkeypatch, lambda: machine.log.append("work"))
    recipe = load_recipe(None, [*TINY, "model.flash_attention=fa4", "model.dtype=bfloat16"])
    with pytest.raises(InterruptedError):
        run(recipe)
    assert machine.log == ["FA4", "work"]
    if command != "train":  # whose table tells it
        assert "attention on GPUs: FlashAttention 4 (fa4)\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "explore", "eval", "bench"])
def test_every_command_refuses_before_it_works(machine, monkeypatch, command):
    machine.gpus = [(8, 0)]
    run = work_of(command, monkeypatch, lambda: machine.log.append("work"))
    with pytest.raises(
        ValueError, match=r"model.flash_attention=fa3 cannot run here: GPU 0, NVIDIA Stand-in, "
    ):
        run(load_recipe(None, [*TINY, "model.flash_attention=fa3"]))
    assert machine.log == []


def test_scores_of_stored_answers_need_no_gpu(machine, monkeypatch):
    machine.gpus = []
    run = work_of("eval", monkeypatch, lambda: machine.log.append("work"))
    with pytest.raises(InterruptedError):
        run(load_recipe(None, [*TINY, "model.flash_attention=fa3", "eval.steps=[score, report]"]))


# -- what cannot run is refused -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "says"),
    [
        ("fa3", [], "PyTorch finds no NVIDIA GPU"),
        ("fa3", [(10, 0)], r"has compute capability 10.0, and FlashAttention 3 needs 9.0 \(hide this GPU"),
        (
            "fa4",
            [(9, 0), (8, 6)],
            "GPU 1, NVIDIA Stand-in, has compute capability 8.6, and FlashAttention 4 needs 9.0 or 10.0",
        ),
        ("fa4", [(12, 0)], "has compute capability 12.0"),
    ],
)
def test_other_gpus_are_refused(machine, monkeypatch, name, gpus, says):
    machine.gpus = gpus
    with pytest.raises(ValueError, match=says) as caught:
        use(name)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(
        "or use fa2, which comes with PyTorch"
    )
    monkeypatch.setenv(flash_version.VARIABLE, name)
    flash_version.choose(None)
    with pytest.raises(ValueError, match=f"^POD_FLASH_ATTENTION={name} cannot run here: "):
        pod.load_model(tiny_model())
    assert machine.log == []


@pytest.mark.parametrize("gpus", [[(9, 0)], [(10, 0), (10, 3)]])
def test_fa4_runs_on_hopper_and_blackwell(machine, gpus):
    machine.gpus = gpus
    assert use("fa4") == "fa4" == active_version()


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        (
            "fa3",
            ModuleNotFoundError("no", name="flash_attn_interface"),
            r"the package flash-attn-3 is not installed \(",
        ),
        (
            "fa4",
            ModuleNotFoundError("no", name="flash_attn.cute"),
            r"the package flash-attn-4 is not installed \(pip ",
        ),
        (
            "fa4",
            ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
            r"cannot be loaded \(No module named 'cut",
        ),
        (
            "fa3",
            ImportError("libcudart.so.12:\n no such file"),
            r"flash-attn-3 cannot be loaded \(libcudart.so.12: no such",
        ),
        ("fa3", RuntimeError("does not expose FA3 kernels"), "cannot be loaded"),
    ],
)
def test_packages_that_are_missing_or_broken_are_refused(machine, name, error, says):
    machine.fails[name.upper()] = error
    with pytest.raises(ValueError, match=says) as caught:
        use(name)
    assert "\n" not in str(caught.value)
    assert active_version() == "fa2"


def test_a_release_with_more_results_than_pytorch_takes_is_refused(machine, monkeypatch):
    """A release with more results than PyTorch takes is refused.

    pytorch/pytorch#190212: PyTorch 2.13 unpacks two results, flash-attn-4 gives four and five since 4.0.0b19.
    """
    machine.packages["flash-attn-4"] = "4.0.0b36"
    with pytest.raises(
        ValueError, match=r"PyTorch 2.13.0 cannot call flash-attn-4 4.0.0b36, .* \(pip install"
    ):
        use("fa4")
    monkeypatch.setattr(flash_version.torch, "__version__", "2.14.0")
    assert use("fa4") == "fa4"


def test_the_extra_names_a_release_that_runs():
    project = tomllib.loads((Path(pod.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    extra = {one.name: one for one in map(Requirement, project["project"]["optional-dependencies"]["gpu"])}
    allowed = extra["flash-attn-4"].specifier
    assert "4.0.0b18" in allowed and "4.0.0b19" not in allowed and "4.0.0" not in allowed
    assert str(allowed) in {"<4.0.0b19,>=4.0.0b17", ">=4.0.0b17,<4.0.0b19"}
    assert "flash-attn-4>=4.0.0b17,<4.0.0b19" in flash_version.VERSIONS["fa4"].how_to_get
    assert "triton" in extra and "flash-attn-3" not in extra, "it is in PyTorch's own index only"


def test_a_name_that_is_unknown_is_refused(monkeypatch):
    monkeypatch.setenv(flash_version.VARIABLE, "fa5")
    with pytest.raises(ValueError, match="^POD_FLASH_ATTENTION=fa5 is not allowed: use fa2, fa3, fa4$"):
        use()
    with pytest.raises(ValueError, match=r"model.flash_attention is 'fa5'"):
        load_recipe(None, ["model.flash_attention=fa5"])


def test_pytorch_without_the_switch_is_refused(machine):
    del attention._registry._FLASH_ATTENTION_IMPLS["FA3"]
    with pytest.raises(
        ValueError, match=r"PyTorch 2.13.0 has no switch for FlashAttention 3 \(update PyTorch\)"
    ):
        use("fa3")


@pytest.mark.parametrize(
    ("name", "head_dim", "capability", "reason"),
    [
        ("fa2", 256, (8, 0), None),
        ("fa3", 256, (9, 0), None),
        ("fa3", 64, (10, 0), "FlashAttention 3 on this GPU"),
        ("fa4", 256, (9, 0), None),
        ("fa4", 128, (10, 0), None),
        ("fa4", 256, (10, 0), "head_dim 256 with FlashAttention 4"),
        ("fa4", 160, (10, 0), "head_dim 160 with FlashAttention 4"),
        ("MyImpl", 64, (8, 0), None),
    ],
)
def test_what_a_version_cannot_run_is_not_given_to_it(machine, name, head_dim, capability, reason):
    found = unsupported_by_version(name, head_dim, capability)
    assert found == reason if reason is None else found.startswith(reason)


def test_the_operation_asks_the_active_version(machine):
    from pod.modeling.model.varlen import unsupported_on_cuda

    q = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 2, 4, 256))
    call = SimpleNamespace(q=q)
    machine.gpus = [(10, 0)]
    assert unsupported_on_cuda(call) is None
    use("fa4")
    assert unsupported_on_cuda(call).startswith("head_dim 256 with FlashAttention 4")


# -- and is told ----------------------------------------------------------------------------


def test_results_tell_it(machine):
    use("fa3")
    assert environment()["hardware"]["flash_attention"] == "fa3"
    machine.gpus = []
    assert environment()["hardware"]["flash_attention"] is None


def test_the_doctor_tells_it(machine, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed", machine.packages.get)
    doctor.flash_attention()
    assert (
        "FlashAttention 2 (fa2) runs on GPUs, unless a recipe or POD_FLASH_ATTENTION names"
        in capsys.readouterr().out
    )
    monkeypatch.setenv(flash_version.VARIABLE, "fa4")
    doctor.flash_attention()
    said = capsys.readouterr().out
    assert "FlashAttention 4 (fa4) runs on GPUs, by POD_FLASH_ATTENTION; installed: fa2, fa4\n" in said
    machine.gpus = [(8, 0)]
    attention.restore_flash_attention_impl()
    with pytest.raises(ValueError, match="POD_FLASH_ATTENTION=fa4 cannot run here"):
        doctor.flash_attention()
    assert capsys.readouterr().out.startswith("bad  FlashAttention")


@pytest.mark.parametrize(
    ("device", "dtype", "line"),
    [
        ("h100", "bfloat16", "attention flash, FlashAttention 3 (fa3)"),
        ("h100", "float32", "attention flex"),
        (None, "float32", "attention flash"),
    ],
)
def test_the_table_of_a_training_tells_it(machine, monkeypatch, device, dtype, line):
    machine.gpus = []
    monkeypatch.setattr(start.flash_version, "check", lambda: None)
    found = layout_search.this_machine(1, 1, layout_search.DEVICES[device] if device else None)
    recipe = load_recipe(
        None, ["model.path=package:tiny", "model.flash_attention=fa3", f"train.dtype={dtype}"]
    )
    text = start.estimate(recipe, found)
    assert [
        row.removeprefix("kernels ").strip() for row in text.splitlines() if row.startswith("kernels")
    ] == [line]


def test_an_estimate_on_a_machine_that_will_refuse_says_so(machine):
    machine.gpus = []
    recipe = load_recipe(
        None, ["model.path=package:tiny", "model.flash_attention=fa3", "train.dtype=float32"]
    )
    refusal = (
        "note: training will refuse this: model.flash_attention=fa3 cannot run here: "
        "PyTorch finds no NVIDIA GPU"
    )
    assert refusal in start.estimate(recipe, layout_search.this_machine(1, 1))
    assert refusal not in start.estimate(
        recipe, layout_search.this_machine(1, 1, layout_search.DEVICES["h100"])
    )
