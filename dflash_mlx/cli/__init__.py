"""The command `dflash-mlx`: its commands, and what becomes of the errors they raise.

Nothing heavy is imported here or at the head of a command's file, so that --help is quick.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.main import get_command

from dflash_mlx import __version__
from dflash_mlx.cli import bench, calibrate, chat, console, convert, doctor, models, plan, train
from dflash_mlx.errors import DFlashError

PIPE_CLOSED = 1  # what Typer exits with when it meets a closed pipe first

app = typer.Typer(
    name="dflash-mlx",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("chat")(chat.chat)
app.command("models")(models.models)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("calibrate")(calibrate.calibrate)
app.command("convert")(convert.convert)
app.command("train")(train.train)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"dflash-mlx {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Run language models on this machine with DFlash speculative decoding."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 doctor found a problem, 2 an error of the user.

    Errors meant for users become their message on standard error; anything else is a bug and
    keeps its traceback.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _help(arguments: list[str]) -> str | None:
    """The help text that `arguments` ask for, None when they ask for none.

    Typer would import pydantic to find out that there is nothing to parse: a quarter of a second.
    """
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--help" not in before:
        return None
    group = get_command(app)
    root = typer.Context(group, info_name="dflash-mlx")
    if before[0] == "--help":
        return group.get_help(root)
    command = group.commands.get(before[0])  # type: ignore[attr-defined]
    if command is None:
        return None
    return command.get_help(typer.Context(command, info_name=before[0], parent=root))


def _run(arguments: list[str]) -> int:
    try:
        code = _command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has gone
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        if not _output_fails():
            raise
        _drop_output()
        return _refuse(f"Standard output cannot be written ({error.strerror}). Send it elsewhere.")


def _command(arguments: list[str]) -> int:
    try:
        if (text := _help(arguments or ["--help"])) is not None:
            print(text)
            return 0
        code = app(arguments or ["--help"], prog_name="dflash-mlx", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except DFlashError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        return _refuse(_with_hint(error))
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return console.INTERRUPTED


def _output_fails() -> bool:
    """Whether standard output is what an error came from: then it fails again."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Let the flush at exit not complain of a standard output that takes nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    print(f"dflash-mlx: {message}", file=sys.stderr)
    return 2


def _with_hint(error: typer.TyperException) -> str:
    """The sentence about wrong arguments, and where the right ones are listed."""
    sentence = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "dflash-mlx"
    return f"{sentence}. `{command} --help` lists what it takes."
