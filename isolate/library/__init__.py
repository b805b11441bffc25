"""Bind to a llama.cpp build that exists: find it, establish its struct layouts, call it."""
