"""Search over cases: where a fault is, what it needs, what nobody reported yet."""
