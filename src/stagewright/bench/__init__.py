"""Benchmarks: suites, baselines, and how they are run and measured."""
