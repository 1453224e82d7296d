"""Compiles, caches, loads and runs generated packages: sources -> ``ModelNew``.

Importing this package compiles nothing, writes nothing and does not initialise CUDA.
"""

from .errors import (
    ArgumentError,
    BuildError,
    CallError,
    GradientError,
    LaunchError,
    PackageError,
    PreparationError,
    RuntimeFailure,
    ToolchainError,
    UnsupportedDeviceError,
)
from .module import GeneratedModule
from .package import Package

__all__ = [
    "ArgumentError",
    "BuildError",
    "CallError",
    "GeneratedModule",
    "GradientError",
    "LaunchError",
    "Package",
    "PackageError",
    "PreparationError",
    "RuntimeFailure",
    "ToolchainError",
    "UnsupportedDeviceError",
]
