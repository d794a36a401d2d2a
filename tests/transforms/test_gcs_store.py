"""What Google Cloud Storage adds to the contract of a store: lost answers, races, sessions, spools, credentials."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

import gcs_emulator
import jobs
from fakes import run_together
from gcs_emulator import Emulator
from transforms import gcs
from transforms.gcs_store import CHUNK_BYTES, GcsStore
from transforms.spool import SpoolFile, delete_left_over
from transforms.store import OutputError, open_store


@pytest.fixture
def store(emulator: Emulator) -> GcsStore:
    return GcsStore(emulator.new_bucket() + "/out")


def content(store: GcsStore, name: str) -> bytes | None:
    found = store.get(name)
    return None if found is None else found[0]


class TestLostAnswers:
    def test_a_creation_whose_answer_was_lost_is_ours(self, emulator: Emulator, store: GcsStore) -> None:
        emulator.fail("POST /upload", gcs_emulator.lose_answer)
        assert store.put_if_absent("entry", b"mine") is True
        assert emulator.left() == 0
        assert emulator.count("POST /upload.*ifGenerationMatch=0") == 2
        assert store.put_if_absent("entry", b"mine") is False

    def test_a_creation_that_failed_while_another_succeeded_is_not(self, emulator: Emulator, store: GcsStore) -> None:
        rival = GcsStore(store.root)
        emulator.fail(
            "POST /upload", gcs_emulator.status(503), gcs_emulator.before(lambda: rival.put("entry", b"mine"))
        )
        assert store.put_if_absent("entry", b"mine") is False  # Though the content is the same.

    def test_put_and_delete_are_repeated(self, emulator: Emulator, store: GcsStore) -> None:
        emulator.fail("POST /upload", gcs_emulator.lose_answer, gcs_emulator.status(500))
        store.put("x", b"data")
        assert content(store, "x") == b"data"
        emulator.fail("DELETE", gcs_emulator.lose_answer)
        assert store.delete("x") is False  # Perhaps ours, perhaps somebody else's.
        assert store.size("x") is None

    def test_an_answer_that_breaks_off_is_asked_for_again(self, emulator: Emulator, store: GcsStore) -> None:
        emulator.fail("GET /download", gcs_emulator.cut_answer, gcs_emulator.cut_answer)
        assert store.get("none") is None  # Why it is not there is an answer too.
        assert emulator.left() == 0
        store.put("x", b"data" * 1000)
        emulator.fail("GET /download", gcs_emulator.cut_answer, gcs_emulator.cut_answer)
        with store.local_copy("x") as path:
            assert Path(path).read_bytes() == b"data" * 1000
        assert emulator.left() == 0

    def test_a_copy_is_repeated_and_costs_no_second_one(self, emulator: Emulator, store: GcsStore) -> None:
        store.put("part", b"records")
        emulator.fail("rewriteTo", gcs_emulator.lose_answer)
        store.copy("part", "final")
        store.copy("part", "final")
        assert content(store, "final") == b"records"
        assert emulator.count("rewriteTo") <= 2


class TestRaces:
    def test_requests_carry_their_preconditions(self, emulator: Emulator, store: GcsStore) -> None:
        store.put("part", b"records")
        version = (store.get("part") or (b"", None))[1]
        store.put("final", b"old")
        old = (store.get("final") or (b"", None))[1]
        store.copy("part", "final")
        assert emulator.count(f"rewriteTo.*ifSourceGenerationMatch={version}") == 1
        assert emulator.count(f"rewriteTo.*ifGenerationMatch={old}") == 1
        store.delete("part", version)
        assert emulator.count(f"DELETE .*ifGenerationMatch={version}") == 1

    def test_a_copy_onto_what_was_just_replaced_looks_again(self, emulator: Emulator, store: GcsStore) -> None:
        store.put("part", b"records")
        store.put("final", b"old")
        rival = GcsStore(store.root)
        emulator.fail(
            "rewriteTo", gcs_emulator.before(lambda: rival.put("final", b"rival's")), gcs_emulator.status(412)
        )
        store.copy("part", "final")
        assert content(store, "final") == b"records"

    def test_one_of_many_creates_through_faults(self, emulator: Emulator, store: GcsStore) -> None:
        faults = [gcs_emulator.lose_answer, gcs_emulator.status(503), gcs_emulator.reset, gcs_emulator.status(429)]
        for number in range(5):
            emulator.fail("POST /upload", *faults)
            calls: list[Callable[[], bool]] = [
                lambda writer=writer, number=number: store.put_if_absent(f"e{number}", b"%d" % writer)  # type: ignore[misc]
                for writer in range(8)
            ]
            won = run_together(calls)
            assert sum(won) == 1
            assert content(store, f"e{number}") == b"%d" % won.index(True)


class TestUploads:
    DATA = os.urandom(2 * CHUNK_BYTES + 777)

    def spool(self, store: GcsStore, data: bytes) -> int:
        spool = store.spool("attempts/part")
        Path(spool.path).write_bytes(data)
        return spool.seal()

    def test_a_large_file_is_one_session_with_a_precondition(self, emulator: Emulator, store: GcsStore) -> None:
        assert self.spool(store, self.DATA) == len(self.DATA)
        assert content(store, "attempts/part") == self.DATA
        assert emulator.count("POST .*uploadType=resumable") == 1
        assert emulator.count("POST .*uploadType=resumable.*ifGenerationMatch=0") == 1
        assert emulator.count("PUT /upload") == 3

    @pytest.mark.parametrize("size", [1000, len(DATA)])
    @pytest.mark.parametrize(
        "faults",
        [
            [gcs_emulator.status(503), gcs_emulator.reset, gcs_emulator.status(429)],
            [gcs_emulator.slow(0.3)],
        ],
    )
    def test_failures_that_pass_cost_time_only(
        self, emulator: Emulator, store: GcsStore, size: int, faults: list[gcs_emulator.Fault]
    ) -> None:
        emulator.fail("(POST|PUT) /upload", *faults)
        assert self.spool(store, self.DATA[:size]) == size
        assert emulator.left() == 0
        assert content(store, "attempts/part") == self.DATA[:size]

    def test_a_lost_answer_to_the_last_piece_does_no_harm(self, emulator: Emulator, store: GcsStore) -> None:
        last = gcs_emulator.lose_answer
        emulator.fail(r"PUT /upload", lambda call: call.reply(call.forward()), lambda call: call.reply(call.forward()))
        emulator.fail(r"PUT /upload", last)
        self.spool(store, self.DATA)
        assert content(store, "attempts/part") == self.DATA

    def test_a_session_that_the_service_forgot_is_begun_anew(self, emulator: Emulator, store: GcsStore) -> None:
        emulator.fail("PUT /upload", gcs_emulator.status(410))
        self.spool(store, self.DATA)
        assert emulator.count("POST .*uploadType=resumable") == 2
        assert content(store, "attempts/part") == self.DATA

    def test_refusals_come_at_once(self, emulator: Emulator, store: GcsStore) -> None:
        emulator.fail("/upload", gcs_emulator.status(403), gcs_emulator.status(403))
        with pytest.raises(OutputError, match=r"cannot write gs://.*/out/attempts/part: .*403"):
            self.spool(store, self.DATA)
        assert emulator.left() == 1
        with pytest.raises(OutputError, match="404"):
            GcsStore("gs://no-such-bucket/out").put("x", b"")

    def test_damage_on_the_way_is_found_and_sent_again(self, emulator: Emulator, store: GcsStore) -> None:
        def damage(call: gcs_emulator.Request) -> None:
            call.body = call.body[:-1] + bytes([call.body[-1] ^ 1])
            call.reply(call.forward())

        emulator.fail("PUT /upload", damage)
        self.spool(store, self.DATA)
        assert content(store, "attempts/part") == self.DATA
        assert emulator.count("POST .*uploadType=resumable") == 2

    def test_a_service_that_stays_away_is_given_up(
        self, emulator: Emulator, store: GcsStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gcs, "PATIENCE_SECS", 0.5)
        emulator.fail("/upload", *[gcs_emulator.status(503)] * 100)
        with pytest.raises(OutputError, match="503"):
            store.put("x", b"data")
        emulator.left()
        store.put("x", b"data")


class TestSpool:
    def test_the_local_file_goes_with_the_spool(
        self, store: GcsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        spool = store.spool("part")
        Path(spool.path).write_bytes(b"x")
        spool.seal()
        assert len(list(tmp_path.iterdir())) == 1
        del spool
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_told_before_anything_is_written(
        self, store: GcsStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("transforms.spool._RESERVE_BYTES", 1 << 60)
        with pytest.raises(OutputError, match="TMPDIR"):
            store.spool("part")

    def test_what_killed_processes_left_is_deleted_and_nothing_else(
        self, store: GcsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        program = (
            "import os, sys; from transforms.spool import SpoolFile; s = SpoolFile(); open(s.path, 'w'); os._exit(9)"
        )
        environment = jobs.environment({"TMPDIR": str(tmp_path)})
        subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=False)
        living = SpoolFile()
        Path(living.path).write_bytes(b"x")
        assert len(list(tmp_path.iterdir())) == 2
        delete_left_over()
        assert [str(path) for path in tmp_path.iterdir()] == [os.path.dirname(living.path)]


@contextlib.contextmanager
def google() -> Iterator[tuple[str, list[str]]]:
    """A metadata server that gives out tokens, as a machine of Google's has it."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            body = json.dumps({"access_token": "token", "expires_in": 3600, "token_type": "Bearer"})
            if "universe" in self.path:
                body = "googleapis.com"
            elif "token" not in self.path:
                body = json.dumps({"aliases": ["default"], "email": "sa@p.iam", "scopes": []})
            self.send_response(200)
            self.send_header("Content-Type", "text/plain" if body == "googleapis.com" else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", seen
        server.shutdown()


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without credentials."""
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "NO_GCE_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.setattr(gcs, "_process", gcs._Process())
    return tmp_path


class TestCredentials:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["convert", "--input", "gs://bucket/*", "--output", "out"],
            ["convert", "--input", "in", "--output", "gs://bucket/out"],
            ["verify", "gs://bucket/out"],
            ["report", "gs://bucket/out"],
            ["replay", "gs://bucket/out"],
            ["inspect", "gs://bucket/x"],
        ],
    )
    def test_without_any_the_message_comes_soon_and_says_what_to_do(self, nobody: Path, arguments: list[str]) -> None:
        jobs.write_tfrecord(nobody / "in/f", [b"x"])
        started = time.monotonic()
        ended = jobs.spawn(list(arguments), nobody, timeout_secs=60)
        assert time.monotonic() - started < 15  # Nearly all of it Python loading its libraries, on a busy machine.
        assert ended.returncode == 2, ended.stderr
        for words in ("gs://bucket/", "gcloud auth application-default login", "GOOGLE_APPLICATION_CREDENTIALS"):
            assert words in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_a_metadata_server_that_does_not_answer_is_given_two_seconds(
        self, nobody: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import socket

        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{deaf.getsockname()[1]}")
            started = time.monotonic()
            with pytest.raises(ValueError, match="gcloud auth"):
                open_store("gs://bucket/out")
            assert time.monotonic() - started < 3

    def test_those_of_a_machine_of_googles_are_found(self, nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with google() as (address, seen):
            monkeypatch.setenv("GCE_METADATA_IP", address)
            monkeypatch.setenv("GCE_METADATA_HOST", address)
            client = gcs.client()
            assert gcs.client() is client
        assert seen

    def test_those_of_a_service_account_are_found(self, nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        fields = {"type": "service_account", "client_email": "sa@p.iam", "private_key": key.decode(), "project_id": "p"}
        (nobody / "key.json").write_text(json.dumps({**fields, "token_uri": "http://127.0.0.1:9/token"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(nobody / "key.json"))
        assert gcs.client()._credentials.service_account_email == "sa@p.iam"
        monkeypatch.setattr(gcs, "_process", gcs._Process())
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(nobody / "missing.json"))
        with pytest.raises(ValueError, match=r"missing\.json.*gcloud auth"):
            open_store("gs://bucket/out")


def test_a_url_without_a_bucket_is_refused(emulator: Emulator) -> None:
    with pytest.raises(ValueError, match="gs://BUCKET/NAME"):
        open_store("gs:///out")
