"""The house rules that a machine can see: import directions, what an import pulls in, docs that match the code."""

import ast
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from pathlib import Path

from torch import nn

from trl_fp8.commands.fp8_checkpoints import COMMANDS
from trl_fp8.features import registrations
from trl_fp8.upstream import patches
from trl_fp8.upstream.patches import PATCHES
from trl_fp8.upstream.private_names import PRIVATE_NAMES


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "trl_fp8"
# What a folder imports of ours, beside itself, by any import; read from the bottom up
ALLOWED = {
    "quantization": set(),
    "upstream": set(),
    "recipe": {"quantization", "upstream"},
    "sync": {"quantization", "recipe"},
    "engine": {"quantization", "recipe", "sync", "upstream"},
    "policy": {"quantization", "recipe", "upstream"},
    "planning": {"recipe"},
    "export": {"planning", "quantization", "recipe", "sync"},
    "run": {"export", "policy", "quantization", "recipe", "sync", "upstream"},
    "features": {"engine", "planning", "policy", "quantization", "recipe", "run", "sync", "upstream"},
    "config": {"features", "recipe", "run"},
    "rollouts": {"engine", "features", "planning", "policy", "recipe", "run", "sync", "upstream"},
    "trainer": {"config", "rollouts"},
    "trainers": {"config", "engine", "rollouts", "run", "trainer", "upstream"},
    "scripts": {"config", "run", "trainer", "upstream"},
    "commands": {
        "config",
        "engine",
        "export",
        "features",
        "planning",
        "policy",
        "quantization",
        "recipe",
        "run",
        "scripts",
        "upstream",
    },
    "__init__": {"upstream"},
}
MOST_ENTRIES = 18  # at the top of the package
PUBLISHED = (
    *("FP8AsyncGRPOConfig", "FP8AsyncGRPOTrainer"),
    *("FP8DistillationConfig", "FP8DistillationTrainer", "FP8SDFTConfig", "FP8SDFTTrainer", "SyncAuditCallback"),
    *("FP8GOLDConfig", "FP8GOLDTrainer", "FP8IWOPDConfig", "FP8IWOPDTrainer"),
    *("FP8SDPOConfig", "FP8SDPOTrainer"),
    *("FP8GMPOConfig", "FP8GMPOTrainer", "FP8GRPOConfig", "FP8GRPOTrainer", "FP8RLOOConfig", "FP8RLOOTrainer"),
    *("FP8ProgressCallback", "FP8Recipe", "FP8Rollouts"),
)
FOREIGN = {  # packages that only some folders may import; a feature's modules that import vllm are called engine_*
    "vllm": {"engine", "features", "upstream"},
    "trl": {"commands", "config", "engine", "features", "policy", "rollouts", "run", "scripts", "trainer", "trainers"},
    "transformers": {
        "commands",
        "engine",
        "export",
        "features",
        "policy",
        "recipe",
        "rollouts",
        "run",
    },
}
# Attributes that are written from outside of their object: in which files, which, and why that has to be
WRITTEN_FROM_OUTSIDE = {
    ("engine/vllm/sync_audit.py", "self._generation.(name)"): "TRL's trainer calls it, and no callback comes after",
    ("config.py", "config.__doc__"): "made of the flags' own texts, which the class has once it is there",
    ("scripts/arguments.py", "*.help"): "transformers' text on a flag that takes more here",
    ("scripts/grpo.py", "args.model_init_kwargs"): "TRL reads there how a model is loaded, and no argument says it",
    ("engine/vllm_server/broadcast.py", "self._options._*"): "torch's options of gloo take no arguments",
    ("engine/vllm/cpu/reference_linear.py", "layer.cpu_linear"): "set by what is patched, read by vLLM's layer",
    ("engine/vllm/generation.py", "processor._apply_prompt_updates"): "vLLM calls it, and asks nobody",
    ("features/*", "batch.metrics"): "a record that passes from feature to feature",
    ("*", "rollouts.metrics"): "the same",
    ("features/*", "trainer.recipe"): "the run's, which two features resolve before the engine starts",
    ("engine/vllm/scale_copies.py", "module*_scale_float')"): "vLLM's CPU kernels read scales as floats",
    ("features/kv_cache/kv_cache.py", "self.trainer._batch_environments"): "TRL's tokenization takes no argument",
    ("features/one_forward/*", "finalizer.atexit"): "weakref.finalize takes no argument for it",
    ("features/one_forward/followed_reference.py", "self._part.seal"): "a record of a delivery",
    ("features/router_replay/replay.py", "router.*"): "routers become replayed ones in place",
    ("features/shared_base/engine_adapters.py", "module.quant_method"): "vLLM's layer calls it, and takes no other",
    ("features/shared_base/held_base.py", "*.save_pretrained"): "it would leave weights out, silently",
    ("features/shared_base/held_base.py", "module.codes"): "modules are shared in place: names and hooks stay",
    ("features/shared_base/base_in_engine.py", "construction.*"): "a record that registrations hand on",
    ("features/shared_base/stored_base.py", "model.hf_quantizer"): "transformers would take the model for quantized",
    ("features/shared_base/stored_base.py", "placeholder._is_hf_initialized"): "transformers would initialize it",
    ("policy/hook.py", "module.(_HOOK)"): "attention functions are given their module and nothing else",
    ("policy/hook.py", "mask.sees"): "masks of layers that window differ, and layers hand on the mask alone",
    ("policy/hook.py", "module.expand_kv"): "what MLA caches passes there, and nowhere else without a cache",
    ("policy/model.py", "base._weight_conversions"): "transformers would write the FP8 layout that it read",
    ("policy/model.py", "processor.valid_processor_kwargs"): "TRL's tokenization has no argument for it",
    ("policy/stored_weights.py", "model._weight_conversions"): "put back after transformers' loader has changed it",
    ("policy/swapped.py", "module.*"): "modules change class in place, so that names, hooks and optimizers keep them",
    ("run/syncs.py", "self.trainer._last_loaded_step"): "TRL syncs by the number of the step",
    ("rollouts.py", "args.vllm_tensor_parallel_size"): "a server's, which flags are read with before it is asked",
    ("sync/delivery.py", "group.*"): "a record of its own",
    ("sync/delivery.py", "self._trained.*"): "the same",
    (
        "trainers/buffered.py",
        "generation.*",
    ): "TRL has no method around its calls for hooks to stand in",
    ("trainers/compared.py", "generation.generate"): "TRL drops the log-probs that its call returns",
    ("upstream/patches.py", "owner.(name)"): "what a patch is; which there are stands there",
}
# CONTRIBUTING.md, "Language": words that no docstring begins with, and identifiers that name nothing of the domain
NO_VERB = re.compile(r"(Of|As|What|Those|Both|How|Where|Which|Whether)\b")
NO_NOUNS = frozenset("given held ours told asked alike said how at_once made among others kept trls".split())
TESTS_OF_SEVERAL = {  # outside of tests/features, and yet they import a feature, which is one part of what they test
    "engine/test_arguments.py",
    "engine/test_experts.py",
    "engine/test_gpu.py",
    "engine/test_rollout_llm.py",
    "engine/test_upstream.py",
    "faults/test_engine.py",
    "faults/test_process.py",
    "planning/test_capacity.py",
    "planning/test_trainer_memory.py",
    "policy/test_latent_attention.py",
    "quantization/test_tensor_format.py",
    "recipe/test_families.py",
    "recipe/test_servable.py",
    "run/test_progress.py",
    "sync/test_audit.py",
    "test_config.py",
    "test_structure.py",
    "trainer/test_train_command.py",
    "trainer/test_trl_features.py",
}
# Instance attributes of other libraries' classes
NAMES_THAT_ARE_WRITTEN = {name for names in PRIVATE_NAMES.values() for name in names if name.startswith("_")}


