"""Sections `train` and `export` of a recipe."""

import re
from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pod.schema import BelowOne, Share, section


@section
class TrainRecipe:
    """Section `train` of a recipe: `pod train`.

    A field whose null means "chosen to fit the devices" is derived from ranks and device, by
    `pod.training.predict.layout_search`.
    """

    total_tokens: PositiveInt | None = None
    """Tokens of the whole run, padding included. The number of steps is total_tokens / tokens_per_step,
    rounded down. null = use max_steps."""

    max_steps: PositiveInt | None = None
    """Optimizer steps of the whole run; overrides total_tokens. When both are null: 100 steps."""

    tokens_per_step: PositiveInt | None = None
    """Tokens of one optimizer step over all ranks, padding included: a multiple of data.context_length.
    null = one row."""

    allow_repeats: bool = False
    """Allow the run to read the data more than once. false = asking for more tokens than the data has is
    an error."""

    sequence_parallel_size: PositiveInt | None = None
    """Ranks that share one row (Ulysses sequence parallelism), from 1 to the number of query heads. null =
    chosen to fit the devices."""

    micro_batch_size: PositiveInt | None = None
    """Rows in one forward and backward pass of a sequence-parallel group. null = chosen to fit the
    devices."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Passes per optimizer step: rows per step / micro_batch_size / (ranks / sequence_parallel_size). null
    = computed."""

    zero_stage: Literal[1, 2, 3] | None = None
    """What DeepSpeed ZeRO divides among all ranks: 1 = optimizer states, 2 = gradients too, 3 = weights
    too. null = chosen to fit the devices."""

    gradient_checkpointing: Literal["full", "none"] | None = None
    """`full` saves memory: one hidden state per layer is kept and the rest is computed again in the
    backward pass. `none` keeps all activations. null = chosen to fit the devices."""

    shared_qk: Literal["keep", "offload", "recompute"] | None = None
    """With gradient_checkpointing, where the queries and keys of leading heads wait for the backward pass:
    `keep` on the device, `offload` in host memory (one copy each way), `recompute` nowhere: they are
    computed again (1 to 3 % more arithmetic). The loss is the same. null = chosen to fit the devices."""

    mlp_tile_tokens: NonNegativeInt | None = None
    """Tokens per rank that a feed-forward layer processes at a time. Tiles save memory and are computed a
    second time in the backward pass. 0 = no tiles; null = chosen to fit the devices."""

    offload_checkpoints: bool | None = None
    """Keep the hidden states of gradient_checkpointing in host memory; one copy each way per layer. null =
    chosen to fit the devices."""

    offload_optimizer: Literal["none", "cpu"] | None = None
    """`cpu`: master weights, moments and gradients are in host memory and are updated there. Over all ranks
    this takes 20 bytes per trained weight (18 with reduce_dtype=bfloat16), plus the rounding of pinned
    memory to powers of two. Needs zero_stage 3. null = chosen to fit the devices."""

    offload_parameters: Literal["none", "cpu"] | None = None
    """`cpu`: weights are in host memory, and each layer is copied to the device when it is used. Needs
    zero_stage 3. null = chosen to fit the devices."""

    memory_reserve_gib: NonNegativeFloat | None = None
    """GiB of every GPU that the chosen layout leaves to the CUDA context, to NCCL's buffers and to
    workspaces, which no estimate counts. null = 1.25, and 1.5 more for every group of ranks that
    communicate. One rank has no such group, several have 2, and with sequence parallelism 3 or 4."""

    fused_layers: Literal["auto", "compile", "none"] = "auto"
    """Run norms, rotary embedding and gated activations as one kernel each, by `torch.compile`. `auto` =
    on GPUs. The loss differs by rounding only."""

    prefetch_steps: NonNegativeInt = 2
    """Steps whose rows are read ahead in the background. 0 = read when needed. The metric data_wait_s
    shows how long training waits for data."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights, activations and gradients. Master weights and Adam's moments are always float32."""

    learning_rate: PositiveFloat = 1e-5
    """Highest learning rate (paper: 1e-5)."""

    min_lr_ratio: Share = 0.1
    """Learning rate of the last step divided by the highest one; it falls along a cosine."""

    warmup_ratio: BelowOne = 0.0
    """Share of the steps in which the learning rate rises linearly from 0, for example 0.02."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW, on matrices only; norms and biases have none."""

    adam_beta1: BelowOne = 0.9
    """Decay rate of Adam's first moment."""

    adam_beta2: BelowOne = 0.95
    """Decay rate of Adam's second moment."""

    adam_epsilon: PositiveFloat = 1e-8
    """Small number that Adam adds to its denominator."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients with a larger global norm are scaled down to it. 0 = no clipping."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks and passes. bfloat16 halves the traffic and is less
    exact."""

    loss_chunk_mib: PositiveInt = 256
    """MiB of float32 logits that the loss computes at a time; smaller saves memory."""

    spike_factor: float = 0.0
    """A step is bad when its loss is above spike_factor times the median of the last good steps, for
    example 2. 0 = only NaN and infinity are bad."""

    spike_window: PositiveInt = 64
    """Number of last good steps from which spike_factor's median is taken. Spikes are recognised as soon as
    a quarter of this number is known."""

    bad_step: Literal["skip", "rewind"] = "skip"
    """What to do with a bad step. `skip`: do not apply its update. `rewind`: return to the last checkpoint
    and continue after the rows of the bad step."""

    max_skipped_steps: PositiveInt = 3
    """The run stops with an error after this many bad steps in a row."""

    max_rewinds: NonNegativeInt = 3
    """The run stops with an error at a bad step after this many rewinds."""

    max_hours: NonNegativeFloat = 0.0
    """Save and end, with exit code 0, before this many hours have passed. The same command continues the
    run. 0 = no limit."""

    hang_timeout_s: NonNegativeFloat = 900.0
    """Seconds without progress after which every rank writes what its threads are doing to
    <output_dir>/train/hang-rank*.txt. 0 = no watchdog."""

    hang_action: Literal["report", "abort"] = "report"
    """What to do after hang_timeout_s: `report` writes the files and waits; `abort` also ends the rank with
    exit code 75, so that a scheduler can start the run again."""

    method: Literal["full", "lora"] = "full"
    """`full` trains all weights; `lora` trains low-rank adapters only (peft)."""

    distill: Share = 0.0
    """With lora: share of the loss that is the divergence from the dense model that the run starts from; the
    rest is the cross entropy. 1 = the model only learns to predict what the dense model predicts. It costs
    one more forward pass."""

    distill_attention: NonNegativeFloat = 0.0
    """With distill: weight of the error of attention in each layer, ‖o - o*‖² / ‖o*‖² for its output o and
    the dense model's o*, as a mean over layers. 10 was better than 100 on SmolLM2; 0 = none."""

    lora_rank: PositiveInt = 16
    """Rank of the LoRA adapters."""

    lora_alpha: PositiveFloat = 32.0
    """Scale of LoRA: the adapters' output is multiplied by lora_alpha / lora_rank."""

    lora_dropout: BelowOne = 0.0
    """Dropout before the adapters, from 0 to below 1."""

    lora_target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """Names of the linear layers that get an adapter."""

    save_every_steps: NonNegativeInt | None = None
    """Steps between checkpoints. 0 = only at the end; null = often enough that at most 30 minutes of work
    can be lost."""

    save_mode: Literal["sync", "async"] = "sync"
    """`sync`: training waits until a checkpoint is on disk. `async`: it waits only until the checkpoint is
    copied to host memory."""

    keep_last: PositiveInt = 2
    """Number of checkpoints to keep. An older one is removed when a newer one is complete."""

    keep_every_steps: NonNegativeInt = 0
    """Never remove checkpoints of steps that are multiples of this number. 0 = only keep_last decides which
    checkpoints are kept."""

    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from the newest checkpoint in <output_dir>/train, on any number of ranks. `never`
    refuses to start when there is one."""

    log_every_steps: PositiveInt = 1
    """Steps between two lines of metrics.jsonl and of the tracker."""

    peak_tflops: NonNegativeFloat = 0.0
    """TFLOP/s of one device in `dtype`, for the metric mfu. 0 = from the data sheet; unknown devices have
    no mfu."""

    eval_every_steps: NonNegativeInt = 0
    """Steps between evaluations on held-out text: loss by position, and passkeys. There is one before the
    first step and one after the last step too. 0 = none at all."""

    eval_rows: PositiveInt = 8
    """Held-out rows of data.context_length tokens in each evaluation, over all ranks."""

    eval_passkeys: NonNegativeInt = 0
    """Passkey prompts in each evaluation, of data.context_length tokens. 0 = none."""

    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Where metrics are logged in addition to <output_dir>/train/metrics.jsonl: Weights & Biases, or
    TensorBoard files in <output_dir>/train/tensorboard."""

    wandb_project: str | None = None
    """Project on wandb. null = the environment variable WANDB_PROJECT, else pod-kv."""

    wandb_entity: str | None = None
    """User or team on wandb. null = the environment variable WANDB_ENTITY, else your own account."""

    wandb_run_name: str | None = None
    """Name of the run on wandb. null = the environment variable WANDB_NAME, else a name that wandb
    invents."""

    wandb_mode: Literal["offline", "online", "disabled"] | None = None
    """`online` sends metrics to the server; `offline` writes a folder for `wandb sync`. null = the
    environment variable WANDB_MODE, else online."""

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        if self.spike_factor != 0 and not self.spike_factor > 1:
            raise ValueError(f"spike_factor is {self.spike_factor}, allowed are 0 (off) and numbers above 1")
        if self.eval_passkeys and not self.eval_every_steps:
            raise ValueError(
                "eval_passkeys is set, but eval_every_steps is 0: set eval_every_steps, or eval_passkeys=0"
            )
        if not self.lora_target_modules:
            raise ValueError("lora_target_modules is empty: name linear layers, for example q_proj, k_proj")
        if self.distill and self.method != "lora":
            raise ValueError(
                f"distill is {self.distill:g} with method={self.method}, but the teacher is the model "
                "without its adapters: set method=lora, or distill=0"
            )
        if self.distill_attention and not self.distill:
            raise ValueError(
                f"distill_attention is {self.distill_attention:g}, but distill is 0, so there is no teacher: "
                "set distill=1, or distill_attention=0"
            )
        moves = self.offload_checkpoints or self.shared_qk not in (None, "keep")
        if self.gradient_checkpointing == "none" and moves:
            raise ValueError(
                f"shared_qk={self.shared_qk} and offload_checkpoints={self.offload_checkpoints} need "
                "gradient checkpointing: set gradient_checkpointing=full, or shared_qk=keep and "
                "offload_checkpoints=false"
            )
        if self.shared_qk == "recompute" and self.method == "lora" and self.lora_dropout:
            raise ValueError(
                f"shared_qk=recompute does not work with lora_dropout={self.lora_dropout}: recomputing would "
                "draw another dropout; set shared_qk=offload, or lora_dropout=0"
            )
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) == "cpu" and self.zero_stage in (1, 2):
                raise ValueError(
                    f"{name}=cpu needs zero_stage=3, got zero_stage={self.zero_stage}: set zero_stage=3, or "
                    f"{name}=none"
                )

    def rows_per_step(self, context_length: int) -> int:
        """Rows of `context_length` tokens in one optimizer step, over all ranks.

        Raises:
            ValueError: tokens_per_step is not a whole number of rows.
        """
        tokens = self.tokens_per_step or context_length
        if tokens % context_length:
            below = tokens - tokens % context_length
            near = ", ".join(f"{one:,}" for one in (below, below + context_length) if one)
            raise ValueError(
                f"train.tokens_per_step is {tokens:,}, but must be a multiple of the row length, "
                f"{context_length:,} tokens: the nearest are {near}"
            )
        return tokens // context_length

    def steps(self, context_length: int) -> int:
        """Optimizer steps of the run: max_steps, else as many as total_tokens allow, else 100.

        Raises:
            ValueError: total_tokens is less than one step takes.
        """
        if self.max_steps is not None or self.total_tokens is None:
            return self.max_steps or 100
        each = self.rows_per_step(context_length) * context_length
        if self.total_tokens < each:
            raise ValueError(
                f"train.total_tokens is {self.total_tokens:,}, but one step takes {each:,} tokens: raise "
                "train.total_tokens, or lower train.tokens_per_step"
            )
        return self.total_tokens // each


