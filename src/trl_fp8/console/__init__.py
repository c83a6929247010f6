"""What a user sees while a command or a training runs: other libraries' noise left out, progress, slow steps named."""
