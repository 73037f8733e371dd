"""Train a model under a sharing plan: ZeRO-3, Ulysses sequence parallelism, exact resume.

One process:  python launch/train_pod.py --config configs/demo.yaml
Two on CPU:   DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 launch/train_pod.py --config configs/demo.yaml
GPUs:         deepspeed launch/train_pod.py --config configs/llama3_8b_32k_pod.yaml

Reads <output_dir>/data and <output_dir>/plan/plan.json, writes <output_dir>/train. SIGTERM saves and exits with code 0.
"""

from dataclasses import asdict

from pod.recipe import Recipe, run


def main(recipe: Recipe) -> None:
    from pod.training.start import train

    train(recipe.model, recipe.train, recipe.output_dir, recipe.seed, asdict(recipe))


def estimate(recipe: Recipe) -> str:
    from pod.training.start import estimate

    return estimate(recipe.model, recipe.train, recipe.output_dir, recipe.data.context_length)


if __name__ == "__main__":
    run(main, sections=("model", "train"), description=__doc__, estimate=estimate)
