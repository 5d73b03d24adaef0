from .codec import override as override
from .config import (
    CheckpointConfig as CheckpointConfig,
    DataConfig as DataConfig,
    EMAConfig as EMAConfig,
    FewShotConfig as FewShotConfig,
    RunConfig as RunConfig,
    ScaleConfig as ScaleConfig,
    TrainConfig as TrainConfig,
)
from .costs import Cost as Cost
from .data.augment import (
    AugmentationConfig as AugmentationConfig,
    ColorJitterConfig as ColorJitterConfig,
    CropConfig as CropConfig,
    CropFlipConfig as CropFlipConfig,
    CutMixConfig as CutMixConfig,
    FlipConfig as FlipConfig,
    InceptionConfig as InceptionConfig,
    MixupConfig as MixupConfig,
    RandAugmentConfig as RandAugmentConfig,
    RandomErasingConfig as RandomErasingConfig,
    ShiftConfig as ShiftConfig,
    ThreeAugmentConfig as ThreeAugmentConfig,
)
from .data.batch import Batch as Batch, normalize as normalize
from .data.images import Transform as Transform, encode_png as encode_png
from .errors import UsageError as UsageError
from .evaluation.models import load_model as load_model
from .frontier.frontier import Frontier as Frontier
from .frontier.points import Point as Point
from .inference.measure import measure_sweep as measure_sweep
from .optimizers import (
    AdafactorConfig as AdafactorConfig,
    AdamWConfig as AdamWConfig,
    LambConfig as LambConfig,
    OptimizerConfig as OptimizerConfig,
    SGDConfig as SGDConfig,
)
from .optimizers.base import decay_groups as decay_groups
from .packing.pack import digits as digits
from .packing.samples import Sample as Sample, Source as Source
from .plugins import load_plugins as load_plugins
from .runs.run_directory import Result as Result
from .schedules import (
    ConstantConfig as ConstantConfig,
    CosineConfig as CosineConfig,
    DeitConfig as DeitConfig,
    LinearConfig as LinearConfig,
    RsqrtConfig as RsqrtConfig,
    ScheduleConfig as ScheduleConfig,
)
from .sweeps.budget import Budget as Budget
from .sweeps.build import load_frontier as load_frontier
from .sweeps.driver import SweepOptions as SweepOptions, run_sweep as run_sweep
from .sweeps.publish import write_formats as write_formats
from .sweeps.queue import Job as Job, Policy as Policy, TrialState as TrialState
from .sweeps.run import Watch as Watch
from .sweeps.scales import Scale as Scale
from .sweeps.scheduler import FrontierScheduler as FrontierScheduler
from .sweeps.search import OptunaSearch as OptunaSearch, SearchOptions as SearchOptions
from .sweeps.stopping import EarlyStopping as EarlyStopping
from .sweeps.sweep import Sweep as Sweep, Trunk as Trunk
from .sweeps.tuning import Tuning as Tuning, tune as tune
from .tasks import ClassificationConfig as ClassificationConfig, TaskConfig as TaskConfig
from .tasks.base import Heads as Heads
from .tracking.base import Follower as Follower
from .tracking.projection import Projection as Projection
from .tracking.tensorboard import TensorBoardConfig as TensorBoardConfig, TrackerConfig as TrackerConfig
from .training.train import train as train
