"""Sections `explore`, `train` and `export` of a recipe."""

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pod.schema import AtLeast2, BelowOne, Share, section


@section
class TrainRecipe:
    """Section `train` of a recipe: `pod train`. A field that is null by default is derived from ranks
    and device (`pod.training.predict.planner`)."""

    total_tokens: PositiveInt | None = None
    """Tokens of the whole run, padding included; total_tokens / tokens_per_step steps, rounded down."""

    max_steps: PositiveInt | None = None
    """Optimizer steps of the whole run. Where it is set total_tokens is not used; without both a run takes 100 steps."""

    tokens_per_step: PositiveInt | None = None
    """Tokens of one optimizer step over all ranks, padding included: a multiple of data.context_length; null = one row."""

    allow_repeats: bool = False
    """Let the run read the data more than once; otherwise more tokens than the data has are refused."""

    sequence_parallel_size: PositiveInt | None = None
    """Ranks that share one row (Ulysses); contiguous ranks form a group. Allowed: 1 to the number of query heads."""

    micro_batch_size: PositiveInt | None = None
    """Packed rows that a sequence-parallel group takes through one forward and backward."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per optimizer step: rows per step / micro_batch_size / (ranks / sequence_parallel_size)."""

    zero_stage: Literal[1, 2, 3] | None = None
    """What DeepSpeed divides among all ranks: 1 optimizer states, 2 gradients too, 3 weights too."""

    gradient_checkpointing: Literal["full", "none"] | None = None
    """`full`: keep one hidden state (and the carry) per layer and recompute the rest in backward; `none`: keep everything."""

    carry: Literal["keep", "offload", "recompute"] | None = None
    """Where the queries and keys that lead layers hand on wait for backward under gradient_checkpointing: `keep` on the device,
    `offload` in host memory (one copy each way), `recompute` nowhere: projected again (1 to 3 % more arithmetic). The loss is the same."""

    mlp_tile_tokens: NonNegativeInt | None = None
    """Tokens per rank that a feed-forward layer works on at a time; tiles are computed once more in backward, so that no
    [tokens, intermediate_size] is ever held whole; 0 = no tiles."""

    offload_checkpoints: bool | None = None
    """Let the hidden states that gradient_checkpointing keeps wait in host memory: one copy each way per layer."""

    offload_optimizer: Literal["none", "cpu"] | None = None
    """`cpu`: hold master weights, moments and reduced gradients (16 bytes per trained weight over all ranks) and update there. Needs
    zero_stage 3."""

    offload_parameters: Literal["none", "cpu"] | None = None
    """`cpu`: hold each rank's share of the weights there and bring a layer to the device when it is used. Needs zero_stage 3."""

    fused_layers: Literal["auto", "compile", "none"] = "auto"
    """Compute norms, rotary embedding and gated activations in one kernel each, by `torch.compile`; `auto`: where there is a GPU. The
    loss differs by rounding."""

    prefetch_steps: NonNegativeInt = 2
    """Steps whose rows a thread reads ahead; 0 = read when they are needed. Metrics tell what is left to wait for (`data_wait_s`)."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights, activations and gradients. Master weights and Adam's moments are float32 either way."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate (paper: 1e-5)."""

    min_lr_ratio: Share = 0.1
    """Learning rate at the last step as a share of the peak, where the cosine ends (PoD names the cosine, no final rate)."""

    warmup_ratio: BelowOne = 0.0
    """Share of the steps in which the learning rate rises linearly from 0 to the peak (PoD names none)."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW on matrices; norms and biases have none."""

    adam_beta1: BelowOne = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: BelowOne = 0.95
    """Decay of Adam's second moment."""

    adam_epsilon: PositiveFloat = 1e-8
    """Term that keeps Adam's denominator from 0."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global 2-norm; 0 = no clipping."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks and micro-batches; bfloat16 halves the traffic, rounds every sum."""

    loss_chunk_mib: PositiveInt = 256
    """MiB of float32 logits that the loss holds at a time."""

    spike_factor: float = 0.0
    """A loss above this x the median of the last spike_window good steps is a bad step; 0 = only NaN and infinity are, else above 1."""

    spike_window: PositiveInt = 64
    """Good steps whose median loss spike_factor multiplies; none is a spike until a quarter of them have passed."""

    bad_step: Literal["skip", "rewind"] = "skip"
    """What follows a bad step. `skip`: its update is left out. `rewind`: the run returns to its last checkpoint and goes on behind
    the rows of the bad step."""

    max_skipped_steps: PositiveInt = 3
    """Bad steps in a row (each is skipped) after which the run stops."""

    max_rewinds: NonNegativeInt = 3
    """Returns to a checkpoint, over the whole run, after which the next bad step stops the run."""

    max_hours: NonNegativeFloat = 0.0
    """The run saves and ends with code 0 before so many hours have passed; the same command continues it. 0 = no limit."""

    hang_timeout_s: NonNegativeFloat = 900.0
    """Seconds without progress (a micro-batch, an update, a written file) after which every rank writes its threads' stacks to
    <output_dir>/train/hang-rank*.txt; 0 = no watchdog."""

    hang_action: Literal["report", "abort"] = "report"
    """After a hang: `report` keeps waiting, `abort` ends the rank with code 75 so that a scheduler starts the run again."""

    method: Literal["full", "lora"] = "full"
    """`full` trains every weight, `lora` low-rank adapters only (peft)."""

    lora_rank: PositiveInt = 16
    """Rank of the LoRA adapters."""

    lora_alpha: PositiveFloat = 32.0
    """LoRA scale: the adapters' output is multiplied by lora_alpha / lora_rank."""

    lora_dropout: BelowOne = 0.0
    """Dropout before the adapters, in [0, 1)."""

    lora_target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """Names of the linear layers that get an adapter."""

    save_every_steps: NonNegativeInt | None = None
    """Steps between checkpoints; 0 = only at the end, null = so that no more than 30 minutes of work can be lost."""

    save_mode: Literal["sync", "async"] = "sync"
    """`sync`: training waits until a checkpoint is on disk; `async`: until it is copied to host memory (divided among the ranks)."""

    keep_last: PositiveInt = 2
    """Checkpoints that are kept; older ones are removed after a newer one is complete."""

    keep_every_steps: NonNegativeInt = 0
    """Checkpoints of steps that this divides are never removed; 0 = all rotate."""

    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from <output_dir>/train/latest when there is one, on any ranks; `never` refuses to start there."""

    log_every_steps: PositiveInt = 1
    """Steps between two lines of metrics.jsonl (and of the tracker)."""

    peak_tflops: NonNegativeFloat = 0.0
    """TFLOP/s of one device in `dtype`, for the metric `mfu`; 0 = the data sheet's figure when the device is known, else no `mfu`."""

    eval_every_steps: NonNegativeInt = 0
    """Steps between two evaluations on held-out rows: loss by position, and passkeys; 0 = never."""

    eval_rows: PositiveInt = 8
    """Held-out rows of data.context_length tokens per evaluation, over all ranks."""

    eval_passkeys: NonNegativeInt = 0
    """Passkey prompts per evaluation, of data.context_length tokens, at depths spread over them."""

    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Where metrics go besides <output_dir>/train/metrics.jsonl: to Weights & Biases, or to <output_dir>/train/tensorboard."""

    wandb_project: str | None = None
    """Project on wandb; null = the environment's WANDB_PROJECT, else pod-kv."""

    wandb_entity: str | None = None
    """User or team that the wandb run belongs to; null = wandb's default (WANDB_ENTITY, else your own account)."""

    wandb_run_name: str | None = None
    """Name of the run on wandb; null = WANDB_NAME, else wandb invents one."""

    wandb_mode: Literal["offline", "online", "disabled"] | None = None
    """`offline` writes a run folder for `wandb sync` and contacts no server; null = WANDB_MODE, else online."""

    def __post_init__(self) -> None:
        """Settings that do not go together."""
        if self.spike_factor != 0 and not self.spike_factor > 1:
            raise ValueError(f"spike_factor is {self.spike_factor}, allowed are 0 (off) and numbers above 1")
        if self.eval_passkeys and not self.eval_every_steps:
            raise ValueError("eval_passkeys is set and eval_every_steps is 0: set eval_every_steps")
        if not self.lora_target_modules:
            raise ValueError("lora_target_modules is empty: name linear layers, for example q_proj, k_proj")
        moves = self.offload_checkpoints or self.carry not in (None, "keep")
        if self.gradient_checkpointing == "none" and moves:
            raise ValueError(
                f"carry is {self.carry} and offload_checkpoints {self.offload_checkpoints}: they move what checkpoints hold; "
                "set gradient_checkpointing=full, or carry=keep and offload_checkpoints=false"
            )
        if self.carry == "recompute" and self.method == "lora" and self.lora_dropout:
            raise ValueError(
                f"carry is recompute with lora_dropout {self.lora_dropout}: the dropout would be drawn anew; set "
                "carry=offload, or lora_dropout=0"
            )
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) == "cpu" and self.zero_stage in (1, 2):
                raise ValueError(
                    f"{name} is cpu with zero_stage {self.zero_stage}: only stage 3 divides weights and gradients; set zero_stage=3"
                )

    def rows_per_step(self, context_length: int) -> int:
        """Rows of `context_length` tokens of one optimizer step over all ranks; ValueError when they are not whole."""
        tokens = self.tokens_per_step or context_length
        if tokens % context_length:
            below = tokens - tokens % context_length
            near = ", ".join(f"{one:,}" for one in (below, below + context_length) if one)
            raise ValueError(
                f"train.tokens_per_step is {tokens:,}, which are no whole rows of {context_length:,} tokens: nearest are {near}"
            )
        return tokens // context_length

    def steps(self, context_length: int) -> int:
        """Optimizer steps of the run: max_steps, else what total_tokens make, else 100."""
        if self.max_steps is not None or self.total_tokens is None:
            return self.max_steps or 100
        each = self.rows_per_step(context_length) * context_length
        if self.total_tokens < each:
            raise ValueError(
                f"train.total_tokens is {self.total_tokens:,}, allowed are {each:,} (one step) and more"
            )
        return self.total_tokens // each


