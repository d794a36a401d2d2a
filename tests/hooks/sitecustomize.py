"""Put on PYTHONPATH by tests: stops a process at a named moment of a job, so that it can be killed there.

GRISTMILL_TEST_STOP is "MOMENT TEXT FILE": at the first store call of that moment whose name holds TEXT, FILE is created
and the process sleeps until somebody deletes it.

GRISTMILL_TEST_HOST is the name that the process takes for its host's, and GRISTMILL_TEST_BEAT the seconds between two
heartbeats of locks, by which it also judges whether others are stale.

GRISTMILL_TEST_CRASH is a text: the process aborts when its reader meets a record that holds it, as if native code
crashed.
"""

import os
import time


def _stop(file: str) -> None:
    with open(file, "w", encoding="utf-8"):
        pass
    while os.path.exists(file):
        time.sleep(0.05)


def _install(moment: str, text: str, file: str) -> None:
    from transforms.store import LocalStore

    when, _, method = moment.partition("-")
    original = getattr(LocalStore, method)

    def stopping(self: LocalStore, *arguments: object) -> object:
        if any(text in str(argument) for argument in arguments) and not os.path.exists(file):
            if when == "after":
                original(self, *arguments)
            _stop(file)
        return original(self, *arguments)

    setattr(LocalStore, method, stopping)


if os.environ.get("GRISTMILL_TEST_STOP"):
    _install(*os.environ["GRISTMILL_TEST_STOP"].split())


def _name_host(name: str) -> None:
    import socket

    socket.gethostname = lambda: name


if os.environ.get("GRISTMILL_TEST_HOST"):
    _name_host(os.environ["GRISTMILL_TEST_HOST"])


def _beat(secs: float) -> None:
    from transforms import job_lock

    job_lock._STALE_SECS = 8 * secs
    job_lock.JobLock.__init__.__defaults__ = (secs, *job_lock.JobLock.__init__.__defaults__[1:])


if os.environ.get("GRISTMILL_TEST_BEAT"):
    _beat(float(os.environ["GRISTMILL_TEST_BEAT"]))


def _crash_on(poison: bytes) -> None:
    from transforms.formats import array_record, tfrecord

    first_mismatch, read_one = tfrecord._first_mismatch, array_record._Records._read_one

    def aborting_on_records(records: list[bytes], stored: list[bytes]) -> object:
        if any(poison in record for record in records):
            os.abort()
        return first_mismatch(records, stored)

    def aborting_on_one(self: object, index: int, chunk: object, max_record_bytes: int) -> None:
        read_one(self, index, chunk, max_record_bytes)
        if chunk.records and poison in chunk.records[-1]:
            os.abort()

    tfrecord._first_mismatch = aborting_on_records
    array_record._Records._read_one = aborting_on_one


if os.environ.get("GRISTMILL_TEST_CRASH"):
    _crash_on(os.environ["GRISTMILL_TEST_CRASH"].encode())
