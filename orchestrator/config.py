"""The config of a run: one frozen tree, which `codec.py` turns into JSON and back."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, SupportsIndex

from moe.config import Bound, Config, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from moe.cost import param_shapes
from moe.layout import ParallelConfig, check_layout
from moe.model import ModelConfig, begins_so
from moe.presets import PRESETS
from orchestrator.costs import counted
from orchestrator.data.augment import AugmentationConfig
from orchestrator.data.augment.base import at, in_stages
from orchestrator.errors import UsageError
from orchestrator.names import check_run_path
from orchestrator.optimizers import AdamWConfig, OptimizerConfig
from orchestrator.plugins import plugins_of, shipped, unpickled
from orchestrator.schedules import RsqrtConfig, ScheduleConfig
from orchestrator.storage import home
from orchestrator.tasks import ClassificationConfig, TaskConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Which images a run reads, in which order, and how they are changed.

    Attributes:
        path: directory or URI with the `manifest.json` that `jobs/pack_shards.py` writes. Empty: the digits
            that come with scikit-learn, which `train` and `run_sweep` pack on first use.
        batch_size: images per step, over all workers.
        lanes: places of the data set that are read at the same time; every batch takes as many images from
            each. The number of workers must divide it. None: see `RunConfig.lane_count`.
        shuffle_window: images of a lane that are shuffled together.
        shuffle_run: neighbouring images of a shard that stay together in the shuffle, and that one request to
            an object storage fetches. 1 shuffles best; with hundreds of GPUs, 8 saves most requests.
        tail: what happens to images at the end of an epoch that do not fill a batch. ``wrap`` fills the batch
            from the next epoch; ``drop`` leaves them out, different images in each epoch.
        augment: how training images are changed at random; ``inception`` is the papers' pre-training and
            ``crop`` their fine-tuning. Members are named by their kinds: ``data.augment=inception,mixup`` has
            two, ``data.augment.mixup.alpha=0.5`` changes or adds a member, ``data.augment.mixup=none`` leaves
            it out.
        eval_resize: what is resized before the central crop of evaluation: the ``shorter`` side, keeping the
            aspect, or both sides to a ``square``, as in the papers' few-shot and fine-tuning.
        eval_crop: fraction of these sides that the central crop keeps.
        eval_interpolation: of that resize; published models often want ``bicubic``.
        eval_pixels: ``timm`` and ``transformers`` give the pixels of these libraries. ``whole`` rounds sides
            as timm, but keeps images of the model's size, and decodes large JPEGs at a part of theirs.
            ``parts`` crops parts of a resized pixel, as all models of earlier versions do.
        repeats: views of each image, one after another, so that an epoch has as many images and fewer
            different ones (repeated augmentation); DeiT III has 3.
        max_bad_frac: fraction of undecodable images above which the run stops.
        cache_gb: disk space per node for indexes and whole remote shards, and for unpacked images of
            compressed shards; 0: none, and each process keeps a remote index in memory.
    """

    path: str = ""
    batch_size: PositiveInt = 64
    lanes: PositiveInt | None = None
    shuffle_window: PositiveInt = 1024
    shuffle_run: PositiveInt = 1
    tail: Literal["wrap", "drop"] = "wrap"
    augment: tuple[AugmentationConfig, ...] = ()
    eval_resize: Literal["shorter", "square"] = "shorter"
    eval_crop: Annotated[float, Bound(">", 0), Bound("<=", 1)] = 0.875
    eval_interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    eval_pixels: Literal["whole", "timm", "transformers", "parts"] = "whole"
    repeats: PositiveInt = 1
    max_bad_frac: Fraction = 0.01
    cache_gb: NonNegativeFloat = 16.0

    def eval_settings(self) -> dict[str, Any]:
        """Returns the fields that say how an image becomes the model's input in evaluation."""
        return {
            f"eval_{n}": getattr(self, f"eval_{n}") for n in ("resize", "crop", "interpolation", "pixels")
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "augment", in_stages(self.augment))
        if self.shuffle_run > self.shuffle_window:
            raise ValueError(
                f"shuffle_run={self.shuffle_run} is more than shuffle_window={self.shuffle_window}: nothing"
                " would be shuffled"
            )
        if self.lanes is not None and self.batch_size % self.lanes:
            raise ValueError(f"lanes={self.lanes} does not divide batch_size={self.batch_size}")


