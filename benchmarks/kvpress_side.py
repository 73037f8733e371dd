"""What kvpress' presses score and keep on given prompts. Runs in a venv of its own, without this package.

python benchmarks/kvpress_side.py job.json found.safetensors     # kvpress_agreement.py does it
"""

import json
import sys
from typing import Any
from unittest.mock import patch

import kvpress
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging


class Threshold(float):
    """Writes down what is compared with it: SimLayerKVPress tells no one how lazy a layer is."""

    seen: list[float]

    def __lt__(self, other: float) -> bool:
        self.seen.append(other)
        return float(self) < other


def make_press(name: str, options: dict[str, Any]) -> Any:
    """A press of this name.

    ``inner``: other presses, each ``[name, options]``. Of one it is the press around it, of more all in turn.
    """
    options = dict(options)
    gates, inner = options.pop("gates", None), [make_press(*x) for x in options.pop("inner", ())]
    if inner:
        options |= {"press": inner[0]} if len(inner) == 1 else {"presses": inner}
    press = getattr(kvpress, name)(**options)
    if gates is not None:  # in place of a download
        pattern = gates["sinks"], gates["recents"], np.array(gates["values"])
        press.load_attention_pattern = lambda model: pattern
    return press


def without_template(*args: Any, load: Any = AutoTokenizer.from_pretrained) -> Any:
    """A tokenizer whose prompts are plain text.

    KVzipPress else takes the first tokens for a template's, and does not score them.
    """
    tokenizer = load(*args)
    tokenizer.chat_template = None
    return tokenizer


def tokens_of(held: Tensor, full: Tensor) -> Tensor:
    """Which of the keys ``[H, n, d]`` are held, bool ``[H, n]``.

    All, where as many are held (in fewer channels, perhaps).
    """
    found = torch.full(full.shape[:2], held.shape[1] == full.shape[1])
    if not bool(found.all()):
        distances = torch.cdist(held, full, compute_mode="donot_use_mm_for_euclid_dist")
        assert not bool(distances.amin(2).any()), "every key held is one of the prompt's"
        found.scatter_(1, distances.argmin(2), True)
    return found


@torch.no_grad()
def measure(model: Any, press: Any, ids: Tensor) -> dict[str, Tensor]:
    """By name: ``kept`` bool ``[L, H, n]``, and what else the press has.

    That is ``scores`` ``[L, H, n]``, ``mass`` ``[L]``, and the ``channels`` bool ``[L, H, d]`` of keys that
    are not all zero.
    """
    plain, pressed = DynamicCache(), DynamicCache()
    model.model(input_ids=ids, past_key_values=plain)
    scorer, scores = getattr(press, "presses", [getattr(press, "press", press)])[0], []
    if hasattr(scorer, "score"):
        score = scorer.score
        scorer.score = lambda *args: scores.append(found := score(*args)) or found.clone()
    if hasattr(press, "lazy_threshold"):
        press.lazy_threshold = Threshold(press.lazy_threshold)
        press.lazy_threshold.seen = []
    if hasattr(press, "compress_post"):
        finish = press.compress_post
        press.compress_post = lambda model: scores.append(press.score_val[:, 0].clone()) or finish(model)
    with patch.object(AutoTokenizer, "from_pretrained", without_template), press(model):
        model.model(input_ids=ids, past_key_values=pressed)
    kept, channels = [], []
    for layer, old, new in zip(model.model.layers, plain.layers, pressed.layers, strict=True):
        channels.append((new.keys[0] != 0).any(1))
        kept.append(tokens_of(new.keys[0], old.keys[0] * channels[-1][:, None]))
        hidden = getattr(layer.self_attn, "masked_key_indices", None)
        if hidden is not None:
            kept[-1][hidden[1], hidden[2]] = False
    found = {"kept": torch.stack(kept), "channels": torch.stack(channels)}
    if scores:
        found["scores"] = torch.cat(scores)
    if hasattr(press, "lazy_threshold"):
        found["mass"] = torch.tensor(press.lazy_threshold.seen)
    return found


def main(job_file: str, out: str) -> None:
    """Every row of a job on every prompt."""
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    found = {}
    for name, row in job["rows"].items():
        model.set_attn_implementation(row["attention"])
        for number, prompt in enumerate(job["prompts"]):
            for layer in model.model.layers:
                layer.self_attn.masked_key_indices = None
            press = make_press(row["press"], row["options"][number])
            measured = measure(model, press, torch.tensor([prompt]))
            found |= {f"{name}/{number}/{key}": x.contiguous() for key, x in measured.items()}
        print(name, flush=True)
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
