"""What the engine asks before every token: whether tensors and weights are where they were.

The answer comes from counts, and must be the one that a look at every tensor gives, whatever happened to the
cache.
"""

import copy
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from engine_tools import decode, feed, make, make_cache
from torch import nn

import pod
from pod import engine
from pod.engine.decode_engine import StaticEngine
from pod.engine.program import Program
from pod.modeling.model.cache_state import CacheState

KINDS = ["full", "pod", "roles", "full+int4", "roles+int4"]
CODEC = {"group_size": 4, "residual": 1}
MOST_CALLS = 12
"""Calls per token, of Python or from it to C, in the three functions together."""


def options_of(kind):
    return CODEC if "+" in kind else {}


# -- the answers of a look at everything -----------------------------------------------------------


def places_of(cache):
    tensors = [tensor for layer in cache.layers for _, tensor in layer.parts()]
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


def is_at_rest(cache):
    return all(buffer.is_at_rest for layer in cache.layers for buffer in layer.kv_buffers().values())


def slow_answer(own):
    """What ``_bind`` of this engine has to answer: ``none``, ``same`` or ``new``."""
    places = places_of(own.cache)
    if not is_at_rest(own.cache):
        return "none"
    if own._bound is not None and own._bound.places == places:
        return "same"
    is_first = own._bound is None and own._moved_to is None
    return "new" if is_first or own._moved_to == places else "none"


@pytest.fixture
def answers(monkeypatch):
    """Compares each answer of ``_bind`` with the slow one, and counts the answers and the looks."""
    found, bind, bind_anew = Counter(), StaticEngine._bind, StaticEngine._bind_anew

    def compared(own):
        before, expected = own._bound, slow_answer(own)
        bound = bind(own)
        if bound is None:
            answer = "none"
        elif bound is before:
            answer = "same"
        else:
            answer = "new"
        assert answer == expected
        found[answer] += 1
        return bound

    def counted(own):
        found["looks"] += 1
        return bind_anew(own)

    monkeypatch.setattr(StaticEngine, "_bind", compared)
    monkeypatch.setattr(StaticEngine, "_bind_anew", counted)
    return found


# -- random operations -----------------------------------------------------------------------------


@dataclass
class Conversation:
    """A cache under random operations."""

    model: object
    kind: str
    path: object
    mask: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.random = random.Random(0)
        self.cache = make_cache(self.model, self.kind, capacity=24, **options_of(self.kind))
        self.start()

    def start(self):
        self.mask = torch.ones(2, 0, dtype=torch.long)
        self.prompt()

    def feed(self, mask):
        self.mask = torch.cat((self.mask, mask), dim=1)
        ids = torch.randint(3, 97, mask.shape)
        feed(self.model, self.cache, ids, None if self.mask.all() else self.mask)

    def ones(self, columns):
        return torch.ones(self.mask.shape[0], columns, dtype=torch.long)

    # each of the following is an operation

    def decode(self):
        for _ in range(self.random.randint(1, 6)):
            self.feed(self.ones(1))

    def prompt(self):
        self.feed(self.ones(self.random.randint(2, 9)))

    def prompt_in_pieces(self):
        self.cache.begin_prompt(7)
        for width in (3, 1, 3):
            self.feed(self.ones(width))

    def prompt_that_is_given_up(self):
        self.cache.begin_prompt(9)
        self.feed(self.ones(4))
        check(self.cache)
        self.cache.begin_prompt(0)
        self.feed(self.ones(1))

    def padded_prompt(self):
        mask = self.ones(5)
        mask[0, :2] = 0
        self.feed(mask)

    def row_that_sleeps(self):
        mask = self.ones(1)
        mask[0] = 0
        self.feed(mask)

    def reorder(self):
        index = torch.randint(self.mask.shape[0], (self.mask.shape[0],))
        self.cache.reorder_cache(index)
        self.mask = self.mask[index]

    def select(self):
        index = torch.tensor([self.random.randrange(self.mask.shape[0])])
        self.cache.batch_select_indices(index)
        self.mask = self.mask[index]

    def repeat(self):
        if self.mask.shape[0] < 3:
            self.cache.batch_repeat_interleave(2)
            self.mask = self.mask.repeat_interleave(2, dim=0)

    def crop(self):
        count = min(self.random.randint(1, 4), self.cache.num_croppable, self.mask.shape[1] - 1)
        self.cache.crop(-count)
        self.mask = self.mask[:, : self.mask.shape[1] - count]

    def crop_all(self):
        if self.cache.num_croppable == self.mask.shape[1]:
            self.cache.crop(-self.mask.shape[1])
            self.start()

    def reset(self):
        self.cache.reset()
        check(self.cache)
        self.start()

    def clear_the_layers(self):
        """Without a word to the engine."""
        for layer in self.cache.layers:
            layer.clear()
        check(self.cache)
        self.reset()

    def copy(self):
        self.cache = copy.deepcopy(self.cache)

    def save_and_load(self):
        pod.save_cache(self.model, self.cache, self.path)
        self.cache = pod.load_cache(self.model, self.path)

    def state(self):
        state = self.cache.state()
        tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
        self.cache.from_state(CacheState(tensors, state.facts))

    def reserve(self):
        self.cache.reserve(self.cache.layers[0].capacity + 3)

    def attach(self):
        engine.attach(self.cache, self.cache.layers[0].capacity)

    def greedy(self):
        if self.mask.all():
            self.cache.engine.greedy(self.model, self.ones(1), 4)
            self.mask = torch.cat((self.mask, self.ones(4)), dim=1)

    def move_one_tensor(self):
        """As anything could do that holds a layer's buffer."""
        holder, name = self.random.choice(references_of(self.cache))
        setattr(holder, name, copy.deepcopy(getattr(holder, name)))


