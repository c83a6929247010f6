"""The published import path of `export_fp8`; the code is in `trl_fp8.export`."""

from trl_fp8.export.checksums import verify_export
from trl_fp8.export.export import export_fp8
from trl_fp8.export.push import push_export


__all__ = ["export_fp8", "push_export", "verify_export"]
