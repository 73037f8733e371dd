"""Caches are saved, loaded, copied and cropped.

What goes on with them has the same bits, or is refused in one line.
"""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from method_table import CODEC, ROWS, SNAP
from oracle_tools import run_cache

import pod

ROOT = Path(pod.__file__).parents[1]
CONTINUE = """
import sys
import torch, pod
from safetensors.torch import load_file, save_file

folder, ids = sys.argv[1], load_file(sys.argv[1] + "/ids.safetensors")["ids"]
torch.set_num_threads(1)
for name in sys.argv[2:]:
    model = pod.load_model(f"{folder}/{name}.model", dtype=torch.float32)
    cache = pod.load_cache(model, f"{folder}/{name}.cache")
    with torch.no_grad():
        out = [model(ids[:, :7], past_key_values=cache).logits]
        out += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(7, 12)]
    save_file({"logits": torch.cat(out, 1)}, f"{folder}/{name}.out")
"""


def model_of(tools, layout, dtype=torch.float64):
    if layout in ("cla", "window"):
        recent = {"num_recent_tokens": 12} if layout == "window" else {}
        return pod.load_model(tools.make_stock("llama", dtype), layout=layout, **recent)
    return tools.make_pod(dtype=dtype, plan=layout == "pod")


def go_on(model, ids, cache):
    """A chunk, then tokens one by one."""
    out = [model(ids[:, :7], past_key_values=cache).logits]
    out += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(7, ids.shape[1])]
    cache.check_integrity()
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
@torch.no_grad()
def test_copies_and_files_go_on_with_the_same_bits(tools, tmp_path, row):
    """Behind two turns, and in the middle of a third prompt."""
    model, ids, path = model_of(tools, row.model), tools.random_ids(2, 60), tmp_path / "cache.safetensors"
    cache = pod.make_cache(model, row.spec, **row.options)
    run_cache(model, cache, ids[:, :42], [("prompt", 30), ("decode", 3), ("prompt", 7), ("decode", 2)])
    cache.begin_prompt(11)
    model(ids[:, 42:46], past_key_values=cache)
    cache.check_integrity()
    pod.save_cache(model, cache, path)
    branch, loaded = copy.deepcopy(cache), pod.load_cache(model, path)
    assert 0 < loaded.nbytes <= cache.nbytes and path.stat().st_size < 3 * cache.nbytes + 200_000
    expected = go_on(model, ids[:, 46:], cache)
    for other in (branch, loaded):
        assert torch.equal(go_on(model, ids[:, 46:], other), expected)


@torch.no_grad()
@pytest.mark.slow
def test_a_new_process_goes_on_with_the_same_bits(tools, tmp_path):
    cases = {
        "pod": ("pod", {}),
        "snapkv": ("pod+snapkv+int4", {"budget": 20, "window": 4, "kernel": 3} | CODEC),
        "engine": ("full", {"capacity": 64}),
    }
    threads, script = torch.get_num_threads(), tmp_path / "continue.py"
    script.write_text(CONTINUE)
    ids = tools.random_ids(2, 42)
    safetensors.torch.save_file({"ids": ids[:, 30:].contiguous()}, tmp_path / "ids.safetensors")
    expected = {}
    torch.set_num_threads(1)
    for name, (spec, options) in cases.items():
        model = model_of(tools, spec.split("+")[0], torch.float32)
        cache = pod.make_cache(model, spec, **options)
        model(ids[:, :30], past_key_values=cache)
        model.save_pretrained(tmp_path / f"{name}.model")
        pod.save_cache(model, cache, tmp_path / f"{name}.cache")
        expected[name] = go_on(model, ids[:, 30:], cache)
    torch.set_num_threads(threads)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, logits in expected.items():
        found = safetensors.torch.load_file(tmp_path / f"{name}.out")["logits"]
        assert torch.equal(found, logits), name


