"""What must not go wrong silently.

Hooks that transformers renames, copied caches, inference mode, and waits for the host.
"""

import copy
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

import pod
from pod import engine
from pod.modeling.model import generation

HOOKS = ("_prefill", "_prepare_cache_for_generation", "_get_candidate_generator")
# A method of transformers' generation gets another name, and its callers call that. Then a prompt is read in
# chunks.
RENAMED = """
import json, os, sys
import torch, transformers
from transformers import AutoModelForCausalLM, GenerationMixin

def rename(old):
    setattr(GenerationMixin, old + "_renamed", getattr(GenerationMixin, old))
    delattr(GenerationMixin, old)
    for name, function in list(vars(GenerationMixin).items()):
        code = getattr(function, "__code__", None)
        if code is not None and old in code.co_names:
            names = tuple(old + "_renamed" if n == old else n for n in code.co_names)
            function.__code__ = code.replace(co_names=names)

def generate(folder):
    if exported:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        options = {}
    else:
        import pod
        model = pod.load_model(folder)
        options = {"past_key_values": pod.make_cache(model, "snapkv", budget=12, window=4, kernel=3)}
    ids = torch.arange(3, 63)[None]
    out = model.generate(ids, max_new_tokens=6, prefill_chunk_size=17, do_sample=False, **options)
    return out[0, 60:].tolist()

exported, folder, found = sys.argv[1] == "export", sys.argv[2], {}
for name in (None, *sys.argv[3:]):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if name is not None:
                rename(name)
            answer = generate(folder)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found[str(name)] = json.load(pipe)
    os.waitpid(child, 0)
print(json.dumps(found))
"""


def small_model(layers, spec="full"):
    layout = spec if spec in ("cla", "window") else "pod"
    config = pod.PodConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.25,
        layout=layout,
        lead=[[0, layer - layer % 2] for layer in range(layers)] if "pod" in spec else None,
        num_sink_tokens=0 if layout == "window" else 4,
        num_recent_tokens=11,
    )
    torch.manual_seed(0)
    return pod.PodForCausalLM(config).eval()


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """`renamed("package")[hook]`: tokens, or the error, when this hook has another name in transformers."""
    folder, known = tmp_path_factory.mktemp("renamed"), {}
    small_model(2).save_pretrained(folder)

    def ask(kind):
        if kind not in known:
            script = folder / "ask.py"
            script.write_text(RENAMED)
            root = str(Path(pod.__file__).parents[1])
            environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
            environment |= {"PYTHONPATH": root if kind == "package" else ""}
            command = [sys.executable, str(script), kind, str(folder), *HOOKS]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
            assert done.returncode == 0, done.stderr
            known[kind] = json.loads(done.stdout.strip().splitlines()[-1])
        return known[kind]

    return ask


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", ["package", "export"])
def test_a_renamed_hook_of_transformers_is_an_error_that_names_it(renamed, kind, hook):
    answers = renamed(kind)
    assert len(answers["None"]) == 6, answers["None"]
    found = answers[hook]
    assert isinstance(found, str), f"generated {found}, with the hook in place {answers['None']}"
    assert hook in found and transformers.__version__ in found and "\n" not in found
    assert not found.startswith(("AttributeError", "TypeError"))


def test_a_hook_with_other_arguments_is_an_error(monkeypatch):
    generation.check_hooks.cache_clear()
    monkeypatch.setattr(
        transformers.GenerationMixin, "_prefill", lambda self, inputs, generation_config, model_kwargs: None
    )
    with pytest.raises(
        ImportError, match=rf"_prefill\(self, input_ids.*{transformers.__version__} does not have"
    ):
        small_model(2).generate(torch.arange(3, 9)[None], max_new_tokens=2)


