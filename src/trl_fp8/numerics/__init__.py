"""Published import paths of the numerics; the code is in `trl_fp8.quantization` and `trl_fp8.correction`."""
