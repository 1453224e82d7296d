"""What the commands say of faults that are the user's to mend: a sentence and an exit code, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from codegen.plan import Refusal
from codegen.spec import SpecError
from runtime import RuntimeFailure


class SpecFault(click.ClickException):
    """A spec that is missing or wrong: a fault of the call, so with the exit code of click's usage errors."""

    exit_code = 2

    def show(self, file=None) -> None:
        click.echo(self.message, file=file, err=file is None)  # as make generate prints it: file, line, column


@contextmanager
def sentences() -> Iterator[None]:
    """For a command's work: SpecError ends it with code 2, Refusal, RuntimeFailure and RuntimeError with code 1."""
    try:
        yield
    except SpecError as error:
        raise SpecFault(str(error)) from None
    except (Refusal, RuntimeFailure, RuntimeError) as error:
        raise click.ClickException(str(error)) from None
