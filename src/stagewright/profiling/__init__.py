"""Profiles and clusters: measured, analytic, imported, read from topology text."""
