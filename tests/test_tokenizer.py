"""pod/tokenizer.py: tokenizers of the families' files, whatever else is installed.

Also tokens that the model does not have.
"""

import json
import os
import subprocess
import sys

import pytest
import sentencepiece
import torch
from hub_tokenizers import FAMILIES, write_files
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.commands import data, evaluate, explore, train
from pod.data.tokens.tokenizers import Encoder
from pod.models import byte_tokenizer
from pod.recipe import load_recipe
from pod.tokenizer import pad_id

TEXT = "Hello  12 naïve\n\tdef f(x):"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_files_of_every_family_load_and_pad_left(model_type, tmp_path):
    backend = write_files(tmp_path, model_type)
    tokenizer = pod.load_tokenizer(tmp_path)
    text = "hello def" if model_type.startswith(("qwen", "gemma")) else TEXT  # their classes bring a regex
    assert (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        == backend.encode(text, add_special_tokens=False).ids
    )
    assert tokenizer.padding_side == "left"


@pytest.mark.slow
@pytest.mark.parametrize("model_type, tokenizer_class", [("mistral", "LlamaTokenizer"), ("mixtral", None)])
def test_mistral_loads_where_mistral_common_is_installed(model_type, tokenizer_class, tmp_path):
    """Mistral loads where mistral_common is installed.

    The package of that name here is newer than transformers asks for, and lacks the modules that transformers
    imports of it.
    """
    backend = write_files(tmp_path, model_type, tokenizer_class)
    site = tmp_path / "site"
    for name in ("mistral_common", "mistral_common-99.0.dist-info"):
        (site / name).mkdir(parents=True)
    (site / "mistral_common" / "__init__.py").write_text("__version__ = '99.0'\n")
    about = "Metadata-Version: 2.1\nName: mistral-common\nVersion: 99.0\n"
    (site / "mistral_common-99.0.dist-info" / "METADATA").write_text(about)
    code = (
        "import sys, json, pod\n"
        "from transformers.utils.import_utils import is_mistral_common_available\n"
        "assert is_mistral_common_available()\n"
        "print(json.dumps(pod.load_tokenizer(sys.argv[1])(sys.argv[2])['input_ids']))\n"
    )
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), TEXT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == backend.encode(TEXT).ids


def test_a_sentencepiece_file_alone_is_enough(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    text = "the lazy fox jumps over the dog"
    found = pod.load_tokenizer(tmp_path)(text, add_special_tokens=False)["input_ids"]
    assert found == own.encode(text) and len(found) < len(text)


def write_alone(folder, model_type, files):
    """A checkpoint whose only tokenizer files are `files`: tekken.json, or those of GPT-2's format."""
    config = {"model_type": model_type, "vocab_size": 400}
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*alphabet, "he", "<|endoftext|>"])}
    content = {
        "tekken.json": json.dumps({"config": {"pattern": ".", "version": "v3"}, "vocab": []}),
        "vocab.json": json.dumps(vocab),
        "merges.txt": "#version: 0.2\nh e\n",
    }
    for name in files:
        (folder / name).write_text(content[name])
    return vocab


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
def test_vocab_and_merges_alone_are_enough_for_families_that_have_them(model_type, tmp_path):
    vocab = write_alone(tmp_path, model_type, ["vocab.json", "merges.txt"])
    tokenizer = pod.load_tokenizer(tmp_path)
    ids = tokenizer("hello")["input_ids"]
    assert ids == [vocab[token] for token in ("he", "l", "l", "o")]
    assert tokenizer.decode(ids) == "hello"


@pytest.mark.parametrize(
    ("model_type", "files"),
    [
        ("mistral", ["tekken.json"]),
        ("llama", ["tekken.json"]),
        ("gemma3_text", ["tekken.json"]),
        ("mistral", ["vocab.json", "merges.txt"]),
        ("granite", ["vocab.json", "merges.txt"]),
        ("gemma3_text", ["vocab.json", "merges.txt"]),
        ("qwen2", ["vocab.json"]),
        ("qwen2", []),
        ("gemma3_text", []),
        ("llama", []),
    ],
)
def test_files_that_no_tokenizer_can_be_made_of_are_refused_by_name(model_type, files, tmp_path):
    """transformers makes a tokenizer of special tokens alone where its class finds none of its files."""
    write_alone(tmp_path, model_type, files)
    have = f"(it has only {' and '.join(files)}, and no" if files else "(it has no tokenizer file, and no"
    with pytest.raises(ValueError) as caught:
        pod.load_tokenizer(tmp_path)
    message = str(caught.value)
    assert "\n" not in message and have in message and "tokenizer.json" in message