@dataclass(frozen=True, kw_only=True)
class FewShotConfig(Config):
    """Ridge regression on frozen features from a few images per class, reported as ``fewshot/acc_<n>shot``
    at every evaluation (`orchestrator.training.fewshot`).

    Attributes:
        paths: data sets whose train split gives the shots and whose val split is tested; default: the run's.
        shots: images per class.
        seeds: how often shots are drawn, with the seeds 0, 1, ..; figures are means.
    """

    paths: tuple[str, ...] = ()
    shots: tuple[int, ...] = (1, 5, 10, 25)
    seeds: PositiveInt = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots):
            raise ValueError(f"shots must be different numbers from 1, got {list(self.shots)}")

    def metrics(self) -> tuple[str, ...]:
        """Returns the names that each evaluation reports."""
        return tuple(f"fewshot/acc_{shots}shot" for shots in self.shots)


@dataclass(frozen=True, kw_only=True)
class EMAConfig(Config):
    """The average of the weights over the updates, saved and evaluated beside them (``val_ema/..``).

    After update t of the run, with s = t - start - 1, average = d * average + (1 - d) * weights, where d is
    min(decay, 1 - (1 + s / gamma)^-power), and 0 until s = 1: a copy. Source: timm's ModelEmaV3.

    Attributes:
        decay: largest d. 1 / (1 - decay) is the number of updates that count, a few percent of the run.
        start: updates that do not count.
        gamma, power: how fast d rises, from .37 over .95 after 100 updates to .999 after 31,600; a power of
            0.75 suits short runs. With power None d is `decay` from s = 1.
    """

    decay: Fraction = 0.9999
    start: NonNegativeInt = 0
    gamma: PositiveFloat = 1.0
    power: PositiveFloat | None = 2 / 3

    def decay_at(self, update: int) -> float:
        """Returns d of an update; updates count from 1."""
        since = update - self.start - 1
        if since <= 0:
            return 0.0
        rise = 1 if self.power is None else 1 - (1 + since / self.gamma) ** -self.power
        return min(self.decay, rise)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """How a model is trained.

    Attributes:
        steps: optimiser updates.
        lr: peak of the learning rate's schedule.
        seed: the number from which initial weights, router noise and the order of the images are drawn.
        init_from: weights to start from, as far as they fit: a directory of checkpoints, one checkpoint's
            folder or an exported file. None: all weights are drawn from `seed`.
        init_noise: what is added to each expert that is a copy of an MLP: this times the expert's own initial
            draw. With 0 all experts of a block start equal.
        init_optimizer: also take over the optimiser's state of these weights, where the checkpoint has it. A
            new router starts with none.
        init_without: prefix of tensor names that are drawn nevertheless: ``head`` for fine-tuning.
        freeze: prefixes of the names of tensors that are not trained, as ``image.`` for the image tower of
            two towers: they are neither decayed nor counted in the gradient's norm. A star stands for any
            text: ``*.router.`` freezes all routers, with what balances their experts.
        trunk: checkpoint folder of another run that this run continues with its optimiser and its place in
            the data, as a cooldown does. None: the run starts at step 0.
        report_every: steps between reports.
        eval_every: steps between evaluations; None: only at the end.
        stop_at: the task's quality at which the run finishes early, to compare models at one quality
            (Implicit Bias in Soft MoE, section 4.2). None: the run takes all its steps.
        microbatch: images per worker and forward pass, whose gradients are accumulated; None: a worker's
            whole share of the batch at once.
        compute_dtype: data type of matmuls and activations; ``auto``: bfloat16 on GPUs, else float32. The
            weights that are trained stay float32, and so does the optimiser's state unless its `state_dtype`
            says otherwise; routers compute in float32.
        clip_norm: largest gradient norm; None: any.
        fewshot: few-shot evaluation of the frozen features at every evaluation; None: none.
        ema: an average of the weights, which takes as much memory as they do; None: none.
        costs: costs to count beside those that every run reports, such as an energy that a plugin defines.
    """

    steps: PositiveInt = 200
    lr: NonNegativeFloat = 1e-3
    seed: NonNegativeInt = 0
    init_from: str | None = None
    init_noise: NonNegativeFloat = 0.0
    init_optimizer: bool = False
    init_without: str | None = None
    freeze: tuple[str, ...] = ()
    trunk: str | None = None
    report_every: PositiveInt = 10
    eval_every: PositiveInt | None = None
    stop_at: Fraction | None = None
    microbatch: PositiveInt | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    clip_norm: PositiveFloat | None = 1.0
    optimizer: OptimizerConfig = AdamWConfig()
    schedule: ScheduleConfig = RsqrtConfig()
    fewshot: FewShotConfig | None = None
    ema: EMAConfig | None = None
    costs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        counted(self.costs)
        if self.stop_at is not None and self.eval_every is None:
            raise ValueError(f"stop_at={self.stop_at} is checked every eval_every steps: set that too")
        if self.init_from is None and (self.init_noise or self.init_optimizer):
            raise ValueError("init_noise and init_optimizer need weights to start from: set init_from too")
        warmup, cooldown = self.schedule.phases(self.steps)
        if warmup + cooldown > self.steps:
            raise ValueError(
                f"schedule.warmup_steps={warmup} and schedule.cooldown_steps={cooldown} do not fit into"
                f" steps={self.steps}"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """When checkpoints are saved and which are kept.

    Attributes:
        every: steps between checkpoints; None: a tenth of the run. The last step is always saved.
        asynchronous: write while training continues, from a second copy of the state in host memory.
        keep_last, keep_best: how many of the newest checkpoints are kept, and of those of best quality.
        keep_every: multiples of this many steps are saved and kept too, for cooldowns to branch from (Soft
            MoE, 3.4).
    """

    every: PositiveInt | None = None
    asynchronous: bool = True
    keep_last: PositiveInt = 2
    keep_best: NonNegativeInt = 1
    keep_every: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(ParallelConfig):
    """How many workers train one model, and how they share it.

    Attributes:
        workers: processes, with a GPU or half a CPU each.
        ep: workers that share one set of experts; dp = workers / ep. ``auto``: the command chooses the number
            that spends the least time on links, and writes it here (`estimate`).
        workers_per_node: what ``auto`` assumes.
        use_gpu: one GPU per worker.
        min_workers: when nodes are lost or not up yet, the run continues with as few workers as this and the
            same global batch, until all `workers` are available again.
        wait_s: how long a run waits for missing workers before it continues with fewer.
        deterministic: use only algorithms that give the same bits in every run. On CPUs all do; on GPUs some
            that add in any order are replaced by slower algorithms (docs/gpu.md).
        profile_steps: steps that the first worker profiles; 0: none (`training.profile`).
    """

    workers: PositiveInt = 1
    ep: PositiveInt | Literal["auto"] = 1
    workers_per_node: PositiveInt = 8
    use_gpu: bool = False
    min_workers: PositiveInt = 1
    wait_s: Annotated[float, Bound(">=", 1)] = 60.0
    deterministic: bool = False
    profile_steps: Annotated[int, Bound(">=", 0), Bound("<=", 1000)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers={self.min_workers} is more than workers={self.workers}")
        if self.ep != "auto" and self.workers % self.ep:
            raise ValueError(f"ep={self.ep} does not divide workers={self.workers}")

    @property
    def cpus_per_worker(self) -> float:
        """CPUs that a worker reserves. A task that decodes reserves as many, so that halves decode too."""
        return 1.0 if self.use_gpu else 0.5


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """A whole run. Its directory is ``<storage>/<name>``.

    Attributes:
        name: name of the run and of its directory; set by ``--name``: letters, digits, ``.``, ``_``, ``-``. A
            run of a sweep is called ``<sweep>/trials/<arm>``.
        storage: directory or URI below which runs lie; by default ``$MOE_FRONTIER_HOME``, else
            ``~/moe-frontier``.
        plugins: the user's own files that define parts of this config, ``name@SHA-256`` each. They are found:
            whatever is given is replaced.
    """

    name: str = "train"
    storage: str = field(default_factory=home)
    model: ModelConfig = PRESETS["debug"]
    task: TaskConfig = ClassificationConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    scale: ScaleConfig = ScaleConfig()
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "plugins", plugins_of((self, *counted(self.train.costs))))
        check_run_path(self.name)
        workers, batch = self.scale.workers, self.data.batch_size
        if batch % workers:
            raise ValueError(f"data.batch_size={batch} does not divide over workers={workers}")
        if batch // workers % self.images_per_pass():
            raise ValueError(
                f"train.microbatch={self.train.microbatch} does not divide a worker's {batch // workers}"
            )
        if self.model.whole_batch and self.images_per_pass() < batch // workers:
            raise ValueError(
                f"train.microbatch={self.train.microbatch} would change the results of a model of kind"
                f" {self.model.kind!r}, which normalises over the whole batch: use train.microbatch=none"
            )
        if self.lane_count() % workers:
            raise ValueError(
                f"data.lanes={self.lane_count()} does not divide over workers={workers}: begin the run"
                f" with data.lanes a multiple of the workers and a divisor of data.batch_size={batch}"
            )
        self.task.check(self.model)
        names, freeze = [*param_shapes(self.model)] if self.train.freeze else [], self.train.freeze
        for prefix in (each for each in freeze if not any(begins_so(name, [each]) for name in names)):
            raise ValueError(f"train.freeze: no tensor of the model has a name that begins with {prefix!r}")
        if freeze and all(begins_so(name, freeze) for name in names):
            raise ValueError(f"train.freeze={list(freeze)} freezes all tensors: leave some to train")
        for member in self.data.augment:
            member.check(task=self.task.kind, classifies=self.task.classifies, images=self.images_per_pass())
        mixing = " and ".join(member.kind for member in at(self.data.augment, "batch"))
        if mixing and self.data.repeats > 1 and not self.data.repeats <= self.lane_count() < batch:
            raise ValueError(
                f"data.repeats={self.data.repeats} with {mixing}: data.lanes={self.lane_count()} would mix"
                f" images with themselves; use a divisor of data.batch_size={batch} from"
                f" {self.data.repeats} to {batch // 2}"
            )
        if self.images_per_pass() % (group := self.model.images_per_group):
            raise ValueError(
                f"model.moe.images_per_group={group} does not divide the {self.images_per_pass()} images of"
                f" one forward pass (train.microbatch, else data.batch_size={batch} / workers={workers})"
            )
        if self.scale.ep != "auto":
            dp = workers // self.scale.ep
            check_layout(self.model, dp=dp, ep=self.scale.ep, dp_replicate=self.scale.dp_replicate)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return unpickled, (shipped(self.plugins), type(self)), self.__dict__

    @property
    def inline(self) -> bool:
        """Whether the process that starts the run is its only worker, and reads its data itself. A GPU waits
        for the decoding of one process, so its images are decoded on the CPUs of the cluster.
        """
        return self.scale.workers == 1 and not self.scale.use_gpu

    def ep(self) -> int:
        """Returns the number of workers that share one set of experts.

        Raises:
            UsageError: if `scale.ep` is still ``auto``.
        """
        if self.scale.ep == "auto":
            raise UsageError("scale.ep=auto: `orchestrator.estimate.resolve_auto(run)` chooses a number")
        return self.scale.ep

    def lane_count(self) -> int:
        """Returns `data.lanes`, or the largest multiple of the workers that divides the batch and is at most
        16, an eighth of the batch or the workers, whichever is most.
        """
        batch, workers = self.data.batch_size, self.scale.workers
        limit = max(16, batch // 8, workers)
        return self.data.lanes or max(n for n in range(workers, limit + 1, workers) if batch % n == 0)

    def save_every(self) -> int:
        """Returns the steps between two checkpoints."""
        return self.checkpoint.every or -(-self.train.steps // 10)

    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """Returns the data type of matmuls and activations."""
        if self.train.compute_dtype == "auto":
            return "bfloat16" if self.scale.use_gpu else "float32"
        return self.train.compute_dtype

    def pixels(self) -> int:
        """Returns the bytes of a decoded image, at least 1."""
        return max(1, 3 * self.model.image_side() ** 2)

    def images_per_pass(self) -> int:
        """Returns the images of one worker's forward pass."""
        return self.train.microbatch or self.data.batch_size // self.scale.workers