@section
class TrainArgs(TrainRecipe):
    """Section `train` in which all fields that depend on ranks and device have values.

    Trainer, engine and estimates work with it.
    """

    max_steps: PositiveInt = 100
    sequence_parallel_size: PositiveInt = 1
    micro_batch_size: PositiveInt = 1
    gradient_accumulation_steps: PositiveInt = 1
    zero_stage: Literal[1, 2, 3] = 3
    gradient_checkpointing: Literal["full", "none"] = "full"
    shared_qk: Literal["keep", "offload", "recompute"] = "keep"
    mlp_tile_tokens: NonNegativeInt = 16_384
    offload_checkpoints: bool = False
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_parameters: Literal["none", "cpu"] = "none"

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return round(self.warmup_ratio * self.max_steps)

    def rank_tokens(self, context_length: int) -> int:
        """Tokens of one micro-batch on the rank that holds most; rows have `context_length` tokens."""
        return -(-context_length // self.sequence_parallel_size) * self.micro_batch_size

    def mlp_tiles(self, context_length: int) -> int:
        """Number of tiles into which a feed-forward layer cuts the tokens of a micro-batch.

        It is the same on every rank, and 1 where nothing is cut. Rows have `context_length` tokens.
        """
        return -(-self.rank_tokens(context_length) // self.mlp_tile_tokens) if self.mlp_tile_tokens else 1


@section
class ExportArgs:
    """Section `export` of a recipe: `pod export`."""

    format: Literal["hf", "vllm"] = "hf"
    """Who loads the folder. hf = transformers, any plan. vllm = vLLM; the plan must give all heads of a layer
    the same role, as explore.target=vllm does."""

    path: str | None = None
    """Folder to write. null = <output_dir>/export, and <output_dir>/export-vllm for vllm. An existing folder
    is replaced when the new one is complete."""

    checkpoint: str | None = None
    """Checkpoint folder to export, for example runs/demo/train/step-00000120. null = the newest one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the exported weights. auto = as trained, so that the logits are exactly the trained ones."""

    max_shard_size: str = "5GB"
    """Size of the largest safetensors file: a number and KB, MB, GB or TB, for example 5GB."""

    adapter: bool = False
    """Write only the LoRA adapters, a few MB in peft's format. false = the whole model with merged
    adapters."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"\d+(\.\d+)? ?[KMGT]B", self.max_shard_size, re.IGNORECASE) is None:
            raise ValueError(
                f"max_shard_size is {self.max_shard_size!r}: give a number and KB, MB, GB or TB, for example "
                "5GB"
            )
