"""The engine behind the rollouts: what any engine answers, and vLLM, which is one. Only this folder imports vllm."""
