"""The published import path of `export_fp8`; the code is in `trl_fp8.export`."""

from .export.export import export_fp8, push_export, verify_export


__all__ = ["export_fp8", "push_export", "verify_export"]
