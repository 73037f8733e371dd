"""Write a training checkpoint as a Hugging Face model folder, for transformers or for vLLM.

The command reads <output_dir>/train and writes <output_dir>/export: safetensors, configuration, tokenizer,
modeling code, model card and licences. Run it again after `pod eval` to show the results in the model card.
With --format vllm it writes <output_dir>/export-vllm, without modeling code: `vllm serve` loads that folder.

  pod export --config demo                              the newest checkpoint, for transformers
  pod export --config demo --format vllm                the same for vLLM; needs a plan of whole layers
  pod export --config demo_lora --set export.adapter=true   only the LoRA adapters, in peft's format"""

import argparse
from functools import partial
from pathlib import Path

from pod.recipe import Recipe

SECTIONS = "model", "export"


def main(recipe: Recipe) -> None:
    """Export the checkpoint that section `export` names (by default the newest), and print where it is.

    Raises:
        ValueError: there is no checkpoint, it was trained with another plan than model.plan, or adapters are
            asked for in vLLM's format.
    """
    import pod
    from pod.export import export, export_adapter, serve_command
    from pod.models import resolve_model
    from pod.training.checkpoint.checkpoint_files import check_plan
    from pod.training.checkpoint.newest import checkpoint_to_export
    from pod.training.run.start_model import load_start_model

    checkpoint = checkpoint_to_export(Path(recipe.output_dir) / "train", recipe.export.checkpoint)
    if recipe.model.plan is not None:
        check_plan(checkpoint, Path(recipe.model.plan))
    path = recipe.export_dir if recipe.export.format == "hf" else recipe.served_dir
    if recipe.export.adapter:
        if recipe.export.format != "hf":
            raise ValueError(
                "export.adapter=true writes adapters for peft, not for vLLM: leave export.format out, or set "
                "export.adapter=false for the whole model"
            )
        export_adapter(checkpoint, path, recipe.model.path, recipe.export.dtype)
        print(f"written: {path}, the LoRA adapters of {checkpoint}", flush=True)
        return
    tokenizer = pod.load_tokenizer(resolve_model(recipe.model.path), gguf_file=recipe.model.gguf_file)
    start_model = partial(load_start_model, recipe.model)
    sizes = recipe.export.dtype, recipe.export.max_shard_size
    export(
        checkpoint,
        path,
        tokenizer,
        *sizes,
        start_model,
        results=recipe.eval_dir,
        format=recipe.export.format,
    )
    print(f"written: {path}, the model of {checkpoint}", flush=True)
    if recipe.export.format == "vllm":
        print(f"to serve it: {serve_command(path)}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--format vllm` for `--set export.format=vllm`."""
    text = "hf (transformers, the default) or vllm; same as --set export.format=…"
    parser.add_argument("--format", dest="export.format", metavar="FORMAT", help=text)