@torch.no_grad()
def test_what_does_not_belong_together_is_refused_in_one_line(tools, tmp_path):
    model, path = tools.make_pod(), tmp_path / "cache.safetensors"
    cache = pod.make_cache(model, "pod")

    def refused(message, model=model, path=path):
        with pytest.raises(ValueError, match=message) as error:
            pod.load_cache(model, path)
        assert "\n" not in str(error.value)

    with pytest.raises(ValueError, match="empty"):
        pod.save_cache(model, cache, path)
    refused("no such file")
    model(tools.random_ids(2, 30), past_key_values=cache)
    pod.save_cache(model, cache, path)
    content = path.read_bytes()
    refused("another shape, plan or windows", tools.make_pod(windows=(4, 12)))
    refused("another shape, plan or windows", tools.make_pod(num_attention_heads=4))
    refused("with other weights", tools.make_pod("qwen3-g3"))
    refused("torch.float64, the model is in torch.float32", tools.make_pod(dtype=torch.float32))
    refused("needs a model|another shape, plan", tools.make_pod(plan=False))
    path.write_bytes(content[: len(content) // 2])
    refused("cannot be read.*save the cache again")
    safetensors.torch.save_file({"x": torch.ones(1)}, path)
    refused("is not a cache that pod.save_cache wrote")
    for change, message in (
        (
            lambda metadata: metadata.update(facts=metadata["facts"].replace('"schema": 4', '"schema": 7')),
            "schema 7, this version reads 4",
        ),
        (
            lambda metadata: metadata.update(facts=metadata["facts"].replace('"KVBuffer"', '"Popen"')),
            "damaged",
        ),
        (
            lambda metadata: metadata.update(facts=metadata["facts"].replace('"KVBuffer"', '"PodCache"')),
            "damaged",
        ),
    ):
        path.write_bytes(content)
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        change(metadata)
        safetensors.torch.save_file(tensors, path, metadata)
        refused(message)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["cache.safetensors"]


@torch.no_grad()
def test_a_state_needs_its_own_kind_of_cache(tools):
    model = tools.make_pod(plan=False)
    full, wa = pod.make_cache(model), pod.make_cache(model, "wa", budget=12)
    model(tools.random_ids(1, 9), past_key_values=full)
    json.dumps(full.state().facts)
    with pytest.raises(ValueError, match="that of a full cache, this is a wa cache"):
        wa.from_state(full.state())
    state = full.state()
    state.facts["schema"] = 0
    with pytest.raises(ValueError, match="schema 0, this version reads 4"):
        pod.make_cache(model).from_state(state)


def spoil_length(cache):
    cache._lengths = cache._lengths + 1


def spoil_numbers(cache):
    cache.layers[2].all_values.data[1, 0, 3] = float("nan")


def spoil_rows(cache):
    cache.layers[1].lead_keys.data = cache.layers[1].lead_keys.data[:1]


def spoil_ids(cache):
    cache._seen_ids.pop()


def spoil_slots(cache):
    cache.layers[0].all_values.data = cache.layers[0].all_values.data[:, :, :9]


def hide_bytes(cache):
    cache.layers[0].hidden = torch.zeros(9)


@pytest.mark.parametrize(
    "spoil",
    [spoil_length, spoil_numbers, spoil_rows, spoil_ids, spoil_slots, hide_bytes],
    ids=lambda f: f.__name__,
)
@torch.no_grad()
def test_integrity_is_really_checked(tools, spoil):
    model = tools.make_pod(plan=False)
    cache = pod.make_cache(model)
    model(tools.random_ids(2, 20), past_key_values=cache)
    cache.check_integrity()
    spoil(cache)
    with pytest.raises(AssertionError):
        cache.check_integrity()


# -- taking back ----------------------------------------------------------------------------

CROPPABLE = {
    "full": ("full", {}, 28),
    "engine": ("full", {"capacity": 64}, 28),
    "cla": ("cla", {}, 28),
    "pod": ("pod", {}, 0),
    "pod-extra": ("pod", {"extra_slots": 5}, 5),
    "window": ("window", {}, 0),
    "snapkv": ("snapkv", SNAP, 0),
}


@pytest.mark.parametrize("name", CROPPABLE)
@pytest.mark.parametrize("count", [1, 4])
@torch.no_grad()
def test_what_is_taken_back_never_was(tools, name, count):
    """What is taken back never was.

    Padded rows, columns without a token in some of them; twice, and again behind the place of the first crop.
    """
    spec, options, most = CROPPABLE[name]
    model, ids = model_of(tools, spec), tools.random_ids(3, 60)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 22], mask[2, 24:27] = 0, 0, 0
    cache, never = (pod.make_cache(model, spec, **options) for _ in range(2))

    def feed(cache, start, stop):
        logits = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        return logits[mask[:, start:stop].bool()]

    feed(cache, 0, 28)
    assert cache.num_croppable == most
    with pytest.raises(ValueError, match=f"{spec} cache can take back {most} of its 28 columns"):
        cache.crop(-most - 1)
    if not most:
        return
    feed(never, 0, 28 - count)
    cache.crop(-count)
    cache.check_integrity()
    assert cache.num_croppable == most - count
    for start, stop in ((0, 3), (3, 4), (4, 5), (5, 6), (6, 15), (15, 16)):
        chunk = start + 28 - count, stop + 28 - count
        assert (feed(cache, *chunk) - feed(never, *chunk)).abs().max() < 1e-9
    assert cache.num_croppable == (most if most == 5 else 44 - count)


@torch.no_grad()
def test_windows_that_are_not_full_give_everything_back(tools):
    model, ids = tools.make_pod(), tools.random_ids(2, 20)
    cache = pod.make_cache(model, "pod")
    model(ids[:, :14], past_key_values=cache)
    cache.crop(-14)
    cache.check_integrity()
    assert not cache.is_initialized
    expected = model(ids).logits
    assert (model(ids[:, :9], past_key_values=cache).logits - expected[:, :9]).abs().max() < 1e-9


@pytest.mark.parametrize("spec", ["full+int4", "pod+int4"])
@pytest.mark.parametrize("options", [{}, {"capacity": 64}], ids=["plain", "engine"])
@torch.no_grad()
def test_packed_tokens_stay_packed(tools, spec, options):
    """Native ones go: as if they never came, while nothing was packed since."""
    model, ids = tools.make_pod(plan="pod" in spec, windows=(4, 40)), tools.random_ids(2, 60)
    options = options | {"group_size": 4, "residual": 6}
    cache, never = (pod.make_cache(model, spec, **options) for _ in range(2))
    model(ids[:, :33], past_key_values=cache)  # 24 packed, and 24 when 30 to 33 have come
    model(ids[:, :30], past_key_values=never)
    assert cache.num_croppable == 9
    cache.crop(-3)
    cache.check_integrity()
    assert (go_on(model, ids[:, 30:], cache) - go_on(model, ids[:, 30:], never)).abs().max() < 1e-9


@torch.no_grad()
def test_a_running_prompt_keeps_its_end(tools):
    model, ids = tools.make_pod(plan=False), tools.random_ids(2, 40)
    options = {"group_size": 4, "residual": 6}
    cache, never = (pod.make_cache(model, "int4", **options) for _ in range(2))
    for each in (cache, never):
        each.begin_prompt(30)
    model(ids[:, :20], past_key_values=cache)
    model(ids[:, :14], past_key_values=never)
    cache.crop(-6)  # nothing is packed before the prompt ends
    outputs = []
    for each in (cache, never):
        model(ids[:, 14:30], past_key_values=each)
        outputs.append(go_on(model, ids[:, 30:], each))
    assert (outputs[0] - outputs[1]).abs().max() < 1e-9


# -- assisted decoding ----------------------------------------------------------------------

ASSISTED = {
    "full": ("full", {}),
    "engine": ("full", {"capacity": 64}),
    "cla": ("cla", {}),
    "pod": ("pod", {"extra_slots": 5}),
    "int4": ("int4", {"group_size": 4, "residual": 6}),
    "int4-engine": ("full+int4", {"group_size": 4, "residual": 6, "capacity": 96}),
    "pod+int4": ("pod+int4", {"group_size": 4, "residual": 6, "extra_slots": 3}),
    "full-own": ("full", None),
    "pod-own": ("pod", None),
}
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def make_or_none(model, spec, options):
    """Keyword arguments for ``generate``; without options it makes a cache itself."""
    return {} if options is None else {"past_key_values": pod.make_cache(model, spec, **options)}


@pytest.mark.parametrize("how", ["lookup", "stock", "pod"])
@pytest.mark.parametrize("name", ASSISTED)
def test_assisted_decoding_is_greedy(tools, name, how):
    """Assisted decoding is greedy, token by token; candidates are really fed.

    On a prompt of repetitions and with an assistant that is nearly the model.
    """
    spec, options = ASSISTED[name]
    model = model_of(tools, spec.split("+")[0])
    ids = tools.random_ids(1, 7).repeat(1, 5)[:, :33]
    assistant = tools.make_stock("llama") if how == "stock" else tools.make_pod(plan=spec.startswith("pod"))
    assisted = {"prompt_lookup_num_tokens": 6} if how == "lookup" else {"assistant_model": assistant}
    fed = []
    expected = model.generate(ids, **GREEDY, **make_or_none(model, spec, options))
    model.model.register_forward_pre_hook(
        lambda module, inputs, named: fed.append((inputs[0] if inputs else named["input_ids"]).shape[1]),
        with_kwargs=True,
    )
    found = model.generate(ids, **GREEDY, **assisted, **make_or_none(model, spec, options))
    assert torch.equal(found, expected)
    assert fed[0] == 33 and max(fed[1:]) > 1, fed


@pytest.mark.parametrize("name", ["full", "pod", "int4", "int4-engine"])
def test_assisted_decoding_goes_on_behind_a_filled_cache(tools, name):
    spec, options = ASSISTED[name]
    model, ids = model_of(tools, spec.split("+")[0]), tools.random_ids(1, 7).repeat(1, 5)
    cache = pod.make_cache(model, spec, **options)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
    branch = copy.deepcopy(cache)
    expected = model.generate(ids, past_key_values=cache, **GREEDY)
    found = model.generate(ids, past_key_values=branch, prompt_lookup_num_tokens=6, **GREEDY)
    assert torch.equal(found, expected) and branch.get_seq_length() == cache.get_seq_length() == 35 + 23
    branch.check_integrity()
    with pytest.raises(ValueError, match="pass all 62 columns"):
        mask = torch.ones(1, 62, dtype=torch.long)
        model.generate(
            ids[:, :4], attention_mask=mask, past_key_values=branch, prompt_lookup_num_tokens=6, **GREEDY
        )


@pytest.mark.parametrize("spec", ["pod", "window"])
def test_assisted_decoding_names_what_its_windows_lack(tools, spec):
    model, ids = model_of(tools, spec), tools.random_ids(1, 12)
    with pytest.raises(ValueError, match=f"room behind the windows of the {spec} cache.*extra_slots"):
        model.generate(ids, prompt_lookup_num_tokens=3, past_key_values=pod.make_cache(model, spec), **GREEDY)
    assert model.generate(ids, max_new_tokens=1, past_key_values=pod.make_cache(model, spec)).shape == (1, 13)


def test_extra_slots_are_checked(tools):
    model = tools.make_pod()
    for options in ({"extra_slots": -1}, {"extra_slots": 3, "capacity": 64}):
        with pytest.raises(ValueError, match="extra_slots ="):
            pod.make_cache(model, "pod", **options)


# -- the example ----------------------------------------------------------------------------


def test_a_prefix_is_read_once_and_asked_twice(tools, tmp_path, monkeypatch):
    """`examples/prefix.py`: answers are those of the whole prompt.

    The second time nothing of the prefix is fed.
    """
    spec = importlib.util.spec_from_file_location("prefix", ROOT / "examples" / "prefix.py")
    assert spec is not None and spec.loader is not None
    prefix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prefix)
    model, ids, path = tools.make_pod(), tools.random_ids(1, 40), tmp_path / "prefix.safetensors"
    questions = [tools.random_ids(1, 5, seed) for seed in (1, 2)]
    expected = [model.generate(torch.cat((ids, question), 1), **GREEDY)[:, 45:] for question in questions]
    fed = []
    model.model.register_forward_pre_hook(
        lambda module, inputs, named: fed.append((inputs[0] if inputs else named["input_ids"]).shape[1]),
        with_kwargs=True,
    )
    options = {name: value for name, value in GREEDY.items() if name != "do_sample"}
    for widths in ([40, 5], [5]):
        fed.clear()
        cache = prefix.read_prefix(model, ids, path)
        found = [prefix.ask(model, cache, ids, question, **options) for question in questions]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert [width for width in fed if width > 1] == [*widths, 5]
