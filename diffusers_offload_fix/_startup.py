"""What runs at import: patch the targets that are loaded, and wait for the others.

Only `sys` is used here, because this may run in every interpreter of the machine (`sitecustomize`), most of which never
load diffusers. Importing wrapt alone would cost such an interpreter about 80 ms.
"""

import sys

TARGET = "diffusers.hooks.group_offloading"
PIPELINES = "diffusers.pipelines.pipeline_utils"
MODELS = "diffusers.models.modeling_utils"
MODULAR = "diffusers.modular_pipelines.modular_pipeline"
# What is patched besides, each when it is imported; the target decides whether anything is.
OTHERS = (PIPELINES, MODELS, MODULAR)


class TargetFinder:
    """A finder that lets the other finders find a target, and adds one step to its loading."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != TARGET and fullname not in OTHERS:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and not isinstance(spec.loader, TargetLoader):
                    spec.loader = TargetLoader(spec.loader)  # type: ignore
                return spec
        return None


class TargetLoader:
    """A target's own loader, with the plugin told after the module has run."""

    def __init__(self, loader):  # type: ignore[no-untyped-def]
        self.loader = loader

    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        if name == "loader":  # asked before __init__ has run, by copy or pickle
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self.loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        # The module keeps its real loader: inspect, pkgutil and importlib.resources look at its type.
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        name = module.__name__
        if sys.modules.get(name) is module:
            from diffusers_offload_fix import activation

            tell = activation.target_loaded if name == TARGET else activation.other_loaded
            tell(sys.modules[name])


_finder = TargetFinder()


def arm() -> None:
    """Have the targets patched when they are imported or reloaded. Twice is once."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def disarm() -> None:
    """Stop waiting for the targets."""
    while _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def is_armed() -> bool:
    return _finder in sys.meta_path


def begin() -> None:
    """The automatic door: arm, and patch what is already loaded."""
    from diffusers_offload_fix import switches

    if switches.is_off():
        return
    arm()
    if TARGET in sys.modules:
        from diffusers_offload_fix import activation

        activation.target_found()
