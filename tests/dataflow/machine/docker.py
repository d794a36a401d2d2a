"""The `docker` command as far as Beam's runner needs it. A container is a process in a folder of its own.

Needs the variable CONTAINERS, the folder of them all. Runs in any python, without a library.

    docker run -d ... IMAGE --id=... --provision_endpoint=...    starts one and prints its name
    docker inspect -f ... NAME                                   running or exited
    docker container logs [--tail N] NAME
    docker kill NAME
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

BOOT = Path(__file__).with_name("boot.py")


def main(words: list[str]) -> int:
    """Carries one command out and returns its exit status."""
    place = Path(os.environ["CONTAINERS"], words[-1])
    if words[0] == "run":
        print(_run(words))
    elif words[0] == "supervise":
        _supervise(Path(words[1]), words[2:])
    elif words[0] == "inspect":
        print("exited" if (place / "exit_status").exists() else "running")
    elif words[0] == "container":
        print("\n".join((place / "log").read_text(errors="replace").splitlines()[-20:]))
    elif words[0] == "kill":
        kill(place)
    else:
        return 1  # There is nothing to pull.
    return 0


def _run(words: list[str]) -> str:
    folder = Path(os.environ["CONTAINERS"])
    place = folder / f"c{len(list(folder.iterdir()))}-{os.getpid()}"
    place.mkdir()
    options = [word for word in words if (word.startswith("--") and "_endpoint=" in word) or word.startswith("--id=")]
    command = [sys.executable, "-I", __file__, "supervise", str(place), *options]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    (place / "group").write_text(str(process.pid))
    return place.name


def _supervise(place: Path, options: list[str]) -> None:
    """Runs the boot program and writes down how it ended, as it cannot do itself."""
    with (place / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-I", BOOT, *options], cwd=place, stdout=log, stderr=log)
        (place / "pid").write_text(str(process.pid))
        _end(place, str(process.wait()))


def _end(place: Path, status: str) -> None:
    if not (place / "exit_status").exists():
        (place / "exit_status.new").write_text(status)
        (place / "exit_status.new").rename(place / "exit_status")


def kill(place: Path) -> None:
    """Ends a container with all its processes."""
    if not (place / "exit_status").exists() and (place / "group").exists():
        _end(place, "killed")
        os.killpg(int((place / "group").read_text()), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
