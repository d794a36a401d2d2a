"""The command line: what every call is, and nothing that takes time to import."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.errors import FAILED, USAGE, UsageError
from pipelines.handlers import handled
from pipelines.imports import without_collecting
from pipelines.paths import expand_flag, expand_home
from pipelines.proxies import direct_to_this_machine
from pipelines.streams import begin_in_utf8, close_output, flush_streams, open_streams

if TYPE_CHECKING:
    from pipelines.supervisor import JobProcess

_DESCRIPTION = """\
Converts and cleans training corpora into sharded ArrayRecord.

  gristmill convert --input 'raw/*.tfrecord' --output out/     the main job; the same command resumes it
  gristmill convert --config configs/tfrecord.yaml ...         keys in a file; --set write.shards=64 changes one
  gristmill convert --append ...                               converts only what is new since
  gristmill replay out/                                        runs the dead letters again
  gristmill status out/                                        how far it is; gristmill cancel out/ stops it
  gristmill verify out/                                        reads everything back and recounts
  gristmill report out/                                        what became of every record
  gristmill inspect FILE ...                                   what is in a TFRecord or ArrayRecord file
"""

_EXIT_STATUS = """\
exit status: 0 done; 1 could not finish, the same command resumes; 2 wrong usage, found before any work;
3 over the budget of dead letters, or nothing written; 4 the books do not balance, or verify found a difference
"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        "gristmill",
        description=_DESCRIPTION,
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_convert(commands)
    _add_replay(commands)
    _add_status(commands)
    verify = _add(commands, "verify", "read every output record and the ledgers back and recount everything")
    verify.epilog = "A flag that is not listed goes to Apache Beam, and then a Beam pipeline reads the records."
    verify.add_argument("output", metavar="DIR", help="output directory of a convert job")
    _add_detach(verify)
    report = _add(commands, "report", "rebuild the report of a job from its ledgers and print it")
    report.add_argument("output", metavar="DIR", help="output directory of a convert job")
    report.add_argument("--json", action="store_true", help="print report.json instead of the summary")
    inspect = _add(commands, "inspect", "say what is in TFRecord and ArrayRecord files")
    inspect.add_argument("files", metavar="FILE", nargs="+", help="files to look into")
    inspect.add_argument("--records", type=int, default=3, metavar="N", help="records to show (default 3)")
    inspect.add_argument("--json", action="store_true", help="print one JSON object a file")
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    command.add_argument(
        "--billing-project",
        metavar="PROJECT",
        help="Google Cloud project that pays for requests to gs://, where a bucket's owner does not (requester pays)",
    )
    return command


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = _add(commands, "convert", "convert a corpus into sharded ArrayRecord")
    convert.epilog = "A flag that is not listed goes to Apache Beam if Beam has an option of exactly that name."
    files = convert.add_argument_group("what and where")
    files.add_argument(
        "--input",
        action="append",
        nargs="+",
        metavar="GLOB",
        help="file, folder, pattern (quoted), or @FILE with one name or pattern a line; may be repeated",
    )
    files.add_argument("--output", metavar="DIR", help="output directory")
    files.add_argument("--config", metavar="FILE", help="YAML config; see configs/reference.yaml")
    files.add_argument("--format", metavar="NAME", help="tfrecord, array_record, files or auto (default)")
    files.add_argument("--name", help="corpus name in file names (default corpus)")
    files.add_argument("--split", help="split name in file names (default train)")
    files.add_argument(
        "--shards",
        metavar="N",
        help="auto (default), match (one an input), a number, or a size such as 256MiB",
    )
    clean = convert.add_argument_group("cleaning")
    clean.add_argument(
        "--step",
        action="append",
        metavar="NAME[,KEY=VALUE...]",
        help="step of the library, or module:function of your own; may be repeated, in order",
    )
    clean.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        dest="changes",
        help="change one config key, such as write.group_size=1",
    )
    run = convert.add_argument_group("running")
    run.add_argument(
        "--dry-run", action="store_true", help="print plan, prediction and what the steps do; write nothing"
    )
    run.add_argument("--limit", type=int, metavar="N", help="convert only the first N records")
    run.add_argument(
        "--append", action="store_true", help="convert only what is new since, as shards with names of their own"
    )
    run.add_argument(
        "--resume-anyway", action="store_true", help="keep committed shards though steps or write keys changed"
    )
    run.add_argument(
        "--accept-touched",
        action="store_true",
        help="take inputs with a new time and the size that they had as what they were, without reading them again",
    )
    run.add_argument("--overwrite", action="store_true", help="replace another job's output once the new set is whole")
    _add_detach(run)
    run.add_argument(
        "--workers",
        metavar="N",
        help="local worker processes; 0 works in this process, auto (default) picks what is worth starting",
    )


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = _add(commands, "status", "say how far a job is, and who runs it")
    status.add_argument("output", metavar="DIR", help="output directory of a convert job")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    cancel = _add(commands, "cancel", "stop a running job; the same command goes on from what is committed")
    cancel.add_argument("output", metavar="DIR", help="output directory of a convert job")


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = _add(commands, "replay", "run the dead letters of a job again; what passes now becomes new shards")
    replay.epilog = "A flag that is not listed goes to Apache Beam if Beam has an option of exactly that name."
    replay.add_argument("output", metavar="DIR", help="output directory of a convert job")
    which = replay.add_argument_group("which dead letters (default: all)")
    which.add_argument("--reason", action="append", nargs="+", metavar="CODE", help="those with one of these reasons")
    which.add_argument(
        "--step", action="append", nargs="+", metavar="NAME", help="those of one of these steps; read is the reader"
    )
    which.add_argument(
        "--source", action="append", nargs="+", metavar="GLOB", help="those of inputs of these names (quote patterns)"
    )
    how = replay.add_argument_group("with what")
    how.add_argument("--config", metavar="FILE", help="take the steps from this YAML config (default: the job's own)")
    how.add_argument("--set", action="append", metavar="KEY=VALUE", dest="changes", help="change one config key")
    _add_detach(how)
    how.add_argument("--workers", metavar="N", help="local worker processes, as in convert")


