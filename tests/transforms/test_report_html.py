"""The report as a page: it stays small, and says how much more there is."""

from __future__ import annotations

from typing import Any

from transforms.report_html import MAX_SHARDS, MAX_SOURCES, render_html

COUNTS = (
    *("records_read", "records_added", "records_written", "records_dropped", "records_dead"),
    *("files_seen", "files_read", "files_empty", "files_dead", "files_skipped", "files_duplicate"),
    *("bytes_read", "bytes_written", "bytes_dead", "records_dead_estimate"),
)


def page(num_sources: int, num_shards: int) -> str:
    source = {"source": "/in/a", "records_read": 1, "records_written": 0, "records_dropped": 0, "records_dead": 1}
    shard = {"name": "corpus", "records": 1, "bytes": 1, "crc32c": "00000000"}
    report: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    report |= {"status": "done", "message": "", "dead_by_reason": {"<late>": 1}, "dropped_by_reason": {}}
    report |= {"sources": [source] * min(num_sources, 1_000), "sources_with_losses": num_sources}
    report |= {"shards": [shard] * num_shards, "config": {}, "versions": {}}
    return render_html(report)


def test_rows_that_are_left_out_are_counted() -> None:
    shown = page(5_000_000, 1_234)
    assert shown.count("<td>/in/a</td>") == MAX_SOURCES
    assert shown.count("<td>corpus</td>") == MAX_SHARDS
    assert "<p>and 4,999,800 more</p>" in shown
    assert "<p>and 234 more</p>" in shown


def test_nothing_is_said_where_all_are_shown() -> None:
    shown = page(MAX_SOURCES, MAX_SHARDS)
    assert " more</p>" not in shown
    assert shown.startswith("<!DOCTYPE html>")
    assert "&lt;late&gt;" in shown
