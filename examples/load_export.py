"""Load a PoD export with nothing but torch and transformers, check its logits, and generate some text.

    python examples/load_export.py runs/demo/export [runs/demo/export_check.safetensors]

`make demo` saves the second file when it exports: a prompt, and the logits of its last token.
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, check: str | None = None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    if check is not None:
        expected = load_file(check)
        with torch.no_grad():
            logits = model(expected["input_ids"], logits_to_keep=1).logits[0, -1]
        error = ((logits - expected["logits"]).abs().max() / expected["logits"].abs().max()).item()
        print(
            f"last-token logits over {expected['input_ids'].shape[1]} tokens: relative difference {error:.1e}"
        )
        if error > 2e-5:
            sys.exit("error: the export does not give the logits it was saved with; export it again")
    inputs = tokenizer("The best way to start a company is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/load_export.py EXPORT_FOLDER [CHECK_FILE]")
    main(*sys.argv[1:])
