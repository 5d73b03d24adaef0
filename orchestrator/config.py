"""One frozen tree describes a run; `codec.py` carries it over wires and files."""

import math
from dataclasses import dataclass
from typing import Literal

from moe.parallel import ParallelConfig, check_layout
from moe.presets import PRESETS
from moe.vit import ViTConfig
from orchestrator.errors import UsageError
from orchestrator.recipe import (
    AdamWConfig,
    FewShotConfig,
    OptimizerConfig,
    RsqrtConfig,
    ScheduleConfig,
    at_least_one,
    within,
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Attributes:
    path: directory or URI with `manifest.json`, as `jobs/pack_shards.py` writes it.
    batch_size: global: images per step over all workers.
    lanes: places of the data set that are read at the same time, each batch taking as much from all of them;
        the number of workers must divide it, and may change as long as it does. None: as `lane_count` says.
    shuffle_window: images of a lane that are mixed with each other.
    tail: what an epoch does with the images that fill no batch: ``wrap``: the batch goes on with the next
        epoch; ``drop``: they are left out, others in each epoch.
    augment: ``none``, or ``inception`` (random crop of 5-100 % of the area, flip; the papers' pre-training).
    eval_crop: part of the shorter side that the central crop of evaluation keeps.
    randaugment: operations per image, 0 to 14, after the crop; of `randaugment_magnitude`, 0 to 30.
    mixup, cutmix: parameter of the Beta distribution that two images are mixed by; 0: not. With both, a pair
        is mixed by one of them, either as often.
    max_bad_frac: images that cannot be decoded, of those read, above which the run stops.
    cache_gb: of a node's disk that shards on S3 may take.
    """

    path: str = ""
    batch_size: int = 64
    lanes: int | None = None
    shuffle_window: int = 1024
    tail: Literal["wrap", "drop"] = "wrap"
    augment: Literal["none", "inception"] = "none"
    eval_crop: float = 0.875
    randaugment: int = 0
    randaugment_magnitude: int = 9
    mixup: float = 0.0
    cutmix: float = 0.0
    max_bad_frac: float = 0.01
    cache_gb: float = 16.0

    def __post_init__(self) -> None:
        at_least_one(self, "batch_size", "shuffle_window", *(["lanes"] if self.lanes is not None else []))
        within(self, 0, math.inf, "mixup", "cutmix", "cache_gb")
        within(self, 0, 14, "randaugment")
        within(self, 0, 30, "randaugment_magnitude")
        within(self, 0, 1, "max_bad_frac", "eval_crop")
        if not self.eval_crop:
            raise ValueError("eval_crop must be more than 0: it is the part of the image that stays")
        if self.lanes is not None and self.batch_size % self.lanes:
            raise ValueError(f"lanes={self.lanes} does not divide batch_size={self.batch_size}")

    def lane_count(self) -> int:
        """`lanes`; else the largest divisor of the batch up to 16, or up to an eighth of it."""
        most = max(16, self.batch_size // 8)
        return self.lanes or max(d for d in range(1, most + 1) if self.batch_size % d == 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Attributes:
    steps: optimiser updates.
    lr: the schedule's peak.
    microbatch: images per worker and forward pass, accumulated; None: the worker's whole share at once.
    init_from: weights to start from, as far as they fit: a directory of checkpoints, the folder of one, or an
        exported file. None: all are drawn from `seed`.
    init_without: tensors whose names begin so stay as drawn all the same: ``head`` for fine-tuning.
    trunk: folder of a checkpoint of another run, which this one goes on from with its optimiser and its place
        in the data: a branch that cools down. None: from the start.
    clip_norm: largest gradient norm.
    compute_dtype: of matmuls and activations; weights and optimiser stay float32, routers compute in it.
    eval_every: steps between; None: at the end only.
    stop_at: ``val/acc1`` at which the run is finished before its last step, for models that are compared at
        one quality (Implicit Bias in Soft MoE, section 4.2). None: at the last step.
    fewshot: evaluate the frozen features too, each time; None: not.
    """

    steps: int = 200
    lr: float = 1e-3
    seed: int = 0
    init_from: str | None = None
    init_without: str | None = None
    trunk: str | None = None
    report_every: int = 10
    eval_every: int | None = None
    stop_at: float | None = None
    microbatch: int | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    clip_norm: float = 1.0
    optimizer: OptimizerConfig = AdamWConfig()
    schedule: ScheduleConfig = RsqrtConfig()
    fewshot: FewShotConfig | None = None

    def __post_init__(self) -> None:
        optional = (n for n in ("eval_every", "microbatch") if getattr(self, n) is not None)
        at_least_one(self, "steps", "report_every", *optional)
        within(self, 0, math.inf, "lr", "seed")
        if self.stop_at is not None:
            within(self, 0, 1, "stop_at")
            if self.eval_every is None:
                raise ValueError(f"stop_at={self.stop_at} is looked at every eval_every steps: set that too")
        if self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm}")
        warmup, cooldown = self.schedule.phases(self.steps)
        if min(warmup, cooldown) < 0 or warmup + cooldown > self.steps:
            raise ValueError(
                f"warmup_steps={warmup} and cooldown_steps={cooldown} do not fit into steps={self.steps}"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Attributes:
    every: steps between; None: every tenth of the run. The last step is always saved.
    asynchronous: write while training goes on; costs a second copy of the state in host memory.
    keep_last, keep_best: newest checkpoints that stay, and those of the best ``val/acc1``.
    keep_every: multiples of this many steps stay too: a trunk that cooldowns branch from (Soft MoE, 3.4).
    """

    every: int | None = None
    asynchronous: bool = True
    keep_last: int = 2
    keep_best: int = 1
    keep_every: int | None = None

    def __post_init__(self) -> None:
        optional = (n for n in ("every", "keep_every") if getattr(self, n) is not None)
        at_least_one(self, "keep_last", *optional)
        within(self, 0, math.inf, "keep_best")


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(ParallelConfig):
    """Attributes:
    workers: processes that train one model together, a GPU or half a CPU each.
    ep: workers that share one set of experts, dp = workers / ep; ``auto``: commands choose the number that
        spends the least time on links, and write it here (`sweeps.estimate`).
    workers_per_node: what ``auto`` assumes.
    use_gpu: a GPU for every worker.
    min_workers: where nodes are lost, or not up yet, the run goes on with as few as these and the same global
        batch, until there are `workers` again.
    wait_s: for how long it waits for the missing ones first.
    profile_steps: that the first worker writes a profile of; 0: none (`training.profile`).
    """

    workers: int = 1
    ep: int | Literal["auto"] = 1
    workers_per_node: int = 8
    use_gpu: bool = False
    min_workers: int = 1
    wait_s: float = 60
    profile_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        ep = ["ep"] if self.ep != "auto" else []
        at_least_one(self, "workers", "workers_per_node", "min_workers", *ep)
        within(self, 1, math.inf, "wait_s")
        within(self, 0, 1000, "profile_steps")
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers={self.min_workers} is more than workers={self.workers}")
        if self.ep != "auto" and self.workers % self.ep:
            raise ValueError(f"ep={self.ep} does not divide workers={self.workers}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = "train"
    storage: str = "runs"
    model: ViTConfig = PRESETS["debug"]
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    scale: ScaleConfig = ScaleConfig()

    def __post_init__(self) -> None:
        workers, batch = self.scale.workers, self.data.batch_size
        if batch % workers:
            raise ValueError(f"data.batch_size={batch} does not divide over workers={workers}")
        if batch // workers % self.images_per_pass():
            raise ValueError(
                f"train.microbatch={self.train.microbatch} does not divide a worker's {batch // workers}"
            )
        if self.data.lane_count() % workers:
            raise ValueError(
                f"data.lanes={self.data.lane_count()} does not divide over workers={workers}: begin the run"
                f" with data.lanes a multiple of the workers and a divisor of data.batch_size={batch}"
            )
        if (self.data.mixup or self.data.cutmix) and self.images_per_pass() % 2:
            raise ValueError(
                f"mixup and cutmix mix pairs of images: the {self.images_per_pass()} images of one forward"
                " pass must be even"
            )
        group = self.model.moe.images_per_group if self.model.moe else 1
        if self.images_per_pass() % group:
            raise ValueError(
                f"model.moe.images_per_group={group} does not divide the {self.images_per_pass()} images of"
                f" one forward pass (train.microbatch, else data.batch_size={batch} / workers={workers})"
            )
        if self.scale.ep != "auto":
            dp = workers // self.scale.ep
            check_layout(self.model, dp=dp, ep=self.scale.ep, dp_replicate=self.scale.dp_replicate)

    def ep(self) -> int:
        """Workers that share one set of experts.

        Raises:
            UsageError: if `scale.ep` is still ``auto``.
        """
        if self.scale.ep == "auto":
            raise UsageError("scale.ep=auto: `orchestrator.sweeps.estimate.with_ep(run)` chooses a number")
        return self.scale.ep

    def images_per_pass(self) -> int:
        """Images of one worker's forward pass."""
        return self.train.microbatch or self.data.batch_size // self.scale.workers
