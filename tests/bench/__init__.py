"""Benchmarks of the converter against a bare loop and the ArrayRecord Beam SDK."""
