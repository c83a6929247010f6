"""vLLM as this project uses it: start, sync, audit, generate. The only folder that imports vllm."""
