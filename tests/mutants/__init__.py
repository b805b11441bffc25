"""Planted faults: libraries in which one thing is wrong, to measure what finds and shrinks faults."""
