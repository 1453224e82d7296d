"""The failures a user of a generated package can meet. Every message is a sentence that says what to do next."""


class RuntimeFailure(Exception):
    """Base of every error raised by this package."""


class PackageError(RuntimeFailure):
    """A generated package is missing, incomplete, or of a format this runtime does not read."""


class ToolchainError(RuntimeFailure):
    """nvcc, g++ or ninja is missing, half installed, or too old; found out before anything is compiled."""


class BuildError(RuntimeFailure):
    """The compiler, or loading what it produced, failed.

    ``kept`` is the folder that holds the sources, the build file and the full log of the failed build, or None.
    """

    def __init__(self, message: str, kept=None):
        super().__init__(message)
        self.kept = kept


class ArgumentError(RuntimeFailure, TypeError):
    """A constructor argument differs from the value that was folded into the kernels."""


class CallError(RuntimeFailure, ValueError):
    """An input or a parameter has a shape, dtype or device that the kernels were not generated for."""


class UnsupportedDeviceError(RuntimeFailure):
    """No emitted target runs on the device, or none was built for it."""


class LaunchError(RuntimeFailure):
    """A launcher returned an error code."""


class PreparationError(RuntimeFailure):
    """Weights cannot be prepared: not in this package, not here, or not now."""


class GradientError(RuntimeFailure):
    """A gradient was asked for that is not generated."""
