"""`EnginePart`: what a feature needs of a vLLM engine."""


class EnginePart:
    """Base of all parts. Each method does nothing by itself."""
