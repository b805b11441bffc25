"""isolate: which call breaks when llama.cpp serves several slots from one KV cache."""
