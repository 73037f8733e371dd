"""Tiny models, packed rows and forked ranks for the multi-process tests.

Imported by the worker scripts only.
"""

import atexit
import functools
import gc
import json
import os
import socket
import sys
import traceback
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

VOCAB = 89


def plan_rows(heads: int = 3) -> list[list[int | None]]:
    """A plan of all three roles.

    Windows lie between the layers of two blocks, below a lead and above a follower.
    """
    rows = [[0, None, 0, None], [None, 1, 0, None], [0, None, 2, 2], [3, 1, None, 2]]
    return [row[:heads] for row in rows]


def draw_constants(model) -> None:
    """Random constant sinks, where the model has some: about as heavy as a window.

    Values are so large that the gradients of logits are no small differences.
    """
    from pod.modeling.model.sinks import is_constant

    generator = torch.Generator().manual_seed(17)
    for name, parameter in model.named_parameters():
        factor = 4.0 if name.endswith("sink_values") else 0.5
        if is_constant(name):
            parameter.data = factor * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


SHARING: list[list[int | None]] = [[0, 0, 0], [1, 0, 0], [2, 0, 2], [3, 3, 2]]
"""A plan without windows: one head leads everywhere, the others share in blocks."""


def make_model(
    seed: int = 0,
    tied: bool = True,
    heads: tuple[int, int] = (6, 3),
    dtype=torch.float32,
    plan=True,
    sinks: str = "tokens",
):
    """PodForCausalLM of 4 layers with windows far shorter than the rows; plan: that of `plan_rows`, none, or
    rows; sinks: of its windows,
    constant ones at random."""
    import pod

    torch.manual_seed(seed)
    config = pod.PodConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        num_sink_tokens=2 if sinks == "tokens" else 0,
        num_recent_tokens=5,
        sinks=sinks,
        sink_keys=sinks == "constant",
        lead=plan_rows(heads[1]) if plan is True else plan or None,
        attention_backend="auto",
    )
    model = pod.PodForCausalLM(config).to(dtype)
    draw_constants(model)
    model.generation_config.eos_token_id = [VOCAB - 1, VOCAB - 2]  # more ends than the configuration knows
    return model


def exported_class(folder) -> type:
    """The class that an export brings along.

    By their names the auto classes take the package's, once that is imported.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = json.loads((Path(folder) / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
    return get_class_from_dynamic_module(name, str(folder))


STOCK_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 48,
    "initializer_range": 0.15,
}


def make_stock(tied: bool = True):
    """A transformers Llama of about the same sizes, with two ends in its generation configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**STOCK_SIZES, max_position_embeddings=256, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [VOCAB - 1, VOCAB - 2]
    return model


def make_data(
    folder: Path,
    context: int = 41,
    rows: int = 12,
    seed: int = 0,
    empty_tail: bool = False,
    one_document: bool = False,
) -> Path:
    """Packed rows of random documents of ragged lengths; documents straddle every border of every split.

    empty_tail: each row holds one short document and padding, so that later ranks of a group have no label.
    one_document: each row is one document.
    """
    from pod.data import write_packed_rows

    generator = np.random.default_rng(seed)
    packed = []
    for _ in range(rows):
        lengths = []
        if empty_tail:
            lengths = [9]
        elif one_document:
            lengths = [context]
        while not empty_tail and sum(lengths) < context - 3:
            lengths.append(int(min(generator.integers(3, 25), context - sum(lengths))))
        packed.append([generator.integers(0, VOCAB // 4, length).astype(np.int32) for length in lengths])
    write_packed_rows(folder, packed, context_length=context, vocab_size=VOCAB, tokenizer_sha256="tiny")
    return folder


@functools.cache
def import_for_ranks() -> None:
    """Import what every rank of training needs, 5 seconds of work, so that ranks forked later have it.

    What is imported is also taken out of garbage collection: DeepSpeed collects whenever it makes an engine.
    """
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.sequence_parallel
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import transformers.processing_utils  # noqa: F401

    import pod.training.run.trainer  # noqa: F401

    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules complain of leaks at the end


def run_ranks(world_size: int, function, *arguments) -> None:
    """Fork `world_size` ranks that call function(*arguments); imports are paid once.

    Raises when one fails.
    """
    import_for_ranks()
    sys.stdout.flush()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            code = 1
            try:
                torch.set_num_threads(1)
                function(*arguments)
                code = 0
            except BaseException:  # noqa: BLE001  the fork must end here, whatever happened
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise SystemExit(f"{function.__name__} on {world_size} ranks: exit codes {codes}")


def write_result(folder: Path, name: str, content: dict) -> None:
    (Path(folder) / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
