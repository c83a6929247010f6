"""Router replay: the trainer's routers use the experts that the engine chose."""