def test_a_tokenizer_of_own_code_without_files_is_refused_for_its_code(tmp_path):
    write_alone(tmp_path, "own", [])
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("raise SystemExit('this ran')\n")
    with pytest.raises(ValueError, match=r"^no tokenizer in .*contains custom code[^\n]*$"):
        pod.load_tokenizer(tmp_path)


@pytest.fixture
def beyond(tmp_path):
    """A model of 258 tokens whose tokenizer has 260.

    A padding token and one of a chat template were added.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"eos_token_id": 256, "bos_token_id": 256, "pad_token_id": 257}
    config = LlamaConfig(vocab_size=258, num_key_value_heads=1, initializer_range=0.2, **sizes, **tokens)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_padding_that_the_model_does_not_have_changes_nothing(beyond):
    tokenizer, model = pod.load_tokenizer(beyond), pod.load_model(beyond, dtype=torch.float64)
    texts = ["a longer text than the other", "short"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert tokenizer.pad_token_id == 258 and (batch["input_ids"] == 258).any()
    assert pad_id(tokenizer) == 256
    alone = [model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1] for text in texts]
    together = model(**batch, labels=batch["input_ids"])
    assert (together.logits[:, -1] - torch.stack(alone)).abs().max() < 1e-10
    assert together.loss.isfinite()
    # one row ends first, at the token that it says second, and is fed padding from then on
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 258}
    whole = model.generate(**batch, eos_token_id=None, **options)
    n = batch["input_ids"].shape[1]
    end = next(int(t) for t in whole[0, n:] if t not in whole[1, n:])
    ended = model.generate(**batch, eos_token_id=end, **options)
    assert (ended[0, n:] == 258).any()
    assert torch.equal(ended[1], whole[1])


def test_text_with_a_token_that_the_model_does_not_have_is_refused_by_name(beyond):
    tokenizer = pod.load_tokenizer(beyond)
    said = r"holds the token '<\|im_start\|>' \(id 259\).*the tokenizer has 260 tokens, the model 258"
    for encode in (tokenizer, tokenizer.encode, lambda text: tokenizer(["a", text], padding=True)):
        with pytest.raises(ValueError, match=said):
            encode("a <|im_start|> b")
    with pytest.raises(ValueError, match=said):
        Encoder(tokenizer)(["a", "<|im_start|>"])
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"


BEYOND = (
    r"^(text for perplexity .*: )?the text holds the token '<\|im_start\|>' \(id 259\), "
    r"which the model has no embedding for: [^\n]*$"
)


@pytest.fixture
def chats(beyond):
    """Sixty chats that hold such a token, and what every recipe for them and the model sets."""
    lines = [
        json.dumps({"text": f"<|im_start|>user {number} " + f"word{number} " * 30}) for number in range(60)
    ]
    file = beyond / "chats.jsonl"
    file.write_text("\n".join(lines))
    lengths = ["data.context_length=128", "data.shortest_interval=64", "data.target_tokens=2048"]
    lengths += ["explore.sequence_length=128", "explore.num_sequences=1", "explore.num_queries=8"]
    lengths += [
        "eval.text_length=128",
        "eval.text_sequences=1",
        "eval.min_context=32",
        "eval.scored_tokens=8",
    ]
    steps = ["train.max_steps=1", "train.tokens_per_step=128", "train.dtype=float32"]
    where = [f"model.path={beyond}", f"output_dir={beyond / 'run'}", f"data.sources=[{file}]"]
    model = ["model.dtype=float32", "model.num_sink_tokens=4", "model.num_recent_tokens=28", "data.workers=1"]
    return file, [*where, *model, *lengths, *steps]


def test_every_command_refuses_texts_with_a_token_that_the_model_does_not_have(chats):
    file, settings = chats
    evaluated = ["eval.methods=[full]", "eval.tasks=[perplexity]", f"eval.text=[{file}]"]
    for command, own in (
        (data, []),
        (explore, [f"explore.sources=[{file}]"]),
        (evaluate, evaluated),
    ):
        with pytest.raises(ValueError, match=BEYOND):
            command.main(load_recipe(None, [*settings, *own]))


def test_rows_of_a_tokenizer_without_its_model_are_refused_by_the_token_that_they_hold(chats, tmp_path):
    """`data.tokenizer` names a folder without config.json: `pod data` cannot know the model's vocabulary."""
    _, settings = chats
    pod.load_tokenizer(tmp_path).save_pretrained(tmp_path / "tokenizer")
    settings = [*settings, "model.layout=dense"]
    data.main(load_recipe(None, [*settings, f"data.tokenizer={tmp_path / 'tokenizer'}"]))
    evaluated = ["eval.methods=[full]", "eval.tasks=[perplexity]"]
    for command, own in ((explore, ["model.layout=pod"]), (train, []), (evaluate, evaluated)):
        with pytest.raises(ValueError, match=BEYOND):
            command.main(load_recipe(None, [*settings, *own]))
