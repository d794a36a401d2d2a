"""Beam's own job service in Python, with several workers a job; runs in the base environment.

    job_server.py FOLDER WORKERS SECS

Writes its port to FOLDER/port.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from apache_beam.portability.api import beam_job_api_pb2
from apache_beam.runners.portability import local_job_service
from apache_beam.runners.portability.fn_api_runner import fn_runner
from watch import watch


def main(folder: str, num_workers: str, secs: str) -> None:
    """Serves until it is killed."""

    class Job(local_job_service.BeamJob):
        """A job of the service, which by itself would start one worker."""

        def _invoke_runner(self) -> Any:
            self.set_state(beam_job_api_pb2.JobState.RUNNING)
            runner = fn_runner.FnApiRunner(provision_info=self._provision_info)
            runner._num_workers = int(num_workers)
            return runner.run_via_runner_api(self._pipeline_proto, self.pipeline_options())

    staging = Path(folder, "staging")
    staging.mkdir()
    port = local_job_service.LocalJobServicer(str(staging), beam_job_type=Job).start_grpc_server()
    Path(folder, "port.new").write_text(str(port))
    Path(folder, "port.new").rename(Path(folder, "port"))
    watch(float(secs))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
