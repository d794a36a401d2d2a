"""The report as one page that needs nothing else."""

from __future__ import annotations

from typing import Any

import jinja2

MAX_SOURCES = 200
MAX_SHARDS = 1_000
"""Rows that a page shows; report.json has all of the shards, and more of the sources."""

_PAGE = """{% macro more(count, shown) %}
{%- if count > shown %}<p>and {{ '{:,}'.format(count - shown) }} more</p>{% endif %}
{%- endmacro %}<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ (r.config.write or {}).name }}: {{ r.status }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
 table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .2rem .9rem .2rem 0; text-align: left }
 td.n { text-align: right; font-variant-numeric: tabular-nums } tr + tr { border-top: 1px solid #e4e4e4 }
 .bar { background: #b5462f; height: .7rem; display: inline-block } code { background: #f4f4f4; padding: 0 .2rem }
 .done { color: #22663b } .bad { color: #b5462f }
</style></head><body>
<h1>{{ (r.config.write or {}).name }}-{{ (r.config.write or {}).split }}:
 <span class="{{ 'done' if r.status == 'done' else 'bad' }}">{{ r.status }}</span></h1>
{% if r.message %}<p>{{ r.message }}</p>{% endif %}
<h2>Records</h2><table>
{% for key in ['records_read', 'records_added', 'records_written', 'records_dropped', 'records_dead',
 'records_dead_estimate'] %}
<tr><td>{{ key[8:].replace('_', ' ') }}</td><td class="n">{{ '{:,}'.format(r[key]) }}</td></tr>{% endfor %}</table>
<h2>Files and bytes</h2><table>
{% for key in ['files_seen', 'files_read', 'files_empty', 'files_dead', 'files_skipped', 'files_duplicate',
 'bytes_read', 'bytes_written', 'bytes_dead'] %}
<tr><td>{{ key.replace('_', ' ') }}</td><td class="n">{{ '{:,}'.format(r[key]) }}</td></tr>{% endfor %}</table>
{% for title, reasons in [('Dead letters', r.dead_by_reason), ('Dropped', r.dropped_by_reason)] if reasons %}
<h2>{{ title }} by reason</h2><table>
{% set most = reasons.values() | max %}
{% for reason, count in reasons.items() %}
<tr><td><code>{{ reason }}</code></td><td class="n">{{ '{:,}'.format(count) }}</td>
<td><span class="bar" style="width: {{ 12 * count / most }}rem"></span></td></tr>{% endfor %}</table>{% endfor %}
{% if r.sources %}<h2>Sources with losses ({{ r.sources_with_losses }})</h2><table>
<tr><th>source</th><th>read</th><th>written</th><th>dropped</th><th>dead</th></tr>
{% for s in r.sources[:max_sources] %}<tr><td>{{ s.source }}</td><td class="n">{{ s.records_read }}</td>
<td class="n">{{ s.records_written }}</td><td class="n">{{ s.records_dropped }}</td>
<td class="n">{{ s.records_dead }}</td></tr>{% endfor %}</table>
{{ more(r.sources_with_losses, max_sources) }}{% endif %}
{% if r.shards %}<h2>Shards ({{ r.shards | length }})</h2><table>
<tr><th>name</th><th>records</th><th>bytes</th><th>crc32c</th></tr>
{% for s in r.shards[:max_shards] %}<tr><td>{{ s.name }}</td><td class="n">{{ '{:,}'.format(s.records) }}</td>
<td class="n">{{ '{:,}'.format(s.bytes) }}</td><td><code>{{ s.crc32c }}</code></td></tr>{% endfor %}</table>
{{ more(r.shards | length, max_shards) }}{% endif %}
<h2>Config</h2><pre>{{ r.config | tojson(indent=1) }}</pre>
<h2>Versions</h2><pre>{{ r.versions | tojson(indent=1) }}</pre>
</body></html>
"""


def render_html(report: dict[str, Any]) -> str:
    """Returns the page of a report; every name in it is escaped."""
    return (
        jinja2.Environment(autoescape=True)
        .from_string(_PAGE)
        .render(r=report, max_sources=MAX_SOURCES, max_shards=MAX_SHARDS)
    )
