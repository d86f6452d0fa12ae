"""Suites of cases, run so that their figures can be trusted.

suite file ─▶ cases ─▶ tasks ─▶ runs ─▶ records, failures, logs in a folder ─▶ report, compare
"""
