from .codec import override as override
from .config import (
    CheckpointConfig as CheckpointConfig,
)
from .config import (
    DataConfig as DataConfig,
)
from .config import (
    EMAConfig as EMAConfig,
)
from .config import (
    FewShotConfig as FewShotConfig,
)
from .config import (
    RunConfig as RunConfig,
)
from .config import (
    ScaleConfig as ScaleConfig,
)
from .config import (
    TrainConfig as TrainConfig,
)
from .data.batch import Batch as Batch
from .data.batch import normalize as normalize
from .data.images import Transform as Transform
from .data.images import encode_png as encode_png
from .data.packing import digits as digits
from .data.samples import Sample as Sample
from .data.samples import Source as Source
from .errors import UsageError as UsageError
from .evaluation.models import load_model as load_model
from .frontier.frontier import Frontier as Frontier
from .frontier.points import Point as Point
from .optimizers import (
    AdafactorConfig as AdafactorConfig,
)
from .optimizers import (
    AdamWConfig as AdamWConfig,
)
from .optimizers import (
    LambConfig as LambConfig,
)
from .optimizers import (
    OptimizerConfig as OptimizerConfig,
)
from .optimizers import (
    SGDConfig as SGDConfig,
)
from .optimizers.base import decay_groups as decay_groups
from .plugins import load_plugins as load_plugins
from .schedules import (
    ConstantConfig as ConstantConfig,
)
from .schedules import (
    CosineConfig as CosineConfig,
)
from .schedules import (
    DeitConfig as DeitConfig,
)
from .schedules import (
    LinearConfig as LinearConfig,
)
from .schedules import (
    RsqrtConfig as RsqrtConfig,
)
from .schedules import (
    ScheduleConfig as ScheduleConfig,
)
from .sweeps.budget import Budget as Budget
from .sweeps.driver import SweepOptions as SweepOptions
from .sweeps.driver import run_sweep as run_sweep
from .sweeps.driver import train as train
from .sweeps.run import Watch as Watch
from .sweeps.scales import Scale as Scale
from .sweeps.scheduler import FrontierScheduler as FrontierScheduler
from .sweeps.search import OptunaSearch as OptunaSearch
from .sweeps.search import SearchOptions as SearchOptions
from .sweeps.stopping import EarlyStopping as EarlyStopping
from .sweeps.sweep import Sweep as Sweep
from .sweeps.sweep import Trunk as Trunk
from .sweeps.tuning import Tuning as Tuning
from .sweeps.tuning import tune as tune
from .tasks import ClassificationConfig as ClassificationConfig
from .tasks import TaskConfig as TaskConfig
from .tasks.base import Heads as Heads
from .tracking.base import Follower as Follower
from .tracking.base import TrackerConfig as TrackerConfig
from .tracking.projection import Projection as Projection
from .tracking.tensorboard import TensorBoardConfig as TensorBoardConfig
from .training.run_directory import Result as Result