def for_type_checkers(tree):
    """Ids of all parts of what only a type checker reads."""
    blocks = (
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    return {id(part) for block in blocks for part in ast.walk(block)}


def imports():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts, tree = path.relative_to(PACKAGE).with_suffix("").parts, tree_of(path)
        hidden = for_type_checkers(tree)
        for node in ast.walk(tree):
            if id(node) in hidden:
                continue
            if isinstance(node, ast.ImportFrom) and node.level:
                base = list(parts[: len(parts) - node.level])
                target = base + (node.module.split(".") if node.module else [])
                for alias in node.names if not target else [None]:
                    yield path, parts[0], "trl_fp8", (target or [alias.name])[0]
            elif isinstance(node, ast.ImportFrom) and node.module != "trl_fp8":
                yield path, parts[0], node.module.split(".")[0], (node.module.split(".") + [""])[1]
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, parts[0], alias.name.split(".")[0], (alias.name.split(".") + [""])[1]


def test_imports_go_one_way():
    """Exactly the arrows of ALLOWED and FOREIGN: one that nothing uses any more would let it come back unseen."""
    ours = {(layer, target) for _, layer, package, target in imports() if package == "trl_fp8" and target != layer}
    foreign = {(layer, package) for _, layer, package, _ in imports() if package in FOREIGN}
    arrows = {(layer, target) for layer, targets in ALLOWED.items() for target in targets}
    may = {(layer, package) for package, layers in FOREIGN.items() for layer in layers}
    assert (ours | foreign) - (arrows | may) == set(), "imported, but not in ALLOWED or FOREIGN"
    assert (arrows | may) - (ours | foreign) == set(), "in ALLOWED or FOREIGN, but nothing imports it"
    read = set()
    for layer, targets in ALLOWED.items():
        assert targets <= read, f"{layer} imports what stands above it in ALLOWED"
        read.add(layer)


def test_the_arrows_in_contributing_are_these():
    lines = [f"{layer:12} -> {', '.join(sorted(targets))}" for layer, targets in ALLOWED.items() if targets]
    assert "\n```\n" + "\n".join(reversed(lines)) + "\n```\n" in (ROOT / "CONTRIBUTING.md").read_text()


def modules():
    """Dotted name within the package -> file; a folder has the name of its `__init__.py`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name, path, known, types_too=False):
    """Yield the modules of ours that one imports anywhere, inside functions too; with `types_too` also those that only
    a type checker reads.
    """
    tree = tree_of(path)
    hidden = set() if types_too else for_type_checkers(tree)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            targets = [
                alias.name.removeprefix("trl_fp8.") for alias in node.names if alias.name.startswith("trl_fp8.")
            ]
            yield from (target for target in targets if target in known)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            elif (node.module or "").split(".")[0] == "trl_fp8":
                base = node.module.split(".")[1:]
            else:
                continue
            base = ".".join(part for part in base if part)
            for alias in node.names:
                inside = f"{base}.{alias.name}" if base else alias.name
                yield inside if inside in known else base


def circles(arrows):
    """Sets of modules that import each other, directly or through others."""

    def reach(start):
        found, due = set(), list(arrows[start])
        while due:
            if (node := due.pop()) not in found:
                found.add(node)
                due += arrows[node]
        return found

    reached = {node: reach(node) for node in arrows}
    tied = {node: frozenset(other for other in reached[node] if node in reached[other]) for node in arrows}
    return {together for node, together in tied.items() if node in together}


def test_no_modules_import_each_other():
    """By imports inside functions and under TYPE_CHECKING, too. A folder's `__init__` is left out: it runs first."""
    known = modules()
    leaves = {name: path for name, path in known.items() if path.name != "__init__.py"}
    arrows = {}
    for name, path in leaves.items():
        arrows[name] = {target for target in imports_of(name, path, known, types_too=True) if target in leaves}
    assert circles(arrows) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {frozenset("bc")}


def test_features_do_not_import_each_other():
    """A feature asks for another through hooks (run/feature.py), so that each can be deleted. The core knows none."""
    known, wrong = modules(), []
    for name, path in known.items():
        of = name.split(".")[1] if name.startswith("features.") else None
        for target in imports_of(name, path, known):
            to = target.split(".")[1] if target.startswith("features.") else None
            if to and to != of:
                wrong.append(f"{name} -> {target}")
    assert wrong == []


def test_a_feature_meets_vllm_in_its_engine_part_only():
    for path in (PACKAGE / "features").rglob("*.py"):
        vllm_imported = "vllm" in {name.split(".")[0] for name in imported(path)}
        assert path.name.startswith("engine_") or not vllm_imported, path


def test_features_know_engines_by_the_contract():
    """No feature names the class of one engine: what it needs stands in `engine/protocol.py` or comes to its part."""
    for path in (PACKAGE / "features").rglob("*.py"):
        assert "FP8VLLMGeneration" not in path.read_text(), path


def test_a_name_is_given_once_and_the_top_is_small():
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert [name for name in names if names.count(name) > 1] == []
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def module_file(name, beside):
    """File of a module by its dotted name, or its folder if that has no `__init__.py`; None if it is none of ours.

    A script's folder, `beside`, counts, too.
    """
    base = name.replace(".", "/")
    for root in (ROOT / "src", ROOT, beside):
        for path in (root / base / "__init__.py", root / f"{base}.py", root / base):
            if path.is_file() or any(path.glob("*.py")):
                return path
    return None


@cache
def tree_of(path):
    """Syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text())


@cache
def names_of(path):
    """Names that a module binds."""
    return set(bound_in(tree_of(path).body))


def bound_in(body):
    """Names that statements bind, at the top of a module or in its branches."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            for part in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.With) else ():
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id
            for block in ("body", "orelse", "finalbody"):
                yield from bound_in(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from bound_in(handler.body)


def names_imported(path):
    """(module, name or None) of each import of a file, relative ones resolved."""
    parts = path.relative_to(ROOT / "src" if path.is_relative_to(PACKAGE) else ROOT).parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            module = ".".join([*base, node.module] if node.module else base)
            yield from ((module, alias.name) for alias in node.names)


def test_imported_names_exist():
    """Also inside functions that no test calls without a GPU. By reading: importing everything would take a minute."""
    ours, missing = {"trl_fp8", "testing", "tests", "benchmarks", "gpu", "examples"}, []
    for folder in ours - {"trl_fp8"} | {"src"}:
        for path in (ROOT / folder).rglob("*.py"):
            for module, name in names_imported(path):
                file = module_file(module, path.parent)
                if file is None and module.partition(".")[0] in ours:
                    missing.append(f"{path.relative_to(ROOT)}: there is no module {module}")
                elif file and name and not module_file(f"{module}.{name}", path.parent):
                    if not file.is_file() or name not in names_of(file):
                        missing.append(f"{path.relative_to(ROOT)}: {module} has no {name}")
    assert missing == []


def sources():
    """(path within the package, syntax tree) of each module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), tree_of(path)


def defined(tree):
    """Names of functions, classes, variables and attributes of self that a module makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            for part in ast.walk(target) if isinstance(node, ast.Assign | ast.AnnAssign) else ():
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    yield part.attr
                elif isinstance(part, ast.Name):
                    yield part.id


def private(name):
    return name.startswith("_") and not name.startswith("__")


def test_private_names_of_other_libraries_are_listed_while_they_are_used():
    """An attribute with a leading underscore that nothing here defines is another library's."""
    listed = {name for names in PRIVATE_NAMES.values() for name in names}
    own = {name for _, tree in sources() for name in defined(tree)} - vars(nn.Module()).keys() - listed
    own |= {"_replace", "_exit"}  # public, of tuples and os
    for path, tree in sources():
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        foreign = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        attributes |= {alias.name for node in foreign for alias in node.names}
        missing = [name for name in attributes - own - listed if private(name) and name not in defined(tree)]
        assert not missing, f"{path} uses {sorted(missing)}: list them in upstream/private_names.py"
    used = {name for path, tree in sources() if path != "upstream/private_names.py" for name in mentioned(tree)}
    for name in listed:
        built = "_{which}" + name[2:]  # by an f-string: scales of q, k and v
        assert {name, built} & used, f"nothing uses {name} any more"


def mentioned(tree):
    """Attributes, imported names, members of classes and whole strings of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            yield from bound_in(node.body)  # overrides
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)[2:-1]


def test_every_patch_is_in_the_list_and_every_entry_is_made():
    made, elsewhere = set(), set()
    for path, tree in sources():
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
            for alias in node.names
            if not (getattr(node, "module", None) or alias.name).startswith("trl_fp8")
        }
        constants = {
            ast.unparse(node.targets[0]): node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("patch", "substituted"):
                    name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ast.unparse(node.args[1])
                    made.add((path, constants.get(name, name)))
                elif called == "setattr" or re.search(r"Interface\.register$|register_(backend|impl)$", called):
                    elsewhere.add(path)
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute) and (owner := ast.unparse(target.value)) != "self":
                    foreign = owner in imported or target.attr == "__class__"
                    if foreign or target.attr in NAMES_THAT_ARE_WRITTEN:
                        elsewhere.add(path)
    registrations()  # each adds its patches
    by_name = {patches.FOR_ONE_BLOCK, patches.FOR_GOOD}
    listed = {(entry.by, target.rpartition(".")[2]) for target, entry in PATCHES.items() if entry.kind in by_name}
    assert made - {("upstream/patches.py", "name")} == listed
    undoes = {"upstream/patches.py", "policy/stored_weights.py"}  # the latter: what a loader has changed
    options = {"engine/vllm_server/broadcast.py"}  # of its own object
    assert elsewhere - undoes - options == {entry.by for entry in PATCHES.values() if entry.kind not in by_name}


def written_from_outside():
    """(file, attribute) of every assignment to, or removal of, an attribute of anything but self, cls and ctx."""
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                owner, name = node.value, node.attr
            elif isinstance(node, ast.Call) and re.search(r"(^|__)(set|del)attr(__)?$", ast.unparse(node.func)):
                owner, name = node.args[0], f"({ast.unparse(node.args[1])})"
            else:
                continue
            if ast.unparse(owner) not in ("self", "cls", "ctx"):
                yield path, f"{ast.unparse(owner)}.{name}"


def test_no_module_has_attributes_written_by_another():
    found, unused = set(written_from_outside()), set(WRITTEN_FROM_OUTSIDE)
    for file, attribute in sorted(found):
        for pattern in WRITTEN_FROM_OUTSIDE:
            if fnmatch(file, pattern[0]) and fnmatch(attribute, pattern[1]):
                found.discard((file, attribute))
                unused.discard(pattern)
    assert found == set(), "written from outside, without a reason in WRITTEN_FROM_OUTSIDE"
    assert unused == set(), "in WRITTEN_FROM_OUTSIDE, but nothing writes it"


def imported(path):
    """Names of the modules that a file imports, relative ones as they are written."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def test_tests_share_code_through_testing():
    """No test module is imported by another, nothing is found by a changed path, and oracles share no code with us."""
    bent = re.compile(r"sys\.path(?:\.(?:insert|append|extend)|\[|\s*\+?=)")
    for folder in ("tests", "testing", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not bent.search(path.read_text()), f"{path} changes the path of imports"
            for name in imported(path):
                assert not re.search(r"(?:^|\.)test_", name), f"{path} imports a test module: {name}"
                assert folder == "tests" or not name.startswith("tests."), f"{path} imports {name}"
    for oracle in ("oracles", "fp8_oracle", "straight_through"):
        ours = [name for name in imported(ROOT / "testing" / f"{oracle}.py") if re.match(r"\.|trl_fp8|testing", name)]
        assert ours == []


def test_tests_of_a_feature_stand_in_its_folder():
    """So that whoever deletes the feature deletes them with it."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if any(f"{module}.{name}".startswith("trl_fp8.features.") for module, name in names_imported(path)):
            found.add(path.relative_to(ROOT / "tests").as_posix())
    assert {path for path in found if not path.startswith("features/")} <= TESTS_OF_SEVERAL


def test_every_module_says_what_it_is():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(tree_of(path)), f"{path} has no docstring"


def unclear(tree):
    """Yield each docstring that begins with a word of `NO_VERB`, and each parameter and variable of `NO_NOUNS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            if NO_VERB.match(docstring):
                yield docstring.splitlines()[0]
        name = node.arg if isinstance(node, ast.arg) else None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in NO_NOUNS:
            yield f"line {node.lineno}: {name}"


def test_docstrings_begin_with_a_verb_and_names_are_nouns():
    assert [f"{path}: {each}" for path, tree in sources() for each in unclear(tree)] == []
    broken = ast.parse(
        'def f(given):\n    """Of what."""\n    with x as held:\n        pass\n    return [how for how in y]'
    )
    assert list(unclear(broken)) == ["Of what.", "line 1: given", "line 3: held", "line 5: how"]


def test_published_names_can_be_imported():
    found = import_module("trl_fp8")
    assert all(getattr(found, name).__module__.startswith("trl_fp8.") for name in PUBLISHED)
    assert set(PUBLISHED) == set(found.__all__)


def test_importing_the_package_touches_no_gpu_and_starts_nothing():
    code = (
        "import torch, sys, threading; import trl_fp8; assert not torch.cuda.is_initialized();"
        "assert not torch.distributed.is_initialized(); print(sorted(trl_fp8.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "FP8GRPOTrainer" in done.stdout


def test_the_console_script_and_registrations_import_no_torch():
    """Ctrl-C is handled before torch is imported, and `trl-fp8 --help` does not wait for transformers."""
    code = (
        "import sys, trl_fp8.commands.cli, trl_fp8.run.feature;"
        "print({'torch', 'transformers', 'trl'}.intersection(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_configuration_page_is_generated_from_the_flags():
    """In a process of its own: a parser of command lines resolves the types of the config's fields for good."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate_configuration.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_scripts_declare_their_dependencies():
    for path in (ROOT / "examples").glob("grpo_*.py"):
        header = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", path.read_text())
        assert header and "trl-fp8" in header.group(1), path


def test_quickstart_is_two_lines_away_from_trl():
    lines = (ROOT / "examples" / "quickstart.py").read_text().splitlines()
    assert len(lines) <= 40
    as_trl = [line.replace("from trl_fp8 import", "from trl import").replace("FP8GRPO", "GRPO") for line in lines]
    assert sum(ours != theirs for ours, theirs in zip(lines, as_trl, strict=True)) == 2
    compile("\n".join(as_trl), "quickstart.py", "exec")


def test_readme_commands_exist():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 90
    targets = set(re.findall(r"(?m)^make (\w[\w-]*)", readme))
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"(?m)^{target}:", makefile) for target in targets)
    words = set(re.findall(r"(?m)^trl-fp8 (\w+)", readme))
    assert {"plan", "train"} <= words <= {"plan", "train", *(command.word for command in COMMANDS)}
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", readme) + re.findall(r"--config (\S+)", readme):
        assert (ROOT / link).exists(), f"README names {link}"


def test_readme_clones_and_installs_what_the_package_declares():
    readme, project = (ROOT / "README.md").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"git clone (\S+)", readme)) == {project["urls"]["Repository"]}
    extras = {extra for listed in re.findall(r'"\.\[([\w,]+)\]"', readme) for extra in listed.split(",")}
    assert {"cuda", "cpu"} <= extras <= project["optional-dependencies"].keys()
    assert re.findall(r"pip install (torch==\S+)", readme) == project["optional-dependencies"]["cpu"][:1]


def test_no_paths_of_a_developers_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home)/\w")
    for name in listed:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".sh", ""} and path.is_file():
            assert not pattern.search(path.read_text(errors="ignore")), f"{name} holds a path of one machine"


def test_testing_imports_no_benchmark():
    """Benchmarks import testing: the other way round it would be a circle."""
    for path in (ROOT / "testing").rglob("*.py"):
        found = [name for name in imported(path) if name.partition(".")[0] == "benchmarks"]
        assert not found, f"{path} imports {found}"
