"""The flag of router replay, for a mixture of experts."""

from dataclasses import dataclass

from trl_fp8.planning.risks import Risk
from trl_fp8.recipe.outline import Outline
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.run.feature import FlagGroup, flag


ROUTER_REPLAYS = ("off", "monitor", "rollout", "policy")


@dataclass
class RouterFlags(FlagGroup):
    """Flag that decides which experts the trainer's routers use."""

    router_replay: str = flag(
        "off",
        "Mixture of experts only. 'off': the trainer's routers choose the experts. 'monitor': they still do, and "
        "metrics say how often the engine chose otherwise. 'rollout': every forward uses the experts that the engine "
        "chose when it sampled, with the trainer's own gate weights. 'policy': the training forwards use the experts "
        "of the old-log-prob pass. With all values but 'off' the engine returns its choices.",
    )

    @property
    def routes_returned(self) -> bool:
        return self.router_replay != "off"

    def wants_engine(self) -> bool:
        return self.routes_returned

    def rules_out_tensor_parallelism(self) -> bool:
        return self.routes_returned

    def risks(self, outline: Outline, recipe: FP8Recipe) -> list[Risk]:
        if not recipe.has_experts:
            return []
        text = "Mixture of experts: routers of engine and trainer can disagree"
        if outline.top_k_routers and recipe.tensor_parallel_size == 1:
            measured = ". router_replay='monitor' measures it, 'rollout' removes it."
            return [Risk(text + measured, {"router_replay": "monitor"})]
        ranks = f"at vllm_tensor_parallel_size={recipe.tensor_parallel_size}"
        where = ranks if outline.top_k_routers else "in this model"
        return [Risk(f"{text}, which router_replay can neither measure nor remove {where}.")]

    def check_model(self, outline: Outline) -> None:
        if self.routes_returned and not outline.experts:
            raise ValueError(
                f"router_replay={self.router_replay!r}: {outline.class_name} is not a mixture of experts. Set "
                "router_replay='off'."
            )
        if self.routes_returned and (ranks := self.vllm_tensor_parallel_size) > 1:
            raise ValueError(
                f"router_replay={self.router_replay!r} with vllm_tensor_parallel_size={ranks}: only the first rank of "
                "an engine returns the experts that it chose. Set vllm_tensor_parallel_size=1, or router_replay='off'."
            )

    def check(self) -> None:
        """Raise `ValueError` if the flag's value is unknown, or if no engine or no pass provides the experts."""
        flag = f"router_replay={self.router_replay!r}"
        if self.router_replay not in ROUTER_REPLAYS:
            raise ValueError(f"{flag} is not a way to replay routers. Use one of {list(ROUTER_REPLAYS)}.")
        if self.router_replay == "off":
            return
        if not self.use_vllm or self.vllm_mode != "colocate":
            raise ValueError(
                f"{flag} with use_vllm={self.use_vllm}, vllm_mode={self.vllm_mode!r}: only a colocated vLLM engine "
                "returns the experts that it chose. Set use_vllm=True and vllm_mode='colocate', or "
                "router_replay='off'."
            )
        if self.router_replay != "rollout" and self.setting_against_full_pass is not None:
            raise ValueError(
                f"{flag} with {self.setting_against_full_pass}: it needs TRL's old-log-prob pass over every token of "
                f"the rollouts. Remove {self.setting_against_full_pass}, or set router_replay='rollout' or 'off'."
            )
