"""What ranks of tensor parallelism load of an export, without processes.

    python worker_vllm_ranks.py ASKED.json ANSWERS.json

It imports nothing of pod-kv. ASKED: {"folder", "ranks"}. ANSWERS: per rank the parameters of layer 1's
attention, as lists. The groups of ranks are stand-ins that say who and how many they are; nothing is
computed, so nothing is exchanged.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins


def stand_in(rank: int, ranks: int) -> Any:
    """A group of ranks as far as layers ask for it."""
    return SimpleNamespace(
        world_size=ranks,
        rank_in_group=rank,
        is_first_rank=rank == 0,
        is_last_rank=rank == ranks - 1,
        unique_name="stand-in",
    )


def load(folder: str, rank: int, ranks: int) -> dict[str, list[float]]:
    """The parameters of layer 1's attention on one rank."""
    from pod_vllm.model import PodServedForCausalLM

    config = EngineArgs(model=folder, dtype="float32", skip_tokenizer_init=True).create_engine_config()
    parallel_state._TP = stand_in(rank, ranks)
    parallel_state._PP = stand_in(0, 1)
    with set_current_vllm_config(config):
        model = PodServedForCausalLM(vllm_config=config)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    loaded = model.load_weights(iter(load_file(f"{folder}/model.safetensors").items()))
    assert loaded >= dict(model.named_parameters()).keys()
    attention = model.model.layers[1].self_attn
    return {name: parameter.tolist() for name, parameter in attention.named_parameters()}


def main(asked: Path, answers: Path) -> None:
    load_general_plugins()
    wanted = json.loads(asked.read_text())
    ranks = wanted["ranks"]
    answers.write_text(json.dumps([load(wanted["folder"], rank, ranks) for rank in range(ranks)]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
