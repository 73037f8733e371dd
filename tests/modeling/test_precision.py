"""What decoding in bfloat16 loses, for every method.

It is no more than twice what rounding its result loses.

The projections copy channels of the embedding, so that a model in bfloat16 and its copy in float64 have the
same queries, keys and values to the last bit: powers of two undo the norm, whose epsilon outweighs
everything, and RoPE turns by nothing. What differs is the arithmetic of attention. Nothing is dropped by a
rank, merged or packed, as that would be decided or rounded differently in the two; windows drop by position.
"""

import copy

import pytest
import torch

import pod

PROMPT, QUERY_HEADS, KV_HEADS = 2100, 4, 2
LOGITS = 3.0  # standard deviation, as of trained models
NORM = 2.0**20  # what the norm divides by
ALL = {"budget": 4096}
WINDOW = {"budget": 2064, "num_sink_tokens": 16}
METHODS = {
    "full": {},
    "full-capacity": {"capacity": 2300},
    "pod": {},
    "pod-capacity": {"capacity": 2300},
    "cla": {},
    "window": {},
    "streamingllm": WINDOW,
    "lm_infinite": WINDOW,
    "wa": {"budget": 2064},
    "local_window": {"budget": 2064},
    "simlayerkv": {"num_sink_tokens": 16, "num_recent_tokens": 2048, "threshold": 0.0},
    "razor": {
        "heads": [[0], [1]],
        "num_sink_tokens": 16,
        "num_recent_tokens": 2048,
        "compression": 9.0,
        "compensation": False,
    },
    "snapkv": ALL,
    "pyramidkv": ALL | {"beta": 4},
    "adakv": ALL,
    "expected_attention": ALL,
    "kvzip": ALL | {"repeat_ids": [[], [], []]},
    "h2o": ALL,
    "roco": ALL,
    "d2o": ALL,
    "quest": ALL | {"num_dense_layers": 0},
    "minicache": {"share": 1.0},
    "imdc": ALL | {"chunk_size": 4096},
    "pod+snapkv": ALL,
    "pod+pyramidkv": ALL | {"beta": 4},
    "pod+expected_attention": ALL,
    "pod+quest": ALL | {"num_dense_layers": 0},
}


def make_model(spec, head_dim):
    """Two layers in bfloat16; the second one's keys are the first one's values, and the reverse."""
    sizes = [QUERY_HEADS * head_dim, KV_HEADS * head_dim, KV_HEADS * head_dim]
    layout = spec if spec in ("cla", "window") else "pod"
    config = pod.PodConfig(
        vocab_size=PROMPT + 64,
        hidden_size=sum(sizes),
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=NORM**2,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 1e30},
        layout=layout,
        lead=[[0, 0], [0, 0]] if spec.startswith("pod") else None,
        num_sink_tokens=0 if layout == "window" else 16,
        num_recent_tokens=2048 if layout == "window" else 1008,
    )
    model = pod.PodForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(head_dim)
    channels = torch.eye(sum(sizes)).split(sizes)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(generator=generator)
        model.model.embed_tokens.weight[:, : sizes[0]] *= LOGITS
        for index, layer in enumerate(model.model.layers):
            own = layer.self_attn
            order = (
                (own.q_proj, own.k_proj, own.v_proj) if index == 0 else (own.q_proj, own.v_proj, own.k_proj)
            )
            for projection, weight in zip(order, channels, strict=True):
                if projection is not None:  # cla
                    projection.weight.copy_(NORM * weight)
            own.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model.to(torch.bfloat16)


@torch.no_grad()
def attended(model, spec, options, widths):
    """What attention gives in every layer, ``[L, Σ widths, Hq·d]`` in fp64.

    The passes of these widths come behind the prompt.
    """
    found = [[] for _ in model.model.layers]
    ids = torch.randperm(PROMPT + sum(widths), generator=torch.Generator().manual_seed(0))[None]
    cache = pod.make_cache(model, spec, **options)
    model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, given, i=index: found[i].append(given[0][0])
        )
    for part in ids[:, PROMPT:].split(widths, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    return torch.stack([torch.cat(parts).double() for parts in found])


def errors_over_rounding(name, head_dim, widths):
    """Error of each pass and layer (root mean square), relative to that of rounding the exact result."""
    spec = name.removesuffix("-capacity")
    model = make_model(spec, head_dim)
    exact = attended(copy.deepcopy(model).double(), spec, METHODS[name], widths)
    found = attended(model, spec, METHODS[name], widths)
    assert found.shape == (2, sum(widths), QUERY_HEADS * head_dim)
    rounding = exact.to(torch.bfloat16).double() - exact
    errors, roundings = (x.square().split(widths, dim=1) for x in (found - exact, rounding))
    return [
        error.mean((1, 2)).sqrt() / rounded.mean((1, 2)).sqrt()
        for error, rounded in zip(errors, roundings, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [*((name, 64) for name in METHODS), *((name, 128) for name in ("full", "pod", "snapkv", "d2o", "quest"))],
)
def test_decoded_tokens_and_a_chunk_are_as_exact_as_their_rounding(name, head_dim):
    for errors in errors_over_rounding(name, head_dim, (1, 1, 1, 1, 40)):
        assert errors.max() <= 2
