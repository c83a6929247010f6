"""The trainer's optional features, one object each, all with the same hooks (feature.py)."""
