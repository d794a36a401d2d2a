"""Google Cloud on this machine, as far as a job for Dataflow needs it beside Cloud Storage.

One server on 127.0.0.1 is the metadata server that gives credentials, and the Dataflow service. The service is reached
as the HTTP proxy for the host `dataflow.sandbox`: under such a name Beam speaks REST, and takes it for the service
itself. (Under `localhost` it would check less and stage other files.) A job does nothing by itself: it runs until a
test says how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from http_server import listening

HOST = "dataflow.sandbox"
PROJECT = "test-project"
REGION = "us-central1"
_TOKEN = "a-token-of-this-machine"
_STATES = ("UNKNOWN", "STOPPED", "RUNNING", "DONE", "FAILED", "CANCELLED")  # As the service numbers them.
_ACTIVE = ("PENDING", "RUNNING", "CANCELLING")
_FILTERS = {"2": False, "3": True, "TERMINATED": False, "ACTIVE": True}

Reply = tuple[int, Any]


@dataclasses.dataclass
class Job:
    """A job as it was submitted, and how far it is.

    Attributes:
        request: What was posted.
        id: What the service calls it.
        state: Without `JOB_STATE_`.
        messages: (importance, text) of what the service has to say.
        counters: (step, namespace, name, value) of each of the job's counters.
    """

    request: dict[str, Any]
    id: str
    state: str = "PENDING"
    messages: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    counters: list[tuple[str, str, str, int]] = dataclasses.field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        """The pipeline options that the workers get."""
        return dict(self.request["environment"]["sdkPipelineOptions"]["options"])

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.state in _ACTIVE

    def end(self, state: str, error: str = "") -> None:
        """Ends the job: DONE, FAILED or CANCELLED."""
        if error:
            self.messages.append(("ERROR", error))
        self.state = state

    def to_json(self) -> dict[str, Any]:
        """Returns what the service says of it."""
        return {
            "id": self.id,
            "name": self.request["name"],
            "type": self.request.get("type", 1),
            "clientRequestId": self.request.get("clientRequestId", ""),
            "projectId": PROJECT,
            "location": REGION,
            "currentState": f"JOB_STATE_{self.state}",
            "currentStateTime": _now(),
        }


class Cloud:
    """Answers for the metadata server and for Dataflow.

    Attributes:
        url: Where it listens.
        jobs: All jobs, in the order of their submission.
        launches: What was posted to launch Flex Templates.
        requests: (method, path) of all that Dataflow was asked.
        refusal: (status, message) that every job to submit is answered with; None to take it.
    """

    def __init__(self) -> None:
        self.url = ""
        self.jobs: list[Job] = []
        self.launches: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        self.refusal: tuple[int, str] | None = None
        self._lock = threading.Lock()

    def machine_environment(self) -> dict[str, str]:
        """Returns the variables by which a process finds its credentials, and no others than these."""
        address = self.url.removeprefix("http://")
        nowhere = {"GOOGLE_APPLICATION_CREDENTIALS": "", "CLOUDSDK_CONFIG": "/nonexistent"}
        return {"GCE_METADATA_HOST": address, "GCE_METADATA_IP": address, **nowhere}

    def driver_environment(self) -> dict[str, str]:
        """Returns the variables by which a process finds credentials and the service."""
        proxies = {"HTTP_PROXY": self.url, "NO_PROXY": "127.0.0.1,localhost"}
        proxies.update({name.lower(): value for name, value in proxies.items()})
        return {**self.machine_environment(), **proxies}

    def answer(self, method: str, url: str, token: str | None, body: bytes) -> Reply:
        """Returns status and body of the answer to a request; a text is sent as it is, all else as JSON."""
        parts = urllib.parse.urlsplit(url)
        path = urllib.parse.unquote(parts.path)
        if parts.netloc != HOST:
            return self._metadata(path)
        self.requests.append((method, path))
        if token != f"Bearer {_TOKEN}":
            return _error(401, "no token of this machine's")
        query = dict(urllib.parse.parse_qsl(parts.query))
        for verb, pattern, handle in _ROUTES:
            found = re.fullmatch(pattern, path)
            if verb == method and found:
                with self._lock:
                    return handle(self, found.groupdict(), query, json.loads(body or b"{}"))
        return _error(404, f"no such method: {method} {path}")

    # The metadata server.

    def _metadata(self, path: str) -> Reply:
        account = {
            "aliases": ["default"],
            "email": f"workers@{PROJECT}.iam.gserviceaccount.com",
            "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
        }
        token = {"access_token": _TOKEN, "expires_in": 3600, "token_type": "Bearer"}
        known: dict[str, Any] = {
            "/": "computeMetadata/",
            "/computeMetadata/v1/project/project-id": PROJECT,
            "/computeMetadata/v1/universe/universe-domain": "googleapis.com",
        }
        found = known.get(path)
        if found is None and "/service-accounts/" in path:
            found = token if path.endswith("/token") else account
        return (404, "not found") if found is None else (200, found)

    # The service.

    def _create(self, names: dict[str, str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        if self.refusal is not None:
            return _error(*self.refusal)
        for job in self.jobs:  # Of one name there is one active job, which is what a second request is told of.
            if job.is_active and job.request["name"] == body["name"]:
                return 200, job.to_json()
        return 200, self._add(body).to_json()

    def _add(self, request: dict[str, Any]) -> Job:
        self.jobs.append(Job(request, f"{time.strftime('%Y-%m-%d_%H_%M_%S')}-{1000 + len(self.jobs)}"))
        return self.jobs[-1]

    def _list(self, names: dict[str, str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        active = _FILTERS.get(query.get("filter", ""))
        found = [job for job in self.jobs if query.get("name") in (None, job.request["name"])]
        return 200, {"jobs": [job.to_json() for job in found if active in (None, job.is_active)]}

    def _find(self, names: dict[str, str]) -> Job | None:
        return next((job for job in self.jobs if job.id == names["job"]), None)

    def _get(self, names: dict[str, str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        job = self._find(names)
        if job is None:
            return _error(404, f"no job {names['job']}")
        seen = job.to_json()
        job.state = {"PENDING": "RUNNING", "CANCELLING": "CANCELLED"}.get(job.state, job.state)
        return 200, seen

    def _update(self, names: dict[str, str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        job = self._find(names)
        if job is None:
            return _error(404, f"no job {names['job']}")
        asked = body.get("requestedState", 0)
        state = _STATES[asked] if isinstance(asked, int) else asked.removeprefix("JOB_STATE_")
        if state != "CANCELLED":
            return _error(400, f"a job cannot be made {state}")
        if job.is_active:
            job.state = "CANCELLING"
        return 200, job.to_json()

    def _messages(self, names: dict[str, str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        job = self._find(names)
        messages = [
            {"id": f"m{number}", "time": _now(), "messageText": text, "messageImportance": f"JOB_MESSAGE_{importance}"}
            for number, (importance, text) in enumerate(job.messages if job else [])
        ]
        return 200, {"jobMessages": messages}

    def _metrics(self, names: dict[str, str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        job = self._find(names)
        metrics = [
            {
                "name": {"origin": "user", "name": name, "context": {"step": step, "namespace": namespace, **attempt}},
                "scalar": value,
                "updateTime": _now(),
            }
            for step, namespace, name, value in (job.counters if job else [])
            for attempt in ({}, {"tentative": "true"})  # Beam wants both of each.
        ]
        return 200, {"metricTime": _now(), "metrics": metrics}

    def _launch(self, names: dict[str, str], query: dict[str, str], body: dict[str, Any]) -> Reply:
        self.launches.append(body)
        return 200, {"job": self._add({"name": body["launchParameter"]["jobName"]}).to_json()}


_PLACE = rf"/v1b3/projects/{PROJECT}(?:/locations/{REGION})?"
_JOB = rf"{_PLACE}/jobs/(?P<job>[^/:]+)"
_ROUTES: list[tuple[str, str, Callable[..., Reply]]] = [
    ("POST", f"{_PLACE}/jobs", Cloud._create),
    ("GET", f"{_PLACE}/jobs(?::aggregated)?", Cloud._list),
    ("GET", _JOB, Cloud._get),
    ("PUT", _JOB, Cloud._update),
    ("GET", f"{_JOB}/messages", Cloud._messages),
    ("GET", f"{_JOB}/metrics", Cloud._metrics),
    ("POST", f"{_PLACE}/flexTemplates:launch", Cloud._launch),
]


def _error(code: int, message: str) -> Reply:
    return code, {"error": {"code": code, "message": message}}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())


@contextlib.contextmanager
def running() -> Iterator[Cloud]:
    """Runs the server."""
    cloud = Cloud()

    def handle(handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        status, reply = cloud.answer(handler.command, handler.path, handler.headers.get("Authorization"), body)
        data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "text/plain" if isinstance(reply, str) else "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("Metadata-Flavor", "Google")
        handler.end_headers()
        handler.wfile.write(data)

    with listening(handle) as cloud.url:
        yield cloud
