"""vLLM's engine with a lighter sleep where the next generation needs the same weights, and a memory of its routers.

TRL 1.16 puts the engine to sleep at level 2 after each generation: memory is freed and the weights are discarded, so the
next generation begins with a sync. In a training step that is right, the weights will have changed. Between the batches
of an evaluation and the turns of a conversation they have not: there level 1 moves them to host memory (half as much in
FP8) and back.
"""

from vllm import LLM, RequestOutput

from .routes import RouteLog


class RolloutLLM(LLM):
    """`vllm.LLM` whose level-2 sleep becomes level 1 while `keep_weights` is set.

    Attributes:
        keep_weights: Whether the weights will be needed again as they are.
        weights_kept: Whether the engine sleeps with its weights in host memory.
        routes: Takes the experts chosen for every token that is generated; None: nobody asks.
    """

    keep_weights = False
    weights_kept = False
    routes: RouteLog | None = None

    def generate(self, *args, **kwargs) -> list[RequestOutput]:
        outputs = super().generate(*args, **kwargs)
        if self.routes is not None:
            self.routes.add(outputs)
        return outputs

    def sleep(self, level: int = 1, **kwargs) -> None:
        self.weights_kept = level == 1 or self.keep_weights
        super().sleep(level=1 if self.weights_kept else level, **kwargs)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            self.weights_kept = False
