"""Plans: a recipe in bytes of a model and tokens of a GPU, printed before anything starts."""
