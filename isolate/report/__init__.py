"""Faults and findings, one writer a file."""
