"""What one forward needs of a vLLM engine: its kernels, called by name, and settings that make them shareable."""
