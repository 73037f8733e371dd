"""Write a training checkpoint as a Hugging Face model folder that loads with plain transformers.

The command reads <output_dir>/train and writes <output_dir>/export: safetensors, configuration, tokenizer, modeling
code, model card and licences. Run it again after `pod eval` to show the results in the model card.

  pod export --config demo                              the newest checkpoint
  pod export --config demo_lora --set export.adapter=true   only the LoRA adapters, in peft's format"""

from functools import partial
from pathlib import Path

from pod.recipe import Recipe

SECTIONS = "model", "export"


def main(recipe: Recipe) -> None:
    import pod
    from pod.export import export, export_adapter
    from pod.models import resolve_model
    from pod.training.checkpoint.files import check_plan
    from pod.training.checkpoint.newest import checkpoint_to_export
    from pod.training.run.start_model import load_start_model

    checkpoint = checkpoint_to_export(Path(recipe.output_dir) / "train", recipe.export.checkpoint)
    if recipe.model.plan is not None:
        check_plan(checkpoint, Path(recipe.model.plan))
    path = recipe.export_dir
    if recipe.export.adapter:
        export_adapter(checkpoint, path, recipe.model.path, recipe.export.dtype)
        print(f"written: {path}, the LoRA adapters of {checkpoint}", flush=True)
        return
    tokenizer = pod.load_tokenizer(resolve_model(recipe.model.path), gguf_file=recipe.model.gguf_file)
    start_model = partial(load_start_model, recipe.model)
    sizes = recipe.export.dtype, recipe.export.max_shard_size
    export(checkpoint, path, tokenizer, *sizes, start_model, results=recipe.eval_dir)
    print(f"written: {path}, the model of {checkpoint}", flush=True)
