"""What a recipe means for a model in bytes, and for a GPU in tokens; printed before anything starts."""
