"""Listing and reading objects of Google Cloud Storage, through faults that pass and refusals that do not."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import pytest
from google.cloud import storage

import gcs_emulator
import jobs
from gcs_emulator import Emulator
from transforms import gcs, gcs_reader, remote_inputs
from transforms.elements import Input
from transforms.gcs_reader import BLOCK_BYTES, HEAD_BYTES
from transforms.inputs import InputPatternError, Listing, list_inputs, read_inputs
from transforms.remote_inputs import Object
from transforms.sources import InputChangedError, MachineFaultError, explain_error, look_up, open_input


@pytest.fixture
def bucket(emulator: Emulator) -> storage.Bucket:
    return gcs.bucket(emulator.new_bucket().removeprefix("gs://"))


def put(bucket: storage.Bucket, *names: str) -> None:
    for size, name in enumerate(names, 1):
        bucket.blob(name).upload_from_string(b"x" * size)


def listed(folder: Path, *arguments: str, output: str = "out") -> tuple[Listing, list[Input]]:
    path = folder / "inputs.jsonl"
    listing = list_inputs(list(arguments), str(path), output)
    with path.open("rb") as lines:
        return listing, [source for _, source in read_inputs(lines)]


def names(bucket: storage.Bucket, inputs: list[Input]) -> list[str]:
    return [source.name.removeprefix(f"gs://{bucket.name}/") for source in inputs]


class TestListing:
    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("a/*.rec", ["a/1.rec", "a/2.rec"]),
            ("a/", ["a/1.rec", "a/2.rec", "a/3.txt", "a/b/4.rec"]),
            ("a", ["a/1.rec", "a/2.rec", "a/3.txt", "a/b/4.rec"]),
            ("a/**", ["a/1.rec", "a/2.rec", "a/3.txt", "a/b/4.rec"]),
            ("**/*.rec", ["a/1.rec", "a/2.rec", "a/b/4.rec", "top.rec"]),
            ("*/b/?.rec", ["a/b/4.rec"]),
            ("a/*/", ["a/b/4.rec"]),
            ("a/[12].rec", ["a/1.rec", "a/2.rec"]),
            ("a/1.rec", ["a/1.rec"]),
            ("*.rec", ["top.rec"]),
        ],
    )
    def test_patterns_and_folders(
        self, bucket: storage.Bucket, tmp_path: Path, pattern: str, expected: list[str]
    ) -> None:
        put(bucket, "a/", "a/1.rec", "a/2.rec", "a/3.txt", "a/b/4.rec", "a/_x/5.rec", "a/.hidden", "ab/6.x", "top.rec")
        _, inputs = listed(tmp_path, f"gs://{bucket.name}/{pattern}")
        assert names(bucket, inputs) == expected
        blob = bucket.get_blob(expected[0])
        assert (inputs[0].size, inputs[0].mtime_ns) == (blob.size, blob.generation)

    def test_hidden_and_temporary_objects_are_counted_and_the_output_is_no_input(
        self, bucket: storage.Bucket, tmp_path: Path
    ) -> None:
        put(bucket, "a/1.rec", "a/.x", "a/_y/2.rec", "a/3.tmp", "a/out/corpus", "a/output")
        listing, inputs = listed(tmp_path, f"gs://{bucket.name}/a/", output=f"gs://{bucket.name}/a/out/")
        assert names(bucket, inputs) == ["a/1.rec", "a/output"]
        assert listing.num_skipped == 3

    def test_an_object_whose_name_is_a_pattern_is_a_name(self, bucket: storage.Bucket, tmp_path: Path) -> None:
        put(bucket, "a[1].rec", "a1.rec", "b*.rec", "bc.rec")
        assert names(bucket, listed(tmp_path, f"gs://{bucket.name}/a[1].rec")[1]) == ["a[1].rec"]
        assert names(bucket, listed(tmp_path, f"gs://{bucket.name}/b*.rec")[1]) == ["b*.rec"]
        assert names(bucket, listed(tmp_path, f"gs://{bucket.name}/[ab]*.rec")[1]) == [
            "a1.rec", "a[1].rec", "b*.rec", "bc.rec",
        ]  # fmt: skip

    def test_a_listing_of_many_pages_asks_for_no_object(
        self, emulator: Emulator, bucket: storage.Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(bucket, *(f"a/{number:03d}" for number in range(60)))
        ask = storage.Client.list_blobs
        monkeypatch.setattr(storage.Client, "list_blobs", lambda *args, **named: ask(*args, page_size=7, **named))
        emulator.seen.clear()
        listing, _ = listed(tmp_path, f"gs://{bucket.name}/a/")
        assert (listing.num_inputs, listing.total_bytes) == (60, sum(range(1, 61)))
        assert emulator.count("GET .*/o[?]") == len(emulator.seen) == 9

    def test_a_list_costs_one_listing_a_folder_and_keeps_its_order(
        self, emulator: Emulator, bucket: storage.Bucket, tmp_path: Path
    ) -> None:
        put(bucket, *(f"{folder}/{number}" for folder in "abc" for number in range(9)), "c/x[1]", "c/x1")
        lines = ["c/7", "a/3", "b/missing", "a/8", "c/7", "c/x[1]", "c/[34]", "b/2", "a/"]
        local = tmp_path / "local"
        local.write_bytes(b"data")
        text = [f"gs://{bucket.name}/{line}" for line in lines] + [str(local)]
        (tmp_path / "list").write_text("\n".join(text))
        emulator.seen.clear()
        listing, inputs = listed(tmp_path, f"@{tmp_path}/list")
        rest = [f"a/{number}" for number in (0, 1, 2, 4, 5, 6, 7)]
        expected = ["c/7", "a/3", "b/missing", "a/8", "c/x[1]", "c/3", "c/4", "b/2", *rest, str(local)]
        assert names(bucket, inputs) == expected
        assert listing.num_duplicates == 3
        assert [source.error for source in inputs if source.error is not None] == [
            ("not_found", "no such object, and nothing matches it as a pattern")
        ]
        assert len(emulator.seen) == 3 + 2 + 1  # Folders, the pattern (is it a name?), the folder taken whole.

    def test_what_cannot_be_listed_is_named(self, bucket: storage.Bucket, tmp_path: Path) -> None:
        with pytest.raises(InputPatternError, match="matches no file"):
            listed(tmp_path, f"gs://{bucket.name}/nothing/*")
        with pytest.raises(InputPatternError, match=r"gs://no-such-bucket/x\.rec.*404"):
            listed(tmp_path, "gs://no-such-bucket/x.rec")

    def test_listing_goes_on_after_failures_that_pass_and_not_after_refusals(
        self, emulator: Emulator, bucket: storage.Bucket, tmp_path: Path
    ) -> None:
        put(bucket, "a/1", "a/2")
        emulator.fail("GET .*/o[?]", gcs_emulator.status(503), gcs_emulator.reset, gcs_emulator.status(429))
        assert listed(tmp_path, f"gs://{bucket.name}/a/")[0].num_inputs == 2
        emulator.fail("GET .*/o[?]", gcs_emulator.status(403), gcs_emulator.status(403))
        with pytest.raises(InputPatternError, match="403"):
            listed(tmp_path, f"gs://{bucket.name}/a/")
        assert emulator.left() == 1


class TestNamesOfObjects:
    """Names are what stands between slashes, nothing too; some only say that there is a folder."""

    SLASHES = ("/top", "//top", "raw", "raw/a", "raw//b", "raw//c", "raw/sub//d", "raw/sub/e", "raw//sub/f", "raw///g")

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("raw/", ["raw///g", "raw//b", "raw//c", "raw//sub/f", "raw/a", "raw/sub//d", "raw/sub/e"]),
            ("raw//", ["raw///g", "raw//b", "raw//c", "raw//sub/f"]),
            ("raw///", ["raw///g"]),
            ("raw//*", ["raw//b", "raw//c"]),
            ("raw/*", ["raw/a"]),
            ("raw/**", ["raw///g", "raw//b", "raw//c", "raw//sub/f", "raw/a", "raw/sub//d", "raw/sub/e"]),
            ("raw/*/*", ["raw//b", "raw//c", "raw/sub/e"]),
            ("raw/*//*", ["raw///g", "raw/sub//d"]),
            ("raw/**/?", ["raw///g", "raw//b", "raw//c", "raw//sub/f", "raw/a", "raw/sub//d", "raw/sub/e"]),
            ("raw/**//?", ["raw///g", "raw//b", "raw//c", "raw/sub//d"]),
            ("*//[bc]", ["raw//b", "raw//c"]),
            ("raw//b", ["raw//b"]),
            ("raw//sub", ["raw//sub/f"]),
            ("/top", ["/top"]),
            ("/", ["//top", "/top"]),
            ("*/top", ["/top"]),
        ],
    )
    def test_empty_parts_are_parts(
        self, bucket: storage.Bucket, tmp_path: Path, pattern: str, expected: list[str]
    ) -> None:
        put(bucket, *self.SLASHES)
        listing, inputs = listed(tmp_path, f"gs://{bucket.name}/{pattern}")
        assert (names(bucket, inputs), listing.num_skipped) == (expected, 0)

    def test_a_list_names_them_as_they_are(self, bucket: storage.Bucket, tmp_path: Path) -> None:
        put(bucket, *self.SLASHES)
        lines = ["raw//b", "raw/b", "raw/a ", "/top", "raw/sub// ", "raw//*"]
        (tmp_path / "list").write_text("".join(f"gs://{bucket.name}/{line}\r\n" for line in lines))
        _, inputs = listed(tmp_path, f"@{tmp_path}/list")
        assert names(bucket, inputs) == ["raw//b", "raw/b", "raw/a", "/top", "raw/sub//d", "raw//c"]
        assert [one.name[-5:] for one in inputs if one.error is not None] == ["raw/b"]

    def test_a_blank_behind_a_name_is_part_of_it_where_there_is_such_an_object(
        self, bucket: storage.Bucket, tmp_path: Path
    ) -> None:
        put(bucket, "a", "a ", "b")
        (tmp_path / "list").write_text("".join(f"gs://{bucket.name}/{line}\n" for line in ("a ", "b ", "c ")))
        _, inputs = listed(tmp_path, f"@{tmp_path}/list")
        assert names(bucket, inputs) == ["a ", "b", "c"]
        assert [one.error is None for one in inputs] == [True, True, False]

    MARKERS = ("raw/", "raw/sub", "raw/sub/", "raw/deep_$folder$", "raw/sub/x/")
    DATA = ("raw/1", "raw/sub-1", "raw/sub.1", "raw/sub/2", "raw/sub/x/3", "raw/tail")

    @pytest.mark.parametrize(
        ("pattern", "expected", "num_skipped"),
        [
            ("raw/", ["raw/1", "raw/empty", "raw/sub-1", "raw/sub.1", "raw/sub/2", "raw/sub/x/3", "raw/tail"], 5),
            ("raw", ["raw/1", "raw/empty", "raw/sub-1", "raw/sub.1", "raw/sub/2", "raw/sub/x/3", "raw/tail"], 5),
            ("raw/*", ["raw/1", "raw/empty", "raw/sub-1", "raw/sub.1", "raw/tail"], 3),
            ("raw/sub*", ["raw/sub-1", "raw/sub.1"], 1),
            ("raw/sub/*", ["raw/sub/2"], 1),
            ("raw/*/*", ["raw/sub/2"], 1),
            ("raw/sub", ["raw/sub/2", "raw/sub/x/3"], 3),
            ("raw/empty", ["raw/empty"], 0),
        ],
    )
    def test_markers_of_folders_are_passed_over_and_counted(
        self, bucket: storage.Bucket, tmp_path: Path, pattern: str, expected: list[str], num_skipped: int
    ) -> None:
        put(bucket, *self.DATA)
        for name in (*self.MARKERS, "raw/empty"):
            bucket.blob(name).upload_from_string(b"")
        listing, inputs = listed(tmp_path, f"gs://{bucket.name}/{pattern}")
        assert (names(bucket, inputs), listing.num_skipped) == (expected, num_skipped)

    def test_a_marker_in_a_list_is_a_name(self, bucket: storage.Bucket, tmp_path: Path) -> None:
        put(bucket, "raw/sub/x")
        bucket.blob("raw/sub").upload_from_string(b"")
        (tmp_path / "list").write_text(f"gs://{bucket.name}/raw/sub\n")
        assert names(bucket, listed(tmp_path, f"@{tmp_path}/list")[1]) == ["raw/sub"]

    def test_leftovers_are_passed_over_and_may_be_asked_for(self, bucket: storage.Bucket, tmp_path: Path) -> None:
        put(bucket, "r/a", "r/a_.gstmp", "r/a.part", "r/beam-temp-a-1/x/a", "r/_final/b", "r/_final/_x", "r/c.idx")
        put(
            bucket,
            "gsutil/tmp/parallel_composite_uploads/for_details_see/gsutil_help_cp/ab",
            "r/1.0.incompleteAB12CD/a",
        )
        url = f"gs://{bucket.name}"
        listing, inputs = listed(tmp_path, f"{url}/**")
        assert names(bucket, inputs) == ["r/a"]
        assert listing.num_skipped == 8
        assert listing.notes == (
            "passed over by their names: 2 _*, 1 *.gstmp, 1 *.idx, 1 *.incomplete*, 1 *.part and 2 kinds more",
        )
        for pattern, expected in (
            ("r/*.part", ["r/a.part"]),
            ("r/_final/*", ["r/_final/b"]),
            ("*/_final/*", ["r/_final/b"]),
            ("**/_final/**", ["r/_final/b"]),
            ("r/beam-temp-*/**", ["r/beam-temp-a-1/x/a"]),
        ):
            assert names(bucket, listed(tmp_path, f"{url}/{pattern}")[1]) == expected
        with pytest.raises(InputPatternError, match=r"passed over.*1 \*\.idx"):
            listed(tmp_path, f"{url}/r/c*")

    def test_an_input_that_is_the_output_is_said_to_be(self, bucket: storage.Bucket, tmp_path: Path) -> None:
        put(bucket, "raw/a", "raw/out/x", "raw/out/_gristmill/y")
        url = f"gs://{bucket.name}/raw"
        for pattern in ("out", "out/*", "out/_gristmill/*"):
            with pytest.raises(InputPatternError, match="lies in the output folder"):
                listed(tmp_path, f"{url}/{pattern}", output=f"{url}/out")
        for output in ("out", "not-there-yet"):
            listing, _ = listed(tmp_path, f"{url}/", output=f"{url}/{output}")
            assert "output folder lies inside the input" in listing.notes[-1]
        assert listed(tmp_path, f"{url}/*", output=f"{url}/out")[0].notes == ()


class TestManyThatWait:
    """Objects without bytes, of which only what comes later tells whether they mark a folder."""

    def test_requests_are_bounded_and_nothing_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def is_below(url: str) -> bool:
            asked.append(url)
            return url.endswith("marker")

        monkeypatch.setattr(remote_inputs, "_has_below", is_below)
        found = [Object("gs://b/marker", 0, 1), *(Object(f"gs://b/marker-{n:05d}", n, 1) for n in range(5_000))]
        found += [Object("gs://b/marker/x", 7, 1), *(Object(f"gs://b/empty-{n:05d}", 0, 1) for n in range(5_000))]
        found.sort()
        marked = list(remote_inputs._with_markers(iter(found)))
        assert [one.url for one in marked] == [one.url for one in found]
        assert [one.url for one in marked if one.size < 0] == ["gs://b/marker"]
        assert len(asked) == 1

    def test_names_within_names_each_wait_for_their_own(self) -> None:
        urls = ["a", "a!", "a!!", "a!!/x", "a!-", "a!/x", "a!0", "a/x", "b", "b!", "c/"]
        found = [Object(f"gs://b/{url}", int(url.endswith("x")), 1) for url in urls]
        marked = [one.url.removeprefix("gs://b/") for one in remote_inputs._with_markers(iter(found)) if one.size < 0]
        assert marked == ["a", "a!", "a!!", "c/"]


def open_new(bucket: storage.Bucket, data: bytes, **fields: str) -> gcs_reader.ObjectReader:
    blob = bucket.blob("folder/x y[1]?#%.rec")
    for name, value in fields.items():
        setattr(blob, name, value)
    blob.upload_from_string(data)
    file = open_input(look_up(f"gs://{bucket.name}/{blob.name}"))
    assert isinstance(file, gcs_reader.ObjectReader)
    return file


class TestReading:
    DATA = os.urandom(3 * BLOCK_BYTES + 12345)

    def test_any_position_gives_the_bytes_there(self, bucket: storage.Bucket) -> None:
        file = open_new(bucket, self.DATA)
        for position in (0, 5, HEAD_BYTES - 1, HEAD_BYTES, BLOCK_BYTES - 7, len(self.DATA) - 3, len(self.DATA), 100):
            for size in (1, 13, HEAD_BYTES + 5, BLOCK_BYTES + 5, len(self.DATA)):
                assert file.read_at(position, size) == self.DATA[position : position + size]
        file.close()

    def test_reading_in_order_takes_few_requests_and_little_memory(
        self, emulator: Emulator, bucket: storage.Bucket
    ) -> None:
        file = open_new(bucket, self.DATA)
        emulator.seen.clear()
        position, step = 0, 500_000
        while position < len(self.DATA):
            assert file.read_at(position, step) == self.DATA[position : position + step]
            position += step - 999  # A reader goes back to the record that was cut.
            assert sum(len(data) for _, data in file._blocks) <= 2 * BLOCK_BYTES
        assert len(emulator.seen) <= 2 + len(self.DATA) // BLOCK_BYTES + 1

    def test_nothing_is_fetched_far_behind_a_range(self, emulator: Emulator, bucket: storage.Bucket) -> None:
        file = open_new(bucket, self.DATA)
        file.will_read(2_000_000)
        for position in range(0, 2_000_000, 100_000):
            file.read_at(position, 100_000)
        file.close()
        assert file._block_end(2_000_000) <= 2_000_000 + HEAD_BYTES

    def test_the_next_block_is_on_its_way_while_one_is_used(self, emulator: Emulator, bucket: storage.Bucket) -> None:
        file = open_new(bucket, self.DATA)
        file.read_at(HEAD_BYTES, 10)
        assert file._next is not None
        assert file._next[1].result(10) == self.DATA[file._next[0] :][: len(file._next[1].result())]

    def test_failures_that_pass_cost_time_only(self, emulator: Emulator, bucket: storage.Bucket) -> None:
        file = open_new(bucket, self.DATA)
        faults = [gcs_emulator.status(503), gcs_emulator.reset, gcs_emulator.cut_answer, gcs_emulator.status(429)]
        emulator.fail("GET /download", *faults, gcs_emulator.slow(0.3))
        assert file.read_at(0, len(self.DATA)) == self.DATA
        assert emulator.left() == 0

    @pytest.mark.parametrize(("code", "reason"), [(404, "not_found"), (403, "permission_denied"), (400, "io_error")])
    def test_refusals_come_at_once_and_have_their_reasons(
        self, emulator: Emulator, bucket: storage.Bucket, code: int, reason: str
    ) -> None:
        file = open_new(bucket, self.DATA)
        emulator.fail("GET /download", gcs_emulator.status(code), gcs_emulator.status(code))
        with pytest.raises(OSError, match=str(code)) as raised:
            file.read_at(HEAD_BYTES + 1, 10)
        assert emulator.left() == 1
        assert explain_error(raised.value)[0] == reason

    def test_a_deleted_object_is_not_found_and_a_replaced_one_has_changed(self, bucket: storage.Bucket) -> None:
        file = open_new(bucket, self.DATA)
        source = look_up(file._url)
        blob = bucket.blob("folder/x y[1]?#%.rec")
        blob.upload_from_string(self.DATA)
        with pytest.raises(InputChangedError, match="generation"):
            file.read_at(HEAD_BYTES, 10)
        with pytest.raises(InputChangedError, match="generation"):
            open_input(source)
        blob.delete()
        with pytest.raises(FileNotFoundError):
            open_input(source)
        with pytest.raises(FileNotFoundError):
            look_up(source.name)

    def test_the_request_carries_the_generation(self, emulator: Emulator, bucket: storage.Bucket) -> None:
        file = open_new(bucket, self.DATA)
        file.read_at(BLOCK_BYTES, 10)
        assert emulator.count(f"GET /download.*ifGenerationMatch={file._generation}") >= 2

    def test_empty_objects_are_empty(self, bucket: storage.Bucket) -> None:
        assert open_new(bucket, b"").read_at(0, 10) == b""

    def test_content_encoding_is_left_as_it_is(self, bucket: storage.Bucket) -> None:
        data = gzip.compress(os.urandom(400_000))
        file = open_new(bucket, data, content_encoding="gzip")
        assert file.size == len(data)
        assert file.read_at(0, len(data)) == data
        assert file.read_at(300_000, 1000) == data[300_000:301_000]

    def test_one_client_serves_all_threads(self, bucket: storage.Bucket) -> None:
        clients: list[storage.Client] = []
        threads = [threading.Thread(target=lambda: clients.append(gcs.client())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, clients))) == 1


def test_no_room_for_a_copy_is_not_the_inputs_fault(
    bucket: storage.Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jobs.write_array_record(tmp_path / "x", [b"one", b"two"])
    bucket.blob("x.array_record").upload_from_filename(path)
    monkeypatch.setattr("transforms.spool._RESERVE_BYTES", 1 << 60)
    from transforms.sources import local_path

    source = look_up(f"gs://{bucket.name}/x.array_record")
    with pytest.raises(MachineFaultError, match="TMPDIR") as raised, local_path(open_input(source), source):
        pass
    with pytest.raises(MachineFaultError):
        explain_error(raised.value)
