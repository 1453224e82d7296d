"""The sentences that commands say of faults that are the user's to mend, each with its exit code and no traceback."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from codegen.plan import Refusal
from codegen.source_text import printable
from codegen.spec import SpecError


class SpecFault(click.ClickException):
    """A spec that is missing or wrong: a fault of the call, so with the exit code of click's usage errors."""

    exit_code = 2

    def show(self, file=None) -> None:
        click.echo(
            self.message, file=file, err=file is None
        )  # file, line and column stand first, where editors look for them


@contextmanager
def sentences() -> Iterator[None]:
    """Run a command's work. SpecError ends it with code 2, the other faults of a user's with code 1.

    Those are Refusal, RuntimeFailure, RuntimeError and OSError.
    """
    try:
        yield
    except (click.exceptions.Exit, click.Abort):  # click's own, which are RuntimeErrors
        raise
    except SpecError as error:
        raise SpecFault(str(error)) from None
    except Refusal as error:  # it may name a file of any spelling
        raise click.ClickException(printable(str(error))) from None
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # who read the output has gone; click ends quietly
            raise
        raise click.ClickException(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None
    except Exception as error:
        if not _is_failure_of_the_runtime(error):
            raise
        raise click.ClickException(str(error)) from None


def _is_failure_of_the_runtime(error: Exception) -> bool:
    """Is it a RuntimeFailure? It can be one only where `runtime` is loaded; to load it here would need torch."""
    errors = sys.modules.get("runtime.errors")
    return errors is not None and isinstance(error, errors.RuntimeFailure)
