"""The matrix of model families: each goes through a whole run with a real engine (`make models`)."""
