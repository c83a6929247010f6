"""The policy's modules that call the engine, with gradients of their own."""
