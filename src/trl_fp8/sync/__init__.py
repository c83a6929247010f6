"""Policy -> engine, without an engine: the writer of tensors, the audit that proves it, what is refused."""