RAGGED = ["padded_prompt", "row_that_sleeps"]
OPERATIONS = [
    "decode",
    "prompt",
    "prompt_in_pieces",
    "prompt_that_is_given_up",
    "reorder",
    "select",
    "repeat",
    "crop",
    "crop_all",
    "reset",
    "clear_the_layers",
    "copy",
    "save_and_load",
    "state",
    "reserve",
    "attach",
    "greedy",
    "move_one_tensor",
]


def references_of(cache):
    """Every attribute that is a tensor, or a tuple of some, and then every one that is a buffer."""
    found = []
    for layer in cache.layers:
        inner = [(item, name, x) for item in layer.versioned()[1:] for name, x in vars(item).items()]
        found += [(item, name) for item, name, x in inner if tensors_in(x)]
        buffers = {id(buffer) for buffer in layer.kv_buffers().values()}
        found += [(layer, name) for name, x in vars(layer).items() if id(x) in buffers]
    return found


def tensors_in(x):
    """The tensor, or those of a tuple."""
    items = x if isinstance(x, tuple) else (x,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def check(cache):
    """An engine that sees no change is where it was, at rest."""
    bound = cache.engine._bound
    if bound is not None and bound.is_untouched():
        assert is_at_rest(cache)
        assert bound.places == places_of(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_answer_as_a_look_at_every_tensor(tools, answers, kind, tmp_path):
    torch.manual_seed(0)
    model = make(tools, kind.split("+")[0], (2, 5))
    talk = Conversation(model, kind, tmp_path / "cache.safetensors")
    operations = OPERATIONS + ([] if "+" in kind else RAGGED)
    order = talk.random.sample(operations * 2, 2 * len(operations))
    for operation in order:
        talk.decode()
        check(talk.cache)
        getattr(talk, operation)()
        check(talk.cache)
    assert min(answers["none"], answers["new"]) > 10, "the operations moved nothing"
    assert answers["looks"] < 0.8 * answers.total(), "most tokens have to be decoded without a look"


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_and_every_store_counts(tools, kind):
    """Each of them alone, and there is no tensor beside them."""
    _, cache = used(tools, kind)
    bound, references = cache.engine._bound, references_of(cache)
    held = {id(tensor) for holder, name in references for tensor in tensors_in(getattr(holder, name))}
    assert held == {id(tensor) for layer in cache.layers for _, tensor in layer.parts()}
    for holder, name in references:
        assert bound.is_untouched()
        setattr(holder, name, copy.deepcopy(getattr(holder, name)))
        assert not bound.is_untouched(), f"{name} of a {type(holder).__name__}"
        bound.watch(cache.layers)


def test_the_engine_checks_its_counts(tools):
    """What every test of caches calls says when a tensor moved unseen."""
    _, cache = used(tools, "pod")
    cache.check_integrity()
    buffer = next(iter(cache.layers[2].kv_buffers().values()))
    vars(buffer)["data"] = buffer.data.clone()
    with pytest.raises(AssertionError, match="a tensor moved, and no version changed"):
        cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_versions_are_no_part_of_a_state(tools, kind):
    """Caches that hold the same say the same, whatever they went through."""
    _, cache = used(tools, kind)
    assert any(item.version for layer in cache.layers for item in layer.versioned())
    assert '"version"' not in json.dumps(cache.state().facts)


def used(tools, kind):
    """A model, and a cache over which the engine decoded."""
    model = make(tools, kind.split("+")[0], (2, 5))
    cache = make_cache(model, kind, capacity=64, **options_of(kind))
    feed(model, cache, tools.random_ids(2, 20))
    decode(model, cache, tools.random_ids(2, 3))
    assert cache.engine.steps == 3
    return model, cache


# -- the model -------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """As adapters do it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def new_data(layer):
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.clone()


def new_parameter(layer):
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.data.clone())


def new_module(layer):
    layer.self_attn.o_proj = copy.deepcopy(layer.self_attn.o_proj)


def module_around(layer):
    layer.mlp.down_proj = Wrapped(layer.mlp.down_proj)


def norm_without_weights_of_its_own(layer):
    layer.input_layernorm.weight = layer.post_attention_layernorm.weight


def other_dtype(layer):
    layer.float()


def loaded_and_assigned(layer):
    layer.load_state_dict({name: x.clone() for name, x in layer.state_dict().items()}, assign=True)


def loaded_in_place(layer):
    layer.load_state_dict({name: x.clone() + 1 for name, x in layer.state_dict().items()})


def trained_in_place(layer):
    for weight in layer.parameters():
        weight.data.mul_(2)


def same_modules_set_again(layer):
    layer.mlp.down_proj = layer.mlp.down_proj
    layer.mlp.up_proj.weight = layer.mlp.up_proj.weight


MOVES = [
    new_data,
    new_parameter,
    new_module,
    module_around,
    norm_without_weights_of_its_own,
    other_dtype,
    loaded_and_assigned,
]
STAYS = [loaded_in_place, trained_in_place, same_modules_set_again]


def all_of(model):
    """Every module, and the address of every weight, in their places."""
    weights = model.named_parameters(remove_duplicate=False)
    modules = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    return modules, {name: weight.data_ptr() for name, weight in weights}


@pytest.mark.parametrize("change", MOVES + STAYS, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_program_serves_the_model_that_it_was_made_of(tools, change):
    model = make(tools, "pod")
    program, before, others = Program(model, lambda: torch.empty(0)), all_of(model), copy.deepcopy(model)
    assert program.serves(model) and not program.serves(others)
    change(model.model.layers[3])
    assert program.serves(model) == (all_of(model) == before) == (change in STAYS)


# -- work ------------------------------------------------------------------------------------------


def calls_below(functions, run):
    """How many calls, of Python functions and from Python to C, these functions make during ``run()``."""
    codes = {function.__code__ for function in functions}
    depth = count = 0

    def note(frame, event, argument):
        nonlocal depth, count
        if event == "call" and (depth or frame.f_code in codes):
            depth += 1
            count += 1
        elif event == "return" and depth:
            depth -= 1
        elif event == "c_call" and depth:
            count += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_work_before_a_token_does_not_grow_with_the_model(tools, kind):
    model, cache = used(tools, kind)
    asked = StaticEngine._bind, StaticEngine._places, StaticEngine._is_at_rest, Program.serves
    token = tools.random_ids(2, 1)
    calls = calls_below(asked, lambda: feed(model, cache, token))
    assert cache.engine.steps == 4
    assert 0 < calls <= MOST_CALLS
    cache.reorder_cache(torch.tensor([1, 0]))
    assert calls_below(asked, lambda: feed(model, cache, token)) > 5 * MOST_CALLS, "a look has to be counted"
