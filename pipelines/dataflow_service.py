"""Dataflow's own view of a job: whether it runs, and how to end it. The client is imported only where it is asked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pipelines.dataflow import RUNNER

T = TypeVar("T")
_TIMEOUT_SECS = 20.0
_ENDED = (None, "DONE", "FAILED", "CANCELLED", "UPDATED", "DRAINED", "STOPPED")


class Service:
    """Dataflow's own view of a job.

    Args:
        job: What `describe_job` gave, with "id" once there is one.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._place = {"project_id": job["project"], "location": job["region"]}

    def state(self) -> str | None:
        """Returns the job's state such as RUNNING, DONE or FAILED; None when there is no such job.

        Raises:
            OSError: The service cannot be asked.
        """
        found = self._find()
        return None if found is None else found.current_state.name.removeprefix("JOB_STATE_")

    def is_running(self) -> bool:
        """Whether the job has not come to its end.

        Raises:
            OSError: The service cannot be asked.
        """
        return self.state() not in _ENDED

    def cancel(self) -> bool:
        """Asks for the job's end; False when there is no such job.

        Raises:
            OSError: The service cannot be asked, or refuses.
        """
        from google.cloud import dataflow_v1beta3 as api

        found = self._find()
        if found is None:
            return False
        wanted = api.Job(requested_state=api.JobState.JOB_STATE_CANCELLED)
        request = api.UpdateJobRequest(job_id=found.id, job=wanted, **self._place)
        _ask(lambda: self._client().update_job(request, timeout=_TIMEOUT_SECS))
        return True

    def _find(self) -> Any:
        """Returns the job, by its number or, where the driver died before it could note it, by its name."""
        from google.cloud import dataflow_v1beta3 as api

        if self._job.get("id"):
            by_id = api.GetJobRequest(job_id=self._job["id"], **self._place)
            return _ask(lambda: self._client().get_job(by_id, timeout=_TIMEOUT_SECS))
        active = api.ListJobsRequest(filter=api.ListJobsRequest.Filter.ACTIVE, **self._place)
        jobs = _ask(lambda: list(self._client().list_jobs(active, timeout=_TIMEOUT_SECS)))
        return next((job for job in jobs or [] if job.name == self._job["name"]), None)

    def _client(self) -> Any:
        from google.cloud import dataflow_v1beta3 as api

        from transforms.gcs import has_credentials

        if not has_credentials():
            raise PermissionError("there are no credentials for Google Cloud")
        endpoint = str(self._job.get("dataflow_endpoint") or "")
        plain = endpoint if "sandbox" in endpoint or "localhost" in endpoint else re.sub("^https?://", "", endpoint)
        options = {"api_endpoint": plain.rstrip("/")} if endpoint else None
        return api.JobsV1Beta3Client(client_options=options, transport="rest")


def _ask(call: Callable[[], T]) -> T | None:
    """Returns what a call gives, None when there is no such thing.

    Raises:
        OSError: The service cannot be asked, or refuses.
    """
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    try:
        return call()
    except exceptions.NotFound:
        return None
    except (exceptions.GoogleAPIError, GoogleAuthError) as error:
        raise OSError(f"Dataflow: {error}") from error


@dataclasses.dataclass(frozen=True)
class State:
    """What a service says of a job.

    Attributes:
        text: In words.
        is_known: Whether the service could be asked.
        has_ended: Whether the job has come to its end.
    """

    text: str
    is_known: bool = False
    has_ended: bool = False


def describe_state(job: dict[str, Any]) -> State | None:
    """Asks the service about the job that holds a lock; None for runners that have none."""
    if job.get("runner") != RUNNER:
        return None
    try:
        state = Service(job).state()
    except (OSError, KeyError) as error:
        return State(f"cannot be asked: {error}")
    return State(state or "there is no such job", is_known=True, has_ended=state in _ENDED)


def is_running(job: dict[str, Any]) -> bool | None:
    """Whether the job that holds a lock still runs; None when that cannot be found out."""
    state = describe_state(job)
    return not state.has_ended if state is not None and state.is_known else None
