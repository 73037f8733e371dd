"""What reading a prompt holds beside the cache.

It holds queries a few times over, and no tensor of queries times keys.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pod
from pod.measure.measured_memory import Meter

TILE = 2**22  # elements
CODEC = {"group_size": 8, "residual": 64}
CACHES = {"full": {}, "pod": {}, "int4": CODEC, "pod+int4": CODEC, "pod+snapkv": {"budget": 8192}}


class Largest(TorchDispatchMode):
    """Elements of the largest memory that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        sizes = (x.untyped_storage().nbytes() // x.element_size() for x in made)
        self.elements = max(self.elements, *sizes, 0)
        return out


def make_model(layers, query_heads, kv_heads, head_dim, dtype=torch.float32, **changes):
    config = pod.PodConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        initializer_range=0.2,
        max_position_embeddings=16384,
        **changes,
    )
    torch.manual_seed(0)
    return pod.PodForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cached", [False, True], ids=["scoring", "prompt"])
@torch.no_grad()
def test_a_prompt_holds_its_queries_a_few_times(cached, dtype):
    """Projected, turned, attended, and in the order of the output's projection: four times, and tiles."""
    windows = {"num_sink_tokens": 0, "num_recent_tokens": 64}
    model = make_model(1, 32, 1, 128, dtype, layout="window", **windows)
    ids, size = torch.randint(61, (1, 8192)), 8192 * 32 * 128 * dtype.itemsize
    with Meter(model) as meter:
        model(ids, past_key_values=pod.make_cache(model) if cached else None, logits_to_keep=1)
    assert meter.peak <= 4 * size


@pytest.mark.parametrize("padded", [False, True], ids=["equal", "padded"])
@pytest.mark.parametrize("spec", CACHES)
@torch.no_grad()
def test_a_chunk_behind_a_long_cache_makes_no_matrix_of_queries_and_keys(spec, padded):
    """512 tokens behind 6K: one head's matrix has 3.4M elements, those of a layer 27M."""
    past, chunk = 6144, 512
    lead = [[0, 0], [0, 0]] if "pod" in spec else None
    model = make_model(2, 8, 2, 16, lead=lead, num_sink_tokens=16, num_recent_tokens=1008)
    ids, given = torch.randint(61, (2, past + chunk)), {}
    mask = torch.ones_like(ids)
    mask[0, :700] = 0
    cache = pod.make_cache(model, spec, **CACHES[spec])
    cache.begin_prompt(past + chunk)
    for columns in (past, past + chunk):
        if padded:
            given = {"attention_mask": mask[:, :columns]}
        with Largest() as largest:
            start = cache.get_seq_length()
            model(ids[:, start:columns], past_key_values=cache, logits_to_keep=1, **given)
    assert largest.elements <= TILE