def test_the_versions_that_are_named_are_those_of_the_package():
    text = (Path(pod.__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"transformers{generation.SUPPORTED}"' in text


def greedy(model, cache, token, steps):
    """Tokens found and the last logits."""
    tokens = []
    with torch.no_grad():
        for _ in range(steps):
            logits = model(token, past_key_values=cache).logits[:, -1]
            token = logits.argmax(-1, keepdim=True)
            tokens.append(token)
    return torch.cat(tokens, dim=1), logits


@pytest.mark.parametrize("spec", ["full", "pod", "pod+int4"])
def test_branches_of_a_cache_with_an_engine_are_independent(tools, spec):
    """Every branch decodes with an engine of its own, whatever the others were fed.

    It decodes as a cache does that was never copied.
    """
    model, ids = tools.make_pod(plan="pod" in spec), tools.random_ids(2, 30)
    options = {"group_size": 4, "residual": 1} if "+" in spec else {}

    def filled():
        cache = pod.make_cache(model, spec, capacity=64, **options)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        greedy(model, cache, ids[:, :1], 3)
        return cache

    trunk, starts = filled(), [tools.random_ids(2, 1, seed) for seed in range(3)]
    branches = [copy.deepcopy(trunk) for _ in starts]
    for branch, start in zip(branches, starts, strict=True):
        greedy(model, branch, start, 4)
    for branch, start in zip(branches, starts, strict=True):
        alone = filled()
        greedy(model, alone, start, 4)
        (found, logits), (expected, exact) = (greedy(model, one, start, 5) for one in (branch, alone))
        assert torch.equal(found, expected) and (logits - exact).abs().max() < 1e-9
        assert branch.engine is not trunk.engine and branch.engine.steps == 12
    assert trunk.engine.steps == 3


@pytest.mark.parametrize("spec", ["full", "pod"])
@pytest.mark.parametrize("capacity", [None, 40], ids=["plain", "reserved"])
def test_a_copy_of_a_cache_can_be_given_an_engine(tools, spec, capacity):
    model, ids = tools.make_pod(plan=spec == "pod"), tools.random_ids(2, 30)
    cache = pod.make_cache(model, spec, capacity=capacity)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    branch = copy.deepcopy(cache)
    engine.attach(branch, 64)
    (found, logits), (expected, exact) = (greedy(model, one, ids[:, :1], 8) for one in (branch, cache))
    assert torch.equal(found, expected) and (logits - exact).abs().max() < 1e-9
    assert branch.engine.steps == 8


def inference_tensors():
    """By address of the object."""
    gc.collect()
    objects = (item for item in gc.get_objects() if type(item) is torch.Tensor)
    return {id(item): tuple(item.shape) for item in objects if item.is_inference()}


@pytest.mark.parametrize("layout", ["pod", "cla", "window"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_inference_mode_leaves_nothing_behind(tools, layout, backend):
    """Inference mode leaves nothing behind.

    Tensors made there cannot be saved for a backward pass: nothing of a prompt, a packed row or a mask may
    stay.
    """
    windows = (0, 11) if layout == "window" else (4, 11)
    config = tools.make_pod(plan=layout == "pod", windows=windows, backend=backend).config.to_dict()
    if layout == "cla":
        config |= {"lead": None}
    model = pod.PodForCausalLM(pod.PodConfig(**(config | {"layout": layout, "head_dim": 16}))).float()
    ids, documents = tools.random_ids(2, 70), torch.zeros(2, 70, dtype=torch.long)
    mask = torch.ones_like(ids)
    documents[:, 31:], mask[0, :9] = 1, 0
    before = inference_tensors()
    with torch.inference_mode():
        for given in ({}, {"doc_ids": documents}, {"attention_mask": mask}):
            model(ids, **given)
        model.generate(ids, attention_mask=mask, max_new_tokens=3)
        model(ids[:, :1], past_key_values=model(ids, use_cache=True).past_key_values)
    assert not [shape for item, shape in inference_tensors().items() if item not in before]
    for given in ({}, {"doc_ids": documents}, {"attention_mask": mask}):
        model(ids, labels=ids, **given).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


class Waits(TorchFunctionMode):
    """How often numbers are read from tensors, or shapes depend on them.

    On a GPU the host waits each time.
    """

    READS = frozenset(
        [
            "item",
            "tolist",
            "cpu",
            "numpy",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "equal",
            "allclose",
            "nonzero",
            "argwhere",
            "unique",
            "unique_consecutive",
            "masked_select",
            "bincount",
        ]
    )

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        index = index if isinstance(index, tuple) else (index,)
        if name in self.READS or any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


CODEC = {"group_size": 8, "residual": 8}
PADDED = {
    "full": {},
    "pod": {},
    "cla": {},
    "window": {},
    "snapkv": {"budget": 14, "window": 4, "kernel": 3},
    "streamingllm": {"budget": 12, "num_sink_tokens": 3},
    "h2o": {"budget": 12},
    "int4": CODEC,
    "pod+int4": CODEC,
    "pod+snapkv": {"budget": 20, "window": 4, "kernel": 3},
}


def waits(spec, layers, when):
    """Reads of a padded pass through so many layers: a prompt, a chunk behind one, or a decoded token."""
    model, ids, mask = small_model(layers, spec), torch.randint(3, 97, (3, 80)), torch.ones(3, 80)
    mask[0, :9], mask[1, :3] = 0, 0
    with torch.no_grad():
        cache, end = (
            pod.make_cache(model, spec, **PADDED[spec]),
            {"prompt": 0, "chunk": 60, "token": 79}[when],
        )
        if end:
            cache.begin_prompt(60 if when == "chunk" else 79)
            model(ids[:, :end], attention_mask=mask[:, :end], past_key_values=cache)
        with Waits() as counter:
            model(ids[:, end:], attention_mask=mask, past_key_values=cache)
    return counter.found


@pytest.mark.parametrize("when", ["prompt", "chunk", "token"])
@pytest.mark.parametrize("spec", PADDED)
def test_layers_of_a_padded_batch_share_what_the_host_must_know(spec, when):
    check_shared(*(waits(spec, layers, when) for layers in (2, 6)))


@pytest.mark.parametrize("spec", ["full", "pod", "cla", "window"])
@torch.no_grad()
def test_layers_of_padded_and_packed_rows_share_what_the_host_must_know(spec):
    """Without a cache, as in scoring and training."""
    ids, mask, documents = torch.randint(3, 97, (3, 80)), torch.ones(3, 80), torch.zeros(3, 80).long()
    mask[0, :9], documents[:, 31:] = 0, 1
    for given in ({"attention_mask": mask}, {"doc_ids": documents}):
        found = []
        for layers in (2, 6):
            with Waits() as counter:
                small_model(layers, spec)(ids, **given)
            found.append(counter.found)
        check_shared(*found)


def check_shared(few, many):
    """Of 2 and of 6 layers."""
    assert len(many) == len(few), f"{(len(many) - len(few)) / 4:g} waits per layer"
