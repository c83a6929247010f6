"""Groups of flags that `FP8GRPOConfig` is made of, each with the checks that concern it alone."""
