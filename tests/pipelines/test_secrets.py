"""Credentials stand in no file that a job writes and on no terminal; in a config they are refused."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

import jobs
from gcs_emulator import Emulator, Request
from gcs_files import download, upload
from gcs_jobs import BUDGET
from pipelines.config import load_config
from pipelines.errors import UsageError
from services import Call, serving

ENVIRONMENT = {"MODEL_PASSWORD": "pa55word/1", "MODEL_SIGNATURE": "5ignature+2=", "MODEL_KEY": "k3y-of-the-model"}
TOKEN = "ya29.t0ken-of-the-account"
CONFIG = """
steps:
  - use: http.post
    url: {url}?X-Goog-Signature=${{MODEL_SIGNATURE}}
    headers: {{x-api-key: "${{MODEL_KEY}}", authorization: "Bearer ${{MODEL_PASSWORD}}"}}
    retries: 0
"""


@contextlib.contextmanager
def giving_tokens() -> Iterator[str]:
    """The server where a service account gets its tokens; yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/token"
        server.shutdown()


def write_key(path: Path, token_url: str) -> list[str]:
    """Writes the key file of a service account, and returns the lines of its secret."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    fields = {"type": "service_account", "client_email": "sa@p.iam", "private_key": key.decode(), "project_id": "p"}
    path.write_text(json.dumps({**fields, "private_key_id": "1d-of-the-key", "token_uri": token_url}))
    return [*key.decode().splitlines()[1:-1], "1d-of-the-key"]


def refuse_some(call: Call) -> None:
    """Refuses records that begin so, and sends everything back that came with the call."""
    if call.body.startswith(b"bad"):
        call.reply(400, json.dumps({"path": call.path, **call.headers}).encode())
    else:
        call.reply(200, call.body)


@pytest.mark.parametrize("basic", [False, True], ids=["bearer", "basic"])
def test_a_job_with_a_key_and_a_token_writes_no_secret(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, basic: bool
) -> None:
    records = [b"good-%d" % number for number in range(50)] + [b"bad-%d" % number for number in range(5)]
    jobs.write_tfrecord(tmp_path / "in/f", records)
    bucket = emulator.new_bucket()
    upload(tmp_path / "in", f"{bucket}/raw")
    used: list[str] = []

    def note(request: Request) -> None:
        used.append(request.headers["Authorization"])
        request.reply(request.forward())

    emulator.fail("POST /upload", *[note] * 3)
    with giving_tokens() as token_url, serving() as service, monkeypatch.context() as environment:
        service.answer = refuse_some
        secrets = [*write_key(tmp_path / "key.json", token_url), TOKEN, *ENVIRONMENT.values()]
        config = CONFIG.format(url=service.url)
        if basic:
            config = config.replace('authorization: "Bearer ${MODEL_PASSWORD}"', "").replace(
                "http://", "http://me:${MODEL_KEY}@"
            )
            secrets.append(base64.b64encode(b"me:" + ENVIRONMENT["MODEL_KEY"].encode()).decode())
        (tmp_path / "job.yaml").write_text(config)
        environment.delenv("STORAGE_EMULATOR_HOST")  # Which would do without credentials.
        given = {"API_ENDPOINT_OVERRIDE": emulator.url, "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}
        arguments = ["convert", "--config", "job.yaml", "--input", f"{bucket}/raw/*", "--output", f"{bucket}/out"]
        ended = jobs.spawn([*arguments, *BUDGET], tmp_path, {**given, **ENVIRONMENT})
        verified = jobs.spawn(["verify", f"{bucket}/out"], tmp_path, given)
    assert (ended.returncode, verified.returncode) == (0, 0), ended.stderr + verified.stderr
    assert used == [f"Bearer {TOKEN}"] * 3
    found = download(f"{bucket}/out", tmp_path / "found")
    assert {letter["reason"] for letter in jobs.dead_letters(found)} == {"http_400"}
    said = "".join((ended.stdout, ended.stderr, verified.stdout, verified.stderr)).encode()
    places = {name: (found / name).read_bytes() for name in jobs.tree(found)} | {"the terminal": said}
    assert {"_gristmill/config.json", "_gristmill/plan.jsonl", "_gristmill/job.log"} < set(places)
    assert [(name, secret) for name, data in places.items() for secret in secrets if secret.encode() in data] == []
    assert b"${MODEL_KEY}" in places["_gristmill/config.json"]  # The name stands there, not the value.


class TestConfig:
    @pytest.mark.parametrize(
        ("step", "where"),
        [
            ({"url": "http://a/", "headers": {"Authorization": "Bearer s3cret"}}, "headers.Authorization"),
            ({"url": "http://a/", "headers": {"x-api-key": "s3cret"}}, "headers.x-api-key"),
            ({"url": "http://a/", "headers": {"X-Goog-Signature": "s3cret"}}, "headers.X-Goog-Signature"),
            ({"url": "https://me:s3cret@a/"}, "url"),
            ({"url": "https://a/x?X-Amz-Signature=s3cret&b=1"}, "url"),
            ({"url": "https://a/x?key=s3cret"}, "url"),
            ({"env": {"HF_TOKEN": "s3cret"}}, "env.HF_TOKEN"),
            ({"api_key": "s3cret"}, "api_key"),
            ({"token": "s3cret"}, "token"),
            ({"password": "s3cret"}, "password"),
            ({"service": [{"client_secret": "s3cret"}]}, "service[0].client_secret"),
        ],
    )
    def test_a_credential_of_a_step_is_refused_by_its_key_and_not_shown(self, step: dict[str, Any], where: str) -> None:
        with pytest.raises(UsageError) as caught:
            load_config(None, [("steps", [{"use": "http.post", **step}])])
        assert str(caught.value).startswith(f"steps[0].{where}: this looks like a credential")
        assert "s3cret" not in str(caught.value)

    def test_one_of_beams_is_refused_as_well(self) -> None:
        with pytest.raises(UsageError, match=r"beam\.s3_secret_access_key: this looks like a credential"):
            load_config(None, [("beam.s3_secret_access_key", "s3cret")])

    @pytest.mark.parametrize(
        "step",
        [
            {"url": "https://me:${PASSWORD}@a/x?key=${KEY}&n=1", "headers": {"authorization": "Bearer ${TOKEN}"}},
            {"headers": {"content-type": "image/png", "x-max-tokens": "100", "x-job": "7"}},
            {"eos_token": "</s>", "max_tokens": 5, "token_column": "text", "keys": ["a"], "key": "text"},
            {"url": "http://a:8080/x?size=2", "text": "see https://b/c@d", "password": "", "token": 7},
        ],
    )
    def test_names_of_variables_and_other_values_pass(self, step: dict[str, Any]) -> None:
        assert load_config(None, [("steps", [{"use": "http.post", **step}])]).steps == [{"use": "http.post", **step}]

    def test_the_command_ends_before_anything_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        jobs.write_tfrecord(tmp_path / "in/f", [b"x"])
        step = "http.post,url=https://me:s3cret@localhost:1/"
        assert jobs.convert("--input", tmp_path / "in", "--output", tmp_path / "out", "--step", step) == 2
        assert "s3cret" not in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