def _add_detach(group: argparse._ActionsContainer) -> None:
    group.add_argument("--detach", action="store_true", help="on a runner elsewhere: end once the job is submitted")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    if argv is None:
        begin_in_utf8()
    open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args, unknown = parser.parse_known_args(arguments)
    if args.version:
        from transforms.report import versions

        print(f"gristmill {versions()['gristmill']}")
        return 0
    if args.command is None:
        parser.print_help()
        return USAGE
    try:
        _name_payer(args.billing_project or "")
        # As Ctrl-C, so that what was begun is ended in order; a job sets handlers of its own.
        with handled((signal.SIGTERM,), signal.default_int_handler, only_default=True), direct_to_this_machine():
            status = _run(args, unknown)
    except (Exception, KeyboardInterrupt) as error:
        status = _explain(args.command, error)
    return flush_streams(status, only_prints=args.command not in _JOBS)


def _name_payer(project: str) -> None:
    from transforms.billing import check_project, pay_by

    try:
        pay_by(check_project(project))
    except ValueError as error:
        raise UsageError(f"--billing-project: {error}, got {project!r}") from error


def _explain(command: str, error: BaseException) -> int:
    """Says what ended a command, in one line, and returns the exit status; a mistake of our own keeps its traceback."""
    from transforms.job_lock import LostLockError
    from transforms.state import StateError
    from transforms.store import OutputError

    if isinstance(error, UsageError | StateError):
        print(f"gristmill {command}: {error}", file=sys.stderr)
        return USAGE
    if isinstance(error, BrokenPipeError):
        close_output()
        return FAILED
    if not isinstance(error, OutputError | OSError | KeyboardInterrupt):
        raise error
    what = "stopped" if isinstance(error, KeyboardInterrupt) else str(error)
    hope = ". Nothing is lost: the same command goes on from here." if command in _JOBS else ""
    if isinstance(error, LostLockError):
        hope = ", and has changed nothing since. See gristmill status before you start it again."
    print(f"gristmill {command}: {what}{hope}", file=sys.stderr)
    return FAILED


_JOBS = ("convert", "replay")
_TWO_PROCESSES_BYTES = 400 << 20
"""What a command and the process of its pipeline take together, with a reserve of a fifth."""


def _check_room() -> None:
    from transforms.machine import check_threads
    from transforms.store import OutputError

    problem = check_threads()
    if problem is not None:
        raise OutputError(problem)


_PATHS = {"input": "--input", "output": "output", "config": "--config", "files": "file", "source": "--source"}
"""Arguments that are paths, and their names in messages."""


def _expand_homes(args: argparse.Namespace) -> None:
    """Puts home folders in the place of `~`: the shell does so only where a word begins with it unquoted."""

    def expand(value: object, where: str) -> object:
        if isinstance(value, list):
            return [expand(inner, where) for inner in value]
        return expand_home(value, where) if isinstance(value, str) else value

    for name, where in _PATHS.items():
        if hasattr(args, name):
            setattr(args, name, expand(getattr(args, name), where))


def _run(args: argparse.Namespace, unknown: list[str]) -> int:
    _expand_homes(args)
    unknown = [expand_flag(word) for word in unknown]
    if args.command == "convert":
        return _convert(args, unknown)
    if args.command == "replay":
        return _replay(args, unknown)
    if args.command == "verify":
        from pipelines import verify
        from pipelines.signals import stop_on_signals

        _check_room()
        with stop_on_signals():
            return verify.run(args.output, unknown, detach=args.detach)
    if unknown:
        raise UsageError(f"unknown argument {unknown[0]!r}; see gristmill {args.command} --help")
    if args.command == "inspect":
        from pipelines import inspect

        _check_room()
        return inspect.run(args.files, args.records, as_json=args.json)
    if args.command == "status":
        from pipelines import status

        return status.run(args.output, as_json=args.json)
    if args.command == "cancel":
        from pipelines import cancel

        return cancel.run(args.output)
    from pipelines import report

    return report.run(args.output, as_json=args.json)


def _convert(args: argparse.Namespace, unknown: list[str]) -> int:
    """Runs convert; the process for the pipeline loads its libraries while this one loads its own and plans."""
    with contextlib.ExitStack() as ending:
        process = None if args.dry_run else _start_process(args, unknown, ending)
        with without_collecting():
            from pipelines import convert
            from pipelines.signals import stop_on_signals
        _check_room()
        with stop_on_signals():
            return convert.run(args, unknown, process)


def _replay(args: argparse.Namespace, unknown: list[str]) -> int:
    with contextlib.ExitStack() as ending:
        process = _start_process(args, unknown, ending)
        with without_collecting():
            from pipelines import replay
            from pipelines.signals import stop_on_signals
        _check_room()
        with stop_on_signals():
            return replay.run(args, unknown, process)


def _start_process(args: argparse.Namespace, unknown: list[str], ending: contextlib.ExitStack) -> JobProcess | None:
    from pipelines import local_runner
    from pipelines.supervisor import JobProcess
    from transforms.machine import available_bytes

    if args.workers == "0" or not local_runner.is_local(unknown):
        return None
    if available_bytes() < _TWO_PROCESSES_BYTES:
        return None  # Where workers are asked for all the same, one is started then.
    return ending.enter_context(JobProcess())
