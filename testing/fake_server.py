"""A server of two workers that are objects, for tests of the trainer's side of a transfer."""

from trl_fp8.engine.vllm_server.numbers import numbers_of
from trl_fp8.engine.vllm_server.staging import content, read
from trl_fp8.engine.vllm_server.uploads import UploadRefused, Uploads
from trl_fp8.engine.vllm_server.weight_patches import decoded, write
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.sync.pieces import Piece


class Worker:
    """A worker that holds whole tensors."""

    def __init__(self, instance):
        self.instance, self.tensors, self.arrived, self.parts = instance, {}, {}, {}
        self.version, self.before, self.error, self.scales, self.table = -1, -1, "", None, {}
        self.constants, self.wrong_scales = "5", ""
        self.refused = ""  # why the latest update was not written

    def read(self, update):
        if "patch" in update:
            self.patch(**update["patch"])
        else:
            self.tensors = {name: tensor.clone() for name, tensor in read(update["whole"]["file"], self.table)}
            self.parts = {name: digest(tensor).item() for name, tensor in self.tensors.items()}
        self.arrived = dict(self.parts)
        self.scales = update["kv_scales"]
        self.version = update["version"]

    def patch(self, file, size, sha256, counts, base):
        if base != self.before:
            raise ValueError(f"the patch changes version {base}, and this worker holds version {self.before}.")
        for name, changes in decoded(content(file, size), sha256, counts, self.table).items():
            tensor = self.tensors[name]
            write(Piece(name, None, "", tensor.dtype), tensor, changes, tensor.shape)
            self.parts[name] = digest(tensor).item()

    def state(self):
        now = {name: digest(tensor).item() for name, tensor in self.tensors.items()}
        return {
            "instance": self.instance,
            "version": self.version,
            "error": self.refused or self.error,
            "arrived": {name: str(each) for name, each in self.arrived.items()},
            "split": {},
            "differ": [name for name in now if now[name] != self.parts[name]],
            "constants": [self.constants],
            "kv_scales": self.scales,
            "kv_wrong": self.wrong_scales,
        }


class Server:
    """A `Control` and the server behind it, with two workers. `fail` (call -> error) raises once."""

    base_url = "http://server"

    def __init__(self, policy, recipe, uploads=""):
        self.calls, self.updates, self.fail, self.resets = [], [], {}, True
        self.sees = True  # the trainer's files
        self.unreached = ""  # why a worker gets nothing from the trainer's GPU
        self.uploads = Uploads(uploads)  # files that come in chunks otherwise
        self.tensors = {recipe.engine_name(name): "bfloat16" for name, _ in policy.named_parameters()}
        for name in recipe.fp8_tensors:
            self.tensors |= {recipe.engine_name(name): "float8_e4m3fn", recipe.scale_name(name): "float32"}
        self.numbers = numbers_of(policy.config)
        self.scale_format = recipe.scale_format
        self.changed = {}  # of what the workers describe
        self.fp8_cache = []
        if recipe.fp8_kv_cache:
            layers = range(policy.config.num_hidden_layers)
            self.fp8_cache = [layer for layer in layers if layer not in recipe.kv_cache_skip_layers]
        self.start("a")

    def start(self, instance):
        self.workers = [Worker(instance + "0"), Worker(instance + "1")]

    def called(self, name):
        self.calls.append(name)
        if name in self.fail:
            raise self.fail.pop(name)

    def wait_until_up(self, seconds):
        self.called("wait_until_up")

    def rpc(self, method, *args):
        self.called(method)
        if method == "fp8_state":
            return [worker.state() for worker in self.workers]
        if method == "fp8_reaches":
            return [{"why_not": self.unreached} for _ in self.workers]
        if method == "fp8_sees":
            path, text = args
            try:
                why_not = "" if self.sees and content(path, len(text)) == text.encode() else "other"
            except ValueError as error:
                why_not = str(error)
            return [{"why_not": why_not} for worker in self.workers]
        described = {"kernels": {"Kernel": 14}, "linears": None, "query_rounded": False, "derived": [], "added": {}}
        described |= {"fp8_cache": self.fp8_cache, "context": 64, "numbers": self.numbers}
        described |= {"scale_format": self.scale_format} | self.changed
        described["tensors"] = self.tensors
        return [
            {"instance": worker.instance, "latest_version": max(worker.version, worker.before, 0)} | described
            for worker in self.workers
        ]

    def init_weight_transfer_engine(self, init_info):
        self.called("init")
        self.init = init_info
        for worker in self.workers:
            worker.refused = ""
            worker.table = init_info["table"]

    def start_weight_update(self):
        self.called("start")
        for worker in self.workers:
            if worker.version >= 0:
                worker.before, worker.version = worker.version, -1

    def update_weights(self, update):
        self.called("update")
        self.updates.append(update)
        for worker in self.workers:
            worker.refused = ""
            try:
                worker.read(update)
            except ValueError as error:
                worker.refused = f"ValueError: {error}"

    def finish_weight_update(self, weight_version):
        self.called("finish")

    def pause(self):
        self.called("pause")

    def resume(self):
        self.called("resume")

    def reset_prefix_cache(self):
        self.called("reset")
        return self.resets

    def upload(self, kind, offset, size, chunk):
        self.called("upload")
        try:
            return self.uploads.write(b"trainer", kind, offset, size, chunk, 2**20)
        except UploadRefused as refusal:
            raise (OSError if refusal.status == 507 else RuntimeError)(str(refusal)) from refusal
