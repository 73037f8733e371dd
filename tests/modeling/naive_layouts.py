"""A decoder in plain tensor algebra, for any rule of what a layer reads and a query sees.

It is differentiable, n x n. It takes weights by their names in the state dict, so it shares no line with the
modules under test.
"""

import math

import torch
from torch.nn import functional as F


def turn(x, position_ids, frequencies):
    """RoPE as complex multiplication of ``[h, n, d]``: pairs (i, i + d/2)."""
    half = x.shape[-1] // 2
    angle = position_ids.double()[:, None] * frequencies.double()
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1)


def norm(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def naive_logits(model, ids, sees, source_layer=None, doc_ids=None):
    """Logits ``[n, vocab]`` of one row.

    Args:
        ids: ``[n]``; doc_ids: ``[n]``, -1 = padding.
        sees: ``(i, j) -> bool`` for positions inside a document, ``j <= i``.
        source_layer: layer to the layer whose keys and values it reads; itself when None.
    """
    config, weights = model.config, dict(model.named_parameters())
    n, d = len(ids), config.head_dim
    documents = [0] * n if doc_ids is None else doc_ids.tolist()
    first = [documents.index(document) for document in documents]
    positions = torch.arange(n) - torch.tensor(first)
    visible = [
        [documents[i] == documents[j] and j <= i and sees(i - first[i], j - first[j]) for j in range(n)]
        for i in range(n)
    ]
    mask = torch.tensor(visible)
    frequencies = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, d, 2).float() / d)
    x, stored = weights["model.embed_tokens.weight"][ids], {}
    for index in range(config.num_hidden_layers):

        def weight(name, index=index):
            return weights.get(f"model.layers.{index}.{name}")

        def heads(hidden, name, weight=weight):
            out = F.linear(
                hidden, weight(f"self_attn.{name}_proj.weight"), weight(f"self_attn.{name}_proj.bias")
            )
            out = out.unflatten(-1, (-1, d))
            scale = weight(f"self_attn.{name}_norm.weight")
            return (out if scale is None else norm(out, scale, config.rms_norm_eps)).transpose(0, 1)

        hidden = norm(x, weight("input_layernorm.weight"), config.rms_norm_eps)
        q = turn(heads(hidden, "q"), positions, frequencies)
        source = index if source_layer is None else source_layer(index)
        if source == index:
            stored[index] = turn(heads(hidden, "k"), positions, frequencies), heads(hidden, "v")
        k, v = (y.repeat_interleave(q.shape[0] // y.shape[0], dim=0) for y in stored[source])
        logits = (q @ k.transpose(1, 2) / math.sqrt(d)).masked_fill(~mask, float("-inf"))
        out = (logits.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + F.linear(out, weight("self_attn.o_proj.weight"), weight("self_attn.o_proj.bias"))
        hidden = norm(x, weight("post_attention_layernorm.weight"), config.rms_norm_eps)
        gate, up = (
            F.linear(hidden, weight(f"mlp.{p}_proj.weight"), weight(f"mlp.{p}_proj.bias"))
            for p in ("gate", "up")
        )
        x = x + F.linear(F.silu(gate) * up, weight("mlp.down_proj.weight"), weight("mlp.down_proj.bias"))
    x = norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    return F.linear(x, weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))


def loss_and_gradients(model, logits, seed=5):
    """A random linear functional of logits ``[…, vocab]`` as loss; gradients of every parameter by name."""
    model.zero_grad()
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed), dtype=logits.dtype)
    loss = (logits * direction).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def feed(model, cache, ids, widths, mask=None):
    """Feed ``[B, n]`` in chunks of the given widths; the logits of all columns."""
    outputs, start = [], 0
    for width in widths:
        part = None if mask is None else mask[:, : start + width]
        chunk = ids[:, start : start + width]
        outputs.append(model(chunk, attention_mask=part, past_key_values=cache).logits)
        start += width
    assert start == ids.shape[1]
    return torch.cat(outputs, dim=1)


CHUNKINGS = [[50], [1] * 50, [7] * 7 + [1], [3, 1, 1, 29, 2, 14], [30] + [1] * 20]


def check_padded_rows(model, naive, widths, make_cache):
    """Each row is the naive decoder on its tokens alone.

    Padding is on the left, inside a conversation and behind it.
    """
    ids = torch.randint(3, 97, (3, 50), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(3, 50, dtype=torch.long)
    mask[0, :9], mask[1, 31:34], mask[2, :33] = 0, 0, 0
    if widths[-1] > 2:  # generation would be fed padding otherwise
        mask[0, 48:] = 0
    logits = feed(model, make_cache(), ids, widths, mask)
    for row in range(3):
        real = mask[row].bool()
        assert (logits[row, real] - naive(ids[row, real])).abs().max() <= 1e-9


def exported_logits(model, folder, ids):
    """Logits and 8 greedy tokens of an export, in a new process.

    Only transformers and the export's own code load it.
    """
    import json
    import os
    import subprocess
    import sys

    model.save_pretrained(folder)
    code = (
        "import json, sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()\n"
        "ids = torch.tensor(json.loads(sys.argv[2]))\n"
        "out = model.generate(ids, max_new_tokens=8, do_sample=False)\n"
        "assert 'pod' not in sys.modules\nprint(json.dumps([model(ids).logits.tolist(), out.tolist()]))"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(folder), json.dumps(ids.tolist())],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    logits, tokens = json.loads(done.stdout.strip().splitlines()[-1])
    return torch.tensor(logits, dtype=model.dtype), torch.tensor(tokens)
