"""Codecs in plain torch: codes, scales, round trips, checksums, the scales of a KV cache."""
