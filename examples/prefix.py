"""Read a long text once, and ask it many questions: in this process, and later in others.

    python examples/prefix.py MODEL text.txt prefix.safetensors "First question?" "Second question?"

The first call reads the text and writes `prefix.safetensors`; later calls load that file instead. MODEL is a
folder or a name that `pod.load_model` takes. The file belongs to this model and text: delete it when either
changes.
"""

import copy
import sys
from pathlib import Path

import torch

import pod


def read_prefix(model, ids, path, spec=None, **options):
    """A cache that holds `ids` [1, n]: loaded from the file at `path`, or read now and saved there."""
    if Path(path).exists():
        return pod.load_cache(model, path)
    cache = pod.make_cache(model, spec, **options)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    pod.save_cache(model, cache, path)
    return cache


def ask(model, cache, ids, question, **options):
    """The answer [1, m] to `question` [1, q] behind the prefix `ids` [1, n]; `cache` is left as it is."""
    branch = copy.deepcopy(cache)
    whole = torch.cat((ids, question), dim=1)
    return model.generate(whole, past_key_values=branch, do_sample=False, **options)[:, whole.shape[1] :]


def main(model_name, text, path, *questions):
    model, tokenizer = pod.load_model(model_name), pod.load_tokenizer(model_name)
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids
    cache = read_prefix(model, ids, path)
    for question in questions:
        tokens = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        answer = ask(model, cache, ids, tokens, max_new_tokens=60)
        print(f"{question}\n{tokenizer.decode(answer[0], skip_special_tokens=True)}\n")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit("usage: python examples/prefix.py MODEL TEXT_FILE CACHE_FILE QUESTION …")
    main(*sys.argv[1:])
