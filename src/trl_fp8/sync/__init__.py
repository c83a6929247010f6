"""Policy -> engine, without an engine: the stream of tensors, the ledger that proves it, what is refused."""
