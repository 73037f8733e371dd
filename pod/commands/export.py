"""Write the newest training checkpoint as a Hugging Face folder that loads with plain transformers.

    python launch/export_hf.py --config configs/demo.yaml

Reads <output_dir>/train, writes <output_dir>/export (safetensors, configuration, tokenizer, remote code); with
--set export.adapter=true the LoRA adapters alone, in peft's format.
"""

from functools import partial
from pathlib import Path

from pod.recipe import Recipe, run


def main(recipe: Recipe) -> None:
    import pod
    from pod.models import resolve_model
    from pod.training.checkpoint.export import check_plan, checkpoint_to_export, export, export_adapter
    from pod.training.run.start_model import load_start_model

    checkpoint = checkpoint_to_export(Path(recipe.output_dir) / "train", recipe.export.checkpoint)
    if recipe.model.plan is not None:
        check_plan(checkpoint, Path(recipe.model.plan))
    path = recipe.export_dir
    if recipe.export.adapter:
        export_adapter(checkpoint, path, recipe.model.path, recipe.export.dtype)
        print(f"exported the adapters of {checkpoint} to {path}", flush=True)
        return
    tokenizer = pod.load_tokenizer(resolve_model(recipe.model.path), gguf_file=recipe.model.gguf_file)
    start_model = partial(load_start_model, recipe.model)
    export(checkpoint, path, tokenizer, recipe.export.dtype, recipe.export.max_shard_size, start_model)
    print(f"exported {checkpoint} to {path}", flush=True)


def start() -> None:
    """The command line."""
    run(main, sections=("model", "export"), description=__doc__)


if __name__ == "__main__":
    start()
