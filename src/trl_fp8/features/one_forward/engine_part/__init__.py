"""The part of a vLLM engine that one forward uses: kernels, called by name, and settings that make them shareable."""
