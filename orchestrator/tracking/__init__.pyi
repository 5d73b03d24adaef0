from .base import (
    Follower as Follower,
    TrackerConfig as TrackerConfig,
    following as following,
    update_now as update_now,
)
from .find import check_original as check_original
from .lost import open_store as open_store
from .registry import checkpoint_of as checkpoint_of, directory_of as directory_of
from .store import Tracking as Tracking, store_uri as store_uri
from .sync import Sync as Sync
from .system import SystemMetrics as SystemMetrics
from .tensorboard import TensorBoardConfig as TensorBoardConfig
