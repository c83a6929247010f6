"""Files that a trainer with FP8 rollouts writes: checkpoints that a run resumes from, FP8 checkpoints, model cards."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import transformers.trainer
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from huggingface_hub import CommitInfo
from torch import nn
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from trl_fp8.export.export import export_fp8, export_merged
from trl_fp8.export.file_checksums import CHECKSUMS
from trl_fp8.export.model_card import fp8_section
from trl_fp8.export.push import push_export
from trl_fp8.policy.model import transformers_model
from trl_fp8.policy.stored_weights import (
    load_adapter,
    load_weights,
    require_none_missing,
    unsaved_beside_adapters,
    weight_files,
)
from trl_fp8.sync.policy_checks import require_finite
from trl_fp8.sync.shards import GatherFailed
from trl_fp8.upstream.patches import substituted

from .checkpoints import (
    RESUME_LAST,
    checkpoint_to_resume,
    checkpoints,
    forget_rollouts,
    has_training_state,
    load_rollouts,
    marker,
    require_same_checkpoint,
    require_slices,
    sampling_of,
    save_rollouts,
    skip_orders,
)
from .facts import run_facts
from .folder_lock import lock_folder, unlock_folder
from .full_disk import explained_full_disk


logger = get_logger(__name__)


class Saving:
    """Methods of `FP8Rollouts` that read and write files. Inherit it before TRL's trainer."""

    # The latest complete checkpoint that this run wrote or was resumed from; None if there is none yet
    last_checkpoint: str | None = None
    _resumed_from: str | None = None  # the checkpoint that `train` was called with

    def save_fp8_model(self, folder: str | Path) -> None:
        """Write an FP8 checkpoint: the weights that a sync would send now, and the KV scales of the last sync.

        With `fp8_base` the engine computes Q(W) x + s B A x, where Q quantizes the base weight W and s B A is the
        LoRA update. One weight cannot express this sum, so the checkpoint holds Q(W + s B A). `merge_and_export` says
        where W comes from.

        All ranks call this, and the main process writes. Under FSDP2 and ZeRO-3 parameters are gathered one at a time.
        Adapters are merged during the call. See `trl_fp8.export.export.export_fp8`.

        Raises:
            ValueError: Nothing is FP8, or no sync has calibrated KV scales yet, or some rank has a weight that is not
                finite.
            RuntimeError: On every rank, if the main process could not write; the message has its reason.
        """
        if self.recipe is None or self.recipe.quantization_config is None:
            raise ValueError("save_fp8_model: nothing is FP8 in this run. Use save_model, or set fp8_weights=True.")
        options = {}
        for feature in self.features:
            options |= feature.export_options()
        self._export("save_fp8_model", partial(export_fp8, folder=folder, recipe=self.recipe, **options))

    def merge_and_export(self, folder: str | Path) -> None:
        """Write the policy as a BF16 checkpoint with merged adapters: W + s B A is computed in FP32 and rounded once.

        With `fp8_base` the base weight W is read again from where the model was loaded, and its quantized codes are
        compared with the engine's. If the model is stored in FP8, or cannot be read again, the engine's codes are
        dequantized instead; a warning and the model card say so. All ranks call this.

        Raises:
            ValueError: Nothing is FP8 in this run, or some rank has a weight that is not finite.
            RuntimeError: On every rank, if the main process could not write; the message has its reason.
        """
        if self.recipe is None:
            raise ValueError(
                "merge_and_export: nothing is FP8 in this run. Use save_model, and PEFT's merge_and_unload."
            )
        self._export("merge_and_export", partial(export_merged, folder=folder))

    def _export(self, method: str, export: Callable) -> None:
        """Call `export` on the main process. All ranks call this. Messages name `method`, the caller."""
        replicas = self.vllm_generation.replicas
        reduce_max = replicas.reduce_max if replicas else None
        require_finite(self.model, reduce_max)  # all ranks raise, or none
        failed = f"{method}: the main process could not write the export"
        with self.vllm_generation.policy_tensors() as parameters, failing_together(failed):
            try:
                if self.accelerator.is_main_process:
                    name = (self.args.hub_model_id or Path(self.args.output_dir).name).split("/")[-1]
                    self.create_model_card(model_name=name)
                    card = Path(self.args.output_dir, "README.md").read_text()
                    merge_notes = "".join(feature.merge_note(method) for feature in self.features)
                    model = transformers_model(self.model)
                    export(model, self.processing_class, parameters=parameters, card=card, merge=merge_notes)
            finally:
                # Each step of the iterator gathers a parameter, which needs every rank. So ranks that do not write
                # iterate, too, and so does a main process whose export failed
                if replicas:
                    for _ in parameters:
                        pass

    def init_hf_repo(self, *args, **kwargs) -> None:
        """Create the repository as transformers does. Raise `OSError` that names `push_to_hub` if that fails."""
        try:
            super().init_hf_repo(*args, **kwargs)
        except (OSError, httpx.HTTPError) as error:
            reason = " ".join(str(error).split())
            raise OSError(
                f"push_to_hub=True: the Hub did not create the repository ({reason}). If it refused your token, log "
                "in with 'hf auth login' or set hub_token. Otherwise set push_to_hub=False, and call "
                "trainer.push_to_hub() after training."
            ) from error

    def push_fp8_to_hub(
        self,
        repo_id: str | None = None,
        *,
        folder: str | Path | None = None,
        commit_message: str = "Upload FP8 checkpoint",
    ) -> CommitInfo | None:
        """Write the FP8 checkpoint of the current policy and push it to a repository of its own; see `push_export`.

        All ranks call this. It can be repeated after an interruption: files that had arrived are not sent again.

        Args:
            repo_id: Repository as `user/name`. None: `hub_model_id`, or the name of `output_dir`, followed by "-FP8".
                Created if it does not exist, private with `hub_private_repo`.
            folder: Folder of the export, which replaces an earlier one. None: `output_dir/_fp8`, which `push_to_hub`
                does not upload.
            commit_message: Message of the commit.

        Returns:
            The commit on the main process, None on others.

        Raises:
            ValueError: For the reasons of `save_fp8_model`.
            RuntimeError: On every rank, if the main process could not write or push; the message has its reason.
        """
        folder = Path(folder or Path(self.args.output_dir, "_fp8"))
        policy_name = self.args.hub_model_id or Path(self.args.output_dir).name
        repo_id = repo_id or f"{policy_name}-FP8"
        # An earlier export stays until the new one, written beside it, is complete. Then the earlier folder is renamed
        # before it is deleted: only folders with checksums may be replaced, and a half-deleted one may have lost them
        new = folder.with_name(f"{folder.name}.new")
        earlier = folder.with_name(f".{folder.name}.trl_fp8_earlier")
        with failing_together("push_fp8_to_hub: the main process could not remove what an interrupted push has left"):
            if self.accelerator.is_main_process:
                if earlier.exists() and not folder.exists():  # interrupted between the two renames below
                    earlier.rename(folder)
                if earlier.exists():
                    shutil.rmtree(earlier)
                if (new / CHECKSUMS).exists():
                    shutil.rmtree(new)
        replaces = (folder / CHECKSUMS).exists()
        self.save_fp8_model(new if replaces else folder)
        with failing_together("push_fp8_to_hub: the main process could not replace the earlier export"):
            if self.accelerator.is_main_process and replaces:
                folder.rename(earlier)
                new.rename(folder)
                shutil.rmtree(earlier)
        options = {"private": self.args.hub_private_repo, "token": self.args.hub_token, "message": commit_message}
        commit = None
        with failing_together("push_fp8_to_hub: the main process could not push the export"):
            if self.accelerator.is_main_process:
                commit = push_export(folder, repo_id, revision=self.args.hub_revision, **options)
        return commit

    def create_model_card(self, *args, **kwargs) -> None:
        """Write TRL's model card, with a section on FP8."""
        super().create_model_card(*args, **kwargs)
        if self.recipe is None or not self.is_world_process_zero():
            return
        card = Path(self.args.output_dir, "README.md")
        section = fp8_section(run_facts(self), self.state.log_history, self.vllm_generation.audit_failures)
        # TRL writes a link to "None" for a model that was loaded from a folder
        base_name = Path(self.model.config.name_or_path).name or "a model that was made in memory"
        text = card.read_text().replace("[None](https://huggingface.co/None)", base_name)
        card.write_text(f"{text.rstrip()}\n\n{section}")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Train as TRL's trainer does. True, "true" and "auto" resume from the last complete checkpoint, if any."""
        folder = self.args.output_dir
        checkpoint = checkpoint_to_resume(folder, resume_from_checkpoint)
        if self.args.own_engine:
            require_same_checkpoint(checkpoint, folder)
        if str(resume_from_checkpoint).lower() in RESUME_LAST:
            _, unfinished = checkpoints(folder)
            if unfinished:
                names = ", ".join(path.name for path in unfinished)
                logger.warning(f"{names} in {folder} were not written to their end and are passed over.")
            if checkpoint is None:
                self.accelerator.print(f"no checkpoint in {folder} yet: starting from the beginning")
        if checkpoint:
            self.accelerator.print(f"resuming from {Path(checkpoint).name}")
            if not has_training_state(checkpoint):
                logger.warning(
                    f"resume_from_checkpoint={checkpoint!r} has weights alone (save_only_model=True): the optimizer "
                    "and the learning rate schedule begin anew."
                )
        # DeepSpeed, and FSDP2 with a full state dict, write all parameters. Other checkpoints have adapters alone, and
        # parameters that are trained beside the adapters would be lost
        fsdp_writes_all = self.is_fsdp_enabled and "FULL" in str(self.accelerator.state.fsdp_plugin.state_dict_type)
        writes_all = self.is_deepspeed_enabled or fsdp_writes_all
        if (checkpoint or self.args.load_best_model_at_end) and is_peft_model(self.model) and not writes_all:
            advice = "PEFT writes adapters alone: name the modules in modules_to_save of peft_config."
            require_none_missing(unsaved_beside_adapters(self.model), f"a checkpoint in {folder} lacks", advice)
        self.last_checkpoint = self._resumed_from = checkpoint
        if self.args.own_engine:
            lock_folder(folder, self.accelerator)
        try:
            with explained_full_disk(folder, lambda: self.last_checkpoint):
                return super().train(checkpoint, *args, **kwargs)
        finally:
            unlock_folder(folder)

    def save_model(self, *args, **kwargs) -> None:
        """Save as TRL's trainer does. If the disk is full, raise `FullDisk`, which says how to continue."""
        with explained_full_disk(self.args.output_dir, lambda: self.last_checkpoint):
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = marker(folder)
        if self.accelerator.is_main_process:
            unfinished.touch()
            forget_rollouts(folder)
        self.accelerator.wait_for_everyone()
        for feature in self.features:
            feature.save(folder)
        # In the middle of a generation save the rollouts that are still unused, on which a resumed run trains
        if self.args.own_engine and self._step % (self.args.steps_per_generation * self.num_iterations):
            save_rollouts(folder, self.accelerator, self._step, self._buffered_inputs, sampling_of(self.args))
        # transformers deletes older checkpoints (save_total_limit) in this call, while the new one is still marked as
        # unfinished. A run killed then would have no complete checkpoint, so the deletion waits for the unmarking
        rotations = []
        with substituted(transformers.trainer, "rotate_checkpoints", lambda **options: rotations.append(options)):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            unfinished.unlink()
        self.last_checkpoint = str(folder)
        for options in rotations:
            rotate_checkpoints(**options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_weights(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_weights(self, folder: str) -> bool:
        """Load all weights of a checkpoint and return True, or return False and leave them to transformers' Trainer.

        Trainer can load checkpoints of FSDP2 and DeepSpeed, which have the names of the parameters. With PEFT this
        method loads the active adapter, and Trainer loads the others.
        """
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return False
        if is_peft_model(self.model):
            load_adapter(self.model, folder)
        elif weight_files(folder):
            load_weights(self.model, folder)
            return True
        return False

    def _get_train_sampler(self, *args, **kwargs) -> Sampler | None:
        """Return TRL's sampler. In a resumed run it goes on with the order of prompts of the checkpoint's epoch."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if self._resumed_from and self.args.own_engine:
            skip_orders(sampler, self._resumed_from)
        return sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load also the state of features, and unused rollouts. transformers calls this before the first batch."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self.args.own_engine:
            return
        for feature in self.features:
            feature.load(checkpoint)
        rollouts = load_rollouts(checkpoint, self.accelerator, sampling_of(self.args))
        if rollouts is not None:
            step, batches = rollouts
            require_slices(checkpoint, len(batches), self.args.steps_per_generation)
            self._step = step
            self._buffered_inputs = batches


@contextmanager
def failing_together(what: str) -> Iterator[None]:
    """Raise `RuntimeError` on every rank if the block fails on the main process. Collective.

    The message is `what` and the main process's reason. Another rank that fails raises alone.
    """
    failure = None
    try:
        yield
    except GatherFailed:  # the other ranks are in a gather, so this one must enter no broadcast
        raise
    except Exception as error:  # of any kind, because the other ranks wait in the broadcast below
        failure = error
    own_reason = None
    if failure is not None:
        own_reason = str(failure) or type(failure).__name__  # some errors have no text
    [reason] = broadcast_object_list([own_reason])  # the main process's, on all ranks
    if reason or own_reason:
        raise RuntimeError(f"{what}: {reason or own_reason}") from failure
