"""Load an export with plain transformers and its own code, and compare its output with `pod.load_model`.

    python -m pod.commands.check_export runs/demo/export 512 runs/demo/export_check.json

512 is the number of prompt tokens: more than the plan's windows, so that shared keys are used. The command
writes the difference of the logits. Beside it, it writes the prompt with its last logits, for
examples/load_export.py. The exit code is 1 when the relative difference is above 2e-5.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import pod

ALLOWED = 2e-5
"""Largest difference of the logits that is allowed, relative to the largest logit."""


@torch.no_grad()
def main(folder: str, length: int, out: Path) -> None:
    """Compare an export with `pod.load_model`, and write the result. Exits with code 1 when they differ.

    Args:
        folder: the export.
        length: tokens of the prompt, which is a text of this package.
        out: the JSON file to write. The prompt and its last logits go beside it, with the suffix
            .safetensors.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    text = " ".join(Path(pod.__file__).with_name("recipe.py").read_text(encoding="utf-8").split())
    prompt = torch.tensor([tokenizer(text)["input_ids"][:length]])
    # AutoModelForCausalLM would take the package's class here, because pod is imported.
    own_code: Any = get_class_from_dynamic_module("llama.PodForCausalLM", folder)
    stock = own_code.from_pretrained(folder, dtype=torch.float32).eval()
    theirs, their_tokens = answer(stock, prompt)
    ours, our_tokens = answer(pod.load_model(folder, dtype=torch.float32), prompt)
    error = float((theirs - ours).abs().max() / ours.abs().max())
    if error > ALLOWED or their_tokens != our_tokens:
        sys.exit(
            f"error: {folder} gives other output in plain transformers: "
            f"a relative difference of {error:.1e} in the logits (allowed: {ALLOWED:.0e})"
        )
    said = tokenizer.decode(their_tokens)
    print(
        f"{prompt.shape[1]} tokens: relative difference of the logits {error:.1e}; generated text: {said!r}"
    )
    save_file({"input_ids": prompt, "logits": ours[0, -1].contiguous()}, out.with_suffix(".safetensors"))
    found = {"relative_logit_error": error, "tokens": prompt.shape[1], "generated": said}
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def answer(model: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The logits [1, n, vocabulary] of a prompt [1, n], and the 16 tokens that the model generates next."""
    generated = model.generate(prompt, max_new_tokens=16, do_sample=False)
    return model(prompt).logits, generated[0, prompt.shape[1] :].tolist()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m pod.commands.check_export EXPORT_FOLDER TOKENS RESULT.json")
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
