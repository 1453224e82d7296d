"""The command `fsk` in this process."""

from click.testing import CliRunner, Result

from fixed_shape_kernels.cli import main


def fsk(*arguments) -> Result:
    """What `fsk ARGUMENTS` printed, its exit code, and what it raised that was no SystemExit."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def words(*arguments) -> str:
    """What it printed, in one line: a terminal's width breaks no sentence."""
    return " ".join(fsk(*arguments).output.split())
