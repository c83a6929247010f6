"""vLLM's engine with a lighter sleep where the next generation needs the same weights, and a memory of its routers.

TRL 1.16 puts the engine to sleep at level 2 after each generation: memory is freed and the weights are discarded, so the
next generation begins with a sync. In a training step that is right, the weights will have changed. Between the batches
of an evaluation and the turns of a conversation they have not: there level 1 moves them to host memory (half as much in
FP8) and back.
"""

import re

from vllm import LLM, RequestOutput

from .routes import RouteLog, RouterCapture, returned_routes


class RolloutLLM(LLM):
    """`vllm.LLM` whose level-2 sleep becomes level 1 while `keep_weights` is set.

    Args:
        routes_from: Where the experts that routers choose come from: `"vllm"` returns them, `"routers"` are read;
            None: nobody asks.
        **kwargs: As for `vllm.LLM`.

    Raises:
        ValueError: vLLM cannot return routes for this model or configuration; the message has its reason.

    Attributes:
        keep_weights: Whether the weights will be needed again as they are.
        weights_kept: Whether the engine sleeps with its weights in host memory.
        routes: Of everything that was generated; None without `routes_from`.
    """

    keep_weights = False
    weights_kept = False
    routes: RouteLog | None = None

    def __init__(self, *, routes_from: str | None = None, **kwargs):
        try:
            super().__init__(**kwargs)
        except ValueError as error:
            if routes_from == "vllm" and (reason := re.search(r"AuxOutput[^\[\n]*", str(error))):
                raise ValueError(
                    f"router_replay: vLLM cannot return the experts that it chooses here: {reason[0].strip()} Otherwise set "
                    "router_replay='off'."
                ) from error
            raise
        if routes_from is not None:
            self.routes = RouteLog(RouterCapture(self) if routes_from == "routers" else returned_routes)

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
