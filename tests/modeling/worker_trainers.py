"""Trains an exported model with the stock trainers of trl and adapters of peft.

Prints what came out as JSON, by trainer.

python worker_trainers.py EXPORT FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

ROWS = [
    [(7 * i + start) % 60 + 4 for i in range(length)] for start, length in ((1, 20), (5, 3), (9, 31), (2, 10))
]
LORA = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", "init_lora_weights": True}


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
def mean_loss(model, rows) -> float:
    """Mean next-token loss in nats of rows alone."""
    model.eval()
    losses = [model(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1) for row in rows]
    return (sum(losses) / (sum(map(len, rows)) - len(rows))).item()


def common(folder, **changes):
    options = {
        "output_dir": str(folder), "max_steps": 4, "learning_rate": 0.01, "logging_steps": 1,
        "report_to": "none", "use_cpu": True, "save_strategy": "no", "lr_scheduler_type": "constant",
        "bf16": False, "disable_tqdm": True, "per_device_train_batch_size": 4,
    }  # fmt: skip
    return options | changes


def sft(kind, model, tokenizer, folder):
    packing = kind != "sft"
    args = SFTConfig(
        **common(folder, packing=packing, max_length=64, per_device_train_batch_size=1 if packing else 4)
    )
    peft_config = LoraConfig(**LORA) if "lora" in kind else None
    data = Dataset.from_dict({"input_ids": ROWS})
    return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, peft_config=peft_config)


def dpo(model, tokenizer, folder):
    rows = {"prompt": ["a b c"] * 4, "chosen": [" d e"] * 4, "rejected": [" f"] * 4}
    # the reference is loaded by the name of the model
    args = DPOConfig(**common(folder, learning_rate=0.001, trust_remote_code=True))
    return DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)


def grpo(model, tokenizer, folder):
    def reward(completion_ids, **rest):
        return [float(sum(token < 30 for token in ids)) for ids in completion_ids]

    options = {
        "trust_remote_code": True,
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": 0.1,
        "temperature": 1.0,
    }
    args = GRPOConfig(**common(folder, learning_rate=0.001, **options))
    data = Dataset.from_dict({"prompt": ["a b c", "d e"] * 4})
    return GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer)


def run(export, folder, kind):
    torch.manual_seed(0)
    model, tokenizer = load(export), AutoTokenizer.from_pretrained(export)
    before, start = (
        mean_loss(model, ROWS),
        {name: weight.clone() for name, weight in model.named_parameters()},
    )
    make = {"dpo": dpo, "grpo": grpo}.get(kind)
    trainer = sft(kind, model, tokenizer, folder) if make is None else make(model, tokenizer, folder)
    trainer.train()
    trained = trainer.model
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    after = mean_loss(trained, ROWS)
    if "lora" in kind:
        trainer.save_model(str(Path(folder) / "adapter"))
        trained = trained.merge_and_unload()
    prompt = torch.tensor([ROWS[0]])
    answer = trained.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
    moved = {name: (start[name] - weight).abs().max().item() for name, weight in trained.named_parameters()}
    return {
        "losses": [entry["loss"] for entry in history],
        "rewards": [entry["reward"] for entry in history if "reward" in entry],
        "before": before,
        "after": after,
        "moved": sorted(moved.values()),
        "answer": answer.shape[1],
    }


if __name__ == "__main__":
    kinds = "sft", "sft_packed", "sft_lora_packed", "dpo", "grpo"
    found = {kind: run(*sys.argv[1:], kind) for kind in kinds}
    assert "pod" not in sys.modules
    print(json.dumps(found))