@section
class TrainArgs(TrainRecipe):
    """Section `train` with nothing left to derive: what trainer, engine and estimates work with."""

    max_steps: PositiveInt = 100
    sequence_parallel_size: PositiveInt = 1
    micro_batch_size: PositiveInt = 1
    gradient_accumulation_steps: PositiveInt = 1
    zero_stage: Literal[1, 2, 3] = 3
    gradient_checkpointing: Literal["full", "none"] = "full"
    carry: Literal["keep", "offload", "recompute"] = "keep"
    mlp_tile_tokens: NonNegativeInt = 16_384
    offload_checkpoints: bool = False
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_parameters: Literal["none", "cpu"] = "none"

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return round(self.warmup_ratio * self.max_steps)

    def rank_tokens(self, context_length: int) -> int:
        """Tokens of one micro-batch on the rank that holds most; rows have `context_length`."""
        return -(-context_length // self.sequence_parallel_size) * self.micro_batch_size

    def mlp_tiles(self, context_length: int) -> int:
        """Parts in which a feed-forward layer takes its tokens, the same on every rank."""
        return -(-self.rank_tokens(context_length) // self.mlp_tile_tokens) if self.mlp_tile_tokens else 1


@section
class ExportArgs:
    """Section `export` of a recipe: `pod export`."""

    path: str | None = None
    """Folder to write; null is <output_dir>/export. An existing one is replaced when the new one is complete."""

    checkpoint: str | None = None
    """Checkpoint folder to export; null is the newest one, <output_dir>/train/latest."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the exported weights; `auto` is the type that was trained in (its logits are exactly the trained ones)."""

    max_shard_size: str = "5GB"
    """Largest safetensors file."""

    adapter: bool = False
    """Write the LoRA adapters alone (peft's format, a few MB) in place of the whole model with the adapters merged into it."""


@section
class ExploreArgs:
    """Section `explore` of a recipe: `pod explore`."""

    algorithm: Literal["dp", "greedy"] = "dp"
    """`dp`: the plan of least cost at `target_saving`; `greedy`: the paper's Algorithm 1 at `threshold` (with cost=similarity)."""

    threshold: Share = 0.5
    """Greedy only: similarity from which two layers may share, 0 to 1 (paper: 0.5)."""

    target_saving: BelowOne = 0.35
    """Dp only: share of the KV cache bytes to save at `budget_length` tokens, 0 to below 1; followers save half of theirs at most.
    Layers that were trained with windows do not count."""

    budget_length: NonNegativeInt | None = None
    """Dp only: tokens at which `target_saving` is meant; 0 = in the limit of long sequences (paper), empty = `sequence_length`."""

    cost: Literal["projected", "similarity"] = "projected"
    """What a role costs. `projected`: squared error behind the output projection relative to the residual stream, on text and on
    repeated random tokens; needs sequences longer than the windows. `similarity`: the paper's, 1 - similarity of whole attention
    rows, which can price followers only (roles=follow)."""

    roles: list[Literal["follow", "window"]] = field(default_factory=lambda: ["follow", "window"])
    """What heads may do beside leading: `follow` a lower layer's attention to distant tokens (own values stay), or keep their
    `window` (sinks and recent tokens, nothing else)."""

    bits: list[int] = field(default_factory=lambda: [16])
    """Projected only: bits in which a layer may hold the keys and values of every token: 16 (as the model computes), or 16 and 4
    (packed as the cache method int4; the plan says which layers)."""

    align_heads: bool = True
    """Projected and follow only: re-order the KV heads of every layer, and the query heads of a KV head, so that heads that fit each
    other share (the model computes the same). The plan records the order."""

    retrieval_sequences: NonNegativeInt = 2
    """Projected only: sequences of random tokens, repeated four times, that are measured beside the text, which seldom needs heads
    that find earlier copies; 0 = text alone."""

    retrieval_weight: NonNegativeFloat = 1.0
    """Projected only: weight of the cost on repeated tokens; that on text has weight 1. Both are in the same units."""

    loss_sequences: NonNegativeInt = 4
    """Projected only: on how many of the num_sequences sequences, beside those of repeated tokens, the loss of the dense model and
    of the chosen plan is measured; 0 = it is not."""

    sources: list[str] = field(default_factory=list)
    """Where the long texts come from, as in data.sources; empty = the text that the prepared data holds out of training."""

    num_sequences: PositiveInt = 64
    """Sequences N to average over (paper: 1000)."""

    sequence_length: PositiveInt = 8192
    """Tokens n per sequence, more than the windows hold (paper: 32768)."""

    num_queries: PositiveInt = 16
    """Last query positions q per sequence whose attention rows are compared (paper: 16)."""

    heads: bool = False
    """Search for retrieval heads (RazorAttention) instead of making a plan; short: `--heads`. Needs no text."""

    head_tokens: AtLeast2 = 2500
    """Heads only: distinct random tokens K (paper: 2500), at most the model's context over `head_repeats`."""

    head_repeats: AtLeast2 = 4
    """Heads only: how often the K tokens are repeated (paper: 4)."""

    induction_share: Share = 0.14
    """Heads only: share of the query heads kept for their attention to what followed earlier copies of a token (paper: 0.14)."""

    echo_share: Share = 0.01
    """Heads only: share of the query heads kept for their attention to earlier copies of a token (paper: 0.01)."""

    def __post_init__(self) -> None:
        if not self.roles or len(set(self.roles)) < len(self.roles):
            raise ValueError(f"roles is {self.roles}, allowed are follow, window, or both")
        if sorted(self.bits) not in ([16], [4, 16]) or (4 in self.bits and self.cost == "similarity"):
            raise ValueError(
                f"bits is {self.bits}, allowed are [16], or [16, 4] with cost=projected: which layers are packed is for the plan"
            )
        if self.cost == "similarity" and self.roles != ["follow"]:
            raise ValueError(
                f"roles is {self.roles} with cost=similarity, which prices followers only: set roles=follow, or cost=projected"
            )
        if self.algorithm == "greedy" and self.cost != "similarity":
            raise ValueError(
                f"cost is {self.cost!r}, but algorithm=greedy groups by similarity only: set cost=similarity and roles=follow, or "
                "algorithm=dp"
            )
        if self.budget_length is None:
            self.budget_length = self.sequence_length

    @property
    def budget_tokens(self) -> int:
        """Tokens at which `target_saving` is meant; a number beyond every window for the limit of long sequences."""
        return self.budget_length or 10**12
