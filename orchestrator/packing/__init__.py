"""Sources, and packing what they list. To add a source, write its file and import its config here."""

from orchestrator.packing.base import FilesConfig, SourceConfig, open_source, source_of
from orchestrator.packing.csv_files import CsvConfig
from orchestrator.packing.digits import ClutteredDigitsConfig, DigitsCaptionsConfig, DigitsConfig
from orchestrator.packing.folders import FolderConfig
from orchestrator.packing.functions import FunctionConfig
from orchestrator.packing.litdata import LitDataConfig
from orchestrator.packing.mds import MDSConfig
from orchestrator.packing.parquet import ParquetConfig
from orchestrator.packing.tars import WebDatasetConfig
from orchestrator.packing.torchvision_sets import TorchvisionConfig

__all__ = [
    "ClutteredDigitsConfig",
    "CsvConfig",
    "DigitsCaptionsConfig",
    "DigitsConfig",
    "FilesConfig",
    "FolderConfig",
    "FunctionConfig",
    "LitDataConfig",
    "MDSConfig",
    "ParquetConfig",
    "SourceConfig",
    "TorchvisionConfig",
    "WebDatasetConfig",
    "open_source",
    "source_of",
]
