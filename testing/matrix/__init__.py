"""Each family of models that people train, through everything that a run does, with a real engine: `make models`."""
