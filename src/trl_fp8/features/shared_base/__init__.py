"""FP8 base with adapters: frozen FP8 weights live once, in the engine; a sync sends adapters alone."""
